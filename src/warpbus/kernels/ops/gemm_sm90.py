"""Launches products by wgmma on Hopper: chooses the tiling, the tensor maps and the number of blocks."""

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.cuda.green import multiprocessors
from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.cuda.tensor_map import ALIGNMENT, fits, tensor_map, tile_maps
from warpbus.kernels.ops.arguments import ACTIVATIONS, ELEMENTS, HALVES, blocks, per_dtype
from warpbus.kernels.ops.tiles_sm90 import BOX, ROW_BYTES, Sm90Tiling
from warpbus.kernels.units import unit

_PARAMETERS = Parameters(
    "TileMaps map_a, TensorMap map_b, TensorMap map_out, const ELEMENT* bias, ELEMENT* out, Problem p, "
    "const int4* list",
    Problem="int m, int n, int k, int group, int direct",
)
_TILE_K = ROW_BYTES // 2  # elements of one stage
_COLUMN_BYTES = 2  # of shared memory: the bias
_NO_MAP = bytes(128)
_ROWS_OF_TILES = 1024  # of the output that are walked together: wide enough that L2 serves a wave of tiles
_L2 = 50e6  # bytes
_LARGEST_FOR_SILU = 128 * 128  # elements of a tile: with more, the registers of a thread do not suffice
_FEW_ROWS = 16  # kFewRows in gemm/sm90_hgemm.cu
_EPILOGUE = 350  # what a tile costs beside its products, in elements of k: filling the ring, writing the result


@dataclass(frozen=True, kw_only=True)
class GemmSm90Tiling(Sm90Tiling):
    """A tiling of `gemm/sm90_hgemm.cu`; efficiencies were measured on an H100 for some thirty shapes.

    Attributes:
        cluster: blocks along m that share the tiles of b.
        variety: the variants beyond operands that both have k as their contiguous axis: 0 none, 1 other
            layouts or an activation, 2 both at once.
    """

    cluster: int = 1
    variety: int = 0

    def clusters(self, m: int, n: int) -> int:
        """How many clusters cover a product."""
        return blocks((m, self.tile_m * self.cluster), (n, self.tile_n))

    def fits(self, a_major: int, b_major: int, activation: int) -> bool:
        """Whether it is compiled for a product."""
        if activation == ACTIVATIONS["silu"] and self.tile_m * self.tile_n > _LARGEST_FOR_SILU:
            return False
        # The blocks of a cluster share b in boxes of 64 columns where n is its contiguous axis.
        boxes = not b_major or self.tile_n // self.cluster % BOX == 0
        return boxes and bool(a_major or b_major) + bool(activation) <= self.variety


TILINGS = (
    GemmSm90Tiling(128, 256, 4, 2, 1.0, variety=1),
    GemmSm90Tiling(256, 128, 4, 2, 0.99),
    GemmSm90Tiling(256, 144, 4, 1, 0.98),
    GemmSm90Tiling(128, 208, 4, 2, 0.97),
    GemmSm90Tiling(128, 192, 5, 1, 0.975, cluster=2),
    GemmSm90Tiling(128, 144, 6, 1, 0.98),
    GemmSm90Tiling(128, 128, 6, 2, 0.97, variety=2),
    GemmSm90Tiling(128, 80, 8, 1, 0.78),
    GemmSm90Tiling(128, 64, 8, 2, 0.70),
    GemmSm90Tiling(64, 128, 8, 2, 0.73, variety=1),
)

OF_EXPERTS = (
    GemmSm90Tiling(64, 64, 12, 2, 0.4),
    GemmSm90Tiling(64, 128, 8, 2, 0.73),
    GemmSm90Tiling(128, 128, 6, 2, 0.97),
    GemmSm90Tiling(128, 256, 4, 2, 1.0),
)
"""The tilings for experts."""

_LARGEST = TILINGS[0]
_MANY_WAVES = 8  # from which on a last one that is not full does not count

_WGMMA = per_dtype(
    "ladder/matmul_wgmma.cu",
    "matmul_wgmma",
    "TensorMap map_a, TensorMap map_b, ELEMENT* out, int m, int n, int k",
    HALVES,
    needs="sm_90a",
)
_WGMMA_TILE = 128
_WGMMA_SHARED = 3 * 2 * _WGMMA_TILE * _TILE_K * 2 + 24 + 1024


def matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
    """The ladder's rung "wgmma": `a [m, k] @ b [k, n]`, both contiguous, any sizes."""
    (m, k), n = a.shape, b.shape[1]
    rows_a, rows_b = addressable(a), addressable(b)  # held until the launch: copies that are given back are overwritten
    map_a, map_b = tensor_map(rows_a, _WGMMA_TILE, BOX), tensor_map(rows_b, _TILE_K, BOX)
    grid = blocks((n, _WGMMA_TILE)), blocks((m, _WGMMA_TILE))
    _WGMMA[a.dtype](grid, 256, map_a=map_a, map_b=map_b, out=out, m=m, n=n, k=k, shared=_WGMMA_SHARED)


def gemm(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: int, out: Tensor, tiling: GemmSm90Tiling | None = None
) -> None:
    """`out = activation(a @ b + bias)` on an sm_90a GPU.

    Args:
        a, b: `[m, k]` and `[k, n]`, each contiguous along one of its axes.
        bias: `[n]`, contiguous.
        out: `[m, n]`, contiguous.
        tiling: one of `TILINGS`; by default the one that should be fastest.
    """
    (m, k), n = a.shape, b.shape[1]
    # A vector counts as having k as its contiguous axis, for which every tiling is compiled.
    a_major, b_major = int(a.stride(1) != 1), int(b.stride(0) != 1)
    tiling = tiling or choose(m, n, k, a_major, b_major, activation, multiprocessors(a.device))
    rows_a = addressable(a.T if a_major else a)
    rows_b = addressable(b if b_major else b.T)
    map_a = tensor_map(rows_a, _TILE_K, BOX) * 2 if a_major else tile_maps(rows_a, tiling.tile_m, BOX)
    map_b = tensor_map(rows_b, _TILE_K if b_major else tiling.tile_n // tiling.cluster, BOX)
    direct = not fits(out)
    map_out = _NO_MAP if direct else tensor_map(out, BOX, BOX)
    resident = multiprocessors(a.device) // tiling.cluster
    group = max(_ROWS_OF_TILES // (tiling.tile_m * tiling.cluster), 1)
    _kernel(a.dtype, tiling, a_major, b_major, activation)(
        min(tiling.clusters(m, n), resident) * tiling.cluster,
        tiling.threads,
        map_a=map_a,
        map_b=map_b,
        map_out=map_out,
        bias=bias,
        out=out,
        m=m,
        n=n,
        k=k,
        group=group,
        direct=direct,
        list=None,
        shared=tiling.shared(_COLUMN_BYTES),
        cluster=tiling.cluster,
        dependent=True,
    )


def multiply_experts(
    x: Tensor, weights: Tensor, tiles: Tensor, most: int, tiling: GemmSm90Tiling, out: Tensor, *, gated: bool = False
) -> None:
    """Products of a mixture of experts: rows of `out` are rows of x times their expert's weight.

    Args:
        x: `[rows, k]`, sorted by expert, contiguous, at least `tiling.tile_m` rows.
        weights: `[experts, n, k]`, contiguous; k is a multiple of 8.
        tiles: int32 `[1 + most, 4]`, see `moe/sort.cu`.
        most: rows of tiles, at most.
        tiling: one of `OF_EXPERTS`.
        out: `[rows, n]`, contiguous; with a gate `[rows, n / 2]`, `silu(gate) * up` of weights whose first half of the
            rows is the gate.
    """
    n = out.shape[1]
    columns = tiling.tile_n // (2 if gated else 1)
    direct = not fits(out)
    _kernel(x.dtype, tiling, 0, 0, ACTIVATIONS["none"], 2 if gated else 1)(
        min(most * blocks((n, columns)), multiprocessors(x.device)),
        tiling.threads,
        map_a=tensor_map(x, tiling.tile_m, BOX) + tensor_map(x, _FEW_ROWS, BOX),
        map_b=tensor_map(weights.flatten(0, 1), columns, BOX),
        map_out=_NO_MAP if direct else tensor_map(out, BOX, BOX),
        bias=None,
        out=out,
        m=len(out),
        n=n,
        k=x.shape[1],
        group=1,
        direct=direct,
        list=tiles[1:],
        shared=tiling.shared(_COLUMN_BYTES),
        dependent=True,
    )


def addressable(matrix: Tensor) -> Tensor:
    """The matrix itself, or a copy with padded rows where the copy engine cannot address it."""
    if fits(matrix):
        return matrix
    rows, columns = matrix.shape
    step = ALIGNMENT // matrix.element_size()
    return matrix.new_empty(rows, blocks((columns, step)) * step)[:, :columns].copy_(matrix)


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, a_major: int, b_major: int, activation: int, multiprocessors: int) -> GemmSm90Tiling:
    """The tiling with the least estimated time, by waves of tiles; the last wave counts as a full one.

    Where L2 does not hold the operands, small tiles would fetch them too often.
    """

    def cost(tiling: GemmSm90Tiling) -> float:
        waves = blocks((tiling.clusters(m, n), multiprocessors // tiling.cluster))
        return waves * tiling.tile_m * tiling.tile_n * (k + _EPILOGUE) / tiling.efficiency

    possible = [tiling for tiling in TILINGS if tiling.fits(a_major, b_major, activation)]
    many = m * n > _LARGEST.tile_m * _LARGEST.tile_n * multiprocessors * _MANY_WAVES
    if many and 2 * k * (m + n) > _L2 and _LARGEST in possible:
        return _LARGEST
    return min(possible, key=cost)


@functools.cache
def _kernel(
    dtype: torch.dtype, tiling: GemmSm90Tiling, a_major: int, b_major: int, activation: int, experts: int = 0
) -> Kernel:
    declared = unit(
        "gemm/sm90_hgemm.cu",
        needs="sm_90a",
        ELEMENT=ELEMENTS[dtype],
        TILE_M=tiling.tile_m,
        TILE_N=tiling.tile_n,
        STAGES=tiling.stages,
        BUFFERS=tiling.buffers,
        CLUSTER=tiling.cluster,
        A_MAJOR=a_major,
        B_MAJOR=b_major,
        ACTIVATION=activation,
        EXPERTS=experts,
        SHARED_BYTES=tiling.shared(_COLUMN_BYTES),
    )
    return declared.kernel("sm90_hgemm", _PARAMETERS)


for _dtype, _tiling, _a, _b, _activation in itertools.product(HALVES, TILINGS, (0, 1), (0, 1), ACTIVATIONS.values()):
    if _tiling.fits(_a, _b, _activation):
        _kernel(_dtype, _tiling, _a, _b, _activation)

for _dtype, _tiling, _experts in itertools.product(HALVES, OF_EXPERTS, (1, 2)):
    _kernel(_dtype, _tiling, 0, 0, ACTIVATIONS["none"], _experts)
