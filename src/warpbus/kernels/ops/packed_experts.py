"""`PackedExperts`: the quantized matrices of a layer's experts, as the kernels of `moe_mlp` read them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from warpbus.errors import TensorError
from warpbus.kernels.ops.arguments import blocks
from warpbus.kernels.ops.packed import TILE_ROWS, PackedWeight, unpack
from warpbus.qtensor import QTensor, Scheme

_MOST_EXPERTS = 1023  # of moe_sort


@dataclass(frozen=True)
class PackedExperts:
    """The quantized matrices of a layer's experts, of one shape and scheme, one behind the other.

    Kernels on a GPU read offloaded matrices from pinned memory of the host, across the link between the two. An
    expert's place here is its slot; a layer may reorder its experts (`moe_route`, `slots`).

    Attributes:
        weights: of the first experts: codes `[experts * words]` and scales `[experts * tiles of rows, groups, 8, 2]`;
            its `shape` is `(n, k)` of one expert.
        count: experts.
        offloaded: the same of all further experts, in pinned memory of the host; None if there are none.
    """

    weights: PackedWeight
    count: int
    offloaded: PackedWeight | None = None

    @classmethod
    def stack(cls, parts: Sequence[PackedWeight]) -> "PackedExperts":
        """Copy the matrices of all experts into one.

        Raises:
            TensorError: they differ in shape, scheme or dtype, or there are too many.
        """
        first = parts[0]
        for number, part in enumerate(parts):
            if (part.shape, part.scheme, part.dtype) != (first.shape, first.scheme, first.dtype):
                raise TensorError(
                    f"experts: expert {number} is {list(part.shape)} {part.scheme} {part.dtype}, expert 0 is "
                    f"{list(first.shape)} {first.scheme} {first.dtype}: expected all alike"
                )
        if len(parts) > _MOST_EXPERTS:
            raise TensorError(f"experts: {len(parts)}, expected at most {_MOST_EXPERTS}")
        zeros = None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
        codes, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
        return cls(replace(first, codes=codes, scales=scales, zeros=zeros), len(parts))

    @classmethod
    def of_parts(cls, parts: Sequence[Tensor], bits: int, group: int, shape: tuple[int, int]) -> "PackedExperts":
        """The inverse of `parts`.

        Args:
            group: columns that share a scale; 0: all.
            shape: of one expert's matrix.
        """
        step = 3 if len(parts) % 3 == 0 else 2
        scheme = Scheme(bits, group or None, step == 2)
        both = [
            PackedWeight(codes, scales, *(zeros or [None]), scheme, shape)
            for codes, scales, *zeros in (parts[at : at + step] for at in range(0, len(parts), step))
        ]
        offloaded = both[1] if len(both) > 1 else None
        return cls(both[0], sum(map(_count, both)), offloaded)

    @property
    def parts(self) -> list[Tensor]:
        """Codes, scales and, with an asymmetric scheme, zero points; then the same of the offloaded experts."""
        both = (self.weights, self.offloaded)
        return [
            part
            for each in both
            if each is not None
            for part in (each.codes, each.scales, each.zeros)
            if part is not None
        ]

    @property
    def resident(self) -> int:
        """How many experts are not offloaded: those of the first slots."""
        return _count(self.weights)

    def expert(self, slot: int) -> PackedWeight:
        """The matrix of the expert in a slot: a view."""
        resident = self.resident
        if slot < resident or self.offloaded is None:
            return _chunk(self.weights, resident, slot)
        return _chunk(self.offloaded, self.count - resident, slot - resident)

    def unpacked(self) -> list[QTensor]:
        """The matrices of all experts."""
        return [unpack(self.expert(slot)) for slot in range(self.count)]


def _count(weights: PackedWeight) -> int:
    return weights.scales.shape[0] // blocks((weights.shape[0], TILE_ROWS))


def _chunk(weights: PackedWeight, count: int, at: int) -> PackedWeight:
    codes, scales = (part.chunk(count)[at] for part in (weights.codes, weights.scales))
    zeros = None if weights.zeros is None else weights.zeros.chunk(count)[at]
    return replace(weights, codes=codes, scales=scales, zeros=zeros)
