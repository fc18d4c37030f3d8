"""gemm, linear and gemv on a GPU against float64: tilings, layouts, alignments, epilogues, odd sizes, GLM's shapes."""

import itertools

import pytest
import torch
from tile_errors import assert_close_everywhere

from warpbus.cuda.jit import architecture
from warpbus.kernels.ops import gemm_sm90
from warpbus.kernels.ops.arguments import ACTIVATIONS
from warpbus.kernels.ops.gemm import gemm, linear
from warpbus.kernels.ops.gemv import gemv
from warpbus.kernels.ops.ladder import MATMUL_RUNGS, matmul

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HOPPER = torch.cuda.is_available() and architecture(0) == "sm_90a"
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs sm_90a")
DTYPES = [torch.float16, torch.bfloat16]
EXPECTED = {
    "none": lambda x: x,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}
ODD = [
    (1, 1, 1),
    (1, 8, 8),
    (7, 17, 63),
    (64, 64, 64),
    (64, 200, 1),
    (300, 72, 5),
    (129, 257, 255),
    (300, 200, 72),
    (515, 1032, 1000),
    (1000, 777, 129),
]
GLM = [
    (4608, 4096),
    (4096, 4096),
    (27392, 4096),
    (4096, 13696),
    (13696, 4096),
    (4096, 6848),
    (4096, 3424),
    (6848, 4096),
]


@pytest.fixture(autouse=True)
def _seed(seed):
    """Each test has random numbers of its own."""


def random(*shape, dtype):
    return torch.randn(shape, device="cuda", dtype=dtype)


def check(found, expected):
    assert found.isfinite().all()
    error = ((found.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    assert error < torch.finfo(found.dtype).eps, error
    assert_close_everywhere(found, expected, torch.finfo(found.dtype).eps)


@needs_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiling", gemm_sm90.TILINGS, ids=lambda tiling: f"{tiling.tile_m}x{tiling.tile_n}")
def test_every_tiling(tiling, dtype):
    for (m, n, k), a_major, b_major in itertools.product(ODD, (0, 1), (0, 1)):
        if not tiling.fits(a_major, b_major, 0):
            continue
        a = random(k, m, dtype=dtype).T if a_major else random(m, k, dtype=dtype)
        b = random(k, n, dtype=dtype) if b_major else random(n, k, dtype=dtype).T
        bias = random(n, dtype=dtype)
        out = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
        gemm_sm90.gemm(a, b, bias, 0, out, tiling)
        check(out, a.double() @ b.double() + bias.double())


@pytest.mark.parametrize("variant", ["auto", "sm80_hgemm"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogues_and_layouts(variant, activation, dtype):
    for m, n, k in [(40, 136, 64), (33, 77, 100)]:
        a, b, bias = random(m, k, dtype=dtype), random(k, n, dtype=dtype), random(n, dtype=dtype)
        expected = EXPECTED[activation](a.double() @ b.double() + bias.double())
        for left, right in itertools.product((a, a.T.contiguous().T), (b, b.T.contiguous().T)):
            check(gemm(left, right, bias=bias, activation=activation, variant=variant), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 130, 1024])
def test_glm_shapes(dtype, tokens):
    for n, k in GLM:
        x, weight, bias = random(tokens, k, dtype=dtype), random(n, k, dtype=dtype), random(n, dtype=dtype)
        check(linear(x, weight, bias), x.double() @ weight.double().T + bias.double())


def test_views_and_strides():
    whole = random(70, 90, dtype=torch.float16)
    a, b = whole[3:60, 5:80], random(80, 200, dtype=torch.float16)[2:77, 1:100]
    expected = a.double() @ b.double()
    check(gemm(a, b), expected)
    check(gemm(a[::2, :], b), expected[::2])
    check(gemm(a.repeat_interleave(2, 1)[:, ::2], b), expected)
    x = random(2, 3, 75, dtype=torch.float16)
    check(linear(x, b.T), x.double() @ b.double())


def test_the_same_bits_at_every_run():
    a, b = random(1000, 13696, dtype=torch.float16), random(13696, 520, dtype=torch.float16)
    first = gemm(a, b)
    assert all(torch.equal(gemm(a, b), first) for _ in range(5))
    y = gemv(b.T, a[0])
    assert all(torch.equal(gemv(b.T, a[0]), y) for _ in range(5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_sums_do_not_overflow(dtype):
    # 13696 products of 16 * 16: beyond float16's largest number on the way to a result within it, by signs.
    a = torch.full((64, 13696), 16.0, device="cuda", dtype=dtype)
    b = torch.full((13696, 64), 16.0, device="cuda", dtype=dtype)
    b[13696 // 2 :] = -16.0
    b[-1] = 16.0
    assert (gemm(a, b) == 512.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemv(dtype):
    for n, k in [*GLM, (1, 1), (3, 7), (33, 8), (4096, 1024), (100, 129), (65024, 4096), (5, 13697)]:
        weight, x, bias = random(n, k, dtype=dtype), random(k, dtype=dtype), random(n, dtype=dtype)
        check(gemv(weight, x, bias), weight.double() @ x.double() + bias.double())
    for activation, function in EXPECTED.items():
        check(gemv(weight, x, bias, activation=activation), function(weight.double() @ x.double() + bias.double()))


def test_a_chain_of_dependent_launches():
    """Each kernel starts before the one ahead has ended, and has to wait for its result."""
    weights = [random(512, 512, dtype=torch.float16) / 22 for _ in range(20)]
    x = random(256, 512, dtype=torch.float16)
    expected = x
    for weight in weights:
        expected = torch.nn.functional.linear(expected, weight)
    for _ in range(5):
        found, vector = x, x[7]
        for weight in weights:
            found, vector = linear(found, weight), gemv(weight, vector)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        torch.testing.assert_close(vector, expected[7], rtol=0.02, atol=0.02)


def test_in_a_graph_and_on_another_stream():
    a, b = random(300, 512, dtype=torch.bfloat16), random(512, 400, dtype=torch.bfloat16)
    expected = a.double() @ b.double()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = gemm(a, b)
    stream.synchronize()
    check(found, expected)
    gemv(b.T, a[1])  # loaded before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, vector = gemm(a, b), gemv(b.T, a[1])
    for _ in range(2):
        a.copy_(torch.randn_like(a))
        graph.replay()
        torch.cuda.synchronize()
        check(out, a.double() @ b.double())
        check(vector, (a.double() @ b.double())[1])


def test_compiled_and_under_autocast():
    x, weight = torch.randn(64, 128, device="cuda"), torch.randn(96, 128, device="cuda")
    compiled = torch.compile(lambda x, w: linear(x.half(), w.half()).relu(), fullgraph=True)
    check(compiled(x, weight), (x.half().double() @ weight.half().double().T).relu())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = linear(x, weight)
    check(found, x.bfloat16().double() @ weight.bfloat16().double().T)


def test_gradients():
    x, weight, bias = (
        random(*shape, dtype=torch.bfloat16).requires_grad_() for shape in ((3, 70, 64), (40, 64), (40,))
    )
    pull = random(3, 70, 40, dtype=torch.bfloat16)
    linear(x, weight, bias).backward(pull)
    flat = pull.double().reshape(-1, 40)
    check(x.grad.reshape(-1, 64), flat @ weight.detach().double())
    check(weight.grad, flat.T @ x.detach().double().reshape(-1, 64))
    assert bias.grad.shape == (40,)


@needs_hopper
def test_the_ladders_last_rungs():
    for rung in ("wgmma", "wgmma_persistent"):
        assert rung in MATMUL_RUNGS
        for m, n, k in ODD:
            a, b = random(m, k, dtype=torch.float16), random(k, n, dtype=torch.float16)
            check(matmul(a, b, rung), a.double() @ b.double())
