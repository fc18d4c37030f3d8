"""Activations in e4m3 times weights of up to 4 bits by wgmma, against float64, at odd sizes too."""

import pytest
import torch
from gpu_random_weights import quantized
from gpu_wna8_products import TOLERANCE, check, product

from warpbus.kernels.ops import wna8_sm90
from warpbus.kernels.ops.packed import pack
from warpbus.qtensor import Scheme

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")]

DTYPES = [torch.float16, torch.bfloat16]
SCHEMES = [
    "w4a16-g128",
    "w4a16-g64",
    "w4a16",
    "w3a16-g128",
    "w3a16-g64-asym",
    "w2a16-g64",
    "w2a16-asym",
    "w4a16-g128-asym",
    "w4a16-g64-asym",
]
# The smallest numbers of rows are given to the kernel all the same; 13696 and its parts on 2 and 4 GPUs.
SIZES = [
    (1, 16, 16),
    (129, 17, 144),
    (512, 130, 3424),
    (700, 1000, 6848),
    (1025, 264, 13696),
    (513, 4608, 4096),
]


@pytest.fixture(autouse=True)
def _seeded(seed):
    """Other numbers at each run."""


def multiply(x, weight, bias=None, gated=False):
    """Into an output that was NaN, with more around it that has to stay."""
    m, n = x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0]
    whole = torch.full((m + 2, n), float("nan"), dtype=x.dtype, device="cuda")
    out = whole[1:-1]
    wna8_sm90.multiply(x, pack(weight, x.dtype), bias, out, gated=gated)
    assert whole[0].isnan().all()
    assert whole[-1].isnan().all()
    return out


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_products(m, n, k, dtype, scheme):
    size = Scheme.parse(scheme).group_size or 1
    k = max(k // size, 1) * size
    weight = quantized(scheme, n, k)
    x = torch.randn(m, k, device="cuda").to(dtype)
    bias = torch.randn(n, device="cuda").to(dtype)
    check(multiply(x, weight, bias), product(x, weight, bias))
    check(multiply(x, weight), product(x, weight))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "half", "k"), [(513, 16, 128), (600, 208, 1024), (1000, 3424, 4096), (512, 13696, 4096)])
def test_products_with_a_gate(m, half, k, dtype, scheme):
    weight = quantized(scheme, 2 * half, k)
    x = torch.randn(m, k, device="cuda").to(dtype)
    bias = torch.randn(2 * half, device="cuda").to(dtype)
    for given in (bias, None):
        gate, up = product(x, weight, given).chunk(2, dim=-1)
        out = multiply(x, weight, given, gated=True)
        # Errors are proportional to gate and up, which are further from the mean of a row than their sums are.
        check(out, torch.nn.functional.silu(gate) * up, 2 * TOLERANCE)
        assert torch.equal(out, multiply(x, weight, given, gated=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_with_outliers_and_a_mean(dtype):
    """Some channels a hundred times as large as others, and all of them shifted: sums of x are far from zero."""
    x = torch.randn(640, 4096, device="cuda") + 1.5
    x[:, ::97] *= 100
    x = x.to(dtype)
    weight = quantized("w4a16-g128", 1024, 4096)
    check(multiply(x, weight), product(x, weight), 5e-3)


def test_rows_of_zeros_and_of_nan_stay_what_they_are():
    weight = quantized("w4a16-g128", 256, 512)
    x = torch.randn(600, 512, device="cuda").half()
    x[3] = 0
    x[5, 7] = float("nan")
    out = multiply(x, weight)
    assert (out[3] == 0).all()
    assert out[5].isnan().all()
    assert out[4].isfinite().all()
    assert out[6].isfinite().all()


def test_the_same_bits_at_every_run_and_in_any_batch():
    weight = quantized("w4a16-g128", 1000, 4096)
    x = torch.randn(1500, 4096, device="cuda").bfloat16()
    first = multiply(x, weight)
    for _ in range(5):
        assert torch.equal(multiply(x, weight), first)
    assert torch.equal(multiply(x[300:1000], weight), first[300:1000])
