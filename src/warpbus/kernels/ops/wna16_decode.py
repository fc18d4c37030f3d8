"""Launching `wna16/decode.cu`: quantized weights times a few tokens, with what surrounds the product in a decoder layer."""

import functools
import itertools

import torch
from torch import Tensor

from warpbus.cuda.kernel import Kernel
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, blocks, multiprocessors
from warpbus.kernels.ops.packed import TILE_COLUMNS, TILE_ROWS, PackedWeight
from warpbus.kernels.units import unit

MOST_TOKENS = 8
_MOST_X = 66 << 10  # bytes of x in shared memory
_WARPS = 16
_STAGES = {4: 6, 8: 3}  # by bits: as many bytes either way
_PAD = 8  # elements between the rows of x in shared memory


def fits(m: int, k: int) -> bool:
    """Whether x `[m, k]` is small enough."""
    return m <= MOST_TOKENS and m * (blocks((k, TILE_COLUMNS)) * TILE_COLUMNS + _PAD) * 2 <= _MOST_X


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
        x: `[m, k]`, contiguous; it `fits`, and with `norm` k is a multiple of 8.
        bias, norm, residual: `[n]`, `[k]` and the shape of `out`, contiguous, or `None`.
        gated: the result is `silu(gate) * up`; n / 2 is a multiple of 16.
        out: `[m, n]`, or `[m, n / 2]` where gated, contiguous.
    """
    m, k = x.shape
    n = weight.shape[0]
    if k % 8 or x.data_ptr() % 16:
        x = _padded(x)
    chunks = blocks((k, TILE_COLUMNS))
    size = weight.scheme.group_size
    shift = 31 if size is None else max(size // TILE_COLUMNS, 1).bit_length() - 1
    two_scales = size == 32
    _kernel(x.dtype, weight.bits, two_scales)(
        multiprocessors(x.device),
        32 * (_WARPS + 1),
        *(weight.codes, weight.scales, weight.zeros, x, norm, bias, residual, out),
        *(m, n, k, x.stride(0), chunks, weight.scales.shape[1], shift, n // 2 // TILE_ROWS if gated else 0, eps),
        shared=_shared(m, chunks, weight.bits, two_scales),
        dependent=True,
    )


def _padded(x: Tensor) -> Tensor:
    """A copy whose rows begin at multiples of 16 bytes, zero up to the next chunk."""
    m, k = x.shape
    copy = x.new_zeros(m, blocks((k, TILE_COLUMNS)) * TILE_COLUMNS)
    copy[:, :k] = x
    return copy


def _shared(m: int, chunks: int, bits: int, two_scales: bool) -> int:
    """Bytes of shared memory of a block."""
    codes = 2 * _WARPS * 512 * bits // 4
    scales = 2 * (_WARPS * (2 if two_scales else 1) + 1) * 32
    stage = blocks((codes + 2 * scales, 128)) * 128
    sums = _WARPS * 2 * 32 * 16
    barriers = 16 * _STAGES[bits]
    x = m * (chunks * TILE_COLUMNS + _PAD) * 2
    return stage * _STAGES[bits] + sums + barriers + MOST_TOKENS * _WARPS * 4 + x


@functools.cache
def _kernel(dtype: torch.dtype, bits: int, two_scales: bool) -> Kernel:
    declared = unit(
        "wna16/decode.cu",
        needs="sm_90",
        ELEMENT=ELEMENTS[dtype],
        BITS=bits,
        GROUPS=2 if two_scales else 1,
        WARPS=_WARPS,
        STAGES=_STAGES[bits],
    )
    return declared.kernel("wna16_decode", "PPPPPPPPiiiiiiiif")


for _dtype, _bits, _two in itertools.product(HALVES, (4, 8), (False, True)):
    _kernel(_dtype, _bits, _two)
