"""What a decoder may have beside its weights: low-rank changes of linears (LoRA), or a prefix of keys and values."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """A change of one linear: it computes `x W^T + (x a^T) b^T`.

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
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685) of some of a decoder's linears.

    Attributes:
        name: what requests choose it by.
        parts: by the name of the decoder's own linear, "layers.0.attention.qkv". Where the file has several that the
            decoder computes as one matrix, their `a` are stacked and their `b` are blocks of a diagonal.
    """

    name: str
    parts: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """The largest rank of a linear."""
        return max(part.rank for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True)
class Prefix:
    """Keys and values that stand before every sequence (P-Tuning v2, Liu et al. 2021, arXiv:2110.07602).

    They are not rotated: the first real token has position 0, and all tokens attend to all of the prefix.

    Attributes:
        name: what requests choose it by.
        keys_lthd: `[layers, tokens, kv_heads, head_dim]`.
        values_lthd: the same.
    """

    name: str
    keys_lthd: Tensor
    values_lthd: Tensor

    @property
    def tokens(self) -> int:
        """How many tokens the prefix stands for."""
        return self.keys_lthd.shape[1]

    @property
    def nbytes(self) -> int:
        return self.keys_lthd.nbytes + self.values_lthd.nbytes
