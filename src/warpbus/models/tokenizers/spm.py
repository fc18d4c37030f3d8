"""SentencePiece models (`tokenizer.model`): Llama's and Qwen's older files, ChatGLM2, ChatGLM3 and glm-poet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece

from warpbus.errors import CheckpointError
from warpbus.models.tokenizers.base import Tokenizer, check_text

# ChatGLM2 and ChatGLM3 keep their special tokens outside the SentencePiece file: behind its last piece.
CHATGLM2_SPECIALS = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
CHATGLM3_SPECIALS = (*CHATGLM2_SPECIALS, "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
CHATGLM2_BEGIN = ("[gMASK]", "sop")
"""What the tokenizers of both put before a text."""

_SPACE = "\u2581"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, with special tokens added behind its pieces where a family wants that.

    The control symbols of the model are its special tokens. SentencePiece writes a space as U+2581, so a U+2581 in the
    text comes back as a space; everything else survives if the model normalizes nothing.

    Args:
        path: of the model.
        added_specials: the special tokens behind its pieces.
        begin: the tokens that become `prompt_prefix`.

    Raises CheckpointError if the file is missing or is no SentencePiece model, or if it lacks a token of `begin`.
    """

    own_spaces: frozenset[int] = frozenset()

    def __init__(self, path: Path, *, added_specials: Sequence[str] = (), begin: Sequence[str] = ()) -> None:
        model = read_sentencepiece(path)
        self._encode = model.encode
        pieces = model.get_piece_size()
        self.special_ids = {model.id_to_piece(i): i for i in range(pieces) if model.is_control(i)}
        self.special_ids |= {text: pieces + i for i, text in enumerate(added_specials)}
        self.vocab_size = pieces + len(added_specials)
        # The model's header says this too, but the library shows it only through what encode does.
        self.drops_first_space = "".join(model.encode("a", out_type=str)).startswith(_SPACE)
        ids = {text: self.special_ids.get(text, model.piece_to_id(text)) for text in begin}
        if model.unk_id() in ids.values():
            raise CheckpointError(
                f"{path}: a token before texts is missing: tokenizer_config.json (add_bos_token, bos_token) names "
                f"{begin[0]!a:.80}; restore the files from one revision of the model"
            )
        self.prompt_prefix = tuple(ids.values())
        self._bytes = [piece_bytes(model, i) for i in range(pieces)]

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        check_text(text)
        return self._encode(text)

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""


def read_sentencepiece(path: Path, *, more: bytes = b"") -> sentencepiece.SentencePieceProcessor:
    """The model in a file, with fields of a serialized `ModelProto` added behind its own.

    Raises CheckpointError if the file is missing or is no SentencePiece model.
    """
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes() + more)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); restore the file from the model's source"
        ) from None
    except RuntimeError:
        raise CheckpointError(
            f"{path}: not a SentencePiece model, or damaged; restore the file from the model's source"
        ) from None


def has_piece(path: Path, text: str) -> bool:
    """Whether the vocabulary of a SentencePiece model has a piece; raises what `read_sentencepiece` raises."""
    model = read_sentencepiece(path)
    return bool(model.piece_to_id(text) != model.unk_id())


def piece_bytes(model: sentencepiece.SentencePieceProcessor, index: int) -> bytes:
    """The bytes that one piece adds to the text: none for control symbols and unused pieces."""
    if model.is_control(index) or model.is_unused(index):
        return b""
    if model.is_unknown(index):
        return "\ufffd".encode()
    piece: str = model.id_to_piece(index)
    if model.is_byte(index):
        return bytes([int(piece[3:-1], 16)])
    return piece.replace(_SPACE, " ").encode()


def is_sentencepiece(head: Iterable[int]) -> bool:
    """Whether a file that begins with these bytes can be a SentencePiece model.

    It is a protocol buffer whose first field, number 1 with a length, is the first piece: byte 0x0A. Rank files of
    byte-level tokenizers are base64 text and cannot begin so.
    """
    return next(iter(head), None) == 0x0A
