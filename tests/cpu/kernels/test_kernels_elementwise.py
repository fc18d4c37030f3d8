"""Sums and the sigmoid on the CPU: against float64, what they refuse, and what torch.compile sees of them."""

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops.elementwise import VECTOR_ADD_VARIANTS, matrix_add, sigmoid, vector_add, volume_add

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SUMS = [(vector_add, (1003,)), (matrix_add, (37, 29)), (volume_add, (5, 11, 13))]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("add", "shape"), SUMS)
def test_sum_is_rounded_once(add, shape, dtype):
    a, b = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    out = add(a, b)
    assert out.dtype == dtype
    assert torch.equal(out, (a.double() + b.double()).to(dtype))


@pytest.mark.parametrize("variant", VECTOR_ADD_VARIANTS)
def test_variants_and_strides(variant):
    a, b = random(300)[::3], random(100, seed=1)
    out = vector_add(a, b, variant)
    assert out.is_contiguous()
    assert torch.equal(out, a + b)


@pytest.mark.parametrize(("add", "shape"), [(vector_add, (0,)), (matrix_add, (0, 4)), (volume_add, (2, 0, 3))])
def test_empty(add, shape):
    assert add(torch.empty(shape), torch.empty(shape)).shape == shape


def test_transposed_matrices():
    a, b = random(7, 9).t(), random(9, 7, seed=1)
    out = matrix_add(a, b)
    assert out.is_contiguous()
    assert torch.equal(out, a + b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid(dtype):
    x = torch.cat([random(1000, dtype=dtype) * 5, torch.tensor([-1e4, 1e4, 0.0], dtype=dtype)])
    expected = torch.sigmoid(x.double())
    torch.testing.assert_close(sigmoid(x).double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_what_sums_refuse():
    a = random(4)
    with pytest.raises(TensorError, match=r"vector_add: a has shape \[2, 2\], expected a vector: reshape it"):
        vector_add(a.view(2, 2), a.view(2, 2))
    with pytest.raises(TensorError, match=r"volume_add: a has shape \[4\], expected a volume"):
        volume_add(a, a)
    with pytest.raises(TensorError, match=r"vector_add: a has shape \[4\] and b \[3\]: .* nothing is broadcast"):
        vector_add(a, a[:3])
    with pytest.raises(TensorError, match=r"vector_add: b is float16 and a float32: convert one of them"):
        vector_add(a, a.half())
    with pytest.raises(TensorError, match=r"matrix_add: b is on meta and a on cpu: move one"):
        matrix_add(a[None], a[None].to("meta"))
    with pytest.raises(TensorError, match=r"sigmoid: x is int64, expected float32, float16, bfloat16"):
        sigmoid(torch.arange(3))
    with pytest.raises(UsageError, match=r"vector_add: variant is 'fast': give auto, scalar or vectorised"):
        vector_add(a, a, "fast")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vector_add", (random(9), random(9), "auto")),
        ("matrix_add", (random(3, 5), random(3, 5))),
        ("volume_add", (random(2, 3, 5), random(2, 3, 5))),
        ("sigmoid", (random(3, 5).t(),)),
    ],
)
def test_registered_as_torch_wants(name, arguments):
    checked = opcheck(getattr(torch.ops.warpbus, name).default, arguments)
    assert set(checked.values()) == {"SUCCESS"}


def test_shapes_without_data():
    with torch.device("meta"):
        assert sigmoid(matrix_add(torch.empty(3, 4), torch.empty(3, 4))).shape == (3, 4)
