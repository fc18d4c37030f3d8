"""The mma.sync product with packed weights against float64: tilings, code widths, groups and dtypes, at odd sizes."""

import itertools

import pytest
import torch
from gpu_random_weights import quantized
from tile_errors import assert_close_everywhere

from warpbus.kernels.ops import wna16_sm80
from warpbus.kernels.ops.packed import pack
from warpbus.qtensor import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = [torch.float16, torch.bfloat16]
TILINGS = {"large": wna16_sm80.LARGE, "medium": wna16_sm80.MEDIUM, "small": wna16_sm80.SMALL}
ODD_SIZES = [
    (1, 1, 1),
    (7, 17, 63),
    (17, 15, 65),
    (31, 127, 64),
    (33, 129, 127),
    (65, 63, 129),
    (127, 255, 17),
    (129, 257, 255),
    (255, 136, 1000),
    (1000, 1000, 65),
]
# n and k of ChatGLM2-6B's layers, the last two as they are split between 2 GPUs.
GLM_SHAPES = [(4608, 4096), (4096, 4096), (27392, 4096), (4096, 13696), (2304, 4096), (4096, 6848)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def activations(m, k, dtype, aligned=True):
    """Random, amid NaN: a stride longer than its rows, and a beginning off 16 bytes unless aligned."""
    stride = k + 8 + (-k % 8 if aligned else k % 2 + 1)
    first = 8 if aligned else 9
    buffer = torch.full((first + m * stride,), float("nan"), dtype=dtype, device="cuda")
    return buffer[first:].view(m, stride)[:, :k].copy_(torch.randn(m, k, device="cuda"))


def poisoned(m, n, dtype, spare=0):
    """An output, and the whole of which it is a part."""
    whole = torch.full((m, n + spare), float("nan"), dtype=dtype, device="cuda")
    return whole[:, :n], whole


def product(x, weight, bias=None):
    exact = x.double() @ weight.dequantize(x.dtype).double().T
    return exact if bias is None else exact + bias.double()


def check(out, expected, k):
    """Rounding each result once, and the errors of k additions in float32, which mostly cancel."""
    assert torch.isfinite(out).all()
    error = (out.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    tolerance = torch.finfo(out.dtype).eps / 2 + 4 * k**0.5 * 2**-23
    assert error.item() <= tolerance
    assert_close_everywhere(out, expected, tolerance)


def force(monkeypatch, tiling, part=None):
    def plan(m, n, k, bits, multiprocessors, shared_memory):
        return tiling, part or max(-(-k // 64), 1) * 64

    monkeypatch.setattr(wna16_sm80, "plan", plan)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "scheme", ["w4a16", "w4a16-asym", "w8a16", "w8a16-asym", "w3a16", "w3a16-asym", "w2a16", "w2a16-asym"]
)
@pytest.mark.parametrize("name", TILINGS)
def test_tilings(monkeypatch, name, scheme, dtype):
    force(monkeypatch, TILINGS[name])
    for spare, (m, n, k) in enumerate(ODD_SIZES):
        weight, x = quantized(scheme, n, k), activations(m, k, dtype)
        bias = torch.randn(n, device="cuda").to(dtype) if spare % 2 else None
        out, whole = poisoned(m, n, dtype, spare)
        wna16_sm80.multiply(x, pack(weight, dtype), bias, out)
        check(out, product(x, weight, bias), k)
        assert torch.isnan(whole[:, n:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "scheme", [f"w{w}a16-g{g}{z}" for w, g, z in itertools.product((4, 8), (32, 64, 128), ("", "-asym"))]
)
@pytest.mark.parametrize("name", TILINGS)
def test_groups(monkeypatch, name, scheme, dtype):
    for part in (None, 64, 192):
        force(monkeypatch, TILINGS[name], part)
        for m, n, groups in [(17, 16, 1), (33, 130, 3), (150, 264, 5), (64, 72, 8)]:
            k = groups * Scheme.parse(scheme).group_size
            weight, x = quantized(scheme, n, k), activations(m, k, dtype)
            out, _ = poisoned(m, n, dtype)
            wna16_sm80.multiply(x, pack(weight, dtype), None, out)
            check(out, product(x, weight), k)


@pytest.mark.parametrize("k", [1, 8, 63, 64, 65, 128, 129, 191, 192, 193, 256, 320, 384])
@pytest.mark.parametrize("name", TILINGS)
def test_pipelines_of_every_length(monkeypatch, name, k):
    force(monkeypatch, TILINGS[name])
    weight, x = quantized("w4a16", 264, k), activations(130, k, torch.float16)
    out, _ = poisoned(130, 264, torch.float16)
    wna16_sm80.multiply(x, pack(weight, torch.float16), None, out)
    check(out, product(x, weight), k)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16-asym"])
@pytest.mark.parametrize("name", TILINGS)
@pytest.mark.parametrize("size", [(129, 257, 1000), (7, 30, 777), (64, 64, 4096)])
def test_split_k_gives_the_same_bits_every_time(monkeypatch, name, size, scheme):
    m, n, k = size
    force(monkeypatch, TILINGS[name], part=128)
    weight, x = quantized(scheme, n, k), activations(m, k, torch.float16)
    bias, packed = torch.randn(n, device="cuda").half(), pack(weight, torch.float16)
    results = []
    for _ in range(3):
        out, whole = poisoned(m, n, torch.float16, 3)
        wna16_sm80.multiply(x, packed, bias, out)
        assert torch.isnan(whole[:, n:]).all()
        results.append(out)
    check(results[0], product(x, weight, bias), k)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [17, 64, 129, 1024])
@pytest.mark.parametrize(("n", "k"), GLM_SHAPES)
def test_glm_shapes_as_planned(n, k, m, dtype):
    scheme = "w4a16-g128" if k % 128 == 0 else "w4a16-g32"
    weight, x = quantized(scheme, n, k), torch.randn(m, k, device="cuda").to(dtype)
    out, _ = poisoned(m, n, dtype)
    wna16_sm80.multiply(x, pack(weight, dtype), None, out)
    check(out, product(x, weight), k)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("size", [*ODD_SIZES, (20, 128, 16384), (2048, 512, 768)])
def test_as_planned(size, aligned):
    m, n, k = size
    weight, x = quantized("w4a16-asym", n, k), activations(m, k, torch.float16, aligned)
    out, whole = poisoned(m, n, torch.float16, 5)
    wna16_sm80.multiply(x, pack(weight, torch.float16), None, out)
    check(out, product(x, weight), k)
    assert torch.isnan(whole[:, n:]).all()


def test_one_row_for_all_and_rows_that_are_columns():
    weight = quantized("w4a16-g64", 72, 256)
    packed = pack(weight, torch.float16)
    for x in (
        torch.randn(1, 256, device="cuda").half().expand(100, 256),
        torch.randn(256, 96, device="cuda").half().T,
        torch.randn(100, 512, device="cuda").half()[:, ::2],
    ):
        out, _ = poisoned(x.shape[0], 72, torch.float16)
        wna16_sm80.multiply(x, packed, None, out)
        check(out, product(x, weight), 256)


def test_nan_and_infinity_stay_in_their_rows():
    weight, x = quantized("w4a16-g32", 200, 96), activations(200, 96, torch.float16)
    x[3, 5] = float("nan")
    x[100, 7] = float("inf")
    out, _ = poisoned(200, 200, torch.float16)
    wna16_sm80.multiply(x, pack(weight, torch.float16), None, out)
    assert torch.isnan(out[3]).all()
    column = weight.dequantize(torch.float16)[:, 7]
    assert torch.equal(torch.isinf(out[100]), column != 0)
    rest = [row for row in range(200) if row not in (3, 100)]
    check(out[rest], product(x[rest], weight), 96)


@pytest.mark.parametrize("size", [(256, 512, 4096), (65, 127, 2049), (20, 4096, 4096)])
def test_in_a_graph_and_on_a_second_stream(size):
    m, n, k = size
    weight, x = quantized("w4a16", n, k), torch.randn(m, k, device="cuda").half()
    packed = pack(weight, torch.float16)
    out, _ = poisoned(m, n, torch.float16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        wna16_sm80.multiply(x, packed, None, out)
    stream.synchronize()
    check(out, product(x, weight), k)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wna16_sm80.multiply(x, packed, None, out)
    for _ in range(2):
        x.copy_(torch.randn(m, k, device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        check(out, product(x, weight), k)


def test_one_product_after_another_without_a_pause():
    """On sm_90 and later each starts before the one whose result it reads has ended."""
    weight = quantized("w4a16-g128", 256, 256)
    packed, dense = pack(weight, torch.float16), weight.dequantize(torch.float16)
    x = torch.randn(100, 256, device="cuda").half()
    chain = [x, *(poisoned(100, 256, torch.float16)[0] for _ in range(20))]
    for before, after in itertools.pairwise(chain):
        wna16_sm80.multiply(before, packed, None, after)
    for before, after in itertools.pairwise(chain):
        check(after, before.double() @ dense.double().T, 256)
