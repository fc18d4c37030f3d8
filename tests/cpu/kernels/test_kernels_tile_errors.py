"""The checker of the GPU tests sees faults that a norm over the whole result does not."""

import pytest
import torch
from tile_errors import assert_close_everywhere

SHAPES = [(256, 1024), (17, 400), (1, 4096), (3, 7)]
DTYPES = [torch.float16, torch.bfloat16]


def product(m, n, dtype):
    """A product of random factors rounded once, and in float64. Rows have sizes of their own."""
    k = 128
    x = torch.randn(m, k, dtype=torch.float64) * 10 ** torch.empty(m, 1, dtype=torch.float64).uniform_(-1, 1)
    expected = x @ torch.randn(k, n, dtype=torch.float64)
    return expected.to(dtype), expected


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_rounded_once_passes(shape, dtype):
    found, expected = product(*shape, dtype)
    assert_close_everywhere(found, expected, torch.finfo(dtype).eps / 2)


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [(0, 0), (240, 1008), (112, 512)])
def test_one_tile_of_zeros(place, dtype):
    found, expected = product(256, 1024, dtype)
    row, column = place
    tile = found[row : row + 16, column : column + 16]
    tile.zero_()
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_close_everywhere(found, expected, torch.finfo(dtype).eps)


@pytest.mark.usefixtures("seed")
def test_a_norm_over_the_whole_result_does_not_see_a_tile():
    expected = torch.randn(1000, 9216, dtype=torch.float64)
    found = expected.bfloat16()
    found[512:528, 1024:1040] = 0
    eps = torch.finfo(torch.bfloat16).eps
    assert ((found.double() - expected).norm() / expected.norm()).item() <= eps
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_close_everywhere(found, expected, eps)


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_of_zero(dtype):
    found, expected = product(256, 1024, dtype)
    column = int(expected[117].abs().argmax())
    found[117, column] = 0
    with pytest.raises(AssertionError, match=rf"1 elements are wrong, the first at \[117, {column}\]"):
        assert_close_everywhere(found, expected, torch.finfo(dtype).eps)


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_tile_that_is_slightly_off(dtype):
    """As with a wrong scale of a group: no element is far off, all of the tile are."""
    found, expected = product(256, 1024, dtype)
    eps = torch.finfo(dtype).eps
    size = expected[32:48].square().mean(-1, keepdim=True).sqrt()
    found[32:48, 64:80] = (expected[32:48, 64:80] + 5 * eps * size).to(dtype)
    with pytest.raises(AssertionError, match=r"1 tiles are wrong, the first is tile \[2, 4\]"):
        assert_close_everywhere(found, expected, eps)


def test_a_missing_number():
    found, expected = product(32, 32, torch.float16)
    found[3, 3] = torch.nan
    with pytest.raises(AssertionError):
        assert_close_everywhere(found, expected, 1.0)
