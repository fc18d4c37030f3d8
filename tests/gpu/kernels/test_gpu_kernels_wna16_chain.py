"""`wna16_chain` as one launch: the bits of single launches, at every run, on shares of a GPU and in graphs; experts."""

from dataclasses import replace

import pytest
import torch
from tile_errors import assert_close_everywhere

from warpbus.cuda.green import GreenContext
from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import runs_on
from warpbus.kernels.ops import wna16_chain as wna16_chain_module
from warpbus.kernels.ops import workspace
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.packed_experts import PackedExperts
from warpbus.kernels.ops.wna16_chain import ChainLink, RoutedExperts, fits, wna16_chain
from warpbus.qtensor import QTensor, Scheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not runs_on(architecture(0), "sm_90"), reason="needs a GPU of sm_90 or later"
    ),
]

EPS = 1e-5
SHAPES = {  # hidden, inner, rows of qkv
    "chatglm2-6b": (4096, 13696, 4608),
    "llama-3-8b": (4096, 14336, 6144),
    "small": (128, 352, 192),
    "fewer tiles than blocks": (72, 160, 24),
    "narrow": (512, 64, 16),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def quantized(scheme, n, k, dtype):
    scheme = Scheme.parse(scheme)
    shape = n, scheme.groups(k)
    codes = torch.randint(0, scheme.max_code + 1, (n, k), dtype=torch.uint8, device="cuda")
    zeros = torch.randint(0, scheme.max_code + 1, shape, dtype=torch.uint8, device="cuda")
    scales = ((torch.rand(shape, device="cuda") + 0.5) / (scheme.max_code * k**0.5)).to(dtype)
    return QTensor.from_codes(scheme, codes, scales, None if scheme.symmetric else zeros)


def normal(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


def layer(shape, rows, scheme="w4a16-g128", dtype=torch.bfloat16, biased=True):
    """The input of o, and the links o, gate and up, down, and the next layer's qkv."""
    hidden, inner, qkv = SHAPES[shape]
    norms = [normal(hidden, dtype=dtype) for _ in range(2)]

    def weight(n, k):
        return pack(quantized(scheme, n, k, dtype), dtype)

    links = [
        ChainLink(weight(hidden, hidden), residual=normal(rows, hidden, dtype=dtype)),
        ChainLink(weight(2 * inner, hidden), norm=norms[0], eps=EPS, activation="swiglu"),
        ChainLink(weight(hidden, inner), residual=0),
        ChainLink(weight(qkv, hidden), normal(qkv, dtype=dtype) if biased else None, norm=norms[1], eps=EPS),
    ]
    return normal(rows, hidden, dtype=dtype), links


def one_by_one(x, elements):
    """As without a chain."""
    with torch.enable_grad():  # where a chain is never one launch
        assert not fits(x, elements)
    return wna16_chain_module._one_by_one(x, elements)


def check(x, elements):
    assert fits(x, elements)
    for found, expected in zip(wna16_chain(x, elements), one_by_one(x, elements), strict=True):
        assert torch.isfinite(found).all()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", ["chatglm2-6b", "llama-3-8b"])
def test_whole_layers(shape, rows):
    check(*layer(shape, rows))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "scheme", ["w2a16-g64", "w3a16-g64", "w4a16-g32", "w4a16-g128-asym", "w4a16", "w6a16-g32", "w8a16"]
)
@pytest.mark.parametrize("shape", ["small", "fewer tiles than blocks", "narrow"])
def test_schemes_and_small_shapes(shape, scheme, dtype):
    hidden, inner, _ = SHAPES[shape]
    group = Scheme.parse(scheme).group_size
    if group and (hidden % group or inner % group):
        pytest.skip("groups do not divide the columns")
    for rows in (1, 3):
        check(*layer(shape, rows, scheme, dtype, biased=rows == 1))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_links(count):
    x, links = layer("chatglm2-6b", 2)
    check(x, links[:count])


def test_close_to_float64():
    x, (o, gate_up, down, qkv) = layer("chatglm2-6b", 2)
    weight = quantized("w4a16-g128", 4096, 13696, torch.bfloat16)
    results = wna16_chain(x, [o, gate_up, replace(down, weight=pack(weight, torch.bfloat16)), qkv])
    expected = results[1].double() @ weight.dequantize(torch.float64).T + results[0].double()
    assert_close_everywhere(results[2], expected, torch.finfo(torch.bfloat16).eps)


def test_the_same_bits_at_every_run_and_zeros_left_behind():
    x, links = layer("chatglm2-6b", 1)
    counters = torch.zeros(64, dtype=torch.int32, device="cuda")
    with workspace.use_counters(counters):
        first = wna16_chain(x, links)
        for _ in range(200):
            again = wna16_chain(x, links)
        torch.cuda.synchronize()
    assert not counters.any()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_chains_one_after_another_wait_for_each_other():
    chains = [layer("chatglm2-6b", 1)[1] for _ in range(3)]
    x = normal(1, 4096, dtype=torch.bfloat16)
    found = expected = x
    for links in chains * 4:
        found = wna16_chain(found, [replace(links[0], residual=found), *links[1:3]])[-1]
        expected = one_by_one(expected, [replace(links[0], residual=expected), *links[1:3]])[-1]
        found, expected = (
            found / found.float().norm().to(found.dtype),
            expected / expected.float().norm().to(found.dtype),
        )
    assert torch.equal(found, expected)


def test_in_a_graph():
    x, links = layer("chatglm2-6b", 2)
    wna16_chain(x, links)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = wna16_chain(x, links)
    for _ in range(50):
        x.copy_(normal(*x.shape, dtype=x.dtype))
        graph.replay()
    for found, expected in zip(results, one_by_one(x, links), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_on_a_share_of_the_gpu(share):
    x, links = layer("chatglm2-6b", 1)
    expected = one_by_one(x, links)
    with GreenContext(x.device, share) as green:
        with green.running():
            results = wna16_chain(x, links)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_beside_other_kernels():
    """Blocks wait for each other while kernels of another stream take multiprocessors."""
    x, links = layer("chatglm2-6b", 1)
    expected = one_by_one(x, links)
    other, matrix = torch.cuda.Stream(), normal(4096, 4096, dtype=torch.bfloat16)
    for _ in range(20):
        with torch.cuda.stream(other):
            for _ in range(4):
                matrix @ matrix
        results = wna16_chain(x, links)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_what_does_not_fit_is_computed_one_by_one():
    x, links = layer("small", 40)
    assert not fits(x, links)
    for found, expected in zip(wna16_chain(x, links), one_by_one(x, links), strict=True):
        assert torch.equal(found, expected)


MIXTURES = {  # hidden, width of attention, inner features of an expert, experts, top k, shared
    "glm-4.7-flash": (2048, 5120, 1536, 64, 4, True),
    "glm-4.5-air": (4096, 12288, 1408, 128, 8, True),
    "qwen3-30b-a3b": (2048, 4096, 768, 128, 8, False),
    "small": (128, 192, 64, 7, 3, True),
    "more experts than warps": (64, 64, 32, 256, 2, False),
}


def mixture(shape, tokens, dtype=torch.bfloat16, scheme="w4a16-g32", **choice):
    """The input of o; o, the experts, and projections of which the second reads a part of the first one's."""
    hidden, width, ffn, experts, top_k, shared = MIXTURES[shape]

    def weight(n, k):
        return pack(quantized(scheme, n, k, dtype), dtype)

    def stacked(n, k):
        return PackedExperts.stack([weight(n, k) for _ in range(experts + shared)])

    routed = RoutedExperts(
        normal(experts, hidden, dtype=dtype) / hidden**0.5,
        torch.rand(experts, device="cuda"),
        normal(hidden, dtype=dtype),
        EPS,
        stacked(2 * ffn, hidden),
        stacked(hidden, ffn),
        top_k=top_k,
        shared=shared,
        **{"scale": 1.8, **choice},
    )
    norms = normal(hidden, dtype=dtype), normal(64, dtype=dtype)
    links = [ChainLink(weight(320, hidden), norm=norms[0], eps=EPS), ChainLink(weight(256, 64), norm=norms[1], eps=EPS)]
    o = ChainLink(weight(hidden, width), residual=normal(tokens, hidden, dtype=dtype))
    return normal(tokens, width, dtype=dtype), [o, routed, *links]


def check_experts(x, elements):
    assert fits(x, elements)
    found, expected = wna16_chain(x, elements), one_by_one(x, elements)
    assert torch.equal(found[0], expected[0])
    error = (found[1].double() - expected[1].double()).norm() / expected[1].double().norm()
    assert error.item() <= torch.finfo(x.dtype).eps / 2
    after = one_by_one(found[1], elements[2:])
    assert all(torch.equal(a, b) for a, b in zip(found[2:], after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("shape", MIXTURES)
def test_experts(shape, tokens, dtype):
    check_experts(*mixture(shape, tokens, dtype))


@pytest.mark.parametrize(
    "choice",
    [{"scoring": "softmax"}, {"normalized": False}, {"groups": 8, "top_groups": 3}],
    ids=lambda choice: next(iter(choice)),
)
def test_how_experts_are_chosen(choice):
    check_experts(*mixture("more experts than warps", 2, **choice))


@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w3a16-g32", "w8a16-g32"])
def test_experts_of_other_schemes(scheme):
    check_experts(*mixture("small", 2, scheme=scheme))


def test_experts_have_the_same_bits_at_every_run_and_leave_zeros():
    x, elements = mixture("qwen3-30b-a3b", 1)
    counters = torch.zeros(64, dtype=torch.int32, device="cuda")
    with workspace.use_counters(counters):
        first = wna16_chain(x, elements)
        for _ in range(200):
            again = wna16_chain(x, elements)
        torch.cuda.synchronize()
    assert not counters.any()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_experts_in_a_graph():
    x, elements = mixture("glm-4.7-flash", 1)
    wna16_chain(x, elements)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = wna16_chain(x, elements)
    for _ in range(50):
        x.copy_(normal(*x.shape, dtype=x.dtype))
        graph.replay()
    for found, expected in zip(results, wna16_chain(x, elements), strict=True):
        assert torch.equal(found, expected)
