"""`trellis_linear` and its kernels against float64: odd sizes, the layers of GLM-4-9B, every combination."""

import itertools
from dataclasses import replace

import pytest
import torch
from tile_errors import assert_close_everywhere
from torch.nn import functional as F

from warpbus.kernels.ops import trellis_decode, trellis_dequantize
from warpbus.kernels.ops.trellis_dequantize import dequantize_trellis, multiply_dequantized
from warpbus.kernels.ops.trellis_linear import times_trellis, trellis_linear
from warpbus.kernels.ops.trellis_packed import pack_trellis
from warpbus.models.layers import QuantizedLinear, RMSNorm, project
from warpbus.qtensor import QTensor, Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GPU = torch.device("cuda")
DTYPES = [torch.float16, torch.bfloat16]
LAYERS = [(4096, 4096), (4608, 4096), (27392, 4096), (4096, 13696)]
SMALL = [(16, 32), (32, 64), (48, 96), (16, 128), (112, 160), (64, 384), (400, 1056), (1040, 2112)]
EPS = 1e-5


@pytest.fixture(autouse=True)
def _seed(seed):
    """Fresh random numbers."""


def trellis(bits, n, k, device=GPU):
    """Any paths, with scales that vary by a factor of 3."""
    words = torch.randint(-(2**31), 2**31, (n, k * bits // 32), dtype=torch.int64, device=device).to(torch.int32)
    scales = (torch.rand(n, 1, device=device) + 0.5) * k**-0.5
    return QTensor(Scheme(bits, None, element="trellis"), words, scales, None, (n, k))


def normal(*shape, dtype):
    return torch.randn(shape, device=GPU).to(dtype)


def exact(x, wide, bias=None, norm=None, residual=None, gated=False):
    y = x.double()
    if norm is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * norm.double()
    y = y @ wide.T
    if bias is not None:
        y = y + bias.double()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual.double()


def check(out, expected):
    """Results, what is normed, the rotated x and dequantized weights are rounded once each; errors mostly cancel."""
    eps = torch.finfo(out.dtype).eps
    assert torch.isfinite(out).all()
    assert ((out.double() - expected).norm() / expected.norm()).item() <= 1.5 * eps
    assert_close_everywhere(out, expected, 1.5 * eps)


def decode(x, packed, bias=None, norm=None, residual=None, gated=False, plan=None):
    m, n = len(x), packed.shape[0]
    plan = plan or trellis_decode.plan_of(x, packed, gated)
    assert plan is not None
    assert norm is None or plan.slices == 1
    out = torch.full((m, n // 2 if gated else n), float("nan"), dtype=x.dtype, device=GPU)
    trellis_decode.multiply(x, packed, bias, norm, EPS, residual, gated, out, plan)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize(("n", "k"), [*SMALL, *LAYERS])
def test_few_rows(n, k, bits, dtype):
    weight = trellis(bits, n, k)
    packed, wide = pack_trellis(weight, dtype), weight.dequantize(torch.float32).double()
    for m in (1, 2, 7, 8, 9, 16):
        x = normal(m, k, dtype=dtype)
        out = decode(x, packed)
        check(out, exact(x, wide))
        assert torch.equal(decode(x, packed), out)  # the same bits at every run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3])
def test_few_rows_with_all_that_surrounds_the_product(bits, dtype):
    n, k = 96, 1152
    weight = trellis(bits, n, k)
    packed, wide = pack_trellis(weight, dtype), weight.dequantize(torch.float32).double()
    for m in (1, 3, 8, 11, 16):
        x, bias = normal(m, k, dtype=dtype), normal(n, dtype=dtype)
        norm = (torch.rand(k, device=GPU) + 0.5).to(dtype)
        for with_bias, with_norm, with_residual, gated in itertools.product((False, True), repeat=4):
            residual = normal(m, n // 2 if gated else n, dtype=dtype) if with_residual else None
            given = bias if with_bias else None, norm if with_norm else None, residual, gated
            check(decode(x, packed, *given), exact(x, wide, *given))


@pytest.mark.parametrize("slices", [1, 2, 3, 8])
def test_columns_shared_by_blocks(slices):
    weight = trellis(3, 160, 2208)
    packed, wide = pack_trellis(weight, torch.float16), weight.dequantize(torch.float32).double()
    for m, gated in itertools.product((1, 10), (False, True)):
        x = normal(m, 2208, dtype=torch.float16)
        plan = replace(trellis_decode.plan_of(x, packed, gated), slices=slices)
        for _ in range(3):  # counters are left as they were found
            check(decode(x, packed, gated=gated, plan=plan), exact(x, wide, gated=gated))


def test_inputs_of_any_size():
    """Each row of the rotated x has a power of two of its own."""
    weight = trellis(3, 64, 512)
    for dtype, sizes in ((torch.float16, (1e-4, 1.0, 6e3)), (torch.bfloat16, (1e-30, 1e-6, 1.0, 1e6, 1e20))):
        packed, wide = pack_trellis(weight, dtype), weight.dequantize(torch.float32).double()
        x = normal(len(sizes), 512, dtype=torch.float32) * torch.tensor(sizes, device=GPU)[:, None]
        x = x.to(dtype)
        out = decode(x, packed)
        for row, expected in zip(out, exact(x, wide), strict=True):
            assert (row.double() - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()
        assert not decode(torch.zeros_like(x), packed).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize(("n", "k"), [*SMALL, *LAYERS])
def test_dequantized_weights(n, k, bits, dtype):
    weight = trellis(bits, n, k)
    packed, wide = pack_trellis(weight, dtype), weight.dequantize(torch.float32)
    poison = torch.full((n * k + 4096,), float("nan"), dtype=dtype, device=GPU)
    del poison  # the allocator gives its memory to the result
    found = dequantize_trellis(packed, range(n), range(k))
    assert found.isfinite().all()
    # Both round once to dtype; sums in float32 are exact here, and nearly so there.
    assert (found.float() - wide).abs().max() <= torch.finfo(dtype).eps * wide.abs().max()
    assert (found == wide.to(dtype)).double().mean() > 0.99
    for rows, columns in ((range(16), range(min(k, 128))), (range(n - n % 32 % 16 - 16, n), range(k // 128 * 128, k))):
        if len(columns):
            part = dequantize_trellis(packed, rows, columns)
            assert torch.equal(part, found[rows.start : rows.stop, columns.start : columns.stop])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), LAYERS)
def test_any_number_of_rows(n, k, dtype):
    weight = trellis(3, n, k)
    packed, wide = pack_trellis(weight, dtype), weight.dequantize(torch.float32).double()
    bias = normal(n, dtype=dtype)
    for m in (1, 2, 7, 16, 17, 48, 100, 1000):
        x = normal(m, k, dtype=dtype)
        check(trellis_linear(x, packed, bias), exact(x, wide, bias))
    assert trellis_linear(normal(3, 6, k, dtype=dtype), packed).shape == (3, 6, n)
    assert trellis_linear(normal(0, k, dtype=dtype), packed).shape == (0, n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_in_bands(dtype, monkeypatch):
    weight = trellis(2, 400, 672)
    packed, wide = pack_trellis(weight, dtype), weight.dequantize(torch.float32).double()
    x, dy, bias = normal(40, 672, dtype=dtype), normal(40, 400, dtype=dtype), normal(400, dtype=dtype)
    for size in (1, 200_000, 2**26):
        monkeypatch.setattr(trellis_dequantize, "BUFFER_BYTES", size)
        for given in (None, bias):
            check(multiply_dequantized(x, packed, given), exact(x, wide, given))
        check(times_trellis(dy, packed), dy.double() @ wide)


@pytest.mark.parametrize("m", [5, 12, 30])
def test_the_operator_with_all_that_surrounds_the_product(m):
    n, k, dtype = 96, 416, torch.bfloat16
    weight = trellis(3, n, k)
    packed, wide = pack_trellis(weight, dtype), weight.dequantize(torch.float32).double()
    x, residual, bias = normal(2, m, k, dtype=dtype), normal(2, m, n // 2, dtype=dtype), normal(n, dtype=dtype)
    norm = (torch.rand(k, device=GPU) + 0.5).to(dtype)
    out = trellis_linear(x, packed, bias, norm=norm, eps=EPS, residual=residual, activation="swiglu")
    check(out, exact(x, wide, bias, norm, residual, True))


def test_rows_that_are_not_contiguous():
    weight = trellis(3, 64, 256)
    packed, wide = pack_trellis(weight, torch.float16), weight.dequantize(torch.float32).double()
    room = normal(20, 513, dtype=torch.float16)
    for m in (3, 20):
        x = room[:m, 1:257]
        check(trellis_linear(x, packed), exact(x, wide))


@pytest.mark.parametrize("m", [1, 16, 40])
def test_in_a_graph_and_on_another_stream(m):
    weight = trellis(3, 256, 13696 // 4)
    packed, wide = pack_trellis(weight, torch.bfloat16), weight.dequantize(torch.float32).double()
    x = normal(m, 13696 // 4, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        trellis_linear(x, packed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = trellis_linear(x, packed)
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(3):
        x.normal_()
        graph.replay()
        check(out, exact(x, wide))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [4, 50])
def test_a_layer_and_its_gradient(m, dtype):
    n, k = 320, 704
    weight = trellis(3, n, k)
    wide = weight.dequantize(torch.float32).double()
    layer, norm = QuantizedLinear(weight, dtype=dtype), RMSNorm(k, EPS).to(GPU, dtype)
    assert layer.form.codes.nbytes == n * 768 * 3 // 8  # columns up to a multiple of 128
    x, residual = normal(2, m, k, dtype=dtype), normal(2, m, n // 2, dtype=dtype)
    with torch.no_grad():
        y = project(layer, x, norm=norm, residual=residual, activation="swiglu")
    check(y, exact(x, wide, None, norm.weight, residual, True))
    x.requires_grad_()
    y, dy = layer(x), normal(2, m, n, dtype=dtype)
    check(y.detach(), exact(x.detach(), wide))
    check(torch.autograd.grad(y, x, dy)[0], dy.double() @ wide)


def test_a_layer_moves_between_devices():
    weight = trellis(2, 80, 160, "cpu")
    layer = QuantizedLinear(weight, dtype=torch.bfloat16)
    expected = layer(torch.ones(1, 160, dtype=torch.bfloat16))
    moved = layer.to(GPU)
    assert moved.form.codes.device.type == "cuda"
    found = moved(torch.ones(1, 160, dtype=torch.bfloat16, device=GPU)).cpu()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    moved.load_state_dict({name: part.clone() for name, part in moved.state_dict().items()})
    again = moved.half().to("cpu").weight
    assert torch.equal(again.qweight, weight.qweight)
    assert torch.equal(again.scales, weight.scales)
