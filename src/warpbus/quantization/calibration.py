"""Calibration data: sequences of tokens, and batches of them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """A batch of sequences, padded on the right.

    Attributes:
        ids: int64 `[batch, tokens]`.
        real: bool `[batch, tokens]`, false where there is padding.
    """

    ids: Tensor
    real: Tensor


@dataclass(frozen=True)
class Calibration:
    """The token ids of each sequence, none empty."""

    sequences: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """The number of tokens without padding."""
        return sum(map(len, self.sequences))

    def batches(self, tokens: int) -> list[TokenBatch]:
        """Batches of sequences of similar length, longest first, with at most `tokens` tokens per batch, including
        padding.

        A sequence longer than that is a batch of its own.
        """
        waiting = sorted(self.sequences, key=len, reverse=True)
        found = []
        while waiting:
            longest = len(waiting[0])
            count = max(1, tokens // longest)
            picked, waiting = waiting[:count], waiting[count:]
            ids = torch.zeros(len(picked), longest, dtype=torch.int64)
            real = torch.zeros(len(picked), longest, dtype=torch.bool)
            for row, sequence in enumerate(picked):
                ids[row, : len(sequence)] = torch.tensor(sequence)
                real[row, : len(sequence)] = True
            found.append(TokenBatch(ids, real))
        return found
