"""The tokenizer of a model directory as metadata of a GGUF file; `formats.gguf.vocabulary` is the way back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece

from warpbus.errors import CheckpointError, UsageError
from warpbus.formats.gguf.file import Value
from warpbus.formats.gguf.vocabulary import BYTE, CONTROL, NORMAL, SPLITS, UNKNOWN, UNUSED, USER_DEFINED
from warpbus.models.tokenizers import RankTokenizer, SentencePieceTokenizer, Tokenizer, load_tokenizer
from warpbus.models.tokenizers.facts import DEFAULT, TOOL_USE, chat_templates, special_texts
from warpbus.models.tokenizers.huggingface import byte_alphabet
from warpbus.models.tokenizers.spm import read_sentencepiece

_PREFIX = "tokenizer.ggml."
_GLM = ("chatglm", "glm4")
_BPE = 2  # SentencePiece's number; 1 is the unigram model
_ENDS = ("eos", "eot", "eom")

Tokens = tuple[list[str], list[float], list[int]]
"""Texts, scores and types."""


def vocabulary_metadata(
    directory: Path, architecture: str, vocab_size: int, stop_ids: tuple[int, ...]
) -> dict[str, Value]:
    """The tokenizer, the chat template and the stop tokens of a model directory.

    Args:
        architecture: of the GGUF file.
        vocab_size: rows of the embedding: the tokens are padded with unused ones to this number.
        stop_ids: at which generation ends; the format has names for three.

    Raises:
        CheckpointError: there is no tokenizer, or it is damaged.
        UsageError: GGUF has no form for it.
    """
    tokenizer = load_tokenizer(directory)
    if isinstance(tokenizer, SentencePieceTokenizer):
        found = _of_sentencepiece(directory / "tokenizer.model", tokenizer)
    elif isinstance(tokenizer, RankTokenizer):
        found = _of_ranks(tokenizer, architecture)
    else:
        path = directory / "tokenizer.json"
        if not path.exists():
            raise UsageError(f"{directory}: GGUF has no form for this tokenizer: convert to another format")
        found = _of_json(path, architecture, tokenizer.special_ids)
    metadata = _padded(found, vocab_size, directory)
    metadata |= {f"{_PREFIX}{name}_token_id": token for name, token in zip(_ENDS, stop_ids, strict=False)}
    return metadata | _templates(directory, tokenizer)


def _templates(directory: Path, tokenizer: Tokenizer) -> dict[str, Value]:
    """The chat template, and the token at the beginning of a text."""
    path = directory / "tokenizer_config.json"
    found: dict[str, Value] = {}
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    templates = chat_templates(directory, config)
    if DEFAULT in templates:
        found["tokenizer.chat_template"] = templates[DEFAULT].source
    if TOOL_USE in templates:
        found["tokenizer.chat_templates"] = [TOOL_USE]
        found[f"tokenizer.chat_template.{TOOL_USE}"] = templates[TOOL_USE].source
    # The format has one token before a text; [gMASK] <sop> of GLM-4 are two.
    prefix, beginning = tokenizer.prompt_prefix, special_texts(directory, config).get("bos_token", "")
    begins = len(prefix) == 1
    token = prefix[0] if begins else tokenizer.special_ids.get(beginning)
    if token is not None:
        found[f"{_PREFIX}bos_token_id"] = token
    return found | {f"{_PREFIX}add_bos_token": begins}


def _padded(found: dict[str, Value], vocab_size: int, directory: Path) -> dict[str, Value]:
    tokens, types, scores = (found.get(_PREFIX + name) for name in ("tokens", "token_type", "scores"))
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    if len(tokens) > vocab_size:
        raise CheckpointError(
            f"{directory}: the tokenizer has {len(tokens)} tokens, the embedding {vocab_size} rows: restore the files "
            "from one revision of the model"
        )
    if len(set(tokens)) != len(tokens):
        twice = next(text for text in tokens if tokens.count(text) > 1)
        raise UsageError(
            f"{directory}: the tokenizer has two tokens {twice!a:.80}, which llama.cpp does not load: convert to "
            "another format"
        )
    missing = vocab_size - len(tokens)
    tokens += [f"[PAD{index}]" for index in range(len(tokens), vocab_size)]
    types += [UNUSED] * missing
    if isinstance(scores, list):
        scores += [0.0] * missing
    return found


def _of_sentencepiece(path: Path, tokenizer: SentencePieceTokenizer) -> dict[str, Value]:
    model = read_sentencepiece(path)
    count = model.get_piece_size()
    tokens = [model.id_to_piece(index) for index in range(count)]
    scores = [model.get_score(index) for index in range(count)]
    types = [_piece_type(model, index) for index in range(count)]
    behind = sorted((index, text) for text, index in tokenizer.special_ids.items() if index >= count)
    tokens += [text for _, text in behind]
    scores += [0.0] * len(behind)
    types += [CONTROL] * len(behind)
    # Pieces of one character are never merged: llama.cpp's "llama" cuts a text the same way, and knows bytes as well.
    characters = all(len(text) == 1 for text, kind in zip(tokens, types, strict=True) if kind == NORMAL)
    merges = characters or _algorithm(path.read_bytes()) == _BPE
    return {
        f"{_PREFIX}model": "llama" if merges else "t5",
        f"{_PREFIX}pre": "default",
        f"{_PREFIX}tokens": tokens,
        f"{_PREFIX}scores": scores,
        f"{_PREFIX}token_type": types,
        f"{_PREFIX}add_space_prefix": tokenizer.drops_first_space,
        f"{_PREFIX}remove_extra_whitespaces": model.encode("a  b") == model.encode("a b"),
    }


def _piece_type(model: sentencepiece.SentencePieceProcessor, index: int) -> int:
    tests = (
        (model.is_unknown, UNKNOWN),
        (model.is_control, CONTROL),
        (model.is_byte, BYTE),
        (model.is_unused, UNUSED),
    )
    return next((kind for test, kind in tests if test(index)), NORMAL)


def _algorithm(data: bytes) -> int:
    """`model_type` of a serialized ModelProto, field 3 of its field 2: 1 (unigram) unless it says another."""
    trainer = next((value for number, value in _fields(data) if number == 2 and isinstance(value, bytes)), b"")
    return next((value for number, value in _fields(trainer) if number == 3 and isinstance(value, int)), 1)


def _fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """The fields of a protocol buffer that SentencePiece has already parsed: numbers, and integers or bytes."""
    found: list[tuple[int, int | bytes]] = []
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            found.append((number, varint()))
            continue
        size = {1: 8, 5: 4}.get(kind) or varint()
        found.append((number, data[position : position + size]))
        position += size
    return found


def _of_ranks(tokenizer: RankTokenizer, architecture: str) -> dict[str, Value]:
    """GLM-4's ranks: a token's merge is that of the two parts that its bytes are merged to before the last step."""
    alphabet = {byte: char for char, byte in byte_alphabet().items()}
    ranks = tokenizer.ranks
    tokens = [f"[PAD{index}]" for index in range(tokenizer.vocab_size)]
    types = [UNUSED] * tokenizer.vocab_size
    merges = []
    for data, rank in sorted(ranks.items(), key=lambda item: item[1]):
        tokens[rank] = "".join(alphabet[byte] for byte in data)
        types[rank] = NORMAL
        if len(data) > 1:
            parts = _last_parts(data, ranks, rank)
            merges.append(" ".join("".join(alphabet[byte] for byte in part) for part in parts))
    for text, index in tokenizer.special_ids.items():
        tokens[index], types[index] = text, CONTROL
    return _byte_level(tokens, types, merges, "chatglm-bpe" if architecture in _GLM else "llama-bpe")


def _last_parts(data: bytes, ranks: Mapping[bytes, int], below: int) -> list[bytes]:
    parts = [data[index : index + 1] for index in range(len(data))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[index] + parts[index + 1], below) for index in range(len(parts) - 1)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[best] >= below:
            raise CheckpointError(
                f"tokenizer.model: the token of rank {below} cannot be merged from two others: restore the file from "
                "the model's source"
            )
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def _byte_level(tokens: list[str], types: list[int], merges: list[str], pre: str) -> dict[str, Value]:
    return {
        f"{_PREFIX}model": "gpt2",
        f"{_PREFIX}pre": pre,
        f"{_PREFIX}tokens": tokens,
        f"{_PREFIX}token_type": types,
        f"{_PREFIX}merges": merges,
    }


def _of_json(path: Path, architecture: str, special_ids: Mapping[str, int]) -> dict[str, Value]:
    description = json.loads(path.read_text(encoding="utf-8"))
    model, added = description["model"], description.get("added_tokens") or []
    vocabulary = {str(text): int(index) for text, index in model["vocab"].items()}
    vocabulary |= {str(token["content"]): int(token["id"]) for token in added} | dict(special_ids)
    tokens = [f"[PAD{index}]" for index in range(max(vocabulary.values()) + 1)]
    types = [UNUSED] * len(tokens)
    for text, index in vocabulary.items():
        tokens[index], types[index] = text, NORMAL
    for token in added:
        types[int(token["id"])] = USER_DEFINED
    for index in special_ids.values():
        types[index] = CONTROL
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if not model.get("byte_fallback"):
        return _byte_level(tokens, types, merges, _pre(description, path, architecture))
    scores = dict.fromkeys(tokens, 0.0)
    for rank, merge in enumerate(merges, 1):
        scores[merge.replace(" ", "")] = max(-float(rank), scores.get(merge.replace(" ", "")) or -float(rank))
    for text, index in vocabulary.items():
        if len(text) == 6 and text.startswith("<0x"):
            types[index] = BYTE
    unknown = vocabulary.get(str(model.get("unk_token")))
    if unknown is None:
        raise UsageError(f"{path}: GGUF has no form for a vocabulary without unk_token: convert to another format")
    types[unknown] = UNKNOWN
    return {
        f"{_PREFIX}model": "llama",
        f"{_PREFIX}pre": "default",
        f"{_PREFIX}tokens": tokens,
        f"{_PREFIX}scores": [scores[text] for text in tokens],
        f"{_PREFIX}token_type": types,
        f"{_PREFIX}add_space_prefix": "prepend" in json.dumps(description.get("normalizer")).lower(),
    }


def _pre(description: dict[str, Any], path: Path, architecture: str) -> str:
    """The name of the way in which text is cut before bytes are merged."""
    steps = description.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers") or [steps]
    splits = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    if not splits and any(step.get("type") == "ByteLevel" and step.get("use_regex", True) for step in steps):
        return "gpt-2"
    fitting = [name for name, split in SPLITS.items() if splits == [split]]
    if not fitting:
        raise UsageError(
            f"{path}: GGUF's readers have no name for the way in which this tokenizer cuts text: convert to another "
            "format"
        )
    return "chatglm-bpe" if architecture in _GLM and "chatglm-bpe" in fitting else fitting[0]
