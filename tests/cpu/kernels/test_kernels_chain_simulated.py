"""`wna16/chain.cu` and `step/head_norm.cu` on the CPU, thread by thread: the bits of single launches, and experts."""

from dataclasses import replace

import pytest
import torch
from simulated import simulated

from warpbus.kernels.ops import wna16_chain
from warpbus.kernels.ops.head_norm import head_norm
from warpbus.kernels.ops.norm import rms_norm
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.packed_experts import PackedExperts
from warpbus.kernels.ops.wna16_chain import ChainLink, RoutedExperts
from warpbus.qtensor import QTensor, Scheme

EPS = 1e-5


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def normal(*shape, dtype=torch.float16):
    return torch.randn(shape).to(dtype)


def packed(scheme, n, k, dtype=torch.float16):
    scheme = Scheme.parse(scheme)
    shape = n, scheme.groups(k)
    codes = torch.randint(0, scheme.max_code + 1, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, scheme.max_code + 1, shape, dtype=torch.uint8)
    scales = ((torch.rand(shape) + 0.5) / (scheme.max_code * k**0.5)).to(dtype)
    return pack(QTensor.from_codes(scheme, codes, scales, None if scheme.symmetric else zeros), dtype)


def by_single_launches(x, links):
    """Each link by the kernel of one product."""
    with simulated():
        return wna16_chain._one_by_one(x, links)


def in_one_launch(x, elements, multiprocessors, **how):
    with simulated(multiprocessors=multiprocessors, **how) as simulation:
        results = wna16_chain._launch(x, elements)
    assert simulation.launched == ["wna16_chain"]
    return results


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("scheme", "rows", "multiprocessors"),
    [("w4a16-g32", 1, 5), ("w4a16", 4, 3), ("w3a16-g32-asym", 2, 13), ("w8a16-g32", 3, 1), ("w2a16-g32", 1, 16)],
)
def test_links_have_the_bits_of_single_launches(scheme, rows, multiprocessors, dtype):
    hidden, inner, qkv = 96, 160, 64
    links = [
        ChainLink(packed(scheme, hidden, 64, dtype), residual=normal(rows, hidden, dtype=dtype)),
        ChainLink(
            packed(scheme, 2 * inner, hidden, dtype), norm=normal(hidden, dtype=dtype), eps=EPS, activation="swiglu"
        ),
        ChainLink(packed(scheme, hidden, inner, dtype), residual=0),
        ChainLink(
            packed(scheme, qkv, hidden, dtype), normal(qkv, dtype=dtype), norm=normal(hidden, dtype=dtype), eps=EPS
        ),
    ]
    x = normal(rows, 64, dtype=dtype)
    found = in_one_launch(x, links, multiprocessors)
    for result, expected in zip(found, by_single_launches(x, links), strict=True):
        assert torch.isfinite(result).all()
        assert torch.equal(result, expected)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("tokens", "multiprocessors", "scheme", "choice"),
    [
        (1, 5, "w4a16-g32", {}),
        (2, 16, "w4a16-g32-asym", {"scoring": "softmax", "normalized": False}),
        (2, 2, "w8a16-g32", {"groups": 4, "top_groups": 2}),
    ],
)
def test_experts(tokens, multiprocessors, scheme, choice, shared):
    hidden, width, ffn, experts = 64, 96, 32, 8

    def stacked(n, k):
        return PackedExperts.stack([packed(scheme, n, k) for _ in range(experts + shared)])

    routed = RoutedExperts(
        normal(experts, hidden) / hidden**0.5,
        torch.rand(experts),
        normal(hidden),
        EPS,
        stacked(2 * ffn, hidden),
        stacked(hidden, ffn),
        top_k=3,
        shared=shared,
        **choice,
    )
    elements = [
        ChainLink(packed(scheme, hidden, width), residual=normal(tokens, hidden)),
        routed,
        ChainLink(packed(scheme, 64, hidden), norm=normal(hidden), eps=EPS),
        ChainLink(packed(scheme, 48, 32), norm=normal(32), eps=EPS),
    ]
    x = normal(tokens, width)
    found, expected = in_one_launch(x, elements, multiprocessors), wna16_chain._one_by_one(x, elements)
    assert torch.equal(found[0], by_single_launches(x, elements[:1])[0])
    # Of the experts alone, which the residual would hide.
    of_experts, others = (each[1].double() - each[0].double() for each in (found, expected))
    assert ((of_experts - others).norm() / others.norm()).item() < 0.02
    for result, other in zip(found[2:], expected[2:], strict=True):
        assert ((result.double() - other.double()).norm() / other.double().norm()).item() < 5e-3


def test_one_link_and_blocks_without_work():
    x, weight = normal(2, 64), packed("w4a16-g32", 32, 64)
    (found,) = in_one_launch(x, [ChainLink(weight)], 4)
    assert torch.equal(found, by_single_launches(x, [ChainLink(weight)])[0])


def test_counters_are_zero_again(monkeypatch):
    x, link = normal(1, 64), ChainLink(packed("w4a16-g32", 64, 64), residual=normal(1, 64))
    counters = torch.zeros(wna16_chain.MOST_LINKS, dtype=torch.int32)
    with simulated(multiprocessors=4):
        monkeypatch.setattr(wna16_chain, "counters", lambda device, count: counters)
        first = wna16_chain._launch(x, [link, replace(link, residual=0), link])
        assert not counters.any()
        again = wna16_chain._launch(x, [link, replace(link, residual=0), link])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_head_norm(head_dim):
    qkv, q_weight, k_weight = normal(3, 7 * head_dim), normal(head_dim), normal(head_dim)
    q, k, v = qkv.clone().unflatten(-1, (7, head_dim)).split([3, 2, 2], dim=1)
    with simulated() as simulation:
        head_norm(qkv, q_weight, k_weight, 3, EPS)
        expected = [rms_norm(part.contiguous(), weight, EPS) for part, weight in ((q, q_weight), (k, k_weight))]
    assert simulation.launched == ["head_norm", "rms_norm", "rms_norm"]
    assert torch.equal(qkv, torch.cat([*expected, v], dim=1).flatten(1))
