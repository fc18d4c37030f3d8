"""Launching `wna16/decode.cu`: quantized weights times a few tokens, with what surrounds the product in a layer."""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda import driver
from warpbus.cuda.green import multiprocessors
from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.cuda.tensor_map import fits as copyable
from warpbus.cuda.tensor_map import tensor_map
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, aligned, blocks
from warpbus.kernels.ops.packed import TILE_COLUMNS, TILE_ROWS, PackedWeight
from warpbus.kernels.units import unit

_PROBLEM = (
    "int m, int n, int k, int chunks, int groups, int shift, int middle, int gate_tiles, int stages, int streamed, "
    "float eps"
)
_PARAMETERS = Parameters(
    "TensorMap map, const uint4* codes, const uint32* scales, const uint32* zeros, const ELEMENT* x, "
    "const ELEMENT* norm, const ELEMENT* bias, const ELEMENT* residual, ELEMENT* out, Problem p",
    Problem=_PROBLEM,
)
_EXPERTS = Parameters(
    "TensorMap map, const uint4* codes, const uint32* scales, const uint32* zeros, const ELEMENT* residual, "
    "ELEMENT* out, Items items, Problem p",
    Items="const int* experts, const int4* tiles, const float* factors, int count, int per_token, int slots, "
    "int shared_expert, int early",
    Problem=_PROBLEM,
)
MOST_TOKENS = 16
_WARPS, _FINISHERS = 16, 3  # that multiply; that add up their sums
_WARPS_OF_EXPERTS, _FINISHERS_OF_EXPERTS = 8, 1
_BLOCKS_OF_EXPERTS = 2  # of a multiprocessor
_MOST_STAGES, _FEWEST_STAGES = 8, 2  # in flight
_NO_MAP = bytes(128)


def fits(x: Tensor, weight: PackedWeight) -> bool:
    """Whether x `[m, k]` has few enough rows for a GPU's shared memory."""
    return x.shape[0] <= MOST_TOKENS and _stages(*x.shape, weight, x.get_device(), streamed=True) >= _FEWEST_STAGES


def norms(x: Tensor, weight: PackedWeight) -> bool:
    """Whether x can be normed on the way: it has to lie in shared memory as a whole."""
    return x.shape[1] % 8 == 0 and _stages(*x.shape, weight, x.get_device(), streamed=False) >= _FEWEST_STAGES


def multiply(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
    out: Tensor,
) -> None:
    """`out = epilogue(norm(x) @ weight.T)` on sm_90 and later; see `wna16.wna16_linear`.

    Args:
        x: `[m, k]`, contiguous; it `fits`.
        bias, residual: `[n]` and the shape of `out`, contiguous, or `None`.
        norm: `[k]`, or `None`; only where it `norms`. Copied where it is not contiguous and aligned.
        gated: the result is `silu(gate) * up`; n / 2 is a multiple of 16.
        out: `[m, n]`, or `[m, n / 2]` where gated, contiguous.
    """
    m, k = x.shape
    n = weight.shape[0]
    pairs = n // 2 // TILE_ROWS if gated else blocks((n, 2 * TILE_ROWS))
    once = pairs <= multiprocessors(x.device)  # a block needs x once, and stages have room for more of it
    streamed = norm is None and (once or _stages(m, k, weight, x.get_device(), streamed=False) < _FEWEST_STAGES)
    copied = False
    if norm is not None:
        x = x if aligned(x) else x.clone()
        if not (norm.is_contiguous() and aligned(norm)):
            norm, copied = norm.clone(memory_format=torch.contiguous_format), True
    elif not copyable(x) or k % TILE_COLUMNS:
        x = _padded(x)
    _kernel(x.dtype, weight.bits, weight.scheme.group_size == 32, _tokens(m))(
        multiprocessors(x.device),
        32 * (_WARPS + 1 + _FINISHERS),
        map=_NO_MAP
        if norm is not None
        else tensor_map(x, m, TILE_COLUMNS, panels=_chunks(weight.bits, _tokens(m), experts=False)),
        x=x,
        norm=norm,
        bias=bias,
        residual=residual,
        out=out,
        eps=eps,
        **_problem(m, k, weight, gated, x.get_device(), streamed=streamed, experts=False),
        dependent=not copied,  # the norm's weight is loaded before the kernels ahead have ended
    )


def multiply_experts(
    x: Tensor,
    weights: PackedWeight,
    rows: int,
    out: Tensor,
    *,
    gated: bool,
    count: int,
    experts: Tensor | None = None,
    tiles: Tensor | None = None,
    factors: Tensor | None = None,
    residual: Tensor | None = None,
    per_token: int = 1,
    slots: int = 1,
    shared_expert: int | None = None,
    early: bool = False,
) -> None:
    """Products of a mixture of experts on sm_90 and later; csrc/wna16/experts.cuh says what an item is.

    Args:
        x: `[any, k]`, contiguous.
        weights: of all experts, one behind the other: its shape is `(n, k)` of one of them.
        rows: of x in an item, at most: 1, 8 or 16.
        out: `[any, n]`, or `[any, n / 2]` where gated, contiguous.
        gated: as in `multiply`.
        count: of items; with tiles the most that there can be.
        experts, factors, per_token, slots, shared_expert, early: see `Items` in experts.cuh.
        tiles: int32 `[1 + count, 4]`, the number of tiles first.
        residual: in the shape of `out`.
    """
    k = x.shape[1]
    if not copyable(x) or k % TILE_COLUMNS:
        x = _padded(x)
    works = blocks((weights.shape[0], 2 * TILE_ROWS)) * count
    resident = multiprocessors(x.device) * _BLOCKS_OF_EXPERTS
    _kernel(x.dtype, weights.bits, weights.scheme.group_size == 32, _tokens(rows), experts=True)(
        min(resident, works),
        32 * (_WARPS_OF_EXPERTS + 1 + _FINISHERS_OF_EXPERTS),
        map=tensor_map(x, rows, TILE_COLUMNS, panels=_chunks(weights.bits, _tokens(rows), experts=True)),
        residual=residual,
        out=out,
        experts=experts,
        tiles=None if tiles is None else tiles[1:],
        factors=factors,
        count=count,
        per_token=per_token,
        slots=slots,
        shared_expert=-1 if shared_expert is None else shared_expert,
        early=early,
        eps=0.0,
        **_problem(rows, k, weights, gated, x.get_device(), streamed=True, experts=True),
        dependent=True,
    )


def _problem(
    m: int, k: int, weight: PackedWeight, gated: bool, device: int, *, streamed: bool, experts: bool
) -> dict[str, Any]:
    """The arguments of a launch that describe the weight, and how it is computed."""
    n, size = weight.shape[0], weight.scheme.group_size
    stages = min(_stages(m, k, weight, device, streamed=streamed, experts=experts), _MOST_STAGES)
    stage, others = _shared(m, k, weight, streamed=streamed, experts=experts)
    return {
        "codes": weight.codes,
        "scales": weight.scales,
        "zeros": weight.zeros,
        "m": m,
        "n": n,
        "k": k,
        "chunks": blocks((k, TILE_COLUMNS)),
        "groups": weight.scales.shape[1],
        "shift": 31 if size is None else max(size // TILE_COLUMNS, 1).bit_length() - 1,
        "middle": weight.scheme.middle_code,
        "gate_tiles": n // 2 // TILE_ROWS if gated else 0,
        "stages": stages,
        "streamed": streamed,
        "shared": stages * stage + others,
    }


def _padded(x: Tensor) -> Tensor:
    """A copy whose rows begin at multiples of 16 bytes, zero up to the next chunk."""
    m, k = x.shape
    copy = x.new_zeros(m, blocks((k, TILE_COLUMNS)) * TILE_COLUMNS)
    copy[:, :k] = x
    return copy


def _span(bits: int, tokens: int) -> int:
    """Chunks of a stage that a warp multiplies: as many as shared memory and registers hold."""
    return 2 if (bits, tokens) == (4, 8) else 1


def _chunks(bits: int, tokens: int, *, experts: bool) -> int:
    """Chunks of a stage."""
    return (_WARPS_OF_EXPERTS if experts else _WARPS) * _span(bits, tokens)


def _tokens(m: int) -> int:
    """Of the kernel that multiplies m rows."""
    return 8 if m <= 8 else 16


def _stages(m: int, k: int, weight: PackedWeight, device: int, *, streamed: bool, experts: bool = False) -> int:
    """How many stages there is room for, with m rows of x."""
    stage, others = _shared(m, k, weight, streamed=streamed, experts=experts)
    room: int = driver.attribute(driver.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device)
    if experts:  # the system takes 1 KB of each block
        room = (room + 1024) // _BLOCKS_OF_EXPERTS - 1024
    return (room - others) // stage


def _shared(m: int, k: int, weight: PackedWeight, *, streamed: bool, experts: bool = False) -> tuple[int, int]:
    """Bytes of shared memory: of one stage, and of all the rest of a block."""
    stage, others = _shared_parts(weight.bits, weight.scheme.group_size == 32, _tokens(m), experts)
    columns = _chunks(weight.bits, _tokens(m), experts=experts) * TILE_COLUMNS
    step = columns * m * 2
    return (stage + step, others) if streamed else (stage, others + blocks((k, columns)) * step)


@functools.cache
def _shared_parts(bits: int, two_scales: bool, tokens: int, experts: bool) -> tuple[int, int]:
    """Bytes of shared memory of a stage, and of the sums, barriers and squares; x is in neither.

    csrc/wna16/decode.cu compares both with its structs, as the macros STAGE_BYTES and OTHER_BYTES.
    """
    warps = _WARPS_OF_EXPERTS if experts else _WARPS
    chunks = _chunks(bits, tokens, experts=experts)
    codes = 2 * chunks * 512 * bits // 4
    scales = 2 * (chunks * (2 if two_scales else 1) + 1) * 32
    sums = warps * 2 * (tokens // 8) * 32 * 16
    barriers, squares = 200, tokens * warps * 4
    return blocks((codes + 2 * scales, 128)) * 128, sums + barriers + squares


@functools.cache
def _kernel(dtype: torch.dtype, bits: int, two_scales: bool, tokens: int, *, experts: bool = False) -> Kernel:
    stage, others = _shared_parts(bits, two_scales, tokens, experts)
    declared = unit(
        "wna16/decode.cu",
        needs="sm_90",
        ELEMENT=ELEMENTS[dtype],
        BITS=bits,
        GROUPS=2 if two_scales else 1,
        TOKENS=tokens,
        WARPS=_WARPS_OF_EXPERTS if experts else _WARPS,
        SPAN=_span(bits, tokens),
        FINISHERS=_FINISHERS_OF_EXPERTS if experts else _FINISHERS,
        STAGE_BYTES=stage,
        OTHER_BYTES=others,
        EXPERTS=int(experts),
        RESIDENT=_BLOCKS_OF_EXPERTS if experts else 1,
    )
    if experts:
        return declared.kernel("wna16_decode_experts", _EXPERTS)
    return declared.kernel("wna16_decode", _PARAMETERS)


for _dtype, _bits, _two, _tokens_of, _experts in itertools.product(
    HALVES, (4, 8), (False, True), (8, 16), (False, True)
):
    _kernel(_dtype, _bits, _two, _tokens_of, experts=_experts)
