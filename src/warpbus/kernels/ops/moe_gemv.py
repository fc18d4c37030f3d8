"""Launches the experts of a few tokens: each slot is a product of its own, which reads only the chosen experts.

Nothing here checks shapes or dtypes: the operators that call it have done so.
"""

import itertools

import torch
from torch import Tensor

from warpbus.cuda.kernel import Kernel
from warpbus.cuda.parameters import Parameters
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, blocks
from warpbus.kernels.ops.w8a8 import CODES, quantize_tokens
from warpbus.kernels.units import unit

_GATED = Parameters(
    "const unsigned char* weight, const float* scales, const unsigned char* x, const float* x_scales, "
    "const int* experts, ELEMENT* out, int n, int k, int per_token"
)
_SUMMED = Parameters(
    "const unsigned char* weight, const float* scales, const unsigned char* x, const float* x_scales, "
    "const int* experts, const float* factors, const ELEMENT* residual, ELEMENT* out, int n, int k, int per_token"
)
_WARPS, _ROWS = 4, 2  # kWarps and kRows in moe/gemv.cu
# One token on an H200, us of GLM-4.7-Flash and of GLM-4.5-Air. 16 bits: 28.4 and 82.6 with 2, 29.8 and 82.6 with 3,
# 27.5 and 83.3 with 3 in the gated kernel only. e4m3: 20.5 and 48.3 with 1, 20.4 and 50.2 with 2, 23.1 and 52.7 with 4.
# int8 was not timed: 1 spills registers on sm_86, sm_89 and sm_120, 2 on sm_80.
_UNROLL, _UNROLL_IN_8_BITS = 2, {torch.int8: 4, torch.float8_e4m3fn: 1}

MOST_SLOTS = 32
"""Of a token: kMostSlots in moe/gemv.cu."""


def kernel(dtype: torch.dtype, codes: torch.dtype, gated: bool, unroll: int | None = None) -> Kernel:
    """The kernel for outputs in `dtype` and weights in `codes`, which may be the same."""
    number = CODES.index(codes) + 1 if codes in CODES else 0
    if unroll is None:
        unroll = _UNROLL_IN_8_BITS.get(codes, _UNROLL)
    declared = unit(
        "moe/gemv.cu",
        needs="sm_89" if codes == torch.float8_e4m3fn else "sm_80",
        ELEMENT=ELEMENTS[dtype],
        CODES=number,
        GATED=int(gated),
        UNROLL=unroll,
    )
    return declared.kernel("moe_gemv_gated", _GATED) if gated else declared.kernel("moe_gemv_summed", _SUMMED)


_KERNELS = {
    (dtype, codes, gated): kernel(dtype, codes, gated)
    for dtype, gated in itertools.product(HALVES, (False, True))
    for codes in (dtype, *CODES)
}


def multiply_few(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    residual: Tensor | None,
    *,
    early: bool = True,
) -> Tensor:
    """What `grouped_mlp` computes, for tokens with up to `MOST_SLOTS` slots.

    Args:
        early: no kernel just ahead writes the weights, which are loaded by the read-only path.
    """
    (tokens, per_token), (_, hidden, ffn) = experts.shape, down.shape
    inner = x.new_empty(tokens * per_token, ffn)
    out = torch.empty_like(x)
    codes, x_scales = _rounded(x, gate_up)
    _KERNELS[x.dtype, gate_up.dtype, True](
        (blocks((ffn, _WARPS)), tokens * per_token),
        32 * _WARPS,
        weight=gate_up,
        scales=None if scales is None else scales[0],
        x=codes,
        x_scales=x_scales,
        experts=experts,
        out=inner,
        n=ffn,
        k=hidden,
        per_token=per_token,
        dependent=early,
    )
    codes, x_scales = _rounded(inner, down)
    _KERNELS[x.dtype, down.dtype, False](
        (blocks((hidden, _ROWS)), tokens),
        32 * per_token,
        weight=down,
        scales=None if scales is None else scales[1],
        x=codes,
        x_scales=x_scales,
        experts=experts,
        factors=weights,
        residual=residual,
        out=out,
        n=hidden,
        k=ffn,
        per_token=per_token,
        dependent=early,
    )
    return out


def _rounded(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """x as the kernel multiplies it with a weight, and the scales of its rows."""
    return (x, None) if weight.dtype == x.dtype else quantize_tokens(x, weight.dtype)
