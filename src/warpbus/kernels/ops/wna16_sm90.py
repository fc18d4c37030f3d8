"""Launching `wna16/sm90_wna16.cu`: quantized weights times many tokens on Hopper."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.green import multiprocessors
from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.cuda.tensor_map import fits, tensor_map, tile_maps
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, blocks
from warpbus.kernels.ops.gemm_sm90 import addressable
from warpbus.kernels.ops.packed import STORED_BITS, TILE_COLUMNS, TILE_ROWS, PackedWeight
from warpbus.kernels.ops.packed_experts import PackedExperts
from warpbus.kernels.ops.tiles_sm90 import BOX, shared_bytes
from warpbus.kernels.ops.workspace import counters
from warpbus.kernels.units import unit

_PARAMETERS = Parameters(
    "Maps maps, const ELEMENT* bias, ELEMENT* out, float* partials, int* flags, int symmetric, Problem p",
    Maps="TileMaps map_x, TensorMap map_codes, TensorMap map_scales, TensorMap map_zeros, TensorMap map_out, "
    "TensorMap host_codes, TensorMap host_scales, TensorMap host_zeros",
    Problem="int m, int n, int k, int gate_tiles, int chunks, int shift, int group, "
    "int waves, int direct, int splits, const int4* tiles, int resident",
)
_NO_MAP = bytes(128)
_FULL_ENOUGH = 0.9
_HANDING_ON = 7  # blocks of k of a tile that take as long as to leave it for another and to add it up there, measured
_GROUP = 4096  # rows of x that are walked together
_MOST_SPLITS = 8  # the largest cluster that every GPU with clusters can run


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: they are few, and looked up at every launch
class Wna16Sm90Tiling:
    """How `wna16/sm90_wna16.cu` cuts a product.

    Attributes:
        tokens: rows of x in a tile.
        consumers: warpgroups that multiply, each 64 rows of the weight.
        stages: blocks of k in flight, by the bits of a code; with 2 and 3 bits as many as with 4.
        parts: of its rows, equal ones, of which a tile of experts copies and multiplies no more than it has.
    """

    tokens: int
    consumers: int
    stages: dict[int, int]
    parts: int = 1

    @property
    def rows(self) -> int:
        """Of the weight in a tile."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * (1 + self.consumers)

    @property
    def unit(self) -> int:
        """Rows of x that are copied at a time for experts, see the kernel."""
        return self.tokens // self.parts

    def tiles(self, m: int, n: int) -> int:
        """How many tiles cover a product."""
        return blocks((m, self.tokens), (n, self.rows))

    def stages_of(self, bits: int) -> int:
        """Blocks of k in flight, of codes of so many bits."""
        return self.stages[max(bits, 4)]

    @functools.cache  # noqa: B019 - see `kernel`
    def shared(self, bits: int) -> int:
        """Bytes: the ring with its barriers, staging buffers, and room to align."""
        stage = (self.tokens * 2 + self.rows * bits // 8) * TILE_COLUMNS + 2 * self.rows // TILE_ROWS * 2 * 32
        return shared_bytes(self.stages_of(bits), stage, self.consumers * min(self.tokens, BOX) * BOX * 2)

    @functools.cache  # noqa: B019 - tilings are few, and are kept as long as their kernels
    def kernel(
        self, dtype: torch.dtype, bits: int, groups: int = 1, *, experts: bool = False, gated: bool = False
    ) -> Kernel:
        """The kernel with these tiles; `groups`: of a block of k, see `_groups`; `experts`: of a mixture of experts."""
        return unit(
            "wna16/sm90_wna16.cu",
            needs="sm_90a",
            ELEMENT=ELEMENTS[dtype],
            BITS=bits,
            GROUPS=groups,
            TOKENS=self.tokens,
            CONSUMERS=self.consumers,
            STAGES=self.stages_of(bits),
            SHARED_BYTES=self.shared(bits),
            EXPERTS=int(experts),
            GATED=int(gated),
            PARTS=self.parts,
        ).kernel("sm90_wna16", _PARAMETERS)


# From the smallest tile to the largest.
TILINGS = (
    Wna16Sm90Tiling(16, 3, {4: 18, 8: 12}),
    Wna16Sm90Tiling(32, 3, {4: 14, 8: 10}),
    Wna16Sm90Tiling(64, 2, {4: 12, 8: 10}),
    Wna16Sm90Tiling(64, 3, {4: 12, 8: 8}),
    Wna16Sm90Tiling(128, 2, {4: 8, 8: 7}),
    Wna16Sm90Tiling(128, 3, {4: 8, 8: 6}),
    Wna16Sm90Tiling(256, 2, {4: 5, 8: 4}),
)


@dataclass(frozen=True)
class Wna16Sm90Plan:
    """How a product is shared out.

    Attributes:
        tiling: its tiles.
        splits: blocks of a cluster that share each tile along k, not more than there are blocks of k; 1: there are no
            clusters, and blocks take whole tiles and equal runs of what is left.
    """

    tiling: Wna16Sm90Tiling
    splits: int = 1


def multiply(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    out: Tensor,
    *,
    gated: bool = False,
    plan: Wna16Sm90Plan | None = None,
) -> None:
    """`out = x @ weight.T + bias` on an sm_90a GPU, or `silu(gate) * up` of it.

    Args:
        x: `[m, k]` in the dtype of the weight.
        bias: `[n]`, contiguous, or `None`.
        out: `[m, n]`, or `[m, n / 2]` where gated, contiguous.
        gated: the first half of the weight's rows is the gate, the second half up; n / 2 is a multiple of 16.
        plan: by default the one that should be fastest.
    """
    m, k = x.shape
    n = weight.shape[0]
    bits = weight.bits
    count = multiprocessors(x.device)
    groups = _groups(weight)
    plan = plan or _chosen(m, n, k, count, x.get_device(), x.dtype, bits, groups)
    tiling = plan.tiling
    chunks = blocks((k, TILE_COLUMNS))
    x = addressable(x)
    tiles = tiling.tiles(m, n)
    if plan.splits == 1:
        grid = min(count, tiles * chunks)
        waves = _waves(tiles, grid)
        handed_on = tiles > waves * grid  # with whole waves the last may hold fewer
    else:
        grid, waves, handed_on = tiles * plan.splits, 0, False
    partials = x.new_empty(grid * tiling.rows * tiling.tokens, dtype=torch.float32) if handed_on else None
    tiling.kernel(x.dtype, bits, groups, gated=gated)(
        grid,
        tiling.threads,
        **_operands(
            *(x, weight, out, tiling),
            rows=tiling.tokens,
            box=min(tiling.tokens, 64) if plan.splits == 1 else 16,
            gated=gated,
        ),
        **_host_maps(None, tiling, 0),
        bias=bias,
        partials=partials,
        flags=counters(x.device, grid * tiling.consumers) if handed_on else None,
        waves=waves,
        splits=plan.splits,
        tiles=None,
        resident=0,
        shared=tiling.shared(bits),
        cluster=plan.splits,
        dependent=True,
    )


def multiply_experts(
    x: Tensor,
    stacked: PackedExperts,
    tiles: Tensor,
    most: int,
    tiling: Wna16Sm90Tiling,
    out: Tensor,
    *,
    gated: bool = False,
) -> None:
    """Products of a mixture of experts on an sm_90a GPU: rows of `out` are rows of x times their expert's weights.

    Args:
        x: `[rows, k]`, sorted by expert, contiguous; at least `tiling.tokens` rows.
        stacked: the weights of all experts.
        tiles: int32 `[1 + most, 4]`, see the kernel.
        most: tiles, of rows, at most.
        out: `[rows, n]`, or `[rows, n / 2]` where gated, contiguous.
        gated: as in `multiply`.
    """
    weights, resident = stacked.weights, stacked.resident
    columns = blocks((weights.shape[0], tiling.rows))
    tiling.kernel(x.dtype, weights.bits, _groups(weights), experts=True, gated=gated)(
        min(multiprocessors(x.device), most * columns),
        tiling.threads,
        **_operands(
            *(x, weights, out, tiling), rows=tiling.unit, box=min(tiling.tokens, 64), count=resident, gated=gated
        ),
        **_host_maps(stacked.offloaded, tiling, stacked.count - resident, gated=gated),
        bias=None,
        partials=None,
        flags=None,
        waves=0,
        splits=1,
        tiles=tiles[1:],
        resident=resident,
        shared=tiling.shared(weights.bits),
        dependent=True,
    )


def _operands(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    tiling: Wna16Sm90Tiling,
    *,
    rows: int,
    box: int,
    count: int = 1,
    gated: bool,
) -> dict[str, Any]:
    """The arguments of a launch that describe x, the weights of `count` experts, and `out`.

    Args:
        rows: of x that are copied at a time.
        box: rows of `out` that are stored at a time.
    """
    (m, k), n, size = x.shape, out.shape[1], weight.scheme.group_size
    codes, scales, zeros = _weight_maps(weight, tiling, count, gated=gated)
    direct = not fits(out)
    return {
        "map_x": tile_maps(x, rows, TILE_COLUMNS),
        "map_codes": codes,
        "map_scales": scales,
        "map_zeros": zeros,
        "map_out": _NO_MAP if direct else tensor_map(out, box, 32 if gated else 64),
        "out": out,
        "symmetric": weight.zeros is None,
        "m": m,
        "n": n,
        "k": k,
        "gate_tiles": n // TILE_ROWS if gated else 0,
        "chunks": blocks((k, TILE_COLUMNS)),
        "shift": 31 if size is None else max(size // TILE_COLUMNS, 1).bit_length() - 1,
        "group": max(_GROUP // tiling.tokens, 1),
        "direct": direct,
    }


@functools.lru_cache(maxsize=4096)
def _chosen(
    m: int, n: int, k: int, multiprocessors: int, device: int, dtype: torch.dtype, bits: int, groups: int
) -> Wna16Sm90Plan:
    def resident(tiling: Wna16Sm90Tiling, splits: int) -> int:
        return tiling.kernel(dtype, bits, groups).resident_clusters(device, tiling.threads, tiling.shared(bits), splits)

    return choose(m, n, k, multiprocessors, resident)


def choose(
    m: int, n: int, k: int, multiprocessors: int, resident: Callable[[Wna16Sm90Tiling, int], int]
) -> Wna16Sm90Plan:
    """The plan for m rows of x and n rows of the weight.

    Up to 256 rows a tiling that holds them all: the larger of two if there is such a tile for each multiprocessor; else
    what is done first, clusters that share a tile of either or runs that hand on what they have of a smaller one.
    Beyond, one of two that do not waste much on rows that are not there.

    Args:
        resident: how many clusters of so many blocks can run at the same time.
    """
    least, few, short, tall, low, high, wide = TILINGS
    chunks = blocks((k, TILE_COLUMNS))

    def shared(tiling: Wna16Sm90Tiling) -> Wna16Sm90Plan:
        """Clusters of as many blocks as can be, all of them resident."""
        most = min(_MOST_SPLITS, multiprocessors // tiling.tiles(m, n), chunks)
        return Wna16Sm90Plan(
            tiling, next((each for each in range(most, 1, -1) if resident(tiling, each) >= tiling.tiles(m, n)), 1)
        )

    def work(plan: Wna16Sm90Plan) -> float:
        """Of a block, in products."""
        if plan.splits > 1:
            mine: float = blocks((chunks, plan.splits))
        else:
            mine = chunks * plan.tiling.tiles(m, n) / multiprocessors + _HANDING_ON
        return mine * plan.tiling.tokens * plan.tiling.rows

    for smaller, larger in ((least, least), (few, few), (short, tall), (low, high), (high, wide)):
        if m <= larger.tokens:
            if blocks((n, larger.rows)) >= multiprocessors:
                return Wna16Sm90Plan(larger)
            return min(Wna16Sm90Plan(smaller), shared(smaller), shared(larger), key=work)
    padded = [blocks((m, tiling.tokens)) * tiling.tokens for tiling in (low, wide)]
    return Wna16Sm90Plan(low if padded[0] < 0.9 * padded[1] else wide)


def _weight_maps(
    weight: PackedWeight, tiling: Wna16Sm90Tiling, count: int, *, gated: bool
) -> tuple[bytes, bytes, bytes]:
    """The tensor maps of the codes, the scales and the zero points of `count` matrices, one behind the other."""
    rows, height = blocks((weight.shape[0], TILE_ROWS)) * count, tiling.rows // TILE_ROWS
    if gated:
        height //= 2  # a copy of the gate, and one of up
    scale_map = functools.partial(tensor_map, box_rows=height, box_columns=8 * _groups(weight), swizzled=False)
    return (
        tensor_map(weight.codes.view(rows, -1), height, 32 * weight.bits, swizzled=False),
        scale_map(_words(weight.scales, rows)),
        _NO_MAP if weight.zeros is None else scale_map(_words(weight.zeros, rows)),
    )


def _host_maps(
    offloaded: PackedWeight | None, tiling: Wna16Sm90Tiling, count: int, *, gated: bool = False
) -> dict[str, Any]:
    """The arguments of a launch that describe the weights of `count` offloaded experts."""
    maps = (_NO_MAP,) * 3 if offloaded is None else _weight_maps(offloaded, tiling, count, gated=gated)
    return dict(zip(("host_codes", "host_scales", "host_zeros"), maps, strict=True))


def _groups(weight: PackedWeight) -> int:
    """Of a block of k: groups of 32 columns are two, others at most one."""
    return 2 if weight.scheme.group_size == 32 else 1


def _waves(tiles: int, grid: int) -> int:
    """Whole tiles of each block; the rest is shared by all.

    Tiles are whole where a last wave that is not full wastes little: blocks at different places along k would not find
    each other's part of x in L2.
    """
    full = blocks((tiles, grid))
    if tiles >= _FULL_ENOUGH * full * grid:
        return full
    return max(tiles // grid - 1, 0)


def _words(scales: Tensor, tiles: int) -> Tensor:
    """Scales as int32 `[tiles, groups * 8]`: a word for the rows g and g + 8."""
    return scales.view(torch.int32).view(tiles, -1)


OF_EXPERTS = (
    Wna16Sm90Tiling(32, 3, {4: 14, 8: 10}, parts=2),
    Wna16Sm90Tiling(64, 3, {4: 12, 8: 8}, parts=2),
    Wna16Sm90Tiling(128, 2, {4: 8, 8: 7}, parts=4),
)
"""The tilings for experts, from the smallest tile to the largest."""

for _dtype, _bits, _groups_of_block, _gated in itertools.product(HALVES, STORED_BITS, (1, 2), (False, True)):
    for _tiling in TILINGS:
        _tiling.kernel(_dtype, _bits, _groups_of_block, gated=_gated)
    for _tiling in OF_EXPERTS:
        _tiling.kernel(_dtype, _bits, _groups_of_block, experts=True, gated=_gated)
