"""w8a8: the reference against float64, what is refused, and which tiles are chosen."""

import pytest
import torch
from torch.library import opcheck

from warpbus.cuda.jit import ARCHITECTURES
from warpbus.cuda.kernel import runs_on
from warpbus.errors import DeviceError, TensorError
from warpbus.kernels.ops import w8a8
from warpbus.kernels.ops.tiles_sm90 import ROW_BYTES
from warpbus.kernels.ops.w8a8 import quantize_rows, quantize_tokens, scaled_gemm, w8a8_linear
from warpbus.kernels.reference import w8a8 as reference
from warpbus.kernels.reference.w8a8 import LARGEST

CODES = [torch.int8, torch.float8_e4m3fn]
HALVES = [torch.float16, torch.bfloat16]


def half(*shape):
    return torch.ones(shape, dtype=torch.float16)


def codes(*shape, dtype=torch.int8):
    return torch.ones(shape).to(dtype)


def scales(*shape):
    return torch.ones(shape)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("of", [*HALVES, torch.float32])
def test_codes_are_the_nearest(of, dtype):
    torch.manual_seed(1)
    x = torch.randn(3, 4, 77).to(of)
    quantize = quantize_tokens if of in HALVES else lambda x, dtype: quantize_rows(x[0], dtype)
    found, scale = quantize(x, dtype)
    x = x if of in HALVES else x[0]
    assert found.dtype == dtype
    assert found.shape == x.shape
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale, x.float().abs().amax(-1) / LARGEST[dtype])
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    grid = grid[grid.isfinite() & (grid.abs() <= LARGEST[dtype])]
    scaled = x.double() / scale.double()[..., None]
    nearest = (scaled[..., None] - grid).abs().amin(-1)
    torch.testing.assert_close((scaled - found.double()).abs(), nearest, rtol=1e-5, atol=1e-5)
    assert (found.double().abs().amax(-1) == LARGEST[dtype]).all()


@pytest.mark.parametrize("dtype", CODES)
def test_tokens_of_zeros_of_next_to_nothing_and_of_no_numbers(dtype):
    x = torch.zeros(5, 16, dtype=torch.bfloat16)
    x[1, 3] = 1e-38
    x[2, 3] = -1e-30
    x[3, 3] = float("nan")
    x[4, 3] = float("inf")
    found, scale = quantize_tokens(x, dtype)
    assert scale[:2].tolist() == [0, 0]
    assert not found[:2].float().any()
    assert found[2, 3].float() == -LARGEST[dtype]
    assert scale[3].isnan()
    assert scale[4].isinf()
    weight, of_rows = quantize_rows(torch.randn(8, 16), dtype)
    out = w8a8_linear(x, weight, of_rows)
    assert not out[:2].any()
    assert out[2].isfinite().all()
    assert not out[3:].isfinite().any()


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("out_dtype", HALVES)
def test_products_against_float64(out_dtype, dtype):
    torch.manual_seed(2)
    a, b = ((torch.randn(rows, 300) * 40).clamp(-127, 127).to(dtype) for rows in (5, 7))
    a_scales, b_scales, bias = torch.rand(5) / 100, torch.rand(7) / 100, torch.randn(7).to(out_dtype)
    expected = a.double() @ b.double().T * a_scales.double()[:, None] * b_scales.double()
    tolerance = torch.finfo(out_dtype).eps
    for shift in (None, bias):
        found = scaled_gemm(a, a_scales, b, b_scales, shift, out_dtype)
        assert found.dtype == out_dtype
        shifted = expected if shift is None else expected + shift.double()
        torch.testing.assert_close(found.double(), shifted, rtol=tolerance, atol=tolerance)


def test_sums_of_integers_are_exact():
    k = 200_000
    a = torch.full((1, k), 127, dtype=torch.int8)
    scale = torch.tensor([1 / (127 * k**0.5)])
    assert scaled_gemm(a, scale, a, scale, None, torch.float16).item() == 1


@pytest.mark.parametrize("dtype", CODES)
def test_layers(dtype):
    torch.manual_seed(3)
    x, weight, bias = torch.randn(2, 9, 512).bfloat16(), torch.randn(33, 512), torch.randn(33).bfloat16()
    found = w8a8_linear(x, *quantize_rows(weight, dtype), bias)
    expected = x.double() @ weight.double().T + bias.double()
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).norm() / expected.norm() < (0.02 if dtype == torch.int8 else 0.05)
    assert torch.equal(w8a8_linear(x[1, 4], *quantize_rows(weight, dtype), bias), found[1, 4])


@pytest.mark.parametrize("dtype", CODES)
def test_the_reference_takes_float32_too(dtype):
    torch.manual_seed(4)
    x, bias = torch.randn(2, 5, 48), torch.randn(9)
    weight, scale = quantize_rows(torch.randn(9, 48), dtype)
    found = reference.w8a8_linear(x, weight, scale, bias)
    tokens, of_tokens = reference.quantize(x, dtype)
    expected = (tokens.double() * of_tokens[..., None]) @ (weight.double() * scale[:, None]).T + bias
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(reference.w8a8_linear(x.half(), weight, scale, None), w8a8_linear(x.half(), weight, scale))


class _ScaledGemm(torch.autograd.Function):
    """The gradient of the row scales alone; the reference's product is the result as it is."""

    @staticmethod
    def forward(ctx, a_scales, a, b, b_scales):
        return reference.scaled_gemm(a, a_scales, b, b_scales, None, torch.float32)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.sum(1), None, None, None


def test_a_compiled_function_may_end_with_the_reference():
    """float32 is what the product is summed in: to convert it once more does nothing."""
    a_scales, e4m3 = scales(3).requires_grad_(), torch.float8_e4m3fn
    compiled = torch.compile(_ScaledGemm.apply, backend="aot_eager", fullgraph=True)
    found = compiled(a_scales, codes(3, 16, dtype=e4m3), codes(5, 16, dtype=e4m3), scales(5))
    (gradient,) = torch.autograd.grad(found.sum(), a_scales)
    assert gradient.tolist() == [5.0] * 3


def test_sums_of_the_largest_codes_are_exact():
    for k in (7, 4096, 131071, 140000):
        a, b = torch.full((3, k), -128, dtype=torch.int8), torch.full((17, k), -128, dtype=torch.int8)
        a[:, 0] = 127  # so that the sum is no power of two
        found = reference.scaled_gemm(a, scales(3), b, scales(17), None, torch.float32)
        exact = 128 * 128 * (k - 1) - 127 * 128
        assert torch.equal(found, torch.full((3, 17), exact, dtype=torch.int64).float())


def test_empty_sides():
    weight, scale, bias = codes(6, 4), scales(6), torch.arange(6).half()
    assert w8a8_linear(half(2, 0, 4), weight, scale).shape == (2, 0, 6)
    assert w8a8_linear(half(3, 4), weight[:0], scale[:0]).shape == (3, 0)
    assert w8a8_linear(half(3, 0), weight[:, :0], scale, bias).tolist() == [bias.tolist()] * 3
    assert quantize_tokens(half(3, 0), torch.int8)[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_tokens(half(2, 3).float(), torch.int8), "quantize_tokens: x is float32, expected float16"),
        (lambda: quantize_tokens(half(2, 3), torch.uint8), "quantize_tokens: codes of torch.uint8 are not known"),
        (lambda: quantize_tokens(half(), torch.int8), "quantize_tokens: x is a scalar"),
        (lambda: quantize_rows(half(3), torch.int8), r"quantize_rows: weight has shape \[3\], expected a matrix"),
        (lambda: quantize_rows(codes(3, 3), torch.int8), "quantize_rows: weight is int8, expected float32"),
        (lambda: w8a8_linear(half(2, 3), codes(4, 5), scales(4)), "w8a8_linear: x has 3 features, weight expects 5"),
        (lambda: w8a8_linear(half(2, 3), half(4, 3), scales(4)), "w8a8_linear: codes of torch.float16 are not known"),
        (
            lambda: w8a8_linear(half(2, 3), codes(4, 3), scales(5)),
            r"scaled_gemm: b_scales has shape \[5\], expected \[4\]",
        ),
        (lambda: w8a8_linear(half(2, 3), codes(4, 3), half(4)), "scaled_gemm: b_scales is float16, expected float32"),
        (
            lambda: w8a8_linear(half(2, 3), codes(4, 3), scales(4), half(3)),
            r"scaled_gemm: bias has shape \[3\], expected \[4\]",
        ),
        (
            lambda: w8a8_linear(half(2, 3), codes(4, 3), scales(4), half(4).bfloat16()),
            "scaled_gemm: bias is bfloat16, expected float16",
        ),
        (
            lambda: scaled_gemm(
                codes(2, 3), scales(2), codes(4, 3, dtype=torch.float8_e4m3fn), scales(4), None, torch.float16
            ),
            "scaled_gemm: b_codes is float8_e4m3fn and a_codes int8",
        ),
        (
            lambda: scaled_gemm(codes(2, 3), scales(2), codes(4, 3), scales(4), None, torch.float32),
            "scaled_gemm: out_dtype is torch.float32, expected torch.float16 or torch.bfloat16",
        ),
        (
            lambda: w8a8_linear(half(2, 3), codes(4, 3).to("meta"), scales(4)),
            "w8a8_linear: weight is on meta and x on cpu",
        ),
    ],
)
def test_what_is_rejected(call, message):
    with pytest.raises(TensorError, match=message):
        call()


def test_e4m3_on_a_gpu_without_it(monkeypatch):
    monkeypatch.setattr(w8a8, "architecture", lambda device: "sm_80")
    device = torch.device("cuda", 7)
    w8a8.check_device("w8a8", torch.int8, device)
    with pytest.raises(DeviceError, match=r"float8_e4m3fn needs sm_89 or later, cuda:7 is sm_80: use torch\.int8"):
        w8a8.check_device("w8a8", torch.float8_e4m3fn, device)


def test_registered_as_operators():
    opcheck(torch.ops.warpbus.quantize_tokens.default, (half(2, 3), torch.int8))
    opcheck(
        torch.ops.warpbus.scaled_gemm.default, (codes(2, 3), scales(2), codes(5, 3), scales(5), half(5), torch.float16)
    )
    weight, scale = quantize_rows(half(5, 3), torch.int8)
    compiled = torch.compile(lambda x: w8a8_linear(x, weight, scale) * 2, backend="eager", fullgraph=True)
    assert compiled(half(2, 3)).tolist() == [[6.0] * 5] * 2


def test_shapes_without_data():
    out = w8a8_linear(half(4, 2, 3).to("meta"), codes(5, 3).to("meta"), scales(5).to("meta"))
    assert out.shape == (4, 2, 5)


TILINGS = [(torch.int8, w8a8.AMPERE), *w8a8.HOPPER.items()]


@pytest.mark.parametrize(("kernels", "room"), [(w8a8._AMPERE_KERNELS, 99), (w8a8._HOPPER_KERNELS, 227)])
def test_tilings_fit_a_multiprocessor(kernels, room):
    assert kernels
    assert all(int(dict(kernel.unit.macros)["SHARED_BYTES"]) <= room * 1024 for kernel in kernels.values())


@pytest.mark.parametrize(("dtype", "tilings"), TILINGS)
@pytest.mark.parametrize("m", [1, 16, 100, 1024, 8192])
def test_plans_cover_k_and_sum_exactly(m, dtype, tilings):
    for n, k in [(1, 1), (27392, 4096), (4096, 13696), (100, 1_000_000)]:
        tiling, part = w8a8.choose(m, n, k, tilings, 132)
        assert tiling in tilings
        assert part % (tiling.tile_k if tilings is w8a8.AMPERE else ROW_BYTES) == 0
        assert part <= 131072


def test_k_is_split_where_there_are_few_tiles():
    tilings = w8a8.HOPPER[torch.float8_e4m3fn]
    assert w8a8.choose(16, 4096, 13696, tilings, 132)[1] < 13696
    assert w8a8.choose(4096, 4096, 13696, tilings, 132)[1] >= 13696


@pytest.mark.parametrize(
    ("dtype", "m", "n", "k", "columns"),
    [
        (torch.float8_e4m3fn, 4096, 27392, 4096, 192),
        (torch.float8_e4m3fn, 4096, 4096, 13696, 128),  # 8 waves of tiles, 7.8 of them full, instead of 5.3 in 6
        (torch.float8_e4m3fn, 1024, 4096, 13696, 128),
        (torch.int8, 4096, 4096, 13696, 256),
        (torch.int8, 1024, 4096, 13696, 256),
    ],
)
def test_tilings_that_were_measured_to_be_the_fastest(dtype, m, n, k, columns):
    tiling, part = w8a8.choose(m, n, k, w8a8.HOPPER[dtype], 132)
    assert (tiling.tile_n, part) == (columns, k)


def test_every_gpu_has_a_kernel_for_what_it_has_instructions_for():
    for arch in ARCHITECTURES:
        for dtype in CODES:
            reaches = runs_on(arch, "sm_80" if dtype == torch.int8 else "sm_89")
            kernels = [kernel for (_, codes, _), kernel in w8a8._AMPERE_KERNELS.items() if codes == dtype]
            assert all(kernel.unit.runs_on(arch) == reaches for kernel in kernels)


def test_a_product_of_rows_is_no_view() -> None:
    """So that LoRA can add its part in place."""
    x, weight = torch.randn(3, 32, dtype=torch.bfloat16), torch.randint(-127, 128, (16, 32), dtype=torch.int8)
    y = w8a8_linear(x, weight, torch.rand(16))
    assert not y._is_view()
    assert torch.equal(w8a8_linear(x[None], weight, torch.ones(16))[0], w8a8_linear(x, weight, torch.ones(16)))
