"""The tokenizer of a GGUF file as the files of a model directory.

| `tokenizer.ggml.model` | becomes |
|---|---|
| gpt2 | `tokenizer.json`: byte-level BPE, whose way of cutting text follows from `tokenizer.ggml.pre` |
| llama, t5 | `tokenizer.model`: a SentencePiece model of the same pieces, scores and types (BPE, unigram) |
"""

import json
import struct
from collections.abc import Sequence
from typing import Any

from warpbus.errors import CheckpointError
from warpbus.formats.gguf.architectures import Keys

_PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The types of tokens, of GGUF and of SentencePiece."""

_UNIGRAM, _BPE = 1, 2
_BYTES = 256

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_THREE_DIGITS = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_ONE_DIGIT = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

SPLITS = {
    "llama-bpe": _THREE_DIGITS,
    "glm4": _THREE_DIGITS,
    "chatglm-bpe": _THREE_DIGITS,
    "qwen2": _ONE_DIGIT,
    "gpt-2": _GPT2,
}
"""How text is cut before bytes are merged, by `tokenizer.ggml.pre`."""

_ENDS = ("eos", "eot", "eom")
_TURN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>")
_GLM_TURN_ENDS = (*_TURN_ENDS, "<|user|>", "<|observation|>")


def vocabulary_files(keys: Keys) -> dict[str, bytes]:
    """The files of the tokenizer by name; `tokenizer_config.json` has the chat template.

    Raises:
        CheckpointError: the tokenizer is missing, damaged, or of a kind that is not supported.
    """
    model = keys.text(f"{_PREFIX}model")
    tokens = _texts(keys, "tokens")
    begin = _begin_of_texts(keys, model, tokens)
    if model == "gpt2":
        files = {"tokenizer.json": _byte_level(keys, tokens, begin)}
    elif model in ("llama", "t5"):
        files = {"tokenizer.model": _sentencepiece(keys, tokens, _BPE if model == "llama" else _UNIGRAM)}
    else:
        raise keys.wrong(f"{_PREFIX}model", "gpt2, llama or t5")
    described: dict[str, Any] = {}
    for name in ("bos", "eos"):
        found = _token_id(keys, name, len(tokens))
        if found is not None:
            described[f"{name}_token"] = tokens[found]
    described["add_bos_token"] = begin is not None
    if begin is not None:
        described["bos_token"] = tokens[begin]
    template, tools = keys.get("tokenizer.chat_template"), keys.get("tokenizer.chat_template.tool_use")
    if isinstance(template, str):
        described["chat_template"] = template
        if isinstance(tools, str):
            named = {"default": template, "tool_use": tools}
            described["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    return files | {"tokenizer_config.json": json.dumps(described, ensure_ascii=False, indent=2).encode()}


def stop_ids(keys: Keys) -> list[int]:
    """The tokens at which generation ends: those that the file names, and control tokens known to end a turn."""
    tokens = _texts(keys, "tokens")
    found = [_token_id(keys, name, len(tokens)) for name in _ENDS]
    texts = _GLM_TURN_ENDS if keys.architecture.model_type.startswith("glm") else _TURN_ENDS
    types = _types(keys, len(tokens))
    found += [index for index, text in enumerate(tokens) if text in texts and types[index] == CONTROL]
    return list(dict.fromkeys(each for each in found if each is not None))


def _begin_of_texts(keys: Keys, model: str, tokens: Sequence[str]) -> int | None:
    """The token before a text. Without `add_bos_token`, the vocabularies of Llama have one, as in llama.cpp."""
    if not _flag(keys, "add_bos_token", model == "llama" or keys.get(f"{_PREFIX}pre") == "llama-bpe"):
        return None
    found = _token_id(keys, "bos", len(tokens))
    return 1 if found is None and model == "llama" and len(tokens) > 1 else found


def _token_id(keys: Keys, name: str, count: int) -> int | None:
    key = f"{_PREFIX}{name}_token_id"
    if keys.get(key) is None:
        return None
    found = keys.size(key)
    if found >= count:
        raise keys.wrong(key, f"a token below {count}")
    return found


def _texts(keys: Keys, name: str) -> list[str]:
    found = keys.get(_PREFIX + name)
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise keys.wrong(_PREFIX + name, "a list of texts")
    return found


def _types(keys: Keys, count: int) -> Sequence[int]:
    found = keys.get(f"{_PREFIX}token_type")
    if found is None:
        return [NORMAL] * count
    if not isinstance(found, list) or len(found) != count or not all(type(kind) is int for kind in found):
        raise CheckpointError(
            f"{keys.header.file}: {_PREFIX}token_type: expected one integer for each of {count} tokens"
        )
    return found


def _byte_level(keys: Keys, tokens: list[str], begin: int | None) -> bytes:
    pre = keys.get(f"{_PREFIX}pre")
    split = SPLITS.get(pre) if isinstance(pre, str) else None
    if split is None:
        raise keys.wrong(f"{_PREFIX}pre", f"one of {', '.join(SPLITS)}")
    vocabulary = {text: index for index, text in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{keys.header.file}: {_PREFIX}tokens: a token occurs twice: the file is damaged")
    merges = [merge.split(" ") for merge in _texts(keys, "merges")]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise CheckpointError(
                f"{keys.header.file}: {_PREFIX}merges: {' '.join(merge)!a:.80}: expected two tokens whose "
                "concatenation is a token: the file is damaged"
            )
    added = [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for index, kind in enumerate(_types(keys, len(tokens)))
        if kind in (CONTROL, USER_DEFINED)
    ]
    steps = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    ]
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None if begin is None else _template(tokens[begin], begin),
        "decoder": steps[1],
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": split == _THREE_DIGITS,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    return json.dumps(description, ensure_ascii=False).encode()


def _template(text: str, token: int) -> dict[str, Any]:
    """The post-processor that puts a token before a text."""
    before, after = {"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [before, after],
        "pair": [before, after, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [token], "tokens": [text]}},
    }


def _sentencepiece(keys: Keys, tokens: list[str], algorithm: int) -> bytes:
    """A serialized ModelProto (sentencepiece_model.proto)."""
    types = _types(keys, len(tokens))
    scores = keys.get(f"{_PREFIX}scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(type(score) is float for score in scores):
        raise CheckpointError(
            f"{keys.header.file}: {_PREFIX}scores: expected one number for each of {len(tokens)} tokens"
        )
    if list(types).count(UNKNOWN) != 1 or any(not UNKNOWN - 1 <= kind <= BYTE for kind in types):
        raise CheckpointError(f"{keys.header.file}: {_PREFIX}token_type: expected types 1 to 6, one token unknown (2)")
    pieces = [
        _field(1, _field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind]))
        for text, score, kind in zip(tokens, scores, types, strict=True)
    ]
    byte_fallback = list(types).count(BYTE) == _BYTES
    trainer = b"\x18" + bytes([algorithm]) + b"\x98\x02" + bytes([byte_fallback])
    spaces = [_flag(keys, name, default) for name, default in (("add_space_prefix", True), _EXTRA_SPACES)]
    normalizer = _field(1, b"identity") + b"\x18" + bytes([spaces[0]]) + b"\x20" + bytes([spaces[1]])
    return b"".join([*pieces, _field(2, trainer), _field(3, normalizer)])


_EXTRA_SPACES = ("remove_extra_whitespaces", False)


def _flag(keys: Keys, name: str, default: bool) -> bool:
    found = keys.get(_PREFIX + name)
    if found is not None and not isinstance(found, bool):
        raise keys.wrong(_PREFIX + name, "true or false")
    return default if found is None else found


def _field(number: int, data: bytes) -> bytes:
    """A field of a protocol buffer that has a length."""
    length, size = bytearray(), len(data)
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2]) + bytes(length) + bytes([size]) + data
