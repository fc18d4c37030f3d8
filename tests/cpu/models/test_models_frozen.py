"""Gradients through quantized weights, in every form in which a weight is held on the CPU."""

import pytest
import torch
from torch import Tensor

from warpbus.kernels.ops import arguments
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.trellis_packed import pack_trellis
from warpbus.kernels.ops.wna16_frozen import dequantize_columns
from warpbus.models.layers import QuantizedLinear, RMSNorm, frozen, project
from warpbus.qtensor import QTensor, Scheme

SCHEMES = ["w4a16-g32", "w4a16-g64-asym", "w8a16", "w3a16-g32", "w8a8-int8", "w8a8-fp8", "w3a16-trellis"]
ROWS, COLUMNS = 48, 192


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def quantized(scheme: str) -> QTensor:
    parsed = Scheme.parse(scheme)
    groups = parsed.groups(COLUMNS)
    if parsed.activations is not None:
        values = torch.randint(-100, 100, (ROWS, COLUMNS)).to(parsed.dtype)
        return QTensor.from_values(parsed, values, torch.rand(ROWS) * 0.01)
    if parsed.is_trellis:
        words = torch.randint(-(2**31), 2**31, (ROWS, COLUMNS * parsed.bits // 32), dtype=torch.int64)
        return QTensor(parsed, words.to(torch.int32), torch.rand(ROWS, 1) * 0.1, None, (ROWS, COLUMNS))
    codes = torch.randint(0, parsed.max_code + 1, (ROWS, COLUMNS), dtype=torch.uint8)
    zeros = torch.randint(0, parsed.max_code + 1, (ROWS, groups), dtype=torch.uint8)
    return QTensor.from_codes(parsed, codes, torch.rand(ROWS, groups) * 0.1, None if parsed.symmetric else zeros)


def layers(weight: QTensor) -> list[QuantizedLinear]:
    bias = torch.randn(ROWS)
    held = [QuantizedLinear(weight, bias), QuantizedLinear(weight, bias, dtype=torch.float32)]
    if weight.scheme.is_trellis:
        held.append(QuantizedLinear(pack_trellis(weight, torch.bfloat16), bias.bfloat16()))
    elif not weight.holds_values:
        held.append(QuantizedLinear(pack(weight, torch.bfloat16), bias.bfloat16()))
    return held


def gradient(layer: QuantizedLinear, x: Tensor, dy: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(layer(x), x, dy)
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradient_is_that_of_the_dequantized_weight(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = quantized(scheme)
    for layer in layers(weight):
        half = layer.form.dtype if hasattr(layer.form, "dtype") else torch.float32
        x = torch.randn(2, 5, COLUMNS, dtype=half, requires_grad=True)
        dy = torch.randn(2, 5, ROWS, dtype=half)
        expected = dy.double() @ weight.dequantize(torch.float64)
        whole = gradient(layer, x, dy)
        near = 1e-5 if half == torch.float32 else 1e-2
        assert whole.dtype == half
        assert float((whole - expected).norm() / expected.norm()) < near
        for module in ("models.layers.frozen", "kernels.ops.wna16_frozen", "kernels.ops.trellis_dequantize"):
            monkeypatch.setattr(f"warpbus.{module}.BUFFER_BYTES", 64 * ROWS * 4)  # a piece is some columns of W
        torch.testing.assert_close(gradient(layer, x, dy), whole)


def test_forward_is_what_it_is_without_gradients() -> None:
    for layer in layers(quantized("w4a16-g32")):
        x = torch.randn(20, COLUMNS, dtype=getattr(layer.form, "dtype", torch.float32), requires_grad=True)
        with torch.no_grad():
            expected = layer(x)
        found = layer(x)
        assert found.requires_grad
        torch.testing.assert_close(found, expected)


def test_nothing_is_kept_but_the_weight() -> None:
    """Neither x nor a dequantized weight waits for the backward pass."""
    for layer in layers(quantized("w4a16-g32")):
        kept: list[int] = []
        own = {buffer.data_ptr() for buffer in layer.buffers()}

        def keep(tensor: Tensor, own: set[int] = own, kept: list[int] = kept) -> Tensor:
            if tensor.data_ptr() not in own:
                kept.append(tensor.numel())
            return tensor

        x = torch.randn(20, COLUMNS, dtype=getattr(layer.form, "dtype", torch.float32), requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(x)
        assert kept == []


def test_a_packed_layer_with_norm_activation_and_residual() -> None:
    weight = quantized("w4a16-g32")
    layer, norm = QuantizedLinear(pack(weight, torch.bfloat16)), RMSNorm(COLUMNS, 1e-5).to(torch.bfloat16)
    x = torch.randn(6, COLUMNS, dtype=torch.bfloat16, requires_grad=True)
    residual = torch.randn(6, ROWS // 2, dtype=torch.bfloat16, requires_grad=True)
    y = project(layer, x, norm=norm, activation="swiglu", residual=residual)
    found = torch.autograd.grad(y.float().square().sum(), [x, residual, norm.weight])
    wide = [each.detach().double().requires_grad_() for each in (x, residual, norm.weight)]
    normed = wide[0] * torch.rsqrt(wide[0].square().mean(-1, keepdim=True) + 1e-5) * wide[2]
    gate, up = (normed @ weight.dequantize(torch.float64).T).chunk(2, -1)
    expected = torch.autograd.grad((torch.nn.functional.silu(gate) * up + wide[1]).square().sum(), wide)
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 3e-2


def test_columns_of_a_packed_weight() -> None:
    weight = quantized("w4a16-g64-asym")
    whole = weight.dequantize(torch.float16)
    packed = pack(weight, torch.float16)
    assert torch.equal(dequantize_columns(packed, 1, 1), whole[:, 64:128])
    assert torch.equal(dequantize_columns(packed, 0, 3), whole)


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-int8"])
def test_autocast_converts_what_comes_in(scheme: str) -> None:
    layer = QuantizedLinear(quantized(scheme), dtype=torch.bfloat16)
    x = torch.randn(20, COLUMNS, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert frozen.frozen_linear(x, layer.form, None).dtype == torch.float32


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-int8", "w8a8-fp8"])
def test_compiled_it_is_the_same(scheme: str) -> None:
    weight = quantized(scheme)
    held = [QuantizedLinear(weight)]
    if not weight.holds_values:
        held.append(QuantizedLinear(pack(weight, torch.bfloat16)))
    for layer in held:
        x = torch.randn(3, COLUMNS, dtype=getattr(layer.form, "dtype", torch.float32), requires_grad=True)
        dy = torch.randn(3, ROWS, dtype=x.dtype)
        compiled = torch.compile(layer, backend="aot_eager")
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x, dy), torch.autograd.grad(layer(x), x, dy))


def test_the_compiler_takes_the_age_of_a_gpu_for_a_constant() -> None:
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(arguments._is_young_enough) == vars(marked)  # which is set without loading the compiler
