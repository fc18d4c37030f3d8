"""Adapters of a decoder: low-rank updates of its matrices (LoRA), or a prefix of keys and values (P-Tuning)."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """The low-rank update of one matrix W: the layer computes `x W^T + (x a^T) b^T`.

    Attributes:
        a: `[rank, in]`.
        b: `[out, rank]`, the scaling (`alpha / rank` in PEFT) multiplied into it.
    """

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True)
class Lora:
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685) of some of a decoder's matrices.

    Attributes:
        name: the name that requests select it by.
        parts: by the name of the decoder's matrix, such as "layers.0.attention.qkv". If the file has updates of several
            matrices that the decoder fuses, their `a` are stacked and their `b` are block-diagonal.
    """

    name: str
    parts: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """The largest rank of a matrix."""
        return max(part.rank for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True)
class Prefix:
    """Keys and values that are prepended to every sequence (P-Tuning v2, Liu et al. 2021, arXiv:2110.07602).

    They have no rotary positions: the first real token has position 0, and all tokens attend to the whole prefix.

    Attributes:
        name: the name that requests select it by.
        keys_lthd: `[layers, tokens, kv_heads, head_dim]`.
        values_lthd: same shape.
    """

    name: str
    keys_lthd: Tensor
    values_lthd: Tensor

    @property
    def tokens(self) -> int:
        """Length of the prefix in tokens."""
        return self.keys_lthd.shape[1]

    @property
    def nbytes(self) -> int:
        return self.keys_lthd.nbytes + self.values_lthd.nbytes
