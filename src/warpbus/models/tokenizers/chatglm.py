"""ChatGLM-6B's `ice_text.model`: a SentencePiece model in which line feeds, tabs and runs of spaces are pieces.

Before SentencePiece sees a text, a line feed becomes `<n>`, a tab `<|tab|>`, and 2 to 80 spaces in a row `<|blank_N|>`;
each is one token, whose bytes are what it stands for. There are two vocabularies. The first revision puts 20000 ids for
parts of images before those of the text, and its file ends with the text's own pieces: the special tokens, tab, runs of
spaces and bytes are to be added behind them. The later one has no image tokens, and all pieces in its file. Either way
`[MASK] [gMASK] [sMASK] <unused_0> <sop> <eop>` follow each other, from 150000 or from 130000 on; bytes have higher ids.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import sentencepiece

from warpbus.errors import CheckpointError
from warpbus.models.tokenizers.base import Tokenizer, check_text
from warpbus.models.tokenizers.spm import piece_bytes, read_sentencepiece

FILE = "ice_text.model"

_LINE = "<n>"
_TAB = "<|tab|>"
_LONGEST_BLANK = 80
_BLANKS = {length: f"<|blank_{length}|>" for length in range(2, _LONGEST_BLANK + 1)}
_NEEDED = ("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>")
_SPECIALS = ("[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>", "<ENC>", "<dBLOCK>")
_MEANT = {_LINE: "\n", _TAB: "\t", **{piece: " " * length for length, piece in _BLANKS.items()}}
_RUN = re.compile(f" {{2,{_LONGEST_BLANK}}}")
# The first character wherever somebody typed what only this module may write.
_TYPED = re.compile(
    "|".join(
        f"{re.escape(first)}(?={'|'.join(re.escape(text[1:]) for text in (*_MEANT, *_SPECIALS) if text[0] == first)})"
        for first in "<["
    )
)

# By the vocab_size of the two revisions.
_IMAGE_TOKENS = {130528: 0, 150528: 20000}

# SentencePiece's kinds of pieces, in sentencepiece_model.proto.
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6


class ChatGLMTokenizer(Tokenizer):
    """The vocabulary of ChatGLM-6B.

    What somebody typed never becomes a special token, nor does a typed `<n>` become a line feed.

    Args:
        model: of `read_vocabulary`.
        num_image_tokens: how many ids come before those of the text.
    """

    def __init__(self, model: sentencepiece.SentencePieceProcessor, *, num_image_tokens: int) -> None:
        pieces = model.get_piece_size()
        self._model = model
        self._shift = num_image_tokens
        self._line = model.piece_to_id(_LINE)
        controls = [model.id_to_piece(i) for i in range(pieces) if model.is_control(i)]
        specials = dict.fromkeys((*controls, *(piece for piece in _SPECIALS if _has(model, piece))))
        self.special_ids = {text: num_image_tokens + model.piece_to_id(text) for text in specials}
        self.vocab_size = num_image_tokens + pieces
        self.drops_first_space = model.id_to_piece(model.encode("a")[0]).startswith("\u2581")
        # SentencePiece puts U+2581 before a text, and takes that alone away again.
        self.own_spaces = frozenset(num_image_tokens + model.piece_to_id(piece) for piece in _BLANKS.values())
        self.prompt_suffix: tuple[int, ...] = (self.special_ids["[gMASK]"], self.special_ids["<sop>"])
        self._bytes = [piece_bytes(model, i) for i in range(pieces)]
        for piece, text in _MEANT.items():
            self._bytes[model.piece_to_id(piece)] = text.encode()
        for token in self.special_ids.values():
            self._bytes[token - num_image_tokens] = b""
        self._forbidden = frozenset(self.special_ids.values())

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        check_text(text)
        # A piece that holds none of these texts whole cannot become one.
        cuts = [0, *(match.end() for match in _TYPED.finditer(text)), len(text)]
        ids: list[int] = self._model.encode(_written(text[: cuts[1]]))
        for start, end in pairwise(cuts[1:]):
            # SentencePiece puts a space before every text. Behind a line feed, which is left out again, it does not.
            found = self._model.encode(_LINE + _written(text[start:end]))
            ids += found[found.index(self._line) + 1 :]
        # A normalizer may make a special token's text of other characters, in a file that then takes it for the token.
        return [i + self._shift for i in ids if i + self._shift not in self._forbidden]

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer.token_bytes`. The tokens of images have none."""
        index = token - self._shift
        return self._bytes[index] if 0 <= index < len(self._bytes) else b""


def read_vocabulary(path: Path) -> sentencepiece.SentencePieceProcessor:
    """An `ice_text.model`, with the pieces that the first revision's lacks.

    Raises CheckpointError if the file is missing, damaged, or lacks some of these pieces but not all.
    """
    model = read_sentencepiece(path)
    added = (*_SPECIALS, _TAB, *_BLANKS.values())
    if not any(_has(model, piece) for piece in added):
        model = read_sentencepiece(path, more=_pieces_behind())
    missing = [piece for piece in (_LINE, *_NEEDED, _TAB, *_BLANKS.values()) if not _has(model, piece)]
    if missing:
        raise CheckpointError(
            f"{path}: the piece {missing[0]} is missing: expected ChatGLM-6B's vocabulary; restore the file from "
            "the model's source"
        )
    if model.piece_to_id(_LINE) not in model.encode(_LINE):
        raise CheckpointError(f"{path}: {_LINE} is not one token; restore the file from the model's source")
    return model


def load_chatglm(directory: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> ChatGLMTokenizer:
    """The tokenizer in a directory of ChatGLM-6B, in the revision that its files name.

    `num_image_tokens` in tokenizer_config.json says it, `bos_token_id` in config.json, which is the id of <sop>, or
    `vocab_size`; where several do, they have to agree.

    Args:
        config, tokenizer_config: the parsed config.json and tokenizer_config.json.

    Raises CheckpointError if none says it, if they disagree, or if the ids do not fit the `vocab_size`.
    """
    path = directory / FILE
    model = read_vocabulary(path)
    said, begin, size = tokenizer_config.get("num_image_tokens"), config.get("bos_token_id"), config.get("vocab_size")
    shifts: dict[str, int] = {}
    if type(said) is int:
        shifts["num_image_tokens in tokenizer_config.json"] = said
    if type(begin) is int:
        shifts["bos_token_id in config.json"] = begin - model.piece_to_id("<sop>")
    if type(size) is int and size in _IMAGE_TOKENS:
        shifts["vocab_size in config.json"] = _IMAGE_TOKENS[size]
    if not shifts:
        raise CheckpointError(
            f"{directory}: neither num_image_tokens in tokenizer_config.json nor bos_token_id in config.json says "
            "which vocabulary this is: set num_image_tokens to 0 (vocab_size 130528) or 20000 (vocab_size 150528)"
        )
    shift = next(iter(shifts.values()))
    if len(set(shifts.values())) > 1 or not 0 <= shift < 2**20:
        stated = ", ".join(f"{name} says {number}" for name, number in shifts.items())
        raise CheckpointError(
            f"{path}: how many tokens of images come first (0 or 20000): {stated}; restore the files from one revision "
            "of the model"
        )
    if type(size) is int and shift + model.get_piece_size() > size:
        raise CheckpointError(
            f"{path}: ids up to {shift + model.get_piece_size() - 1}, but vocab_size in config.json is {size}: restore "
            "the files from one revision of the model"
        )
    return ChatGLMTokenizer(model, num_image_tokens=shift)


def _written(text: str) -> str:
    """The text as SentencePiece is to see it."""
    text = text.replace("\n", _LINE).replace("\t", _TAB)
    return _RUN.sub(lambda run: _BLANKS[len(run[0])], text)


def _has(model: sentencepiece.SentencePieceProcessor, piece: str) -> bool:
    return bool(model.piece_to_id(piece) != model.unk_id())


def _pieces_behind() -> bytes:
    """The pieces that the first revision's file leaves to the program, in their order, as fields of a ModelProto.

    Protocol buffers append repeated fields of joined messages, and merge the others.
    """
    pieces = [_piece(text, _CONTROL) for text in _SPECIALS]
    pieces += [_piece(text, _USER_DEFINED) for text in (_TAB, *_BLANKS.values())]
    pieces += [_piece(f"<0x{byte:02X}>", _BYTE) for byte in range(256)]
    byte_fallback = b"\x98\x02\x01"  # TrainerSpec's field 35: true
    return b"".join(pieces) + b"\x12" + bytes([len(byte_fallback)]) + byte_fallback


def _piece(text: str, kind: int) -> bytes:
    """Field 1 of a ModelProto: a piece's text, its score 0 and its kind."""
    data = text.encode()
    message = b"\x0a" + bytes([len(data)]) + data + b"\x15" + struct.pack("<f", 0.0) + b"\x18" + bytes([kind])
    return b"\x0a" + bytes([len(message)]) + message
