"""`wna16_chain` on the CPU: as `wna16_linear` one after another; what is refused."""

from dataclasses import replace

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.wna16 import wna16_linear
from warpbus.kernels.ops.wna16_chain import Link, fits, wna16_chain
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
        Link(packed(HIDDEN, HIDDEN, scheme, dtype), residual=x),
        Link(packed(2 * INNER, HIDDEN, scheme, dtype), norm=norm, eps=EPS, activation="swiglu"),
        Link(packed(HIDDEN, INNER, scheme, dtype), residual=0),
        Link(packed(80, HIDDEN, scheme, dtype), torch.randn(80).to(dtype), norm=norm, eps=EPS),
    ]


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a16-asym"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_links_are_linear_layers_one_after_another(dtype, scheme):
    x, inner = torch.randn(2, 1, HIDDEN).to(dtype), torch.randn(2, 1, HIDDEN).to(dtype)
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
    (result,) = wna16_chain(x, [Link(weight)])
    assert torch.equal(result, wna16_linear(x, weight))


def test_the_cpu_has_no_single_launch():
    x = torch.randn(1, HIDDEN).half()
    assert not fits(x, [link.weight for link in layer(x)])


def test_the_operator_is_one_of_pytorch():
    x, links = torch.randn(2, HIDDEN).half(), layer(torch.randn(2, HIDDEN).half())
    arguments = (
        x,
        [link.weight.codes for link in links],
        [link.weight.scales for link in links],
        [link.weight.zeros for link in links],
        [link.weight.shape[0] for link in links],
        *(4, 32),
        [link.bias for link in links],
        [link.norm for link in links],
        [link.eps for link in links],
        [torch.randn(2, HIDDEN).half(), None, None, None],
        [-1, -1, 0, -1],
        [False, True, False, False],
    )
    opcheck(torch.ops.warpbus.wna16_chain.default, arguments)


def test_refusals():
    x = torch.randn(1, HIDDEN).half()
    links = layer(x)
    with pytest.raises(TensorError, match="expected 1 to 4 weights of one scheme, got none"):
        wna16_chain(x, [])
    with pytest.raises(TensorError, match="of one scheme, got w4a16-g32, w8a16"):
        wna16_chain(x, [links[0], Link(packed(HIDDEN, HIDDEN, "w8a16"))])
    with pytest.raises(TensorError, match="the residual of link 2 is link 2: give an earlier one"):
        wna16_chain(x, [*links[:2], replace(links[2], residual=2)])
    with pytest.raises(TensorError, match="x has shape .*96.*, the weight expects 64 features"):
        wna16_chain(x, [*links[:2], links[3]])
    with pytest.raises(TensorError, match="residual has shape"):
        wna16_chain(x, [replace(links[0], residual=torch.randn(2, HIDDEN).half())])
    with pytest.raises(TensorError, match="float16"):
        wna16_chain(x.float(), links)
    with pytest.raises(UsageError, match="activation is 'relu'"):
        wna16_chain(x, [replace(links[0], activation="relu")])
