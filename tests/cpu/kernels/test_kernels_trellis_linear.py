"""Packed trellises and `trellis_linear` on the CPU: its reference, what it refuses, and how a product is divided."""

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional as F

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops import trellis_decode, trellis_dequantize
from warpbus.kernels.ops.trellis_dequantize import dequantize_trellis, multiply_dequantized, times_dequantized
from warpbus.kernels.ops.trellis_linear import times_trellis, trellis_linear
from warpbus.kernels.ops.trellis_packed import pack_trellis
from warpbus.models.cost import packed_bytes
from warpbus.qtensor import QTensor, Scheme

LAYERS = [(4096, 4096), (4608, 4096), (27392, 4096), (4096, 13696)]
CARDS = [(132, 227 * 1024, 16), (108, 163 * 1024, 16), (128, 99 * 1024, 11)]  # H100, A100, RTX 4090


@pytest.fixture(autouse=True)
def _seed(seed):
    """Fresh random numbers."""


def trellis(bits: int, n: int, k: int) -> QTensor:
    words = torch.randint(-(2**31), 2**31, (n, k * bits // 32), dtype=torch.int64).to(torch.int32)
    return QTensor(Scheme(bits, None, element="trellis"), words, torch.rand(n, 1) + 0.5, None, (n, k))


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize(("n", "k"), [(16, 32), (48, 160), (32, 384)])
def test_a_packed_trellis_is_unpacked_to_the_same(n, k, bits):
    weight = trellis(bits, n, k)
    packed = pack_trellis(weight, torch.float16)
    assert torch.equal(packed.unpack().qweight, weight.qweight)
    assert torch.equal(packed.unpack().scales, weight.scales)
    assert packed.nbytes == packed_bytes(weight.scheme, n, k) == n * -(-k // 128) * 16 * bits + 4 * n + k // 8


def test_other_schemes_are_not_packed():
    weight = QTensor.from_codes(Scheme(4, None), torch.zeros(16, 32, dtype=torch.uint8), torch.ones(16, 1))
    with pytest.raises(TensorError, match="pack_trellis: the weight is w4a16, expected w3a16-trellis or w2a16-trellis"):
        pack_trellis(weight, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_product_with_all_that_surrounds_it(dtype):
    weight = trellis(3, 32, 96)
    x, residual, bias = (torch.randn(*shape).to(dtype) for shape in ((2, 5, 96), (2, 5, 16), (32,)))
    norm = (torch.rand(96) + 0.5).to(dtype)
    given = {"norm": norm, "eps": 1e-5, "residual": residual, "activation": "swiglu"}
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * norm.double()
    gate, up = (normed @ weight.dequantize(torch.float64).T + bias.double()).chunk(2, -1)
    expected = residual.double() + F.silu(gate) * up
    for held in (pack_trellis(weight, dtype), weight):
        found = trellis_linear(x, held, bias, **given)
        assert found.dtype == dtype
        assert ((found.double() - expected).norm() / expected.norm()) < 4 * torch.finfo(dtype).eps


def test_bands_are_the_whole(monkeypatch):
    packed = pack_trellis(trellis(2, 80, 352), torch.bfloat16)
    wide = dequantize_trellis(packed, range(80), range(352))
    x, dy, bias = (torch.randn(*shape).bfloat16() for shape in ((20, 352), (20, 80), (80,)))
    sizes = []
    actual = dequantize_trellis

    def noted(weight, rows, columns):
        sizes.append((len(rows), len(columns)))
        return actual(weight, rows, columns)

    monkeypatch.setattr(trellis_dequantize, "dequantize_trellis", noted)
    for size, rows, columns in ((1, [16] * 5, [128, 128, 96]), (2 * 48 * 352, [48, 32], [128] * 2 + [96])):
        monkeypatch.setattr(trellis_dequantize, "BUFFER_BYTES", size)
        for given in (None, bias):
            sizes.clear()
            torch.testing.assert_close(multiply_dequantized(x, packed, given), F.linear(x, wide, given))
            assert sizes == [(each, 352) for each in rows]
        sizes.clear()
        torch.testing.assert_close(times_dequantized(dy, packed), dy @ wide)
        assert sizes == [(80, each) for each in columns]


def test_the_operators_for_the_compiler():
    packed = pack_trellis(trellis(3, 32, 64), torch.float16)
    x, parts = torch.randn(3, 64).half(), (packed.codes, packed.scales, packed.signs)
    opcheck(torch.ops.warpbus.trellis.default, (x, *parts, 32, 3, None, None, 0.0, None, "none"))
    residual = torch.randn(3, 16).half()
    opcheck(torch.ops.warpbus.trellis.default, (x, *parts, 32, 3, None, x[0], 1e-5, residual, "swiglu"))
    opcheck(torch.ops.warpbus.trellis_times.default, (torch.randn(3, 32).half(), *parts, 64, 3))
    assert times_trellis(torch.zeros(0, 32).half(), packed).shape == (0, 64)
    assert trellis_linear(x[:0], packed).shape == (0, 32)


def test_what_is_wrong_is_said():
    packed = pack_trellis(trellis(3, 32, 64), torch.float16)
    with pytest.raises(TensorError, match=r"trellis_linear: x has shape \[3, 32\], the weight expects 64 features"):
        trellis_linear(torch.zeros(3, 32).half(), packed)
    with pytest.raises(TensorError, match=r"x is torch\.bfloat16, the weight expects torch\.float16"):
        trellis_linear(torch.zeros(3, 64).bfloat16(), packed)
    with pytest.raises(TensorError, match="trellis_linear: x is float32, expected float16, bfloat16"):
        trellis_linear(torch.zeros(3, 64), packed)
    with pytest.raises(UsageError, match="trellis_linear: activation is 'gelu': give one of none, swiglu"):
        trellis_linear(torch.zeros(3, 64).half(), packed, activation="gelu")


@pytest.mark.parametrize(("resident", "shared", "most"), CARDS)
@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize(("n", "k"), LAYERS)
def test_every_layer_of_glm_has_a_plan(n, k, bits, resident, shared, most):
    for m in range(1, most + 1):
        plan = trellis_decode.choose(m, n, k, bits, n == 27392, resident, shared)
        assert plan is not None
        assert plan.variant.tokens == (4 if m <= 4 else 8 if m <= 8 else 16)
        assert 1 <= plan.slices <= resident
        assert plan.variant.shared(m, k, plan.slices, plan.stages) <= shared


def test_x_that_fits_no_shared_memory_has_none():
    assert trellis_decode.choose(16, 4096, 2**20, 3, False, 132, 227 * 1024) is None
