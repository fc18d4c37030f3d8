"""The mma.sync kernels against float64: every rung, tiling, layout, alignment and epilogue, at odd sizes."""

import itertools

import pytest
import torch
from tile_errors import assert_close_everywhere

from warpbus.kernels.ops import gemm_sm80

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = [torch.float16, torch.bfloat16]
LAYOUTS = list(itertools.product(("row", "column"), repeat=2))
TILINGS = {
    "wide": gemm_sm80.WIDE,
    "square": gemm_sm80.SQUARE,
    "small": gemm_sm80.SMALL,
    "unaligned": gemm_sm80.UNALIGNED,
}
ACTIVATIONS = [
    lambda x: x,
    torch.sigmoid,
    torch.relu,
    torch.nn.functional.gelu,
    torch.nn.functional.silu,
]
ODD_SIZES = [
    (1, 1, 1),
    (7, 17, 63),
    (17, 7, 1),
    (63, 65, 127),
    (65, 63, 129),
    (127, 255, 17),
    (129, 257, 255),
    (255, 129, 1000),
    (1000, 1000, 65),
    (300, 1000, 96),
]
# n and k of ChatGLM2-6B's layers, the last three as they are split among 2 and 4 GPUs.
GLM_SHAPES = [(4608, 4096), (4096, 4096), (27392, 4096), (4096, 13696), (2304, 4096), (4096, 6848), (4096, 3424)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def operand(rows, columns, layout="row", dtype=torch.float16, aligned=True):
    """Random, amid NaN: a stride longer than its rows, and a beginning off 16 bytes unless aligned."""
    outer, inner = (rows, columns) if layout == "row" else (columns, rows)
    stride = inner + 8 + (-inner % 8 if aligned else inner % 2 + 1)
    first = 8 if aligned else 9
    buffer = torch.full((first + outer * stride,), float("nan"), dtype=dtype, device="cuda")
    matrix = buffer[first:].view(outer, stride)[:, :inner]
    matrix.copy_(torch.randn(outer, inner, device="cuda") * 0.5)
    return matrix if layout == "row" else matrix.T


def poisoned(m, n, dtype, spare):
    """An output, and the whole of which it is a part."""
    whole = torch.full((m, n + spare), float("nan"), dtype=dtype, device="cuda")
    return whole[:, :n], whole


def check(out, expected, k):
    """Rounding the result once, and the errors of k additions in float32, which mostly cancel."""
    assert torch.isfinite(out).all()
    error = (out.double() - expected).norm() / expected.norm()
    tolerance = torch.finfo(out.dtype).eps / 2 + 4 * k**0.5 * 2**-23
    assert error.item() < tolerance
    assert_close_everywhere(out, expected, tolerance)


def force(monkeypatch, tiling, part=None):
    def plan(m, n, k, multiprocessors, tilings):
        return tiling, part or max(-(-k // tiling.tile_k), 1) * tiling.tile_k

    monkeypatch.setattr(gemm_sm80, "plan", plan)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rung", ["mma_naive", "mma_permuted", *gemm_sm80.RUNGS])
@pytest.mark.parametrize("size", [*ODD_SIZES, (128, 128, 32), (512, 256, 128), (1024, 1024, 1024), (8, 4608, 4096)])
def test_rungs(rung, dtype, size):
    m, n, k = size
    a = torch.randn(m, k, device="cuda").to(dtype)
    b = torch.randn(k, n, device="cuda").to(dtype)
    out, _ = poisoned(m, n, dtype, 0)
    gemm_sm80.launch(a, b, out, rung)
    check(out, a.double() @ b.double(), k)


@pytest.mark.parametrize("rung", ["mma_naive", "mma_permuted", *gemm_sm80.RUNGS])
def test_rungs_where_rows_fit_and_the_beginning_does_not(rung):
    a = torch.randn(64 * 64 + 1, device="cuda").half()[1:].view(64, 64)
    b = torch.randn(64, 72, device="cuda").half()
    out, _ = poisoned(64, 72, torch.float16, 0)
    gemm_sm80.launch(a, b, out, rung)
    check(out, a.double() @ b.double(), 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("name", TILINGS)
def test_tilings(monkeypatch, name, layouts, dtype):
    tiling = TILINGS[name]
    if tiling is gemm_sm80.WIDE and layouts == ("column", "column"):
        pytest.skip("not compiled for two column-major operands, and never planned for them")
    force(monkeypatch, tiling)
    for spare, (m, n, k) in enumerate(ODD_SIZES):
        a = operand(m, k, layouts[0], dtype, tiling.align == 8)
        b = operand(k, n, layouts[1], dtype, tiling.align == 8)
        out, whole = poisoned(m, n, dtype, spare)
        gemm_sm80.sm80_gemm(a, b, None, 0, out)
        check(out, a.double() @ b.double(), k)
        assert torch.isnan(whole[:, n:]).all()


@pytest.mark.parametrize("k", [1, 8, 31, 32, 33, 64, 65, 96, 97, 128, 129, 160, 192, 193, 256])
@pytest.mark.parametrize("name", TILINGS)
def test_pipelines_of_every_length(monkeypatch, name, k):
    tiling = TILINGS[name]
    force(monkeypatch, tiling)
    a, b = operand(130, k, aligned=tiling.align == 8), operand(k, 264, "column", aligned=tiling.align == 8)
    out, _ = poisoned(130, 264, torch.float16, 0)
    gemm_sm80.sm80_gemm(a, b, None, 0, out)
    check(out, a.double() @ b.double(), k)


@pytest.mark.parametrize("name", TILINGS)
@pytest.mark.parametrize("size", [(129, 257, 1000), (7, 30, 777), (64, 64, 4096)])
def test_split_k_gives_the_same_bits_every_time(monkeypatch, name, size):
    m, n, k = size
    tiling = TILINGS[name]
    force(monkeypatch, tiling, part=128)
    a, b = operand(m, k, aligned=tiling.align == 8), operand(k, n, "column", aligned=tiling.align == 8)
    bias = torch.randn(n, device="cuda").half()
    results = []
    for _ in range(3):
        out, whole = poisoned(m, n, torch.float16, 3)
        gemm_sm80.sm80_gemm(a, b, bias, 4, out)
        assert torch.isnan(whole[:, n:]).all()
        results.append(out)
    check(results[0], torch.nn.functional.silu(a.double() @ b.double() + bias.double()), k)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", range(5))
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("size", [(200, 264, 64), (65, 127, 100), (70, 1000, 33)])
@pytest.mark.parametrize("name", TILINGS)
def test_epilogues(monkeypatch, name, size, with_bias, activation, dtype):
    m, n, k = size
    tiling = TILINGS[name]
    force(monkeypatch, tiling)
    a = operand(m, k, dtype=dtype, aligned=tiling.align == 8)
    b = operand(k, n, "column", dtype, tiling.align == 8)
    bias = torch.randn(n, device="cuda").to(dtype) if with_bias else None
    out, _ = poisoned(m, n, dtype, 0)
    gemm_sm80.sm80_gemm(a, b, bias, activation, out)
    sums = a.double() @ b.double() + (bias.double() if with_bias else 0)
    check(out, ACTIVATIONS[activation](sums), k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 16, 129, 1024])
@pytest.mark.parametrize(("n", "k"), GLM_SHAPES)
def test_glm_shapes_as_planned(n, k, m, dtype):
    x = torch.randn(m, k, device="cuda").to(dtype)
    weight = torch.randn(n, k, device="cuda").to(dtype)
    out, _ = poisoned(m, n, dtype, 0)
    gemm_sm80.sm80_gemm(x, weight.T, None, 0, out)
    check(out, x.double() @ weight.double().T, k)


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("size", [*ODD_SIZES, (128, 128, 16384), (2048, 512, 768)])
def test_as_planned(size, aligned, layouts):
    m, n, k = size
    a, b = operand(m, k, layouts[0], aligned=aligned), operand(k, n, layouts[1], aligned=aligned)
    out, whole = poisoned(m, n, torch.float16, 5)
    gemm_sm80.sm80_gemm(a, b, None, 0, out)
    check(out, a.double() @ b.double(), k)
    assert torch.isnan(whole[:, n:]).all()


def test_one_row_for_all():
    a = torch.randn(1, 256, device="cuda").half().expand(100, 256)
    b = torch.randn(256, 72, device="cuda").half()
    out, _ = poisoned(100, 72, torch.float16, 0)
    gemm_sm80.sm80_gemm(a, b, None, 0, out)
    check(out, a.double() @ b.double(), 256)


@pytest.mark.parametrize("activation", range(5))
def test_nothing_to_sum(activation):
    bias = torch.randn(70, device="cuda").half()
    out, _ = poisoned(130, 70, torch.float16, 2)
    nothing = torch.empty(130, 0, device="cuda").half(), torch.empty(0, 70, device="cuda").half()
    gemm_sm80.sm80_gemm(*nothing, bias, activation, out)
    check(out, ACTIVATIONS[activation](bias.double()).expand(130, 70), 1)


def test_nan_and_infinity_stay_where_they_belong():
    a, b = operand(200, 96), operand(96, 200)
    a[3, 5] = float("nan")
    a[100, 7] = float("inf")
    out, _ = poisoned(200, 200, torch.float16, 0)
    gemm_sm80.sm80_gemm(a, b, None, 2, out)
    assert torch.isnan(out[3]).all()
    assert torch.equal(torch.isinf(out[100]), b[7] > 0)
    rest = [row for row in range(200) if row not in (3, 100)]
    check(out[rest], torch.relu(a[rest].double() @ b.double()), 96)


@pytest.mark.parametrize("size", [(256, 512, 4096), (65, 127, 2049)])
def test_in_a_graph_and_on_a_second_stream(size):
    m, n, k = size
    a, b = torch.randn(m, k, device="cuda").half(), torch.randn(k, n, device="cuda").half()
    out, _ = poisoned(m, n, torch.float16, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gemm_sm80.sm80_gemm(a, b, None, 0, out)
    stream.synchronize()
    check(out, a.double() @ b.double(), k)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm_sm80.sm80_gemm(a, b, None, 0, out)
    for _ in range(2):
        a.copy_(torch.randn(m, k, device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        check(out, a.double() @ b.double(), k)
