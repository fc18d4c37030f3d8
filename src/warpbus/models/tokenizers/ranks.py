"""GLM-4's `tokenizer.model`: byte-level BPE given as ranks, one `base64 rank` a line, read by `tiktoken`."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

import tiktoken

from warpbus.errors import CheckpointError
from warpbus.models.tokenizers.base import Tokenizer, check_text

GLM4_SPECIALS = {
    text: 151329 + i
    for i, text in enumerate(
        (
            "<|endoftext|>",
            "[MASK]",
            "[gMASK]",
            "[sMASK]",
            "<sop>",
            "<eop>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|observation|>",
            "<|begin_of_image|>",
            "<|end_of_image|>",
            "<|begin_of_video|>",
            "<|end_of_video|>",
        )
    )
}

# What GLM-4's tokenizer puts before a text.
_BEGIN = ("[gMASK]", "<sop>")

# How GLM-4 cuts text before merging: English contractions, words with one leading mark, up to three digits, runs of
# marks with their line ends, line ends, and spaces.
_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class RankTokenizer(Tokenizer):
    """Byte-level BPE from a file of ranks, with GLM-4's way of cutting text.

    Attributes:
        ranks: the id of each token's bytes, special tokens excluded.

    Args:
        path: the file of ranks.
        special_ids: special tokens and their ids, none of which is a rank of the file.

    Raises CheckpointError if the file is missing or damaged, or if an id is taken twice.
    """

    own_spaces: frozenset[int] = frozenset()

    def __init__(self, path: Path, *, special_ids: Mapping[str, int]) -> None:
        ranks = self.ranks = _read_ranks(path)
        self.special_ids = dict(special_ids)
        self._bytes = {rank: data for data, rank in ranks.items()}
        taken = sorted(set(self.special_ids.values()) & self._bytes.keys())
        if taken or len(self._bytes) != len(ranks):
            raise CheckpointError(
                f"{path}: id {taken[0] if taken else 'of a rank'} is given twice: expected one id a token; "
                "restore the file from the model's source"
            )
        self.vocab_size = max([*self._bytes, *self.special_ids.values()]) + 1
        if self.special_ids.keys() >= set(_BEGIN):
            self.prompt_prefix = tuple(self.special_ids[text] for text in _BEGIN)
        self.drops_first_space = False
        self._encode = tiktoken.Encoding(
            name=str(path), pat_str=_SPLIT, mergeable_ranks=ranks, special_tokens={}
        ).encode_ordinary

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        check_text(text)
        return self._encode(text)

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        return self._bytes.get(token, b"")


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); restore the file from the model's source"
        ) from None
    for number, line in enumerate(lines, start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise CheckpointError(
                f"{path}: line {number} is not 'base64 rank', nor is the file a SentencePiece model; restore it from "
                "the model's source"
            ) from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(
            f"{path}: byte 0x{missing[0]:02X} has no rank: expected all 256; restore the file from the model's source"
        )
    return ranks
