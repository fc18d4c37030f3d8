"""gemm, linear and gemv: the reference, what they reject, and which tiles are chosen."""

import math

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops import gemm_sm90
from warpbus.kernels.ops.arguments import ACTIVATIONS
from warpbus.kernels.ops.gemm import VARIANTS, gemm, linear
from warpbus.kernels.ops.gemv import gemv

EXPECTED = {
    "none": lambda x: x,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_against_float64(activation, dtype):
    torch.manual_seed(1)
    a, b, bias = torch.randn(5, 33).to(dtype), torch.randn(33, 7).to(dtype), torch.randn(7).to(dtype)
    expected = EXPECTED[activation](a.double() @ b.double() + bias.double())
    tolerance = torch.finfo(dtype).eps
    found = gemm(a, b, bias=bias, activation=activation)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(linear(a[None], b.T, bias, activation=activation)[0], found)
    vector = gemv(b.T, a[2], bias, activation=activation)
    torch.testing.assert_close(vector.double(), expected[2], rtol=tolerance, atol=tolerance)


def test_empty_sides():
    a = torch.ones(3, 0, dtype=torch.float16)
    bias = torch.tensor([1.0, -1.0], dtype=torch.float16)
    assert gemm(a, a.new_ones(0, 2), bias=bias, activation="relu").tolist() == [[1.0, 0.0]] * 3
    assert gemm(a[:0], a.new_ones(0, 2)).shape == (0, 2)
    assert linear(torch.ones(2, 0, 4, dtype=torch.float16), torch.ones(6, 4, dtype=torch.float16)).shape == (2, 0, 6)
    assert gemv(a, a.new_ones(0)).tolist() == [0.0, 0.0, 0.0]


def half(*shape):
    return torch.ones(shape, dtype=torch.float16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gemm(half(2, 3), half(4, 5)), TensorError, r"gemm: b has shape \[4, 5\], expected \[3, 5\]"),
        (lambda: gemm(half(3), half(3, 5)), TensorError, r"gemm: a has shape \[3\], expected a matrix"),
        (lambda: gemm(half(2, 3).float(), half(3, 5)), TensorError, "gemm: a is float32, expected float16, bfloat16"),
        (lambda: gemm(half(2, 3), half(3, 5).bfloat16()), TensorError, "gemm: b is bfloat16 and a float16"),
        (
            lambda: gemm(half(2, 3), half(3, 5), bias=half(4)),
            TensorError,
            r"gemm: bias has shape \[4\], expected \[5\]",
        ),
        (lambda: gemm(half(2, 3), half(3, 5), activation="tanh"), UsageError, "activation is 'tanh': give one of none"),
        (lambda: gemm(half(2, 3), half(3, 5), variant="fast"), UsageError, "variant is 'fast': give one of auto"),
        (lambda: linear(half(2, 3), half(5, 4)), TensorError, "expected"),
        (lambda: gemv(half(2, 3), half(2)), TensorError, r"gemv: x has shape \[2\], expected \[3\]"),
        (lambda: gemv(half(2, 3), half(3), activation="x"), UsageError, "gemv: activation is 'x'"),
    ],
)
def test_what_is_rejected(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_registered_as_operators():
    opcheck(torch.ops.warpbus.gemm.default, (half(2, 3), half(3, 5), half(5), "gelu", "auto"))
    opcheck(torch.ops.warpbus.gemv.default, (half(2, 3), half(3), None, "none"))
    compiled = torch.compile(lambda x, w: linear(x, w) * 2, backend="eager", fullgraph=True)
    assert compiled(half(2, 3), half(5, 3)).tolist() == [[6.0] * 5] * 2


def test_shapes_without_data():
    x, weight = half(4, 2, 3).to("meta"), half(5, 3).to("meta")
    assert linear(x, weight).shape == (4, 2, 5)
    assert gemv(weight, x[0, 0]).shape == (5,)


def test_autocast():
    x, weight, bias = torch.randn(4, 8), torch.randn(3, 8), torch.randn(3)
    with pytest.raises(TensorError, match="float32"):
        linear(x, weight, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, vector = linear(x, weight, bias), gemv(weight, x[1], bias)
        compiled = torch.compile(linear, backend="eager", fullgraph=True)(x, weight, bias)
    assert found.dtype == vector.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), x @ weight.T + bias, rtol=0.05, atol=0.05)
    assert torch.equal(vector, found[1])
    assert torch.equal(compiled, found)


@pytest.mark.parametrize("biased", [True, False])
def test_gradients(biased):
    x, weight = torch.randn(2, 3, 8), torch.randn(5, 8)
    ours = [t.bfloat16().requires_grad_() for t in (x, weight, torch.randn(5))]
    theirs = [t.detach().float().requires_grad_() for t in ours]
    pull = torch.randn(2, 3, 5)
    linear(ours[0], ours[1], ours[2] if biased else None).backward(pull.bfloat16())
    torch.nn.functional.linear(theirs[0], theirs[1], theirs[2] if biased else None).backward(pull)
    for mine, other in zip(ours[: 2 + biased], theirs, strict=False):
        torch.testing.assert_close(mine.grad.float(), other.grad, rtol=0.03, atol=0.06)


def test_no_gradient_through_an_activation():
    x, weight = half(2, 3).requires_grad_(), half(5, 3)
    with pytest.raises(UsageError, match="no gradient through activation 'silu'"):
        linear(x, weight, activation="silu")
    with torch.no_grad():
        assert linear(x, weight, activation="silu").shape == (2, 5)


def test_every_variant_is_the_reference_on_the_cpu():
    a, b = torch.randn(4, 8).half(), torch.randn(8, 6).half()
    for variant in VARIANTS:
        assert torch.equal(gemm(a, b, variant=variant), gemm(a, b))


def test_tilings_fit_a_multiprocessor():
    for tiling in gemm_sm90.TILINGS:
        kernel = gemm_sm90._kernel(torch.float16, tiling, 0, 0, 0)
        assert int(dict(kernel.unit.macros)["SHARED_BYTES"]) <= 227 * 1024, tiling
        assert tiling.tile_n % 16 == 0


@pytest.mark.parametrize("activation", [0, 1])
@pytest.mark.parametrize("a_major", [0, 1])
@pytest.mark.parametrize("b_major", [0, 1])
def test_a_tiling_is_compiled_for_every_product(activation, a_major, b_major):
    for m, n, k in [(1, 1, 1), (64, 64, 64), (1024, 4608, 4096), (16384, 16384, 16384), (4096, 27392, 4096)]:
        chosen = gemm_sm90.choose(m, n, k, a_major, b_major, activation, 132)
        assert chosen.fits(a_major, b_major, activation)


def test_tiles_are_chosen_for_full_waves():
    def tile(m, n, k):
        chosen = gemm_sm90.choose(m, n, k, 0, 0, 0, 132)
        return chosen.tile_m, chosen.tile_n

    # On 132 multiprocessors 32 * 4 tiles of 256 x 144 are one wave, 18 * 8 of 128 x 256 are two.
    assert tile(1024, 4608, 4096)[1] == 144
    assert tile(4096, 4096, 4096) == (128, 256)
    assert math.prod(tile(1024, 1024, 1024)) == 64 * 128
