"""wna16 on a CPU in floating point: packing, every scheme against float64, few rows and many, gradients, refusals."""

import pytest
import torch
from cpu_weights import assert_same_weight, random_weight
from torch.nn import functional as F

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops import cpu_table
from warpbus.kernels.ops.cpu_codes import CpuCodes
from warpbus.kernels.ops.cpu_library import DTYPES, activations_in_8_bits
from warpbus.kernels.ops.cpu_table import CpuTable, pack_table, table_linear
from warpbus.models.layers import linear
from warpbus.models.layers.linear import QuantizedLinear
from warpbus.qtensor import QTensor

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="there is a fast path on x86 CPUs alone"
)

SCHEMES = [
    f"w{bits}a16{group}{asym}"
    for bits in (2, 3, 4, 5, 6, 8)
    for group in ("", "-g32", "-g64", "-g128")
    for asym in ("", "-asym")
]
# The relative error that rounding x.dtype once leaves, with room for sums in float32.
ERRORS = {torch.float32: 3e-6, torch.bfloat16: 2.5e-3, torch.float16: 3e-4}


def packed(name, n, k):
    weight = random_weight(name, n, k, torch.float16)
    found = pack_table(weight)
    assert found is not None
    return weight, found


def expected(x, weight, bias=None):
    return F.linear(x.double(), weight.dequantize(torch.float64), None if bias is None else bias.double())


def error(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme(name):
    torch.manual_seed(2)
    for n, k in ((1, 128), (37, 384), (1030, 128)):
        weight, fast = packed(name, n, k)
        assert_same_weight(fast.unpack(), weight)
        for rows in (1, 5, 17):
            x = torch.randn(rows, k) + 0.5
            assert error(table_linear(x, fast), expected(x, weight)) < ERRORS[torch.float32]


@pytest.mark.parametrize("name", ["w3a16", "w4a16-asym", "w8a16"])
def test_any_number_of_columns(name):
    torch.manual_seed(3)
    for k in (1, 7, 3425):
        weight, fast = packed(name, 19, k)
        assert_same_weight(fast.unpack(), weight)
        x = torch.randn(2, k)
        assert error(table_linear(x, fast), expected(x, weight)) < ERRORS[torch.float32]


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_biases(dtype, rows):
    torch.manual_seed(4)
    weight, fast = packed("w4a16-g64-asym", 600, 192)
    x, bias = torch.randn(rows, 192).to(dtype), torch.randn(600).to(dtype)
    found = table_linear(x, fast, bias)
    assert found.dtype == dtype
    # Many rows of bfloat16 are multiplied by weights that are rounded to it.
    limit = ERRORS[dtype] * (2 if dtype == torch.bfloat16 and rows > 16 else 1)
    assert error(found, expected(x, weight, bias)) < limit


def test_shapes():
    weight, fast = packed("w4a16-g32", 48, 64)
    x = torch.randn(2, 3, 128)[..., ::2]
    found = table_linear(x, fast)
    assert found.shape == (2, 3, 48)
    assert error(found, expected(x, weight)) < ERRORS[torch.float32]
    assert table_linear(x[0, 0], fast).shape == (48,)
    assert table_linear(x[:0], fast).shape == (0, 3, 48)


@pytest.mark.parametrize("name", ["w2a16-g32", "w4a16-g128-asym", "w8a16"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(name):
    torch.manual_seed(5)
    _, fast = packed(name, 1100, 256)
    x = torch.randn(16, 256)
    together = table_linear(x, fast)
    assert torch.equal(table_linear(x, fast), together)
    for row in range(16):
        assert torch.equal(table_linear(x[row], fast), together[row])


@pytest.mark.parametrize("rows", [3, 20])
def test_gradients(rows):
    torch.manual_seed(6)
    weight, fast = packed("w4a16-g32-asym", 530, 96)
    x = torch.randn(rows, 96)
    with torch.inference_mode():
        alone = table_linear(x, fast)
    x.requires_grad_()
    found = table_linear(x, fast)
    torch.testing.assert_close(found.detach(), alone.clone(), rtol=1e-4, atol=1e-5)
    found.square().sum().backward()
    wanted = x.detach().double().requires_grad_()
    expected(wanted, weight).square().sum().backward()
    assert error(x.grad, wanted.grad) < ERRORS[torch.float32]


def test_memory():
    weight, fast = packed("w4a16-g128", 1024, 512)
    assert fast.nbytes < 1.03 * weight.nbytes
    weight, fast = packed("w4a16-g128-asym", 1024, 512)
    assert fast.nbytes < 1.03 * weight.nbytes


def test_a_cpu_without_torchs_kernels(monkeypatch):
    weight = random_weight("w4a16-g32", 8, 32)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    cpu_table._bag.cache_clear()
    try:
        assert pack_table(weight) is None
    finally:
        cpu_table._bag.cache_clear()
    monkeypatch.undo()
    assert pack_table(weight) is not None


def test_which_form_a_weight_gets(monkeypatch):
    def form(dtype, **options):
        return QuantizedLinear(random_weight("w4a16-g32", 8, 32), dtype=dtype, **options).form

    assert isinstance(form(torch.float32), CpuTable)
    assert isinstance(form(torch.float32, int8_activations=True), CpuCodes)
    assert isinstance(form(torch.float64, int8_activations=True), QTensor)
    monkeypatch.setattr(linear, "is_available", lambda: False)
    assert isinstance(form(torch.float32, int8_activations=True), CpuTable)


def test_whether_activations_are_rounded(monkeypatch):
    monkeypatch.delenv("WARPBUS_CPU_ACTIVATIONS", raising=False)
    assert activations_in_8_bits()
    monkeypatch.setenv("WARPBUS_CPU_ACTIVATIONS", "float")
    assert not activations_in_8_bits()
    monkeypatch.setenv("WARPBUS_CPU_ACTIVATIONS", "int4")
    with pytest.raises(UsageError, match="WARPBUS_CPU_ACTIVATIONS is 'int4': set it to int8 or float"):
        activations_in_8_bits()


def test_rejects():
    _, fast = packed("w4a16-g32", 8, 64)
    with pytest.raises(TensorError, match=r"x has shape \[63\], the weight expects 64 features"):
        table_linear(torch.ones(63), fast)
    with pytest.raises(TensorError, match=r"x is torch.float64 on cpu, expected"):
        table_linear(torch.ones(64, dtype=torch.float64), fast)
    with pytest.raises(TensorError, match=r"bias has shape \[1\] on cpu, expected \[8\]"):
        table_linear(torch.ones(64), fast, torch.ones(1))
