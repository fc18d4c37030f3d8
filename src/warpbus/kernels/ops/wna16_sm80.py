"""The product with a packed weight by `mma.sync`: what `wna16` does with many rows where there is no `wgmma`.

Nothing here checks shapes or dtypes: the operators that call it have done so.
"""

import functools
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from warpbus.cuda.devices import shared_memory
from warpbus.cuda.green import multiprocessors
from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, blocks
from warpbus.kernels.ops.gemm_sm90 import addressable
from warpbus.kernels.ops.packed import STORED_BITS, TILE_COLUMNS, PackedWeight
from warpbus.kernels.ops.packed_experts import PackedExperts
from warpbus.kernels.ops.split_k import partial_sums, reduce
from warpbus.kernels.ops.tiles_sm80 import Sm80Tiling, choose, clocks, resident_within
from warpbus.kernels.units import unit

_PARAMETERS = Parameters(
    "const ELEMENT* x, const uint4* codes, const ELEMENT* scales, const ELEMENT* zeros, const ELEMENT* bias, "
    "ELEMENT* out, float* partial, int m, int n, int k, int groups, int group_shift, int middle, int x_stride, "
    "long long out_stride, int k_per_split"
)
_EXPERTS = Parameters(
    "const ELEMENT* x, const uint4* codes, const ELEMENT* scales, const ELEMENT* zeros, const uint4* host_codes, "
    "const ELEMENT* host_scales, const ELEMENT* host_zeros, ELEMENT* out, const int4* tiles, int n, int k, int groups, "
    "int group_shift, int middle, int resident"
)
_STAGES = 3  # kStages in sm80_wna16.cu
_WHOLE_ROW = 31  # a shift that leaves nothing of a column's number: one group a row


@dataclass(frozen=True, eq=False, kw_only=True)
class Wna16Sm80Tiling(Sm80Tiling):
    """A tiling of sm80_wna16.cu; its rows are those of x, and its columns the rows of the weight.

    Attributes:
        resident: blocks that a multiprocessor holds at a time as far as registers go.
    """

    resident: int

    def shared(self, bits: int) -> int:
        """Bytes of shared memory of a block: of each stage x, codes, and two scales and zero points per row."""
        return self.stages * (self.tile_m * self.tile_k * 2 + self.tile_n * (self.tile_k * bits // 8 + 2 * 2 * 2))

    def resident_within(self, bits: int, shared_memory: int) -> int:
        """Blocks that a multiprocessor with so many bytes of shared memory holds at a time."""
        return resident_within(self.resident, self.shared(bits), shared_memory)

    def kernel(self, dtype: torch.dtype, bits: int, *, experts: bool = False) -> Kernel:
        """The kernel for activations of a dtype and codes of so many bits; `experts`: of a mixture of experts."""
        declared = unit(
            "wna16/sm80_wna16.cu",
            ELEMENT=ELEMENTS[dtype],
            BITS=bits,
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            WARP_M=self.warp_m,
            WARP_N=self.warp_n,
            RESIDENT=self.resident,
            SHARED_BYTES=self.shared(bits),
            EXPERTS=int(experts),
        )
        if experts:
            return declared.kernel("sm80_wna16_experts", _EXPERTS)
        return declared.kernel("sm80_wna16", _PARAMETERS)


# In the large one two warps dequantize each weight, for 64 rows of x each; in the others one does, for all rows.
LARGE = Wna16Sm80Tiling(128, 128, TILE_COLUMNS, 64, 64, _STAGES, efficiency=0.85, resident=2)
MEDIUM = Wna16Sm80Tiling(64, 128, TILE_COLUMNS, 64, 32, _STAGES, efficiency=0.7, resident=3)
SMALL = Wna16Sm80Tiling(32, 128, TILE_COLUMNS, 32, 32, _STAGES, efficiency=0.45, resident=4)
TILINGS = (LARGE, MEDIUM, SMALL)

_KERNELS = {
    (tiling, dtype, bits, experts): tiling.kernel(dtype, bits, experts=experts)
    for tiling, dtype, bits, experts in product(TILINGS, HALVES, STORED_BITS, (False, True))
}


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """`out = x @ weight.T + bias` with the weight as `QTensor.dequantize` gives it, summed in float32.

    The same bits every time.

    Args:
        x: `[m, k]` in the dtype of the weight, any strides; copied where its rows do not begin at 16 bytes.
        weight: `[n, k]`.
        bias: `[n]`, contiguous, in their dtype.
        out: `[m, n]` in their dtype, row-major.
    """
    (m, n), k = out.shape, x.shape[1]
    if m == 0 or n == 0:
        return
    x = addressable(x)
    tiling, part = plan(m, n, k, weight.bits, multiprocessors(x.device), shared_memory(x.device))
    splits = blocks((max(k, 1), part))
    partial = partial_sums(splits, out)
    _KERNELS[tiling, x.dtype, weight.bits, False](
        (tiling.tiles(m, n), splits),
        tiling.threads,
        x=x,
        codes=weight.codes,
        scales=weight.scales,
        zeros=weight.zeros,
        bias=bias,
        out=out,
        partial=partial,
        m=m,
        n=n,
        k=k,
        groups=weight.scales.shape[1],
        group_shift=_shift(weight),
        middle=weight.scheme.middle_code,
        x_stride=x.stride(0) if m > 1 else 0,
        out_stride=out.stride(0),
        k_per_split=part,
        shared=tiling.shared(weight.bits),
        dependent=True,
    )
    reduce(partial, bias, out)


def multiply_experts(
    x: Tensor, stacked: PackedExperts, tiles: Tensor, most: int, tiling: Wna16Sm80Tiling, out: Tensor
) -> None:
    """Products of a mixture of experts: rows of `out` are rows of x times their expert's weights.

    Args:
        x: `[rows, k]`, sorted by expert, contiguous; k is a multiple of 8.
        stacked: the weights of all experts.
        tiles: int32 `[1 + most, 4]`, see the kernel.
        most: tiles, of rows, at most.
        out: `[rows, n]`, contiguous.
    """
    weights, offloaded = stacked.weights, stacked.offloaded
    n, k = weights.shape
    _KERNELS[tiling, x.dtype, weights.bits, True](
        most * blocks((n, tiling.tile_n)),
        tiling.threads,
        x=x,
        codes=weights.codes,
        scales=weights.scales,
        zeros=weights.zeros,
        host_codes=None if offloaded is None else offloaded.codes,
        host_scales=None if offloaded is None else offloaded.scales,
        host_zeros=None if offloaded is None else offloaded.zeros,
        resident=stacked.resident,
        out=out,
        tiles=tiles[1:],
        n=n,
        k=k,
        groups=weights.scales.shape[-3],
        group_shift=_shift(weights),
        middle=weights.scheme.middle_code,
        shared=tiling.shared(weights.bits),
        dependent=True,
    )


def _shift(weight: PackedWeight) -> int:
    group = weight.scheme.group_size
    return _WHOLE_ROW if group is None else group.bit_length() - 1


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, k: int, bits: int, multiprocessors: int, shared_memory: int) -> tuple[Wna16Sm80Tiling, int]:
    """The tiling of least expected time, and how much of k a block sums; see `tiles_sm80.choose`.

    Args:
        shared_memory: bytes of a multiprocessor.

    Returns:
        A tiling of `TILINGS`, and a multiple of 64.
    """

    def cost(tiling: Wna16Sm80Tiling, part: int) -> float:
        return clocks(
            tiling,
            m=m,
            n=n,
            k=k,
            part=part,
            resident=tiling.resident_within(bits, shared_memory),
            multiprocessors=multiprocessors,
            bytes_per_k=2 * min(m, tiling.tile_m) + min(n, tiling.tile_n) * bits / 8,
            weight_bytes=n * k * bits / 8,
        )

    return choose(TILINGS, k, cost)
