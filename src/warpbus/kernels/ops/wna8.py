"""`wna8`: many tokens, rounded to 8 bits, times packed weights of few bits, on the 8-bit tensor cores.

The weights are those that `wna16` multiplies with activations of 16 bits, in the same packed form. Each token has a
scale of its own, as in `w8a8`. `wna8/quantize.cu` rounds the activations; `wna8/sm90_wna8.cu` multiplies e4m3 on
Hopper, `wna8/sm80_wna8.cu` e4m3 on other GPUs from Ada on, and int8 on every GPU since Ampere.
"""

import torch
from torch import Tensor

from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.jit import architecture
from warpbus.kernels.ops import wna8_sm80, wna8_sm90
from warpbus.kernels.ops.arguments import aligned
from warpbus.kernels.ops.packed import PackedWeight
from warpbus.kernels.ops.wna8_quantize import UNIT
from warpbus.qtensor import Scheme

LEAST_ROWS = 512
"""With fewer rows of x, `wna16` is used."""

_GROUPS = (None, 64, 128)


def supports(scheme: Scheme, codes: torch.dtype) -> bool:
    """Whether weights of a scheme can be multiplied with such activations.

    Groups have 64 or 128 columns, or are whole rows. Weights have up to 4 bits; with int8 also 8, if symmetric.
    """
    bits = scheme.bits <= 4 or (scheme.bits == 8 and scheme.symmetric and codes == torch.int8)
    return bits and scheme.group_size in _GROUPS


def runs_on(arch: str, codes: torch.dtype) -> bool:
    """Whether an architecture such as "sm_86" has tensor cores for such activations, int8 or float8_e4m3fn."""
    able = capabilities(arch)
    return able.mma if codes == torch.int8 else able.e4m3


def joins_gates(arch: str, codes: torch.dtype) -> bool:
    """Whether the kernel for such activations computes `silu(gate) * up` itself; see `multiply`."""
    return capabilities(arch).wgmma and codes == torch.float8_e4m3fn


def fits(x: Tensor, weight: PackedWeight, codes: torch.dtype) -> bool:
    """Whether the kernels can multiply these: rows of whole units of 16, and enough of them, on a GPU that can."""
    whole = x.shape[0] >= LEAST_ROWS and x.shape[1] % UNIT == 0 and aligned(x)
    return whole and runs_on(architecture(x.device), codes) and supports(weight.scheme, codes)


def multiply(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, codes: torch.dtype, *, gated: bool = False
) -> None:
    """`out = x @ weight.T + bias`, or `silu(gate) * up` of it, each row of x rounded to 8 bits with a scale of its own.

    Args:
        x: `[m, k]` in the dtype of the weight, contiguous, as `fits` says.
        bias: of the rows of the weight, contiguous, or `None`.
        out: `[m, n]`, or `[m, n / 2]` where gated, contiguous.
        codes: int8 or float8_e4m3fn.
        gated: the first half of the weight's rows is the gate, the second half up; n / 2 is a multiple of 16. Only
            where `joins_gates` says so.
    """
    if joins_gates(architecture(x.device), codes):
        wna8_sm90.multiply(x, weight, bias, out, gated=gated)
    else:
        wna8_sm80.multiply(x, weight, bias, out, codes)
