"""Rounding to FP8: the reference against the nearest codes, what is refused, and the operator."""

import pytest
import torch
from torch.library import opcheck

from warpbus.cuda.jit import ARCHITECTURES
from warpbus.cuda.kernel import runs_on
from warpbus.errors import TensorError
from warpbus.kernels.ops import fp8
from warpbus.kernels.ops.fp8 import FORMATS, round_to_fp8

E4M3, E5M2 = FORMATS
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("of", DTYPES)
def test_codes_are_the_nearest(of, dtype):
    torch.manual_seed(1)
    x = (torch.randn(7, 48) * 10 ** torch.empty(7, 48).uniform_(-4, 1)).to(of)
    codes, _, scale = round_to_fp8(x, dtype)
    largest = torch.finfo(dtype).max
    assert codes.dtype == dtype
    assert scale.dtype == torch.float32
    assert scale == x.abs().max().float() / largest
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    grid = grid[grid.isfinite()]
    scaled = x.double() / scale.double()
    nearest = (scaled[..., None] - grid).abs().amin(-1)
    torch.testing.assert_close((scaled - codes.double()).abs(), nearest, rtol=1e-5, atol=1e-5)
    assert codes.double().abs().max() == largest


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("m", [1, 15, 16, 37])
def test_columns_are_padded_with_zeros(m, dtype):
    x = torch.randn(m, 32)
    codes, columns, scale = round_to_fp8(x, dtype, transposed=True)
    assert columns.shape == (32, -(-m // 16) * 16)
    assert columns.is_contiguous()
    assert torch.equal(columns[:, :m].float(), codes.float().T)
    assert not columns[:, m:].view(torch.uint8).any()
    alone, none, again = round_to_fp8(x, dtype)
    assert torch.equal(alone.view(torch.uint8), codes.view(torch.uint8))
    assert none.shape == (32, 0)
    assert again == scale


@pytest.mark.parametrize("dtype", FORMATS)
def test_zeros_next_to_nothing_and_no_numbers(dtype):
    zeros = torch.zeros(3, 16)
    codes, _, scale = round_to_fp8(zeros, dtype)
    assert not codes.float().any()
    assert scale == torch.tensor(1e-12) / torch.finfo(dtype).max
    codes, _, _ = round_to_fp8(torch.full((3, 16), 1e-40), dtype)
    assert not codes.float().any()
    infinite = zeros.clone()
    infinite[1, 3], infinite[2, 2] = -torch.inf, 1
    codes, columns, scale = round_to_fp8(infinite, dtype, transposed=True)
    assert scale.isinf()
    assert torch.equal(codes.float().isnan(), infinite.isinf())
    assert not columns[:, 3:].view(torch.uint8).any()
    infinite[0, 0] = torch.nan
    codes, columns, scale = round_to_fp8(infinite, dtype, transposed=True)
    assert scale.isnan()
    assert codes.float().isnan().all()
    assert not columns[:, 3:].view(torch.uint8).any()


@pytest.mark.parametrize(
    ("x", "dtype", "message"),
    [
        (torch.ones(16), E4M3, r"round_to_fp8: x has shape \[16\], expected a matrix"),
        (torch.ones(2, 24), E4M3, r"round_to_fp8: x has shape \[2, 24\], expected rows and a multiple of 16 columns"),
        (torch.ones(0, 16), E5M2, r"round_to_fp8: x has shape \[0, 16\], expected rows"),
        (torch.ones(2, 0), E5M2, r"round_to_fp8: x has shape \[2, 0\], expected rows"),
        (torch.ones(2, 16).double(), E4M3, "round_to_fp8: x is float64, expected float32"),
        (torch.ones(2, 16), torch.int8, "round_to_fp8: codes of torch.int8 are not known: use torch.float8_e4m3fn"),
    ],
)
def test_what_is_refused(x, dtype, message):
    with pytest.raises(TensorError, match=message):
        round_to_fp8(x, dtype)


@pytest.mark.parametrize("transposed", [False, True])
def test_registered_as_an_operator(transposed):
    x = torch.randn(5, 32).bfloat16()
    opcheck(torch.ops.warpbus.round_to_fp8.default, (x, E5M2, transposed))
    compiled = torch.compile(
        lambda x: round_to_fp8(x, E4M3, transposed=transposed)[1].float() * 2, backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(x), round_to_fp8(x, E4M3, transposed=transposed)[1].float() * 2)


def test_shapes_without_data():
    codes, columns, scale = round_to_fp8(torch.empty(37, 64, device="meta"), E4M3, transposed=True)
    assert (codes.shape, columns.shape, scale.shape) == ((37, 64), (64, 48), ())


def test_kernels_are_for_gpus_that_have_the_instructions():
    for arch in ARCHITECTURES:
        assert all(of.runs_on(arch) == runs_on(arch, "sm_89") for of in fp8._UNITS.values())
