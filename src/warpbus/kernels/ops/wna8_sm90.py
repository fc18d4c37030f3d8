"""Many tokens, rounded to e4m3, times weights of 2 to 4 bits, by Hopper's `wgmma`.

Nothing here checks shapes or dtypes: the operators that call it have done so.
"""

from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.green import multiprocessors
from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.cuda.tensor_map import fits as addressed
from warpbus.cuda.tensor_map import tensor_map, tile_maps
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, blocks
from warpbus.kernels.ops.expert_rows import SortedRows
from warpbus.kernels.ops.packed import TILE_ROWS, PackedWeight
from warpbus.kernels.ops.packed_experts import PackedExperts
from warpbus.kernels.ops.tiles_sm90 import BOX, shared_bytes
from warpbus.kernels.ops.wna8_quantize import round_e4m3
from warpbus.kernels.units import unit

ROWS_OF_TILE = 128
"""Rows of x in a tile."""

_PARAMETERS = Parameters(
    "Maps maps, const float* x_scale, const uint32* scales, const uint32* zeros, const ELEMENT* bias, ELEMENT* out, "
    "Problem p",
    Maps="TileMaps map_x, TileMaps map_sums, TensorMap map_codes, TensorMap map_scales, TensorMap map_out",
    Problem="int m, int n, int k, int gate_tiles, int sums, int groups, int shift, int group, int direct, "
    "const int4* tiles",
)
_NO_MAP = bytes(128)
_TILE = ROWS_OF_TILE  # and rows of the weight, and columns of a stage
_LEAST_CODE = 2.0**-9  # the number that the bits of code 1 are in e4m3
_STAGES = 8
_SUMS_AT_ONCE = 32  # kSumsAtOnce in sm90_wna8.cu
_ROWS_OF_TILES = 2048  # of x that are processed together, so that a wave of tiles shares L2


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, *, gated: bool = False) -> None:
    """`out = x @ weight.T + bias`, or `silu(gate) * up` of it, each row of x rounded to e4m3 with a scale of its own.

    Args:
        x: `[m, k]` in the dtype of the weight, as `wna8.fits` says.
        bias: of the rows of the weight, contiguous, or `None`.
        out: `[m, n]`, or `[m, n / 2]` where gated, contiguous.
        gated: the first half of the weight's rows is the gate, the second half up; n / 2 is a multiple of 16.
    """
    columns = _TILE // 2 if gated else _TILE
    rounded = round_e4m3(x, *_sums(weight))
    _kernel(x.dtype, weight, gated=gated, experts=False)(
        min(blocks((len(x), _TILE), (out.shape[1], columns)), multiprocessors(x.device)),
        384,
        **_operands(rounded, weight, out, gated=gated),
        bias=bias,
        tiles=None,
        dependent=True,
    )


def multiply_experts(
    x: Tensor, stacked: PackedExperts, rows: SortedRows, out: Tensor, *, gated: bool = False, gathers: bool = False
) -> None:
    """Products of a mixture of experts: rows of `out` are rows of x, rounded to e4m3, times their expert's weights.

    Args:
        x: `[rows.padded, k]` in the sorted order, or, where it `gathers`, tokens; contiguous, k a multiple of 16.
        stacked: the weights of all experts, none offloaded.
        rows: in tiles of `ROWS_OF_TILE` rows.
        out: `[rows, n]`, or `[rows, n / 2]` where gated, contiguous.
        gated: as in `multiply`.
    """
    weights = stacked.weights
    rounded = round_e4m3(x, *_sums(weights), rows if gathers else None)
    columns = blocks((out.shape[1], _TILE // 2 if gated else _TILE))
    _kernel(x.dtype, weights, gated=gated, experts=True)(
        min(rows.most * columns, multiprocessors(x.device)),
        384,
        **_operands(rounded, weights, out, copied=_TILE // 2, gated=gated, count=stacked.count),
        bias=None,
        tiles=rows.tiles[1:],
        dependent=True,
    )


def _groups(weight: PackedWeight) -> int:
    """Of a stage: groups of 64 columns are two, others at most one."""
    return 2 if weight.scheme.group_size == _TILE // 2 else 1


def _sums(weight: PackedWeight) -> tuple[int, float]:
    """The columns of a sum of codes, and the factor of the sums."""
    factor = -_LEAST_CODE * (weight.scheme.middle_code if weight.zeros is None else 1)
    return _TILE // _groups(weight), factor


def _kernel(dtype: torch.dtype, weight: PackedWeight, *, gated: bool, experts: bool) -> Kernel:
    return _KERNELS[dtype, weight.bits, _groups(weight), weight.zeros is None, gated, experts]


def _operands(
    rounded: tuple[Tensor, Tensor, Tensor],
    weight: PackedWeight,
    out: Tensor,
    *,
    copied: int = _TILE,
    gated: bool,
    count: int = 1,
) -> dict[str, Any]:
    """The arguments of a launch that describe rounded activations, the weights of `count` experts, and `out`.

    Args:
        copied: rows of x that are copied at a time.
    """
    codes, scales, sums = rounded
    (m, k), n = codes.shape, out.shape[1]
    groups, size = _groups(weight), weight.scheme.group_size
    rows, tile_rows = blocks((weight.shape[0], TILE_ROWS)) * count, _TILE // TILE_ROWS
    if gated:
        tile_rows //= 2  # of the gate, and as many of up
    words = weight.scales.view(torch.int32)
    direct = not addressed(out)
    return {
        "map_x": tile_maps(codes, copied, _TILE),
        "map_codes": tensor_map(weight.codes.view(rows, -1), tile_rows, 64 * weight.bits, swizzled=False),
        "map_scales": tensor_map(words.view(rows, -1), tile_rows, 8 * groups, swizzled=False),
        "map_sums": tile_maps(sums, copied, _SUMS_AT_ONCE),
        "map_out": _NO_MAP if direct else tensor_map(out, BOX, BOX // 2 if gated else BOX),
        "x_scale": scales,
        "scales": words,
        "zeros": weight.zeros,
        "out": out,
        "m": m,
        "n": n,
        "k": k,
        "gate_tiles": n // TILE_ROWS if gated else 0,
        "sums": blocks((k, _TILE // groups)),
        "groups": weight.scales.shape[1],
        "shift": 31 if size is None else max(size // _TILE, 1).bit_length() - 1,
        "group": _ROWS_OF_TILES // _TILE,
        "direct": direct,
        "shared": _shared(weight.bits, groups),
    }


def _shared(bits: int, groups: int) -> int:
    """Bytes of shared memory: the ring with its barriers, staging buffers, and room to align."""
    stage = _TILE * _TILE + _TILE * _TILE * bits // 8 + _TILE // TILE_ROWS * groups * 32
    return shared_bytes(_STAGES, stage, 2 * BOX * BOX * 2)


_KERNELS = {
    (dtype, bits, groups, symmetric, gated, experts): unit(
        "wna8/sm90_wna8.cu",
        needs="sm_90a",
        ELEMENT=ELEMENTS[dtype],
        BITS=bits,
        GROUPS=groups,
        SYMMETRIC=int(symmetric),
        STAGES=_STAGES,
        SHARED_BYTES=_shared(bits, groups),
        GATED=int(gated),
        EXPERTS=int(experts),
    ).kernel("sm90_wna8", _PARAMETERS)
    for dtype in HALVES
    for bits in (2, 3, 4)
    for groups in (1, 2)
    for symmetric in (True, False)
    for gated in (False, True)
    for experts in (False, True)
}
