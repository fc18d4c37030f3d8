"""`wna16_linear`, its kernels for few tokens and for Hopper against float64: odd sizes, every combination."""

import itertools
from dataclasses import replace

import pytest
import torch
from tile_errors import assert_close_everywhere
from torch.nn import functional as F

from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import runs_on
from warpbus.kernels.ops import wna16_decode, wna16_sm90, workspace
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.wna16 import wna16_linear
from warpbus.qtensor import QTensor, Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ARCH = architecture(0) if torch.cuda.is_available() else "sm_80"
needs_decode = pytest.mark.skipif(not runs_on(ARCH, "sm_90"), reason="needs sm_90 or later")
needs_hopper = pytest.mark.skipif(ARCH != "sm_90a", reason="needs sm_90a")

DTYPES = [torch.float16, torch.bfloat16]
SCHEMES = [
    f"w{bits}a16{group}{asym}"
    for bits, group, asym in itertools.product((2, 3, 4, 8), ("", "-g32", "-g64", "-g128"), ("", "-asym"))
]
EPS = 1e-5
BY_PLAN = pytest.mark.parametrize(
    "plan",
    [wna16_sm90.Wna16Sm90Plan(tiling, splits) for tiling in wna16_sm90.TILINGS for splits in (1, 2, 5)],
    ids=lambda plan: f"{plan.tiling.tokens}x{plan.tiling.rows}by{plan.splits}",
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def quantized(scheme, n, k, dtype):
    """Random, with scales that dtype can hold, and packed for it."""
    scheme = Scheme.parse(scheme)
    shape = n, scheme.groups(k)
    codes = torch.randint(0, scheme.max_code + 1, (n, k), dtype=torch.uint8, device="cuda")
    zeros = torch.randint(0, scheme.max_code + 1, shape, dtype=torch.uint8, device="cuda")
    scales = ((torch.rand(shape, device="cuda") + 0.5) / (scheme.max_code * k**0.5)).to(dtype)
    weight = QTensor.from_codes(scheme, codes, scales, None if scheme.symmetric else zeros)
    return weight, pack(weight, dtype)


def normal(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


def poisoned(*shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def exact(x, weight, bias=None, norm=None, residual=None, gated=False):
    y = x.double()
    if norm is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * norm.double()
    y = y @ weight.dequantize(torch.float64).T
    if bias is not None:
        y = y + bias.double()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual.double()


def check(out, expected):
    """Results, what is normed, and weights are rounded once or twice each: errors that mostly cancel."""
    error = (out.double() - expected).norm() / expected.norm()
    assert torch.isfinite(out).all()
    assert error.item() <= torch.finfo(out.dtype).eps
    assert_close_everywhere(out, expected, torch.finfo(out.dtype).eps)


def decode(x, packed, bias=None, norm=None, residual=None, gated=False):
    n = packed.shape[0]
    out = poisoned(x.shape[0], n // 2 if gated else n, dtype=x.dtype)
    wna16_decode.multiply(x, packed, bias, norm, EPS, residual, gated, out)
    return out


def wgmma(x, packed, bias=None, plan=None, gated=False):
    if plan is not None:
        plan = replace(plan, splits=min(plan.splits, -(-x.shape[1] // 64)))
    n = packed.shape[0]
    out = poisoned(x.shape[0], n // 2 if gated else n, dtype=x.dtype)
    wna16_sm90.multiply(x, packed, bias, out, gated=gated, plan=plan)
    return out


@needs_hopper
@pytest.mark.parametrize("exponent", [-60, -30, 15, 25])
@pytest.mark.parametrize("scheme", ["w2a16", "w3a16-g64", "w4a16-g32", "w8a16-g128", "w4a16-g64-asym"])
def test_scales_of_any_size(scheme, exponent):
    """Codes are subnormal bfloat16 numbers, which factors of 2^101 times the scale bring back into the range."""
    weight, packed = quantized(scheme, 200, 256, torch.bfloat16)
    packed = replace(packed, scales=packed.scales * 2.0**exponent)
    x, bias = normal(70, 256, dtype=torch.bfloat16), normal(200, dtype=torch.bfloat16)
    expected = exact(x, weight) * 2.0**exponent
    check(wgmma(x, packed), expected)
    check(wgmma(x, packed, bias * 2.0**exponent), expected + bias.double() * 2.0**exponent)


@needs_decode
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_few_tokens(scheme, dtype):
    size = Scheme.parse(scheme).group_size or 40
    for n, groups in [(64, 1), (100, 3), (1000, 32), (17, 27)]:
        weight, packed = quantized(scheme, n, groups * size, dtype)
        for m in (1, 5, 8, 9, 16):
            x = normal(m, groups * size, dtype=dtype)
            check(decode(x, packed), exact(x, weight))


@needs_decode
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["w4a16-g128", "w4a16-g32-asym", "w8a16-asym", "w2a16-g64", "w3a16-asym"])
def test_few_tokens_with_all_that_surrounds_the_product(scheme, dtype):
    n, k = 96, 1152
    weight, packed = quantized(scheme, n, k, dtype)
    for m in range(1, 17):
        x, bias = normal(m, k, dtype=dtype), normal(n, dtype=dtype)
        norm = (torch.rand(k, device="cuda") + 0.5).to(dtype)
        for with_bias, with_norm, with_residual, gated in itertools.product((False, True), repeat=4):
            residual = normal(m, n // 2 if gated else n, dtype=dtype) if with_residual else None
            given = bias if with_bias else None, norm if with_norm else None, residual, gated
            check(decode(x, packed, *given), exact(x, weight, *given))


@needs_decode
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k", "scheme"),
    [
        (4096, 6848, "w4a16-g64"),
        (4096, 3424, "w4a16-g32"),
        (27392, 4096, "w4a16-g128"),
        (4096, 13696, "w4a16-g128"),
        (4608, 13696, "w4a16-g128"),
        (27392, 4096, "w2a16-g64"),
        (4096, 13696, "w3a16-g128"),
        (4096, 6848, "w2a16-g64-asym"),
        (4096, 3424, "w3a16-g32-asym"),
        (68, 1000, "w8a16-asym"),
        (100, 200, "w4a16"),
        (33, 100, "w8a16"),
        (15, 63, "w4a16-asym"),
        (48, 96, "w3a16-g32-asym"),
        (130, 65, "w2a16"),
        (16384, 72, "w4a16"),
    ],
)
def test_few_tokens_at_sizes_of_models_and_at_odd_ones(n, k, scheme, dtype):
    weight, packed = quantized(scheme, n, k, dtype)
    bias = normal(n, dtype=dtype)
    for m in (1, 7, 16):
        x = normal(m, k, dtype=dtype)
        check(decode(x, packed, bias), exact(x, weight, bias))
        norm = (torch.rand(k, device="cuda") + 0.5).to(dtype)
        if wna16_decode.norms(x, packed):
            check(decode(x, packed, None, norm), exact(x, weight, None, norm))
        if n % 32 == 0:
            check(decode(x, packed, bias, gated=True), exact(x, weight, bias, gated=True))


@needs_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
@BY_PLAN
def test_many_tokens(plan, scheme, dtype):
    size = Scheme.parse(scheme).group_size or 40
    for m, n, groups in [(100, 100, 3), (300, 1032, 8), (17, 16, 1), (1, 257, 27)]:
        weight, packed = quantized(scheme, n, groups * size, dtype)
        x = normal(m, groups * size, dtype=dtype)
        bias = normal(n, dtype=dtype) if groups % 2 else None
        check(wgmma(x, packed, bias, plan), exact(x, weight, bias))


@needs_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k", "scheme"),
    [
        (4608, 4096, "w4a16-g128"),
        (4096, 13696, "w8a16-g128"),
        (4096, 6848, "w4a16-g64"),
        (1000, 3424, "w4a16-g32-asym"),
        (4096, 6848, "w2a16-g64"),
        (1000, 3424, "w3a16-g32-asym"),
        (27392, 4096, "w4a16-g128"),
        (100, 200, "w4a16"),
        (68, 1000, "w8a16-asym"),
        (33, 100, "w3a16"),
    ],
)
def test_many_tokens_at_sizes_of_models_and_at_odd_ones(n, k, scheme, dtype):
    weight, packed = quantized(scheme, n, k, dtype)
    whole, bias = normal(1000, k, dtype=dtype), normal(n, dtype=dtype)
    expected = exact(whole, weight, bias)
    for m in (1, 16, 17, 33, 64, 65, 128, 200, 256, 300, 1000):
        check(wgmma(whole[:m], packed, bias), expected[:m])


@needs_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["w4a16-g128", "w4a16-g32-asym", "w8a16-g32", "w8a16-asym", "w3a16-g128-asym"])
@BY_PLAN
def test_many_tokens_with_a_gate(plan, scheme, dtype):
    size = Scheme.parse(scheme).group_size or 40
    for m, half, groups in [(100, 112, 3), (300, 1040, 8), (17, 16, 1), (1, 272, 27)]:
        weight, packed = quantized(scheme, 2 * half, groups * size, dtype)
        x = normal(m, groups * size, dtype=dtype)
        bias = normal(2 * half, dtype=dtype) if groups % 2 else None
        check(wgmma(x, packed, bias, plan, gated=True), exact(x, weight, bias, gated=True))


@needs_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("half", "k", "scheme"),
    [
        (13696, 4096, "w4a16-g128"),
        (6848, 4096, "w4a16-g64"),
        (3424, 4096, "w8a16-g128"),
        (14336, 4096, "w4a16-g128-asym"),
        (1536, 2048, "w4a16-g32"),
        (16, 200, "w4a16"),
    ],
)
def test_a_gate_at_sizes_of_models(half, k, scheme, dtype):
    weight, packed = quantized(scheme, 2 * half, k, dtype)
    whole, bias = normal(1000, k, dtype=dtype), normal(2 * half, dtype=dtype)
    expected = exact(whole, weight, bias, gated=True)
    for m in (17, 33, 64, 65, 128, 200, 256, 300, 1000):
        out = wgmma(whole[:m], packed, bias, gated=True)
        check(out, expected[:m])
        assert torch.equal(out, wgmma(whole[:m], packed, bias, gated=True))


@needs_hopper
@BY_PLAN
def test_tiles_that_are_shared_and_whole_waves(plan):
    """From tiles that many blocks share to several waves, with runs that end anywhere."""
    for tiles, k in [(1, 8192), (3, 1088), (50, 704), (131, 192), (133, 192), (240, 320), (390, 128), (400, 64)]:
        n = tiles * plan.tiling.rows - 24
        weight, packed = quantized("w4a16-g32", n, k, torch.float16)
        x = normal(plan.tiling.tokens, k, dtype=torch.float16)
        out = wgmma(x, packed, None, plan)
        check(out, exact(x, weight))
        assert torch.equal(out, wgmma(x, packed, None, plan))


@needs_hopper
def test_graphs_keep_what_their_kernels_count_with():
    """Of so many that the next product has a new reserve set aside, and others take the memory that is free."""
    _, packed = quantized("w4a16-g128", 4096, 4096, torch.float16)
    x, plan = normal(40, 4096, dtype=torch.float16), wna16_sm90.Wna16Sm90Plan(wna16_sm90.TILINGS[2])
    expected = wgmma(x, packed, None, plan)
    out = torch.empty_like(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(600):
            wna16_sm90.multiply(x, packed, None, out, plan=plan)
    wgmma(x, packed, None, plan)
    torch.cuda.empty_cache()
    others = [torch.full((1 << 18,), 7, dtype=torch.int32, device="cuda") for _ in range(8)]
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)
    assert all((other == 7).all() for other in others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(96, 256), (72, 192), (64, 1000), (130, 100)])
def test_the_operator_in_every_combination(n, k, dtype):
    """Whatever kernel it takes; swiglu of halves that are no whole tiles, and norms of rows that are not aligned."""
    weight, packed = quantized("w4a16-asym", n, k, dtype)
    bias, norm = normal(n, dtype=dtype), (torch.rand(k, device="cuda") + 0.5).to(dtype)
    for m in (1, 6, 16, 17, 150):
        x = normal(m, k, dtype=dtype)
        for with_bias, with_norm, with_residual, gated in itertools.product((False, True), repeat=4):
            residual = normal(m, n // 2 if gated else n, dtype=dtype) if with_residual else None
            given = bias if with_bias else None, norm if with_norm else None, residual, gated
            before = None if residual is None else residual.clone()
            poisoned(m, n, dtype=dtype)  # what the operator allocates next is likely to be this
            activation = "swiglu" if gated else "none"
            out = wna16_linear(x, packed, given[0], norm=given[1], eps=EPS, residual=residual, activation=activation)
            expected = exact(x, weight, *given)
            error = (out.double() - expected).norm() / expected.norm()
            assert error <= 2 * torch.finfo(dtype).eps  # of several kernels, each rounds its result
            assert before is None or torch.equal(residual, before)


@pytest.mark.parametrize(("k", "scheme"), [(256, "w4a16-g64"), (200, "w4a16"), (100, "w8a16")])
def test_any_axes_strides_and_beginnings(k, scheme):
    n = 64
    weight, packed = quantized(scheme, n, k, torch.float16)

    def shifted(*shape):
        """Contiguous, but off 16 bytes."""
        count = torch.Size(shape).numel()
        return normal(count + 1, dtype=torch.float16)[1:].view(shape)

    for m in (1, 4, 40):
        rows = [
            normal(m, 2 * k, dtype=torch.float16)[:, :k],
            normal(m, 2 * k, dtype=torch.float16)[:, ::2],
            normal(k, m, dtype=torch.float16).T,
            normal(1, k, dtype=torch.float16).expand(m, k),
            shifted(m, k),
        ]
        for x in rows:
            bias, norm, residual = shifted(n), shifted(k), shifted(m, n)
            check(wna16_linear(x, packed, bias), exact(x, weight, bias))
            out = wna16_linear(x, packed, bias, norm=norm, eps=EPS, residual=residual)
            check(out, exact(x, weight, bias, norm, residual))
    x = normal(2, 3, 1, k, dtype=torch.float16)
    assert torch.equal(wna16_linear(x, packed).view(6, n), wna16_linear(x.view(6, k), packed))
    assert wna16_linear(x[:, :0], packed).shape == (2, 0, 1, n)
    assert torch.equal(wna16_linear(x[0, 0, 0], packed), wna16_linear(x[0, 0], packed)[0])


@pytest.mark.parametrize("m", [1, 8, 16, 64, 300])
@pytest.mark.parametrize(("n", "k"), [(4608, 4096), (1000, 13696), (50, 200)])
def test_the_same_bits_at_every_run(n, k, m):
    weight, packed = quantized("w4a16" if k == 200 else "w4a16-g128", n, k, torch.float16)
    x, bias = normal(m, k, dtype=torch.float16), normal(n, dtype=torch.float16)
    first = wna16_linear(x, packed, bias)
    check(first, exact(x, weight, bias))
    for _ in range(5):
        assert torch.equal(wna16_linear(x, packed, bias), first)


@needs_decode
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k", "scheme"),
    [
        (4096, 13696, "w4a16-g128"),
        (96, 1024, "w8a16"),
        (640, 4096, "w4a16-g32"),
        (640, 4096, "w3a16-g128"),
        (96, 3424, "w2a16-g32-asym"),
    ],
)
def test_a_row_alone_has_the_bits_that_it_has_among_others(n, k, scheme, dtype):
    _, packed = quantized(scheme, n, k, dtype)
    x, norm = normal(16, k, dtype=dtype), (torch.rand(k, device="cuda") + 0.5).to(dtype)
    for of_kernel in ((8, 5, 2, 1), (16, 11, 9)):
        whole = decode(x[: of_kernel[0]], packed)
        for m in of_kernel[1:]:
            for first in (0, of_kernel[0] - m):
                assert torch.equal(decode(x[first : first + m], packed), whole[first : first + m])
    if wna16_decode.norms(x[:8], packed):
        whole = decode(x[:8], packed, None, norm)
        for row in range(8):
            assert torch.equal(decode(x[row : row + 1], packed, None, norm), whole[row : row + 1])


@needs_hopper
@pytest.mark.parametrize("m", [17, 40, 100, 200])
def test_a_row_has_the_bits_that_it_has_in_a_full_tile(m):
    _, packed = quantized("w4a16-g128", 4096, 4096, torch.float16)
    x = normal(max(32, 1 << (m - 1).bit_length()), 4096, dtype=torch.float16)
    assert torch.equal(wgmma(x[:m], packed), wgmma(x, packed)[:m])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("m", [4, 16, 200])
def test_what_is_no_number_stays_in_its_row(m, bad):
    _, packed = quantized("w4a16-g32", 200, 96, torch.float16)
    x, norm = normal(m, 96, dtype=torch.float16), (torch.rand(96, device="cuda") + 0.5).half()
    spoiled, row = x.clone(), m - 2
    spoiled[row, 7] = bad
    for given in ({}, {"norm": norm, "eps": EPS}):
        out, clean = (wna16_linear(source, packed, **given) for source in (spoiled, x))
        assert not torch.isfinite(out[row]).all()
        assert bad == bad or torch.isnan(out[row]).all()
        rest = [at for at in range(m) if at != row]
        assert torch.equal(out[rest], clean[rest])


def all_zero():
    torch.cuda.synchronize()
    return not any(held.any() for held in workspace._of_stream.values())


@pytest.mark.parametrize("m", [1, 16, 50, 300])
def test_on_two_streams_at_once(m):
    weights = [quantized("w4a16-g64", n, 2048, torch.float16) for n in (1000, 4096)]
    x = normal(m, 2048, dtype=torch.float16)
    expected = [exact(x, weight) for weight, _ in weights]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in weights]
    found = [[], []]
    for _ in range(20):
        for stream, (_, packed), outs in zip(streams, weights, found, strict=True):
            with torch.cuda.stream(stream):
                outs.append(wna16_linear(x, packed))
    torch.cuda.synchronize()
    for outs, of in zip(found, expected, strict=True):
        check(outs[0], of)
        assert all(torch.equal(out, outs[0]) for out in outs)
    assert all_zero()


def captured(x, packed, out, norm=None):
    """A graph of a few products, each written over the last."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            out.copy_(wna16_linear(x, packed, norm=norm, eps=EPS))
    return graph


@pytest.mark.parametrize("m", [1, 9, 16, 50, 300])
def test_in_a_graph_that_is_replayed(m):
    weight, packed = quantized("w4a16-g64", 1000, 2048, torch.float16)
    x, norm = normal(m, 2048, dtype=torch.float16), (torch.rand(2048, device="cuda") + 0.5).half()
    out = poisoned(m, 1000, dtype=torch.float16)
    wna16_linear(x, packed, norm=norm, eps=EPS)
    reserve = workspace._reserves.get(x.device)
    graph = captured(x, packed, out, norm)
    for _ in range(4):
        x.copy_(torch.randn_like(x))
        out.fill_(float("nan"))
        graph.replay()
        check(out, exact(x, weight, None, norm))
        assert torch.equal(out, wna16_linear(x, packed, norm=norm, eps=EPS))
    assert all_zero()
    assert reserve is None or not reserve.any()


@pytest.mark.parametrize("reserved", [True, False])
@pytest.mark.parametrize("m", [16, 50, 300])
def test_two_graphs_and_products_between_them(monkeypatch, m, reserved):
    """Kernels of both may run at one time: they have partial sums and counters of their own."""
    pairs = [quantized("w4a16-g64", n, 4096, torch.float16) for n in (520, 4608)]
    x = normal(m, 4096, dtype=torch.float16)
    expected = [wna16_linear(x, packed) for _, packed in pairs]
    for (weight, _), out in zip(pairs, expected, strict=True):
        check(out, exact(x, weight))
    if not reserved:
        monkeypatch.setattr(workspace, "_reserves", {})
    outs = [poisoned(*out.shape, dtype=out.dtype) for out in expected]
    graphs = [captured(x, packed, out) for (_, packed), out in zip(pairs, outs, strict=True)]
    streams = [torch.cuda.Stream() for _ in pairs]
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, graph, out in zip(streams, graphs, outs, strict=True):
            with torch.cuda.stream(stream):
                out.fill_(float("nan"))
                graph.replay()
        between = wna16_linear(x, pairs[1][1])
        torch.cuda.synchronize()
        assert torch.equal(between, expected[1])
        assert all(torch.equal(*both) for both in zip(outs, expected, strict=True))
    assert all_zero()


@pytest.mark.parametrize("m", [1, 4, 16, 20, 300])
def test_one_layer_after_another_without_a_pause(m):
    """On sm_90 and later each kernel starts before the one whose result it reads has ended."""
    width, inner = 512, 1024
    up, packed_up = quantized("w4a16-g128", 2 * inner, width, torch.float16)
    down, packed_down = quantized("w4a16-g32-asym", width, inner, torch.float16)
    norm = (torch.rand(width, device="cuda") + 0.5).half()
    for _ in range(3):
        states, inside = [normal(m, width, dtype=torch.float16)], []
        for _ in range(12):
            inside.append(wna16_linear(states[-1], packed_up, norm=norm, eps=EPS, activation="swiglu"))
            states.append(wna16_linear(inside[-1], packed_down, residual=states[-1]))
        for before, hidden, after in zip(states, inside, states[1:], strict=False):
            gated = exact(before, up, None, norm, None, True)
            assert (hidden - gated).norm() / gated.norm() <= 2 * torch.finfo(torch.float16).eps
            check(after, exact(hidden, down, None, None, before))
