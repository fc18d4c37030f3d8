"""Every rung of the ladder on a GPU: against float64, any size and stride, repeatable, on streams and in graphs."""

import itertools

import pytest
import torch

from warpbus.cuda.jit import architecture
from warpbus.errors import DeviceError
from warpbus.kernels.ops.ladder import GEMV_RUNGS, MATMUL_RUNGS, check_architecture, gemv, linear_sigmoid, matmul

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MATMULS = [(rung.name, dtype) for rung in MATMUL_RUNGS.values() for dtype in rung.dtypes]
GEMVS = list(itertools.product(GEMV_RUNGS, DTYPES))

# Multiples of every tile; one element; odd everywhere; each side thin in turn; more than a tile and no multiple of it.
SIZES = [(256, 256, 256), (1, 1, 1), (129, 65, 33), (1, 300, 70), (300, 1, 70), (257, 259, 1), (384, 136, 200)]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def poison(*shape, dtype):
    """NaN in the memory that the next output of this shape is given."""
    torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


def bound(dtype, k):
    """Rounding the result once, and the errors of k additions in float32, which mostly cancel."""
    return torch.finfo(dtype).eps / 2 + 2 * k**0.5 * 2**-24


@pytest.fixture
def runs_here():
    """Skips a rung that this GPU is too old or too new for."""

    def check(rung):
        try:
            check_architecture("ladder", MATMUL_RUNGS[rung], torch.device("cuda", torch.cuda.current_device()))
        except DeviceError as unfit:
            pytest.skip(str(unfit))

    return check


@pytest.mark.parametrize(("rung", "dtype"), MATMULS)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_matmul(runs_here, rung, dtype, m, n, k):
    runs_here(rung)
    a, b = random(m, k, dtype=dtype), random(k, n, dtype=dtype, seed=1)
    poison(m, n, dtype=dtype)
    out = matmul(a, b, rung)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert error(out, a.double() @ b.double()) < bound(dtype, k)


@pytest.mark.parametrize(("rung", "dtype"), MATMULS)
def test_large_matmul(runs_here, rung, dtype):
    """Many tiles along every axis, and the same bits again."""
    runs_here(rung)
    a, b = random(1032, 2056, dtype=dtype), random(2056, 1544, dtype=dtype, seed=1)
    out = matmul(a, b, rung)
    assert error(out, a.double() @ b.double()) < bound(dtype, 2056)
    assert torch.equal(out, matmul(a, b, rung))


@pytest.mark.parametrize(("rung", "dtype"), MATMULS)
def test_operands_of_any_stride(runs_here, rung, dtype):
    runs_here(rung)
    left, right = random(200, 301, dtype=dtype), random(301, 200, dtype=dtype, seed=1)
    for a, b in (
        (left.t(), right.t()),  # both transposed
        (left[:96, 1:138], right[1:138, 3:]),  # rows that begin anywhere
        (left[1:97, ::2], right[150:, 1::2]),  # gaps between elements
        (left.flatten()[1 : 1 + 96 * 136].view(96, 136), right.flatten()[8 : 8 + 136 * 64].view(136, 64)),
        (left[:1].expand(64, 301), right),  # one row for all
    ):
        assert error(matmul(a, b, rung), a.double() @ b.double()) < bound(dtype, a.shape[1])


@pytest.mark.parametrize("rung", ["naive", "tiled", "wmma"])
def test_more_rows_than_a_grid_is_high(rung):
    a, b = random(600_001, 5, dtype=torch.float16), random(5, 3, dtype=torch.float16, seed=1)
    poison(600_001, 3, dtype=torch.float16)
    assert error(matmul(a, b, rung), a.double() @ b.double()) < bound(torch.float16, 5)


@pytest.mark.parametrize("rung", MATMUL_RUNGS)
def test_empty_products(runs_here, rung):
    runs_here(rung)
    for m, n, k in ((0, 3, 2), (3, 0, 2), (3, 2, 0)):
        a, b = (
            torch.ones(m, k, dtype=torch.float16, device="cuda"),
            torch.ones(k, n, dtype=torch.float16, device="cuda"),
        )
        poison(m, n, dtype=torch.float16)
        assert torch.equal(matmul(a, b, rung), torch.zeros(m, n, dtype=torch.float16, device="cuda"))


def test_a_rung_for_another_gpu():
    if architecture(torch.cuda.current_device()) == "sm_90a":
        pytest.skip("this GPU runs every rung")
    a = random(8, 8, dtype=torch.float16)
    with pytest.raises(DeviceError, match="rung wgmma needs sm_90a"):
        matmul(a, a, "wgmma")


@pytest.mark.parametrize(("rung", "dtype"), GEMVS)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (9, 7), (257, 1000), (3, 100_003), (64, 65_536), (5000, 4096), (33, 4104)]
)
def test_gemv(rung, dtype, n, k):
    w, x = random(n, k, dtype=dtype), random(k, dtype=dtype, seed=1)
    poison(n, dtype=dtype)
    out = gemv(w, x, rung)
    assert out.shape == (n,)
    assert error(out, w.double() @ x.double()) < bound(dtype, k)
    assert torch.equal(out, gemv(w, x, rung))


@pytest.mark.parametrize(("rung", "dtype"), GEMVS)
def test_gemv_of_any_stride(rung, dtype):
    whole, x = random(65, 4097, dtype=dtype), random(8200, dtype=dtype, seed=1)
    for w, vector in ((whole[:, 1:], x[1:4097]), (whole.t(), x[:130:2]), (whole[1:], x[1:4098])):
        assert error(gemv(w, vector, rung), w.double() @ vector.double()) < bound(dtype, w.shape[1])


@pytest.mark.parametrize("rung", GEMV_RUNGS)
def test_empty_gemv(rung):
    assert gemv(torch.ones(0, 3, device="cuda"), torch.ones(3, device="cuda"), rung).shape == (0,)
    poison(3, dtype=torch.float32)
    out = gemv(torch.ones(3, 0, device="cuda"), torch.ones(0, device="cuda"), rung)
    assert torch.equal(out, torch.zeros(3, device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (1,), (2,), (33,), (3, 43)])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (37, 65), (128, 4096), (129, 1000)])
def test_linear_sigmoid(dtype, batch, n, k):
    x, weight, bias = random(*batch, k, dtype=dtype), random(n, k, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
    weight /= k**0.5
    poison(*batch, n, dtype=dtype)
    out = linear_sigmoid(x, weight, bias)
    assert out.shape == (*batch, n)
    expected = torch.sigmoid(x.double() @ weight.double().T + bias.double())
    assert error(out, expected) < bound(dtype, k) + 32 * 2**-24  # the exponential is the fast one


def test_empty_linear_sigmoid():
    weight, bias = torch.ones(3, 0, device="cuda"), torch.zeros(3, device="cuda")
    for batch in ((), (2,)):
        poison(*batch, 3, dtype=torch.float32)
        out = linear_sigmoid(torch.ones(*batch, 0, device="cuda"), weight, bias)
        assert torch.equal(out, torch.full((*batch, 3), 0.5, device="cuda"))
    assert linear_sigmoid(torch.ones(0, 4, device="cuda"), torch.ones(3, 4, device="cuda"), bias).shape == (0, 3)


@pytest.mark.parametrize("rung", MATMUL_RUNGS)
def test_matmul_on_streams_and_in_graphs(runs_here, rung):
    runs_here(rung)
    a, b = random(130, 72, dtype=torch.float16), random(72, 200, dtype=torch.float16, seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = matmul(a, b, rung)
    torch.cuda.current_stream().wait_stream(stream)
    assert error(out, a.double() @ b.double()) < bound(torch.float16, 72)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = matmul(a, b, rung)
    a.copy_(random(130, 72, dtype=torch.float16, seed=2))
    graph.replay()
    assert error(out, a.double() @ b.double()) < bound(torch.float16, 72)


@pytest.mark.parametrize("rung", GEMV_RUNGS)
def test_gemv_on_streams_and_in_graphs(rung):
    w, x = random(40, 20_000, dtype=torch.float16), random(20_000, dtype=torch.float16, seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = gemv(w, x, rung)
    torch.cuda.current_stream().wait_stream(stream)
    assert error(out, w.double() @ x.double()) < bound(torch.float16, 20_000)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemv(w, x, rung)
    w.copy_(random(40, 20_000, dtype=torch.float16, seed=2))
    graph.replay()
    assert error(out, w.double() @ x.double()) < bound(torch.float16, 20_000)


def test_compiled_by_torch():
    a, b, x = random(9, 5), random(5, 7, seed=1), random(7, seed=2)
    compiled = torch.compile(
        lambda a, b, x: gemv(matmul(a, b, "tiled"), x, "split_k") + 1, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(a, b, x), a.double().mm(b.double()).mv(x.double()).float() + 1)
