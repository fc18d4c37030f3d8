"""Launching `wna16/decode.cu`: quantized weights times a few tokens, with what surrounds the product in a layer."""

import functools
import itertools

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

_PARAMETERS = Parameters(
    "TensorMap map, const uint4* codes, const uint32* scales, const uint32* zeros, const ELEMENT* x, "
    "const ELEMENT* norm, const ELEMENT* bias, const ELEMENT* residual, ELEMENT* out, Problem p",
    Problem="int m, int n, int k, int chunks, int groups, int shift, int middle, int gate_tiles, int stages, "
    "int streamed, float eps",
)
MOST_TOKENS = 16
_WARPS, _FINISHERS = 16, 3  # that multiply; that add up their sums
_MOST_STAGES, _FEWEST_STAGES = 8, 2  # in flight
_NO_MAP = bytes(128)


def fits(x: Tensor, weight: PackedWeight) -> bool:
    """Whether x `[m, k]` has few enough rows for a GPU's shared memory."""
    return x.shape[0] <= MOST_TOKENS and _stages(x, weight, streamed=True) >= _FEWEST_STAGES


def norms(x: Tensor, weight: PackedWeight) -> bool:
    """Whether x can be normed on the way: it has to lie in shared memory as a whole."""
    return x.shape[1] % 8 == 0 and _stages(x, weight, streamed=False) >= _FEWEST_STAGES


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
    streamed = norm is None and (once or _stages(x, weight, streamed=False) < _FEWEST_STAGES)
    copied = False
    if norm is not None:
        x = x if aligned(x) else x.clone()
        if not (norm.is_contiguous() and aligned(norm)):
            norm, copied = norm.clone(memory_format=torch.contiguous_format), True
    elif not copyable(x) or k % TILE_COLUMNS:
        x = _padded(x)
    size = weight.scheme.group_size
    shift = 31 if size is None else max(size // TILE_COLUMNS, 1).bit_length() - 1
    stages = min(_stages(x, weight, streamed=streamed), _MOST_STAGES)
    stage, others = _shared(m, k, weight, streamed=streamed)
    _kernel(x.dtype, weight.bits, size == 32, _tokens(m))(
        multiprocessors(x.device),
        32 * (_WARPS + 1 + _FINISHERS),
        map=_NO_MAP if norm is not None else tensor_map(x, m, TILE_COLUMNS, panels=_WARPS),
        codes=weight.codes,
        scales=weight.scales,
        zeros=weight.zeros,
        x=x,
        norm=norm,
        bias=bias,
        residual=residual,
        out=out,
        m=m,
        n=n,
        k=k,
        chunks=blocks((k, TILE_COLUMNS)),
        groups=weight.scales.shape[1],
        shift=shift,
        middle=weight.scheme.middle_code,
        gate_tiles=pairs if gated else 0,
        stages=stages,
        streamed=streamed,
        eps=eps,
        shared=stages * stage + others,
        dependent=not copied,  # the norm's weight is loaded before the kernels ahead have ended
    )


def _padded(x: Tensor) -> Tensor:
    """A copy whose rows begin at multiples of 16 bytes, zero up to the next chunk."""
    m, k = x.shape
    copy = x.new_zeros(m, blocks((k, TILE_COLUMNS)) * TILE_COLUMNS)
    copy[:, :k] = x
    return copy


def _tokens(m: int) -> int:
    """Of the kernel that multiplies m rows."""
    return 8 if m <= 8 else 16


def _stages(x: Tensor, weight: PackedWeight, *, streamed: bool) -> int:
    """How many stages there is room for."""
    m, k = x.shape
    stage, others = _shared(m, k, weight, streamed=streamed)
    return (driver.attribute(driver.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, x.get_device()) - others) // stage


def _shared(m: int, k: int, weight: PackedWeight, *, streamed: bool) -> tuple[int, int]:
    """Bytes of shared memory: of one stage, and of all the rest of a block."""
    stage, others = _shared_parts(weight.bits, weight.scheme.group_size == 32, _tokens(m))
    step = _WARPS * m * TILE_COLUMNS * 2
    if streamed:
        return stage + step, others
    return stage, others + blocks((k, _WARPS * TILE_COLUMNS)) * step


@functools.cache
def _shared_parts(bits: int, two_scales: bool, tokens: int) -> tuple[int, int]:
    """Bytes of shared memory of a stage, and of the sums, barriers and squares; x is in neither.

    csrc/wna16/decode.cu compares both with its structs, as the macros STAGE_BYTES and OTHER_BYTES.
    """
    codes = 2 * _WARPS * 512 * bits // 4
    scales = 2 * (_WARPS * (2 if two_scales else 1) + 1) * 32
    sums = _WARPS * 2 * (tokens // 8) * 32 * 16
    barriers, squares = 200, tokens * _WARPS * 4
    return blocks((codes + 2 * scales, 128)) * 128, sums + barriers + squares


@functools.cache
def _kernel(dtype: torch.dtype, bits: int, two_scales: bool, tokens: int) -> Kernel:
    stage, others = _shared_parts(bits, two_scales, tokens)
    declared = unit(
        "wna16/decode.cu",
        needs="sm_90",
        ELEMENT=ELEMENTS[dtype],
        BITS=bits,
        GROUPS=2 if two_scales else 1,
        TOKENS=tokens,
        WARPS=_WARPS,
        FINISHERS=_FINISHERS,
        STAGE_BYTES=stage,
        OTHER_BYTES=others,
    )
    return declared.kernel("wna16_decode", _PARAMETERS)


for _dtype, _bits, _two, _tokens_of in itertools.product(HALVES, (4, 8), (False, True), (8, 16)):
    _kernel(_dtype, _bits, _two, _tokens_of)
