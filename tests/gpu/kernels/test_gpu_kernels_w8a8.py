"""w8a8 on a GPU: codes against the reference, bit by bit, products of codes and layers against float64."""

import pytest
import torch
from tile_errors import assert_close_everywhere

from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import runs_on
from warpbus.errors import DeviceError
from warpbus.kernels.ops import w8a8
from warpbus.kernels.ops.gemm_sm90 import addressable
from warpbus.kernels.ops.w8a8 import quantize_rows, quantize_tokens, scaled_gemm, w8a8_linear
from warpbus.kernels.reference import w8a8 as reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ARCH = architecture(0) if torch.cuda.is_available() else "sm_80"
HAS_E4M3 = runs_on(ARCH, "sm_89")
HALVES = [torch.float16, torch.bfloat16]
CODES = [
    torch.int8,
    pytest.param(torch.float8_e4m3fn, marks=pytest.mark.skipif(not HAS_E4M3, reason="needs sm_89")),
]
ODD = [
    (1, 1, 1),
    (1, 8, 16),
    (7, 17, 63),
    (64, 64, 128),
    (65, 200, 144),
    (129, 257, 255),
    (300, 392, 1040),
    (515, 1032, 1000),
    (1000, 777, 129),
]
GLM = [(4608, 4096), (4096, 4096), (27392, 4096), (4096, 13696), (4096, 3424)]


@pytest.fixture(autouse=True)
def _seed(seed):
    """Each test has random numbers of its own."""


def random_codes(rows, columns, dtype):
    if dtype == torch.int8:
        return torch.randint(-127, 128, (rows, columns), device="cuda", dtype=torch.int8)
    return (torch.randn(rows, columns, device="cuda") * 100).clamp(-448, 448).to(dtype)


def problem(m, n, k, dtype, out_dtype):
    """Operands whose product is about 1 in size, and the product in float64."""
    a, b = random_codes(m, k, dtype), random_codes(n, k, dtype)
    a_scales, b_scales = (torch.rand(rows, device="cuda") / (75 * k**0.25) for rows in (m, n))
    bias = torch.randn(n, device="cuda", dtype=out_dtype)
    product = a.float().double() @ b.float().double().T
    expected = product * a_scales.double()[:, None] * b_scales.double() + bias.double()
    return (a, a_scales, b, b_scales, bias), expected


def error(found, expected):
    assert found.isfinite().all()
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def check(found, expected, codes):
    # Half of eps is rounding the result; e4m3 sums lose as much again on the way, at most.
    tolerance = torch.finfo(found.dtype).eps * (0.51 if codes == torch.int8 else 1.0)
    assert error(found, expected) < tolerance
    assert_close_everywhere(found, expected, tolerance)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", HALVES)
def test_codes_are_those_of_the_reference(dtype, codes):
    for rows, k in [(1, 1), (3, 7), (5, 64), (17, 4096), (4, 13696), (2, 16384), (3, 16391), (2, 40000), (700, 136)]:
        x = torch.randn(rows, k, device="cuda", dtype=dtype) * 10 ** torch.empty(rows, 1, device="cuda").uniform_(-3, 2)
        x = x.to(dtype)
        x[rows // 2] = 0
        found, scales = quantize_tokens(x, codes)
        expected, of_rows = reference.quantize(x.cpu(), codes)
        assert torch.equal(scales.cpu(), of_rows)
        assert torch.equal(found.cpu().view(torch.int8), expected.view(torch.int8))
        assert scales[rows // 2] == 0


@pytest.mark.parametrize("codes", CODES)
def test_codes_of_views_and_of_rows_that_are_not_numbers(codes):
    whole = torch.randn(9, 100, device="cuda", dtype=torch.float16)
    flat = whole.reshape(-1)
    views = (
        whole[:, 3:80],
        flat[1:801].reshape(8, 100),
        flat[1:801].reshape(10, 80),
        flat[:77],
        whole.reshape(3, 3, 100),
    )
    for x in views:
        found, scales = quantize_tokens(x, codes)
        expected, of_rows = reference.quantize(x.cpu(), codes)
        assert torch.equal(found.cpu().view(torch.int8), expected.view(torch.int8))
        assert torch.equal(scales.cpu(), of_rows)
    whole[1, 5], whole[2, 99] = float("nan"), float("inf")
    scales = quantize_tokens(whole, codes)[1]
    assert scales[1].isnan()
    assert scales[2].isinf()
    assert scales[3:].isfinite().all()


@pytest.mark.parametrize("part", [1 << 16, 256])
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", HALVES)
def test_every_tiling(dtype, codes, part):
    """Of both kernels, with all of k in a block and with k split."""
    launches = [(w8a8.ampere, tiling) for tiling in w8a8.AMPERE]
    if ARCH == "sm_90a":
        launches += [(w8a8.hopper, tiling) for tiling in w8a8.HOPPER[codes]]
    for m, n, k in ODD:
        (a, a_scales, b, b_scales, bias), expected = problem(m, n, k, codes, dtype)
        for launch, tiling in launches:
            out = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
            launch(addressable(a), addressable(b), (a_scales, b_scales, bias), out, tiling, part)
            check(out, expected, codes)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", HALVES)
def test_products_of_odd_sizes(dtype, codes):
    for m, n, k in ODD:
        operands, expected = problem(m, n, k, codes, dtype)
        check(scaled_gemm(*operands, dtype), expected, codes)
        if m * n > 100:  # of few results one may be too small for float16
            check(scaled_gemm(*operands[:4], None, dtype), expected - operands[4].double(), codes)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("tokens", [1, 16, 130, 1024])
def test_glm_shapes(codes, tokens):
    for n, k in GLM:
        operands, expected = problem(tokens, n, k, codes, torch.float16)
        assert error(scaled_gemm(*operands, torch.float16), expected) < 1e-3


@pytest.mark.parametrize("codes", CODES)
def test_sums_of_one_sign_stay_precise(codes):
    # What the tensor cores cut off of e4m3 products adds up where all are positive: why sums are carried over.
    a, b = (random_codes(rows, 13696, codes).float().abs().to(codes) for rows in (130, 300))
    scales = torch.full((300,), 1e-4, device="cuda")
    found = scaled_gemm(a, scales[:130], b, scales, None, torch.float16)
    assert error(found, a.float().double() @ b.float().double().T * 1e-8) < (1e-3 if codes == torch.int8 else 5e-3)


def test_long_sums_of_integers():
    k = 300_000  # as many products of 127 * 127 do not fit into int32
    a = torch.full((3, k), 127, device="cuda", dtype=torch.int8)
    scales = torch.full((3,), 1 / (127 * k**0.5), device="cuda")
    assert (scaled_gemm(a, scales, a, scales, None, torch.float16) == 1).all()


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", HALVES)
def test_layers(dtype, codes):
    for m, n, k in [(1, 4608, 4096), (5, 100, 77), (300, 4096, 1712)]:
        x = torch.randn(2, m, k, device="cuda", dtype=dtype)
        weight, bias = torch.randn(n, k, device="cuda"), torch.randn(n, device="cuda", dtype=dtype)
        found = w8a8_linear(x, *quantize_rows(weight, codes), bias)
        assert found.shape == (2, m, n)
        assert found.dtype == dtype
        # Rounding to 8 bits: with a step of absmax / 127, about 4 sigma / 127, an error of 4 / 127 / sqrt(12) of each
        # operand; e4m3 has 3 bits of fraction, 2 ** -4 / sqrt(3) at most.
        assert error(found, x.double() @ weight.double().T + bias.double()) < (0.02 if codes == torch.int8 else 0.05)


@pytest.mark.parametrize("codes", CODES)
def test_views_and_strides(codes):
    (a, a_scales, b, b_scales, bias), expected = problem(100, 120, 96, codes, torch.float16)
    out = torch.float16
    inner = [torch.nn.functional.pad(of.view(torch.int8), (3, 8)).view(codes)[:, 3:-8] for of in (a, b)]
    check(scaled_gemm(inner[0], a_scales, inner[1], b_scales, bias, out), expected, codes)
    check(scaled_gemm(a[::2], a_scales[::2], b[::3], b_scales[::3], bias[::3], out), expected[::2, ::3], codes)
    check(scaled_gemm(a.T.contiguous().T, a_scales, b, b_scales, bias, out), expected, codes)


@pytest.mark.parametrize("codes", CODES)
def test_the_same_bits_at_every_run(codes):
    for m in (16, 600):
        operands, _ = problem(m, 520, 13696, codes, torch.bfloat16)
        first = scaled_gemm(*operands, torch.bfloat16)
        assert all(torch.equal(scaled_gemm(*operands, torch.bfloat16), first) for _ in range(5))


@pytest.mark.parametrize("codes", CODES)
def test_a_chain_of_dependent_launches(codes):
    """Each kernel starts before the one ahead has ended, and has to wait for its result."""
    layers = [quantize_rows(torch.randn(512, 512, device="cuda") / 22, codes) for _ in range(12)]
    x = torch.randn(256, 512, device="cuda", dtype=torch.float16)
    first: list[torch.Tensor] = []
    for _ in range(5):
        found = [x]
        for weight, scale in layers:
            found.append(w8a8_linear(found[-1], weight, scale))
        first = first or found
        assert all(map(torch.equal, found, first))
    # Each layer by itself, of what the chain gave to it: reading too early shows in one of them. Over all layers a sum
    # that differs in its last bit would move codes, and hide what a few rows lose.
    for before, after, (weight, scale) in zip(first[:-1], first[1:], layers, strict=True):
        codes_of, scales = reference.quantize(before, codes)
        product = codes_of.float().double() @ weight.float().double().T
        # Tensor cores keep e4m3 sums in fewer bits than float32, which costs a chain up to 1.6 eps. A row that was read
        # too early is off by more than its own size.
        assert_close_everywhere(
            after, product * scales.double()[:, None] * scale.double(), 4 * torch.finfo(x.dtype).eps
        )


@pytest.mark.parametrize("codes", CODES)
def test_in_a_graph_and_on_another_stream(codes):
    weight, scale = quantize_rows(torch.randn(400, 512, device="cuda"), codes)
    for m in (3, 300):
        x = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
        expected = w8a8_linear(x, weight, scale)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = w8a8_linear(x, weight, scale)
        stream.synchronize()
        assert torch.equal(found, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = w8a8_linear(x, weight, scale)
        for _ in range(2):
            x.copy_(torch.randn_like(x))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, w8a8_linear(x, weight, scale))


def test_compiled():
    weight, scale = quantize_rows(torch.randn(96, 128, device="cuda"), torch.int8)
    x = torch.randn(64, 128, device="cuda", dtype=torch.float16)
    compiled = torch.compile(lambda x: w8a8_linear(x, weight, scale) * 2, fullgraph=True)
    assert torch.equal(compiled(x), w8a8_linear(x, weight, scale) * 2)


@pytest.mark.skipif(HAS_E4M3, reason="needs a GPU without e4m3")
def test_e4m3_where_there_is_none():
    x = torch.ones(2, 4, device="cuda", dtype=torch.float16)
    with pytest.raises(DeviceError, match=r"quantize_tokens: torch.float8_e4m3fn needs sm_89 or later.*use torch.int8"):
        quantize_tokens(x, torch.float8_e4m3fn)
