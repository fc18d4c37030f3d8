"""Activations in 8 bits times packed weights by mma.sync: codes, and products against float64 and integers."""

import pytest
import torch
from gpu_random_weights import quantized
from gpu_wna8_products import check, product, rounded

from warpbus.kernels.ops import wna8, wna8_sm80
from warpbus.kernels.ops.packed import pack, unpack
from warpbus.kernels.ops.wna8_quantize import round_e4m3, round_int8
from warpbus.kernels.ops.wna16 import wna16_linear
from warpbus.kernels.reference.wna8 import integer_product, scaled
from warpbus.qtensor import Scheme

available = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available, reason="needs an NVIDIA GPU")]
e4m3 = pytest.mark.skipif(not available or torch.cuda.get_device_capability() < (8, 9), reason="needs an Ada GPU")

DTYPES = [torch.float16, torch.bfloat16]
CODES = [torch.int8, pytest.param(torch.float8_e4m3fn, marks=e4m3)]
SCHEMES = [
    *("w4a16-g128", "w4a16-g64", "w4a16", "w4a16-g128-asym", "w4a16-g64-asym", "w3a16-g128", "w3a16-g64-asym"),
    *("w2a16-g64", "w2a16-asym"),
]
WIDE = ["w8a16", "w8a16-g128", "w8a16-g64"]  # int8 alone
TILINGS = {"large": wna8_sm80.LARGE, "medium": wna8_sm80.MEDIUM}
SIZES = [(1, 1, 16), (129, 17, 144), (63, 130, 64), (200, 257, 1008), (257, 136, 3424)]
# n and k of GLM-4-9B, and as 2 and 4 GPUs divide them.
GLM_SHAPES = [(4608, 4096), (4096, 13696), (4096, 6848), (4096, 3424), (13696, 4096)]
ROWS = [(1, 16), (3, 144), (5, 4096), (130, 13696), (2, 16384), (3, 40000)]


@pytest.fixture(autouse=True)
def _seeded(seed):
    """Other numbers at each run."""


def force(monkeypatch, tiling, part=None):
    def plan(m, n, k, form, multiprocessors, shared_memory):
        return tiling, part or -(-k // 128) * 128

    monkeypatch.setattr(wna8_sm80, "plan", plan)


def whole_groups(scheme, k):
    size = Scheme.parse(scheme).group_size or 1
    return max(k // size, 1) * size


def multiply(x, packed, bias, codes):
    """Into an output that was NaN, with more around it that has to stay."""
    m, n = x.shape[0], packed.shape[0]
    whole = torch.full((m + 2, n), float("nan"), dtype=x.dtype, device="cuda")
    out = whole[1:-1]
    wna8_sm80.multiply(x, packed, bias, out, codes)
    assert whole[0].isnan().all()
    assert whole[-1].isnan().all()
    return out


def in_integers(x, packed, bias):
    """The bits that int8 has to give, where k is not split."""
    values, scales = rounded(x, torch.int8)
    return scaled(integer_product(values, unpack(packed)), scales, bias).to(x.dtype)


def in_order(codes):
    """Codes as bytes, in the order of the columns."""
    m, k = codes.shape
    cut = codes.view(torch.uint8).view(m, k // 16, 4, 2, 2)  # block, t, e, p
    return cut.permute(0, 1, 4, 2, 3).reshape(m, k)


@e4m3
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k"), ROWS)
def test_codes_in_e4m3_and_their_sums(m, k, dtype, columns):
    x = torch.randn(m, k, device="cuda").mul(3).to(dtype)
    x[0, : k // 2] = 0
    codes, scales, sums = round_e4m3(x, columns)
    expected, of_rows = rounded(x)
    assert torch.equal(scales, of_rows)
    assert torch.equal(in_order(codes), expected.view(torch.uint8))
    padded = torch.nn.functional.pad(expected.double(), (0, -k % columns)).view(m, -1, columns).sum(-1)
    assert torch.allclose(sums.double(), padded, rtol=2**-11, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k"), ROWS)
def test_codes_in_int8(m, k, dtype):
    x = torch.randn(m, k, device="cuda").mul(3).to(dtype)
    x[0, : k // 2] = 0
    codes, scales = round_int8(x)
    expected, of_rows = rounded(x, torch.int8)
    assert torch.equal(scales, of_rows)
    assert torch.equal(in_order(codes), expected.view(torch.uint8))


@pytest.mark.parametrize("scheme", [*SCHEMES, *WIDE])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TILINGS)
def test_int8_gives_the_bits_of_integers(monkeypatch, name, dtype, scheme):
    force(monkeypatch, TILINGS[name])
    for m, n, k in SIZES:
        k = whole_groups(scheme, k)
        packed = pack(quantized(scheme, n, k), dtype)
        x = torch.randn(m, k, device="cuda").to(dtype)
        bias = torch.randn(n, device="cuda").to(dtype) if m % 2 else None
        assert torch.equal(multiply(x, packed, bias, torch.int8), in_integers(x, packed, bias)), (m, n, k)


@e4m3
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TILINGS)
def test_products_of_e4m3(monkeypatch, name, dtype, scheme):
    force(monkeypatch, TILINGS[name])
    for m, n, k in SIZES:
        k = whole_groups(scheme, k)
        weight = quantized(scheme, n, k)
        x = torch.randn(m, k, device="cuda").to(dtype)
        bias = torch.randn(n, device="cuda").to(dtype) if m % 2 else None
        # On an H200 mma.sync of e4m3 has an error of 0.1% with 4,096 columns, more than wgmma.
        out = multiply(x, pack(weight, dtype), bias, torch.float8_e4m3fn)
        check(out, product(x, weight, bias), tolerance=1.5e-3)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("m", [512, 513, 1000])
@pytest.mark.parametrize(("n", "k"), GLM_SHAPES)
def test_glm_shapes_as_planned(n, k, m, codes):
    scheme = "w4a16-g128" if k % 128 == 0 else "w4a16" if k % 64 else "w4a16-g64"
    weight, x = quantized(scheme, n, k), torch.randn(m, k, device="cuda").bfloat16()
    packed = pack(weight, torch.bfloat16)
    out = multiply(x, packed, None, codes)
    check(out, product(x, weight, codes=codes))
    assert torch.equal(multiply(x, packed, None, codes), out)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("scheme", ["w4a16-g128", "w3a16-g64-asym"])
@pytest.mark.parametrize("name", TILINGS)
@pytest.mark.parametrize("size", [(129, 257, 1024), (7, 30, 704), (64, 64, 4096)])
def test_split_k_gives_the_same_bits_every_time(monkeypatch, name, size, scheme, codes):
    m, n, k = size
    force(monkeypatch, TILINGS[name], part=256)
    k = whole_groups(scheme, k)
    weight, x = quantized(scheme, n, k), torch.randn(m, k, device="cuda").half()
    bias, packed = torch.randn(n, device="cuda").half(), pack(weight, torch.float16)
    out = multiply(x, packed, bias, codes)
    check(out, product(x, weight, bias, codes))
    for _ in range(2):
        assert torch.equal(multiply(x, packed, bias, codes), out)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("k", [16, 112, 128, 144, 256, 384, 400, 512, 640])
@pytest.mark.parametrize("name", TILINGS)
def test_pipelines_of_every_length(monkeypatch, name, k, codes):
    force(monkeypatch, TILINGS[name])
    weight, x = quantized("w4a16", 264, k), torch.randn(130, k, device="cuda").half()
    check(multiply(x, pack(weight, torch.float16), None, codes), product(x, weight, codes=codes))


@pytest.mark.parametrize("codes", CODES)
def test_activations_with_outliers_and_a_mean(codes):
    x = torch.randn(640, 4096, device="cuda") + 1.5
    x[:, ::97] *= 100
    weight, x = quantized("w4a16-g128-asym", 1024, 4096), x.bfloat16()
    check(multiply(x, pack(weight, x.dtype), None, codes), product(x, weight, codes=codes), 5e-3)


@pytest.mark.parametrize("codes", CODES)
def test_rows_of_zeros_and_of_nan_stay_what_they_are(codes):
    packed = pack(quantized("w4a16-g128", 256, 512), torch.float16)
    x = torch.randn(600, 512, device="cuda").half()
    x[3] = 0
    x[5, 7] = float("nan")
    out = multiply(x, packed, None, codes)
    assert (out[3] == 0).all()
    assert out[5].isnan().all()
    assert out[[4, 6]].isfinite().all()


@pytest.mark.parametrize("activation", ["none", "swiglu"])
@pytest.mark.parametrize("rows", [wna8.LEAST_ROWS - 1, wna8.LEAST_ROWS])
def test_the_layer_rounds_many_rows_to_int8(rows, activation):
    weight = quantized("w4a16-g128", 1024, 512)
    packed = pack(weight, torch.bfloat16)
    x, norm, bias = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((rows, 512), (512,), (1024,)))
    residual = torch.randn(rows, 512 if activation == "swiglu" else 1024, device="cuda").bfloat16()
    around = {"norm": norm, "eps": 1e-5, "residual": residual, "activation": activation}
    out = wna16_linear(x, packed, bias, **around, activation_dtype=torch.int8)
    exact = wna16_linear(x, packed, bias, **around)
    moved = (out.double() - exact.double()).norm() / exact.double().norm()
    assert torch.equal(out, exact) == (rows < wna8.LEAST_ROWS)
    assert moved < 0.03
