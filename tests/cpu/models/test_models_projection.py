"""Linear layers in every form a weight is held in, and matrices on their way to a device."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from warpbus.errors import DeviceError, TensorError
from warpbus.formats import Checkpoint
from warpbus.kernels import ops
from warpbus.kernels.ops import w8a8
from warpbus.kernels.ops.cpu_codes import CpuCodes
from warpbus.kernels.ops.cpu_table import CpuTable, pack_table
from warpbus.kernels.ops.packed import PackedWeight, pack
from warpbus.kernels.ops.rounding import round_to_nearest
from warpbus.kernels.reference.w8a8 import quantize
from warpbus.models import RopeConfig, load_model, placement
from warpbus.models.layers import LayerNorm, QuantizedLinear, RMSNorm, Rotary, linear, project
from warpbus.qtensor import QTensor, Scheme

SCHEMES = ["w4a16-g32", "w8a16-g64-asym", "w3a16", "w2a16-g128-asym", "w5a16-g64", "w6a16-asym"]
GENERATOR = torch.Generator().manual_seed(0)


def matrix(scheme, n=80, k=128, dtype=torch.float32):
    chosen = Scheme.parse(scheme)
    groups = chosen.groups(k)
    codes = torch.randint(0, chosen.max_code + 1, (n, k), generator=GENERATOR)
    scales = (torch.rand(n, groups, generator=GENERATOR) * 0.02 + 0.01).to(dtype)
    zeros = torch.randint(0, chosen.max_code + 1, (n, groups), generator=GENERATOR)
    return QTensor.from_codes(chosen, codes, scales, None if chosen.symmetric else zeros)


def same(one, other):
    assert torch.equal(one.codes(), other.codes())
    torch.testing.assert_close(one.scales, other.scales, rtol=0, atol=0, check_dtype=False)
    assert (one.zeros is None) == (other.zeros is None)
    assert one.zeros is None or torch.equal(one.zeros, other.zeros)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_weight_comes_back_from_every_form(scheme):
    weight = matrix(scheme)
    plain, arranged = QuantizedLinear(weight), QuantizedLinear(weight, dtype=torch.float32)
    half = matrix(scheme, dtype=torch.float16)
    packed = QuantizedLinear(pack(half, torch.float16))
    rounding = QuantizedLinear(weight, dtype=torch.float32, int8_activations=True)
    assert isinstance(plain.form, QTensor)
    assert isinstance(arranged.form, QTensor | CpuTable)  # as the CPU has it
    assert isinstance(rounding.form, CpuCodes)
    same(rounding.weight, weight)
    assert isinstance(packed.form, PackedWeight)
    same(plain.weight, weight)
    same(arranged.weight, weight)
    same(packed.weight, half)
    assert isinstance(rounding.to(torch.bfloat16).form, CpuCodes)
    same(rounding.weight, arranged.to(torch.bfloat16).weight)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_every_form_gives_the_same_product(scheme, tokens):
    weight = matrix(scheme)
    bias, x = torch.rand(80, generator=GENERATOR), torch.randn(2, tokens, 128, generator=GENERATOR)
    expected = F.linear(x, weight.dequantize(), bias)
    for layer in (QuantizedLinear(weight, bias), QuantizedLinear(weight, bias, dtype=torch.float32)):
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("activation", ["none", "swiglu", "gelu"])
def test_the_cpu_rounds_activations_to_8_bits(scheme, activation):
    weight = matrix(scheme)
    norm, x = RMSNorm(128, 1e-5), torch.randn(3, 128, generator=GENERATOR)
    residual = torch.randn(3, 40 if activation == "swiglu" else 80, generator=GENERATOR)
    for bias in (None, torch.rand(80, generator=GENERATOR)):
        layer = QuantizedLinear(weight, bias, dtype=torch.float32, int8_activations=True)
        exact = QuantizedLinear(weight, bias)
        with torch.inference_mode():
            found, wanted = (
                project(each, x, norm=norm, residual=residual, activation=activation) for each in (layer, exact)
            )
        # By about 0.6 % of the norm of x; a gate and what it is multiplied with are rounded both.
        assert 1e-4 < float((found - wanted).norm() / wanted.norm()) < 0.015


def test_a_layer_moves_and_is_copied_with_its_weight():
    weight = matrix("w4a16-g32")
    layer = QuantizedLinear(weight, torch.zeros(80), dtype=torch.float32)
    x = torch.randn(3, 128, generator=GENERATOR)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    names = set(layer.state_dict())
    moved = layer.to(torch.bfloat16)
    assert moved is layer
    assert layer.weight.scales.dtype == layer.bias.dtype == torch.bfloat16
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(layer(x.bfloat16()).float(), expected, rtol=0.05, atol=0.05)
    assert set(layer.state_dict()) == names


@pytest.mark.parametrize("kind", ["linear", "quantized", "packed"])
@pytest.mark.parametrize("activation", ["none", "swiglu", "gelu"])
@pytest.mark.parametrize("surrounded", [None, RMSNorm, LayerNorm])
def test_a_projection_is_what_its_parts_give(kind, activation, surrounded):
    weight = matrix("w4a16-g32", dtype=torch.float16)
    dtype = torch.float16 if kind == "packed" else torch.float32
    if kind == "linear":
        layer = nn.Linear(128, 80, bias=False)
        layer.weight.data = weight.dequantize(dtype)
    else:
        layer = QuantizedLinear(pack(weight, dtype) if kind == "packed" else weight)
    norm = (surrounded or RMSNorm)(128, 1e-5)
    norm.weight.data = torch.rand(128, generator=GENERATOR)
    if surrounded is LayerNorm:
        norm.bias.data = torch.randn(128, generator=GENERATOR)
    norm = norm.to(dtype)
    x = torch.randn(2, 3, 128, generator=GENERATOR).to(dtype)
    wide = norm(x).float() if surrounded else x.float()
    expected = wide @ weight.dequantize(torch.float32).T
    if activation == "swiglu":
        gate, up = expected.chunk(2, dim=-1)
        expected = F.silu(gate) * up
    if activation == "gelu":
        expected = 0.5 * expected * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (expected + 0.044715 * expected**3)))
    residual = torch.randn(expected.shape, generator=GENERATOR).to(dtype) if surrounded else None
    expected = expected if residual is None else expected + residual
    with torch.no_grad():
        found = project(layer, x, norm=norm if surrounded else None, residual=residual, activation=activation)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=4e-3, atol=4e-3)


def test_a_projection_takes_what_stands_in_for_a_layer():
    x = torch.randn(2, 8, generator=GENERATOR)
    assert project(nn.Identity(), x) is x


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [16, 40, 2048 + 24])
def test_pieces_of_rows_make_the_whole_packed_matrix(monkeypatch, scheme, rows):
    """As a GPU is filled, here on the CPU."""
    monkeypatch.setattr(placement, "gpu_has_kernels", lambda device: True)
    monkeypatch.setattr(placement, "_ELEMENTS", 500 * 128)
    weight = matrix(scheme, rows)
    found, expected = placement.place(weight, "cpu", torch.bfloat16), pack(weight, torch.bfloat16)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales, expected.scales)
    assert (found.shape, found.scheme) == (expected.shape, expected.scheme)
    assert found.zeros is None or torch.equal(found.zeros, expected.zeros)


@pytest.mark.parametrize("packs", [False, True])
def test_rounding_is_to_the_nearest(monkeypatch, packs):
    monkeypatch.setattr(placement, "gpu_has_kernels", lambda device: packs)
    weight = torch.randn(1040, 256, generator=GENERATOR)
    weight[3, :128] = 0
    rounded = QuantizedLinear(placement.round_onto(weight, Scheme.parse("w8a16-g128"), "cpu", torch.float16)).weight
    error = (rounded.dequantize(torch.float32) - weight).unflatten(1, (2, 128)).abs().amax(-1)
    # The grid has one value more on one side: the largest weight of the other side may be clipped to the last value.
    assert (error <= 1.05 * rounded.scales.float().abs() + 1e-6).all()
    assert rounded.dequantize()[3, :128].eq(0).all()


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("scheme", ["w4a16-g64", "w3a16-g128", "w8a16", "w4a16-g32-asym"])
def test_weights_are_rounded_as_everywhere_else(monkeypatch, packs, scheme):
    """On the one grid of this package, which puts the largest weight of a group on the longer side."""
    monkeypatch.setattr(placement, "gpu_has_kernels", lambda device: packs)
    weight = torch.randn(1040, 256, generator=torch.Generator().manual_seed(11))
    expected = round_to_nearest(weight, Scheme.parse(scheme), scale_dtype=torch.bfloat16)
    found = placement.round_onto(weight, Scheme.parse(scheme), "cpu", torch.bfloat16)
    if packs:
        expected = pack(expected, torch.bfloat16)
        assert torch.equal(found.codes, expected.codes)
    else:
        assert torch.equal(found.qweight, expected.qweight)
    assert torch.equal(found.scales, expected.scales)
    largest = 2 ** (Scheme.parse(scheme).bits - 1) - 1
    groups = weight.unflatten(1, (Scheme.parse(scheme).groups(256), -1))
    scales = groups.abs().amax(-1, keepdim=True) / largest  # the largest weight on the largest code
    coarse = ((groups / scales).round() * scales - groups).norm()
    exact = round_to_nearest(weight, Scheme.parse(scheme), scale_dtype=torch.float32).dequantize(torch.float32)
    assert (exact - weight).norm() < 0.995 * coarse


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w8a8-fp8"])
def test_values_are_rounded_too(scheme):
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(12))
    rounded = placement.round_onto(weight, Scheme.parse(scheme), "cpu", torch.float32)
    assert rounded.qweight.dtype == Scheme.parse(scheme).dtype
    assert (rounded.dequantize(torch.float32) - weight).norm() < 0.04 * weight.norm()


@torch.no_grad()
def test_a_head_may_be_rounded_and_the_embedding_elsewhere(tiny_model):
    checkpoint = Checkpoint(tiny_model)
    plain = load_model(checkpoint, device="cpu", dtype=torch.float32)
    rounded = load_model(
        checkpoint, device="cpu", dtype=torch.float32, head=Scheme.parse("w8a16"), embedding_device="cpu"
    )
    assert isinstance(rounded.head, QuantizedLinear)
    tokens = torch.arange(12)[None]
    expected = plain(tokens)
    assert (rounded(tokens) - expected).norm() < 0.02 * expected.norm()
    assert rounded.embedding.weight.shape == plain.embedding.weight.shape


W8A8 = ["w8a8-int8", "w8a8-fp8"]


def values(scheme, n=80, k=128, dtype=torch.float32):
    chosen = Scheme.parse(scheme)
    weight = torch.randint(-127, 128, (n, k), generator=GENERATOR).to(chosen.dtype)
    return QTensor.from_values(chosen, weight, (torch.rand(n, generator=GENERATOR) * 2e-3 + 1e-3).to(dtype))


def rounded(x, scheme):
    """What 8 bits leave of the tokens."""
    codes, scales = quantize(x, Scheme.parse(scheme).dtype)
    return codes.double() * scales.double()[..., None]


@pytest.mark.parametrize("scheme", W8A8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arranged", [False, True])
def test_w8a8_rounds_its_input_token_by_token(scheme, dtype, arranged):
    weight = values(scheme, dtype=torch.bfloat16)
    bias, x = torch.rand(80, generator=GENERATOR).to(dtype), torch.randn(2, 5, 128, generator=GENERATOR).to(dtype)
    x[0, 1] *= 100
    layer = QuantizedLinear(weight, bias, dtype=dtype if arranged else None)
    expected = rounded(x, scheme) @ weight.dequantize(torch.float64).T + bias
    found = layer(x)
    assert found.dtype == dtype
    tolerance = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(layer(x[:1, 1]), found[:1, 1])
    exact = x.double() @ weight.dequantize(torch.float64).T
    assert 1e-3 < (expected - bias - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("scheme", W8A8)
def test_w8a8_moves_to_a_dtype_with_all_its_bits(scheme):
    weight = values(scheme)
    layer = QuantizedLinear(weight, torch.ones(80), dtype=torch.float32)
    names = set(layer.state_dict())
    moved = copy.deepcopy(layer).to(torch.bfloat16)
    assert moved.weight.qweight.dtype == weight.scheme.dtype
    assert torch.equal(moved.weight.dequantize(), weight.dequantize())
    assert moved.bias.dtype == torch.bfloat16
    assert set(moved.state_dict()) == names
    x = torch.randn(3, 128, generator=GENERATOR).bfloat16()
    torch.testing.assert_close(moved(x).float(), layer(x.float()), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("scheme", W8A8)
@torch.no_grad()
def test_a_w8a8_projection_is_what_its_parts_give(scheme):
    weight = values(scheme)
    norm, x = RMSNorm(128, 1e-5), torch.randn(2, 3, 128, generator=GENERATOR)
    norm.weight.data = torch.rand(128, generator=GENERATOR)
    residual = torch.randn(2, 3, 40, generator=GENERATOR)
    gate, up = (rounded(norm(x), scheme) @ weight.dequantize(torch.float64).T).chunk(2, dim=-1)
    found = project(QuantizedLinear(weight), x, norm=norm, residual=residual, activation="swiglu")
    torch.testing.assert_close(found.double(), residual + F.silu(gate) * up, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", W8A8)
def test_w8a8_is_placed_as_it_is(monkeypatch, scheme):
    monkeypatch.setattr(placement, "gpu_has_kernels", lambda device: True)
    weight = values(scheme, 40, dtype=torch.float16)
    found = placement.place(weight, "cpu", torch.float16)
    assert torch.equal(found.dequantize(), weight.dequantize())
    held = QuantizedLinear(found, dtype=torch.float16).form
    assert held.scales.dtype == torch.float32
    assert torch.equal(held.dequantize(torch.float16), weight.dequantize())


def test_fp8_is_refused_where_a_gpu_cannot_multiply_it(monkeypatch):
    monkeypatch.setattr(linear, "gpu_has_kernels", lambda device: True)
    monkeypatch.setattr(w8a8, "architecture", lambda device: "sm_80")
    QuantizedLinear(values("w8a8-int8"), dtype=torch.float16)
    QuantizedLinear(values("w8a8-fp8"), dtype=torch.float32)  # by the reference
    with pytest.raises(DeviceError, match=r"float8_e4m3fn needs sm_89 or later, cpu is sm_80: use torch\.int8"):
        QuantizedLinear(values("w8a8-fp8"), dtype=torch.float16)


@pytest.mark.parametrize("scheme", W8A8)
def test_kernels_of_weights_alone_refuse_w8a8(scheme):
    weight = values(scheme)
    for call in (
        lambda: pack(weight, torch.float16),
        lambda: pack_table(weight),
        lambda: ops.wna16_linear(torch.randn(2, 128), weight),
    ):
        with pytest.raises(TensorError, match=rf"the weight is {scheme}, expected w<bits>a16: use w8a8_linear"):
            call()


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_rotary_table_holds_the_angles(interleaved):
    rotary = Rotary(RopeConfig(theta=1e4, rotary_dim=16, interleaved=interleaved, position_scale=2.0))
    table = rotary.table(50, torch.device("cpu"))
    assert table.shape == (50, 16)
    cos, sin = rotary(torch.arange(50)[None], torch.float32)
    assert torch.equal(table, torch.cat((cos, sin), dim=-1)[0, :, 0])
    assert rotary.table(20, torch.device("cpu")) is table
    assert rotary.table(60, torch.device("cpu")).shape[0] == 60
