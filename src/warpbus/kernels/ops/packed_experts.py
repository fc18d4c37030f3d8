"""`PackedExperts`: the quantized matrices of a layer's experts, as the kernels of `moe_mlp` read them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from warpbus.cuda.staging import pinned_bytes
from warpbus.errors import TensorError
from warpbus.kernels.ops.arguments import blocks
from warpbus.kernels.ops.expert_rows import MOST_EXPERTS
from warpbus.kernels.ops.packed import TILE_ROWS, PackedWeight, scheme_of, unpack
from warpbus.qtensor import QTensor


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
    def stack(cls, parts: Sequence[PackedWeight], offloaded: Sequence[PackedWeight] = ()) -> "PackedExperts":
        """Copy the matrices of all experts into one.

        Args:
            parts: of the first slots, at least one.
            offloaded: of the further slots, on any device. They are copied to memory of the host: pinned, if `parts`
                are on a GPU.

        Raises:
            TensorError: they differ in shape, scheme or dtype, or there are too many.
            DeviceError: there is not so much memory to pin.
        """
        first, every = parts[0], (*parts, *offloaded)
        for number, part in enumerate(every):
            if (part.shape, part.scheme, part.dtype) != (first.shape, first.scheme, first.dtype):
                raise TensorError(
                    f"experts: expert {number} is {list(part.shape)} {part.scheme} {part.dtype}, expert 0 is "
                    f"{list(first.shape)} {first.scheme} {first.dtype}: expected all alike"
                )
        if len(every) > MOST_EXPERTS:
            raise TensorError(f"experts: {len(every)}, expected at most {MOST_EXPERTS}")
        join = _pinned if first.device.type == "cuda" else torch.cat
        return cls(_joined(parts, torch.cat), len(every), _joined(offloaded, join) if offloaded else None)

    @classmethod
    def of_parts(cls, parts: Sequence[Tensor], bits: int, group: int, shape: tuple[int, int]) -> "PackedExperts":
        """The inverse of `parts`.

        Args:
            group: columns that share a scale; 0: all.
            shape: of one expert's matrix.
        """
        step = 3 if len(parts) % 3 == 0 else 2
        scheme = scheme_of(bits, group, step == 2)
        both = [
            PackedWeight(parts[at], parts[at + 1], parts[at + 2] if step == 3 else None, scheme, shape)
            for at in range(0, len(parts), step)
        ]
        return cls(both[0], sum(map(_count, both)), both[1] if len(both) > 1 else None)

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


def _joined(parts: Sequence[PackedWeight], join: Callable[[list[Tensor]], Tensor]) -> PackedWeight:
    codes, scales = (join([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(parts[0], codes=codes, scales=scales, zeros=join(zeros) if zeros else None)


def _pinned(tensors: list[Tensor]) -> Tensor:
    """As `torch.cat`, in pinned memory of the host."""
    first, rows = tensors[0], sum(map(len, tensors))
    joined = pinned_bytes(sum(each.nbytes for each in tensors)).view(first.dtype).view(rows, *first.shape[1:])
    return torch.cat([each.cpu() for each in tensors], out=joined)


def _count(weights: PackedWeight) -> int:
    return weights.scales.shape[0] // blocks((weights.shape[0], TILE_ROWS))


def _chunk(weights: PackedWeight, count: int, at: int) -> PackedWeight:
    codes, scales = (part.chunk(count)[at] for part in (weights.codes, weights.scales))
    zeros = None if weights.zeros is None else weights.zeros.chunk(count)[at]
    return replace(weights, codes=codes, scales=scales, zeros=zeros)
