"""Gradients through quantized weights on a GPU: the dequantizing kernel, layers in training, QLoRA in a decoder."""

from dataclasses import replace

import pytest
import torch
from dense_configs import with_traits
from torch import nn

from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import runs_on
from warpbus.kernels.ops import wna16_frozen
from warpbus.kernels.ops.packed import pack
from warpbus.models import SHAPES, random_model
from warpbus.models.layers import CausalAttention, QuantizedLinear
from warpbus.qtensor import QTensor, Scheme
from warpbus.train.lora import LoraLinear, attach_lora
from warpbus.train.loss import summed_cross_entropy
from warpbus.train.recompute import recompute_layers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HALVES = [torch.float16, torch.bfloat16]
SCHEMES = ["w4a16-g128", "w4a16-g32-asym", "w4a16", "w3a16-g64", "w2a16-g32-asym", "w8a16", "w8a16-g32-asym"]
HAS_E4M3 = torch.cuda.is_available() and runs_on(architecture(0), "sm_89")
SMALL = with_traits(
    SHAPES["chatglm2-6b"], vocab_size=1000, hidden_size=256, num_layers=3, num_heads=8, head_dim=64, ffn_size=384
)
SMALL = replace(SMALL, rope=replace(SMALL.rope, rotary_dim=32), max_context=2048)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def quantized(scheme, n, k, dtype):
    scheme = Scheme.parse(scheme)
    groups = scheme.groups(k)
    if scheme.activations is not None:
        values = torch.randint(-100, 100, (n, k), device="cuda").to(scheme.dtype)
        return QTensor.from_values(scheme, values, torch.rand(n, device="cuda") * 0.01)
    codes = torch.randint(0, scheme.max_code + 1, (n, k), dtype=torch.uint8, device="cuda")
    zeros = torch.randint(0, scheme.max_code + 1, (n, groups), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(n, groups, device="cuda") * 0.02 + 0.001).to(dtype)
    return QTensor.from_codes(scheme, codes, scales, None if scheme.symmetric else zeros)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("n", "k"), [(16, 64), (37, 256), (129, 1152), (1000, 4096)])
def test_columns_have_the_bits_of_dequantize(scheme, dtype, n, k):
    if k % (Scheme.parse(scheme).group_size or 1):
        k += 128 - k % 128
    weight = quantized(scheme, n, k, dtype)
    expected = weight.dequantize(dtype)
    packed = pack(weight, dtype)
    tiles = -(-k // 64)
    assert torch.equal(wna16_frozen.dequantize_columns(packed, 0, tiles), expected)
    for first, count in ((0, 1), (tiles // 2, tiles - tiles // 2), (tiles - 1, 1)):
        found = wna16_frozen.dequantize_columns(packed, first, count)
        assert torch.equal(found, expected[:, 64 * first : 64 * (first + count)])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scheme", ["w4a16", "w8a16"])
def test_columns_where_the_last_tile_is_not_full(scheme, dtype):
    weight = quantized(scheme, 50, 203, dtype)
    packed = pack(weight, dtype)
    assert torch.equal(wna16_frozen.dequantize_columns(packed, 0, 4), weight.dequantize(dtype))
    assert torch.equal(wna16_frozen.dequantize_columns(packed, 3, 1), weight.dequantize(dtype)[:, 192:])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scheme", ["w4a16-g128", "w4a16-g32-asym", "w8a16"])
@pytest.mark.parametrize("buffer", [2**28, 2**17])
def test_gradient_is_that_of_the_dequantized_weight(scheme, dtype, buffer, monkeypatch):
    monkeypatch.setattr(wna16_frozen, "BUFFER_BYTES", buffer)
    weight = quantized(scheme, 304, 1152, dtype)
    layer = QuantizedLinear(weight, torch.randn(304, device="cuda", dtype=dtype), dtype=dtype)
    x = torch.randn(3, 100, 1152, device="cuda", dtype=dtype, requires_grad=True)
    dy = torch.randn(3, 100, 304, device="cuda", dtype=dtype)
    y = layer(x)
    with torch.no_grad():
        assert torch.equal(y, layer(x))
    (found,) = torch.autograd.grad(y, x, dy)
    expected = dy.double() @ weight.dequantize(torch.float64)
    assert found.dtype == dtype
    assert float((found - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize(
    "scheme", ["w8a8-int8", pytest.param("w8a8-fp8", marks=pytest.mark.skipif(not HAS_E4M3, reason="needs sm_89"))]
)
def test_gradient_is_passed_straight_through_rounded_activations(scheme):
    weight = quantized(scheme, 304, 1152, torch.bfloat16)
    layer = QuantizedLinear(weight, dtype=torch.bfloat16)
    x = torch.randn(100, 1152, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(100, 304, device="cuda", dtype=torch.bfloat16)
    (found,) = torch.autograd.grad(layer(x), x, dy)
    expected = dy.double() @ weight.dequantize(torch.float64)
    assert float((found - expected).norm() / expected.norm()) < 1e-2


class Training(nn.Module):
    """As `warpbus train` calls a model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        hidden = self.model.hidden(tokens, None, CausalAttention(torch.zeros_like(tokens)))
        return summed_cross_entropy(hidden[:, :-1], self.model.head, tokens[:, 1:])


def loss_and_gradients(model, tokens, compiled=False, rounded=True):
    model.zero_grad()
    training = Training(model)
    with torch.autocast("cuda", torch.bfloat16, enabled=rounded):
        loss = (torch.compile(training) if compiled else training)(tokens)
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_qlora_in_a_decoder(compiled, recompute):
    """Against LoRA on the dequantized weights in float32: as near to it as those are in bfloat16, compiled or not."""
    model = random_model(SMALL, Scheme.parse("w4a16-g128"), "cuda", torch.bfloat16)
    dense = random_model(SMALL, None, "cuda", torch.bfloat16)
    with torch.no_grad():
        # Large beside what the layers add: gradients of a random model grow 20 times a layer otherwise, and so do the
        # errors of rounding.
        model.embedding.weight.mul_(50)
        dense.embedding.weight.copy_(model.embedding.weight)
        dense.head.weight.copy_(model.head.weight)
        for name, linear in model.named_modules():
            if isinstance(linear, QuantizedLinear):
                target = dense.get_submodule(name)
                target.weight.copy_(linear.weight.dequantize(torch.bfloat16))
                if linear.bias is not None:
                    target.bias.copy_(linear.bias)
    for each in (model, dense):
        torch.manual_seed(1)
        attach_lora(each, rank=8, alpha=16.0)
        for module in each.modules():
            if isinstance(module, LoraLinear):
                torch.nn.init.normal_(module.b, std=0.02)
        each.train()
    if recompute:
        recompute_layers(model)
    tokens = torch.randint(1000, (2, 128), device="cuda")
    found, rounded = (loss_and_gradients(each, tokens, compiled) for each in (model, dense))
    exact = loss_and_gradients(dense.float(), tokens, rounded=False)
    assert float(found[0] / exact[0]) == pytest.approx(1, abs=5e-3)
    assert found[1].keys() == exact[1].keys()
    for name, gradient in exact[1].items():
        errors = [float((each[1][name] - gradient).norm() / gradient.norm()) for each in (found, rounded)]
        assert errors[0] < 1.5 * errors[1] + 0.02, (name, *errors)
        assert errors[0] < 0.2, (name, *errors)


def test_no_dequantized_matrix_is_kept():
    model = random_model(
        with_traits(SMALL, hidden_size=1024, ffn_size=4096), Scheme.parse("w4a16-g128"), "cuda", torch.bfloat16
    )
    attach_lora(model, rank=8, alpha=16.0)
    model.train()
    recompute_layers(model)
    tokens = torch.randint(1000, (1, 64), device="cuda")
    loss_and_gradients(model, tokens)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss_and_gradients(model, tokens)
    largest = 2 * 2 * 4096 * 1024  # gate and up in 16 bits
    assert torch.cuda.max_memory_allocated() - before < 2.5 * largest
