"""Launches of the `mma.sync` kernels, which are behind the rungs `mma_*` and behind `gemm` on sm_80 and later.

Nothing here checks shapes or dtypes: the operators that call it have done so.
"""

import functools
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from warpbus.cuda.green import multiprocessors
from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, aligned, blocks, per_dtype
from warpbus.kernels.ops.split_k import partial_sums, reduce
from warpbus.kernels.ops.tiles_sm80 import Sm80Tiling, choose, clocks
from warpbus.kernels.units import unit

_PARAMETERS = Parameters(
    "const ELEMENT* a, const ELEMENT* b, const ELEMENT* bias, ELEMENT* out, float* partial, int m, int n, "
    "int k, long long a_stride, long long b_stride, long long out_stride, int k_per_split, int activation, "
    "const int4* list"
)
_CHUNK = 8  # elements in 16 bytes


@dataclass(frozen=True, eq=False, kw_only=True)
class GemmSm80Tiling(Sm80Tiling):
    """A tiling of sm80_hgemm.cu.

    Attributes:
        resident: blocks that a multiprocessor holds at a time.
        swizzle: rows of tiles that blocks go down before they go on to the next column.
        align: 8 if all loads are of 16 bytes, 1 if they are of single elements.
    """

    resident: int = 2
    swizzle: int = 8
    align: int = 8

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return self.stages * (self.tile_m + self.tile_n) * self.tile_k * 2

    def kernel(self, dtype: torch.dtype, layout_a: str, layout_b: str, *, experts: bool = False) -> Kernel:
        """The kernel for operands of two layouts, "row" or "column", or that for a mixture of experts."""
        return unit(
            "gemm/sm80_hgemm.cu",
            ELEMENT=ELEMENTS[dtype],
            TILE_M=self.tile_m,
            TILE_N=self.tile_n,
            TILE_K=self.tile_k,
            WARP_M=self.warp_m,
            WARP_N=self.warp_n,
            STAGES=self.stages,
            BLOCK_SWIZZLE=self.swizzle,
            ALIGN=self.align,
            A_LAYOUT=layout_a,
            B_LAYOUT=layout_b,
            EXPERTS=int(experts),
            SHARED_BYTES=self.shared,
        ).kernel("sm80_hgemm", _PARAMETERS)


WIDE = GemmSm80Tiling(128, 256, 32, 64, 64, stages=3, efficiency=0.95, resident=1)
SQUARE = GemmSm80Tiling(128, 128, 32, 64, 64, stages=3, efficiency=0.9)
SMALL = GemmSm80Tiling(64, 64, 64, 32, 32, stages=3, efficiency=0.7)
UNALIGNED = GemmSm80Tiling(128, 128, 32, 64, 32, stages=2, efficiency=0.3, resident=1, align=1)


def _ladder(stages: int, swizzle: int) -> tuple[GemmSm80Tiling, GemmSm80Tiling]:
    """A rung for aligned and for other operands."""
    return replace(SQUARE, stages=stages, swizzle=swizzle), replace(UNALIGNED, stages=stages, swizzle=swizzle)


RUNGS = {
    "mma_cp_async": _ladder(2, 1),
    "mma_stages_3": _ladder(3, 1),
    "mma_stages_4": _ladder(4, 1),
    "mma_swizzle": _ladder(4, 8),
}
_SINGLE_STAGE = {
    "mma_naive": per_dtype(
        "ladder/mma_naive.cu",
        "mma_naive",
        "const ELEMENT* a, const ELEMENT* b, ELEMENT* out, int m, int n, int k, int aligned",
        HALVES,
    ),
    "mma_permuted": per_dtype(
        "ladder/mma_permuted.cu",
        "mma_permuted",
        "const ELEMENT* a, const ELEMENT* b, ELEMENT* out, int m, int n, int k, int aligned",
        HALVES,
    ),
}
_SINGLE_STAGE_TILE = 128  # kTileM, kTileN and kThreads in mma_tile.cuh
_RUNG_KERNELS = {
    (tiling, dtype): tiling.kernel(dtype, "row", "row")
    for pair in RUNGS.values()
    for tiling in pair
    for dtype in HALVES
}
# Both operands column-major is what nobody's layers ask for: the widest tiling is not compiled for it.
_KERNELS = {
    (tiling, dtype, layout_a, layout_b): tiling.kernel(dtype, layout_a, layout_b)
    for tiling, dtype, layout_a, layout_b in product(
        (WIDE, SQUARE, SMALL, UNALIGNED), HALVES, ("row", "column"), ("row", "column")
    )
    if not (tiling is WIDE and layout_a == layout_b == "column")
}
OF_EXPERTS = (SMALL, SQUARE)
"""The tilings for experts."""
_EXPERT_KERNELS = {
    (tiling, dtype): tiling.kernel(dtype, "row", "column", experts=True)
    for tiling, dtype in product(OF_EXPERTS, HALVES)
}


def launch(a: Tensor, b: Tensor, out: Tensor, rung: str) -> None:
    """`out = a @ b` by a rung of the ladder.

    Args:
        a, b, out: `[m, k]`, `[k, n]` and `[m, n]` of at least one element, contiguous, all float16 or all bfloat16.
        rung: "mma_naive", "mma_permuted", or a name in `RUNGS`.
    """
    (m, n), k = out.shape, a.shape[1]
    if rung in _SINGLE_STAGE:
        grid = blocks((m, _SINGLE_STAGE_TILE), (n, _SINGLE_STAGE_TILE))
        kernel = _SINGLE_STAGE[rung][a.dtype]
        kernel(grid, _SINGLE_STAGE_TILE, a=a, b=b, out=out, m=m, n=n, k=k, aligned=aligned(a, b))
        return
    tiling = RUNGS[rung][0 if aligned(a, b) else 1]
    _RUNG_KERNELS[tiling, a.dtype](
        tiling.tiles(m, n),
        tiling.threads,
        a=a,
        b=b,
        bias=None,
        out=out,
        partial=None,
        m=m,
        n=n,
        k=k,
        a_stride=k,
        b_stride=n,
        out_stride=n,
        k_per_split=k,
        activation=0,
        list=None,
        shared=tiling.shared,
    )


def sm80_gemm(a: Tensor, b: Tensor, bias: Tensor | None, activation: int, out: Tensor) -> None:
    """`out = activation(a @ b + bias)`, summed in float32, the same bits every time.

    Args:
        a, b: `[m, k]` and `[k, n]`, both float16 or both bfloat16, each row- or column-major (one of its strides is 1).
        bias: `[n]`, contiguous, in their dtype.
        activation: a number of `Activation` in common/numeric.cuh.
        out: `[m, n]` in their dtype, row-major.
    """
    (m, n), k = out.shape, a.shape[1]
    if m == 0 or n == 0:
        return
    layout_a, stride_a, aligned_a = _layout(a)
    layout_b, stride_b, aligned_b = _layout(b)
    tilings: tuple[GemmSm80Tiling, ...] = (UNALIGNED,)
    if aligned_a and aligned_b:
        tilings = (SQUARE, SMALL) if layout_a == layout_b == "column" else (WIDE, SQUARE, SMALL)
    tiling, part = plan(m, n, k, multiprocessors(a.device), tilings)
    splits = blocks((max(k, 1), part))
    partial = partial_sums(splits, out)
    _KERNELS[tiling, a.dtype, layout_a, layout_b](
        (tiling.tiles(m, n), splits),
        tiling.threads,
        a=a,
        b=b,
        bias=bias,
        out=out,
        partial=partial,
        m=m,
        n=n,
        k=k,
        a_stride=stride_a,
        b_stride=stride_b,
        out_stride=out.stride(0),
        k_per_split=part,
        activation=activation,
        list=None,
        shared=tiling.shared,
    )
    reduce(partial, bias, out, activation)


def multiply_experts(x: Tensor, weights: Tensor, tiles: Tensor, most: int, tiling: GemmSm80Tiling, out: Tensor) -> None:
    """Products of a mixture of experts: rows of `out` are rows of x times their expert's weight.

    Args:
        x: `[rows, k]`, sorted by expert, contiguous, 16-byte aligned.
        weights: `[experts, n, k]`, contiguous; k is a multiple of 8.
        tiles: int32 `[1 + most, 4]`, see `moe/sort.cu`.
        most: rows of tiles, at most.
        tiling: one of `OF_EXPERTS`.
        out: `[rows, n]`, contiguous.
    """
    n, k = weights.shape[1:]
    _EXPERT_KERNELS[tiling, x.dtype](
        most * blocks((n, tiling.tile_n)),
        tiling.threads,
        a=x,
        b=weights,
        bias=None,
        out=out,
        partial=None,
        m=len(out),
        n=n,
        k=k,
        a_stride=k,
        b_stride=k,
        out_stride=n,
        k_per_split=k,
        activation=0,
        list=tiles[1:],
        shared=tiling.shared,
    )


def _layout(matrix: Tensor) -> tuple[str, int, bool]:
    """Whether a matrix is row- or column-major, its stride, and whether all rows, or columns, begin at 16 bytes.

    A matrix of one row or column can be seen in both ways; the stride that nobody uses counts as aligned.
    """
    rows, columns = matrix.shape
    seen = []
    if matrix.stride(1) == 1 or columns == 1:
        seen.append(("row", matrix.stride(0) if rows > 1 else 0))
    if matrix.stride(0) == 1 or rows == 1:
        seen.append(("column", matrix.stride(1) if columns > 1 else 0))
    begins = matrix.data_ptr() % 16 == 0
    views = [(layout, stride, begins and stride % _CHUNK == 0) for layout, stride in seen]
    return next((view for view in views if view[2]), views[0])


@functools.lru_cache(maxsize=4096)
def plan(
    m: int, n: int, k: int, multiprocessors: int, tilings: tuple[GemmSm80Tiling, ...]
) -> tuple[GemmSm80Tiling, int]:
    """The tiling of least expected time, and how much of k a block sums; see `tiles_sm80.choose`.

    Returns:
        A tiling of `tilings`, and a multiple of its `tile_k`.
    """

    def cost(tiling: GemmSm80Tiling, part: int) -> float:
        return clocks(
            tiling,
            m=m,
            n=n,
            k=k,
            part=part,
            resident=tiling.resident,
            multiprocessors=multiprocessors,
            bytes_per_k=2 * (min(m, tiling.tile_m) + min(n, tiling.tile_n)),
        )

    return choose(tilings, k, cost)
