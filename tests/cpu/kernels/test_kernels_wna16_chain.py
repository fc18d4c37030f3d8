"""`wna16_chain` on the CPU: as `wna16_linear` one after another; what is refused."""

from dataclasses import replace

import pytest
import torch

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops.moe_mlp import moe_mlp
from warpbus.kernels.ops.moe_router import moe_route
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.packed_experts import PackedExperts
from warpbus.kernels.ops.wna16 import wna16_linear
from warpbus.kernels.ops.wna16_chain import ChainLink, RoutedExperts, fits, wna16_chain
from warpbus.qtensor import QTensor, Scheme

EPS = 1e-5
HIDDEN, INNER = 64, 96


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def packed(n, k, scheme="w4a16-g32", dtype=torch.float16):
    scheme = Scheme.parse(scheme)
    shape = n, scheme.groups(k)
    codes = torch.randint(0, scheme.max_code + 1, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, scheme.max_code + 1, shape, dtype=torch.uint8)
    scales = (torch.rand(shape) + 0.5) / (scheme.max_code * 12)
    return pack(QTensor.from_codes(scheme, codes, scales, None if scheme.symmetric else zeros), dtype)


def layer(x, dtype=torch.float16, scheme="w4a16-g32"):
    """o, gate and up, down, and the next layer's qkv."""
    norm = (torch.rand(HIDDEN) + 0.5).to(dtype)
    return [
        ChainLink(packed(HIDDEN, HIDDEN, scheme, dtype), residual=x),
        ChainLink(packed(2 * INNER, HIDDEN, scheme, dtype), norm=norm, eps=EPS, activation="swiglu"),
        ChainLink(packed(HIDDEN, INNER, scheme, dtype), residual=0),
        ChainLink(packed(80, HIDDEN, scheme, dtype), torch.randn(80).to(dtype), norm=norm, eps=EPS),
    ]


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a16-asym"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_links_are_linear_layers_one_after_another(dtype, scheme):
    x, inner = torch.randn(2, HIDDEN).to(dtype), torch.randn(2, HIDDEN).to(dtype)
    links = layer(x, dtype, scheme)
    o, gate_up, down, qkv = links
    results = wna16_chain(inner, links)
    first = wna16_linear(inner, o.weight, residual=x)
    second = wna16_linear(first, gate_up.weight, norm=gate_up.norm, eps=EPS, activation="swiglu")
    third = wna16_linear(second, down.weight, residual=first)
    fourth = wna16_linear(third, qkv.weight, qkv.bias, norm=qkv.norm, eps=EPS)
    for result, expected in zip(results, (first, second, third, fourth), strict=True):
        assert result.shape == expected.shape
        assert torch.equal(result, expected)


def test_one_link_is_a_linear_layer():
    x, weight = torch.randn(3, HIDDEN).half(), packed(48, HIDDEN)
    (result,) = wna16_chain(x, [ChainLink(weight)])
    assert torch.equal(result, wna16_linear(x, weight))


def test_the_cpu_has_no_single_launch():
    x = torch.randn(1, HIDDEN).half()
    assert not fits(x, layer(x))


def test_a_link_reads_the_first_columns_of_the_one_before():
    x, first, second = torch.randn(2, HIDDEN).half(), packed(96, HIDDEN), packed(40, 32)
    norm = (torch.rand(32) + 0.5).half()
    before, after = wna16_chain(x, [ChainLink(first), ChainLink(second, norm=norm, eps=EPS)])
    assert torch.equal(after, wna16_linear(before[:, :32], second, norm=norm, eps=EPS))


@pytest.mark.parametrize("shared", [False, True])
def test_experts_are_routed_and_summed(shared):
    x, hidden, ffn, experts = torch.randn(3, HIDDEN).half(), HIDDEN, 32, 6
    weights = [(packed(2 * ffn, hidden), packed(hidden, ffn)) for _ in range(experts + shared)]
    routed = RoutedExperts(
        torch.randn(experts, hidden).half(),
        torch.rand(experts),
        (torch.rand(hidden) + 0.5).half(),
        EPS,
        PackedExperts.stack([gate_up for gate_up, _ in weights]),
        PackedExperts.stack([down for _, down in weights]),
        top_k=2,
        scale=1.5,
        shared=shared,
    )
    o, after = packed(hidden, hidden), packed(24, hidden)
    entered, result, last = wna16_chain(x, [ChainLink(o, residual=x), routed, ChainLink(after)])
    assert torch.equal(entered, wna16_linear(x, o, residual=x))
    normed, chosen, factors = moe_route(
        entered, routed.router, routed.router_bias, norm=routed.norm, eps=EPS, top_k=2, scale=1.5, shared=shared
    )
    assert chosen.shape == (3, 2 + shared)
    expected = moe_mlp(normed, chosen, factors, routed.gate_up, routed.down, residual=entered, shared=shared)
    assert torch.equal(result, expected)
    assert torch.equal(last, wna16_linear(result, after))


def test_refusals():
    x = torch.randn(1, HIDDEN).half()
    links = layer(x)
    with pytest.raises(TensorError, match=r"x has shape .*32.*, the weight expects 64 features"):
        wna16_chain(x[:, :32], links)
    with pytest.raises(TensorError, match="residual has shape"):
        wna16_chain(x, [replace(links[0], residual=torch.randn(2, HIDDEN).half())])
    with pytest.raises(UsageError, match="activation is 'relu'"):
        wna16_chain(x, [replace(links[0], activation="relu")])
