"""Products of rounded activations and quantized weights in float64, for the tests of both kernels of `wna8`."""

import torch
from tile_errors import assert_close_everywhere

from warpbus.kernels.reference.w8a8 import quantize
from warpbus.qtensor import QTensor

# Of sums of 128 products by tensor cores that keep about 14 bits, for factors with random signs.
TOLERANCE = 6e-4


def rounded(x, codes=torch.float8_e4m3fn):
    """By the reference on the CPU, which divides: torch's operators on a GPU multiply by the reciprocal of a number."""
    values, scales = quantize(x.cpu(), codes)
    return values.cuda(), scales.cuda()


def product(x, weight, bias=None, codes=torch.float8_e4m3fn):
    """What the rounded activations give, in float64."""
    values, scales = rounded(x, codes)
    values = values.double() * scales.double()[:, None]
    scales_of_x_dtype = QTensor.from_codes(
        weight.scheme, weight.codes(), weight.scales.to(x.dtype).float(), weight.zeros
    )
    exact = values @ scales_of_x_dtype.dequantize(torch.float64).T
    return exact if bias is None else exact + bias.double()


def check(out, expected, tolerance=TOLERANCE):
    assert torch.isfinite(out).all()
    tolerance += torch.finfo(out.dtype).eps / 2
    assert ((out.double() - expected).norm() / expected.norm()).item() <= tolerance
    assert_close_everywhere(out, expected, tolerance)
