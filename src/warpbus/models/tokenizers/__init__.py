"""Text to token ids and back, whatever kind of file a checkpoint keeps its vocabulary in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from warpbus.errors import CheckpointError
from warpbus.formats.checkpoint import read_object
from warpbus.models.tokenizers.base import StreamDecoder, Tokenizer, encode_prompt, encode_text
from warpbus.models.tokenizers.chatglm import FILE as CHATGLM_FILE
from warpbus.models.tokenizers.chatglm import ChatGLMTokenizer, load_chatglm
from warpbus.models.tokenizers.facts import special_texts
from warpbus.models.tokenizers.huggingface import HuggingFaceTokenizer
from warpbus.models.tokenizers.ranks import GLM4_SPECIALS, RankTokenizer
from warpbus.models.tokenizers.spm import (
    CHATGLM2_BEGIN,
    CHATGLM2_SPECIALS,
    CHATGLM3_SPECIALS,
    SentencePieceTokenizer,
    has_piece,
    is_sentencepiece,
)

__all__ = [
    "ChatGLMTokenizer",
    "HuggingFaceTokenizer",
    "RankTokenizer",
    "SentencePieceTokenizer",
    "StreamDecoder",
    "Tokenizer",
    "encode_prompt",
    "encode_text",
    "has_tokenizer",
    "load_tokenizer",
]

# By `model_type`, where tokenizer_config.json names no `tokenizer_class`.
_TOKENIZER_CLASSES = {"llama": "LlamaTokenizer", "mistral": "LlamaTokenizer"}

# Of the tokens that tokenizer_config.json lists.
_TOKEN_FLAGS = frozenset(("lstrip", "normalized", "rstrip", "single_word", "special"))


def has_tokenizer(directory: Path) -> bool:
    """Whether a model directory has a file that `load_tokenizer` reads."""
    return any((Path(directory) / name).exists() for name in ("tokenizer.json", "tokenizer.model", CHATGLM_FILE))


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory: its `tokenizer.json`, or its `tokenizer.model`, or its `ice_text.model`.

    A `tokenizer.model` is either a SentencePiece model or, for GLM-4, a list of ranks; its content tells which. An
    `ice_text.model` is ChatGLM-6B's.

    Raises CheckpointError if the directory has none of them, or if a file is damaged.
    """
    directory = Path(directory)
    path = directory / "tokenizer.json"
    tokenizer_config = read_object(directory / "tokenizer_config.json")
    if path.exists():
        return HuggingFaceTokenizer(path, added=tuple(_listed_tokens(tokenizer_config).values()))
    config = read_object(directory / "config.json")
    path = directory / "tokenizer.model"
    if not path.exists():
        if (directory / CHATGLM_FILE).exists():
            return load_chatglm(directory, config, tokenizer_config)
        raise CheckpointError(
            f"{directory}: no tokenizer.json and no tokenizer.model (nor ChatGLM-6B's {CHATGLM_FILE}): copy one from "
            "the model's source"
        )
    if _is_sentencepiece_file(path):
        specials = _chatglm_specials(directory, config, tokenizer_config)
        begin = CHATGLM2_BEGIN if specials else _begin_of_texts(path, config, tokenizer_config)
        return SentencePieceTokenizer(path, added_specials=specials, begin=begin)
    return RankTokenizer(path, special_ids=_listed_specials(tokenizer_config) or GLM4_SPECIALS)


def _is_sentencepiece_file(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return is_sentencepiece(file.read(1))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); restore the file from the model's source"
        ) from None


def _begin_of_texts(path: Path, config: dict[str, Any], tokenizer_config: dict[str, Any]) -> tuple[str, ...]:
    """The token before a text, of which a `tokenizer.model` does not tell whether it is used.

    Where `add_bos_token` is missing, the tokenizers of Llama have `bos_token` before texts: their models were trained
    so. `transformers` up to 4 does the same; 5 documents it and leaves the token out.
    """
    named = tokenizer_config.get("tokenizer_class") or _TOKENIZER_CLASSES.get(str(config.get("model_type")))
    is_llama = str(named).removesuffix("Fast") in ("LlamaTokenizer", "LLaMATokenizer", "CodeLlamaTokenizer")
    added = tokenizer_config.get("add_bos_token", is_llama)
    begin = special_texts(path.parent, tokenizer_config).get("bos_token") or "<s>"  # as LlamaTokenizer has it
    if added is not True:
        return ()
    if "add_bos_token" not in tokenizer_config and not has_piece(path, begin):
        return ()
    return (begin,)


def _chatglm_specials(directory: Path, config: dict[str, Any], tokenizer_config: dict[str, Any]) -> tuple[str, ...]:
    """The special tokens behind the pieces: none but for ChatGLM2 and ChatGLM3, which share file and architecture.

    The two differ in the special tokens that ChatGLM3 adds for the roles. What tells them apart, the surest first: a
    list of the tokens, the stop ids, the tokenizer's published source, the model's name, the context length.
    """
    named = str(tokenizer_config.get("tokenizer_class", ""))
    if config.get("model_type") != "chatglm" and not named.startswith("ChatGLM"):
        return ()
    if "<|user|>" in _listed_specials(tokenizer_config) or "<|user|>" in str(tokenizer_config.get("chat_template")):
        return CHATGLM3_SPECIALS
    stops = config.get("eos_token_id")
    if isinstance(stops, list) and len(stops) > 1:
        return CHATGLM3_SPECIALS
    source = directory / "tokenization_chatglm.py"
    if source.exists():
        # Read, never run.
        found = "<|observation|>" in source.read_text(encoding="utf-8", errors="replace")
        return CHATGLM3_SPECIALS if found else CHATGLM2_SPECIALS
    sources = (config.get("_name_or_path"), tokenizer_config.get("name_or_path"), config.get("auto_map"))
    names = " ".join(map(str, sources)).lower()
    if "chatglm3" in names or config.get("seq_length") == 8192:
        return CHATGLM3_SPECIALS
    return CHATGLM2_SPECIALS


def _listed_specials(tokenizer_config: dict[str, Any]) -> dict[str, int]:
    return {token.content: index for index, token in _listed_tokens(tokenizer_config).items() if token.special}


def _listed_tokens(tokenizer_config: dict[str, Any]) -> dict[int, AddedToken]:
    """The tokens that tokenizer_config.json adds to a vocabulary, in the order of their ids."""
    listed = tokenizer_config.get("added_tokens_decoder") or {}
    try:
        found = {
            int(index): AddedToken(
                token["content"], **{name: token[name] is True for name in _TOKEN_FLAGS & token.keys()}
            )
            for index, token in listed.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(
            "tokenizer_config.json: added_tokens_decoder: expected ids with objects of content and special; restore "
            "the file from the model's source"
        ) from None
    return dict(sorted(found.items()))
