"""Sums and the sigmoid on a GPU: against float64, at the edges of blocks and grids, on streams and in graphs."""

import pytest
import torch

from warpbus.errors import TensorError
from warpbus.kernels.ops.elementwise import VECTOR_ADD_VARIANTS, matrix_add, sigmoid, vector_add, volume_add

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def poison(*shape, dtype):
    """NaN in the memory that the next output of this shape is given."""
    torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def exact_sum(a, b):
    return (a.double() + b.double()).to(a.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["auto", *VECTOR_ADD_VARIANTS])
@pytest.mark.parametrize("size", [1, 3, 7, 8, 255, 256, 4096, 4103, 8191, 1_000_003])
def test_vector_add(size, variant, dtype):
    a, b = random(size, dtype=dtype), random(size, dtype=dtype, seed=1)
    poison(size, dtype=dtype)
    assert torch.equal(vector_add(a, b, variant), exact_sum(a, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_that_begin_anywhere(dtype):
    a, b = random(5001, dtype=dtype), random(10_000, dtype=dtype, seed=1)[::2]
    assert torch.equal(vector_add(a[1:], b), exact_sum(a[1:], b))
    with pytest.raises(TensorError, match="does not begin at a multiple of 16 bytes"):
        vector_add(a[1:], b, "vectorised")


@pytest.mark.parametrize("variant", VECTOR_ADD_VARIANTS)
def test_more_than_31_bits_of_elements(variant):
    size = 2**31 + 13
    if torch.cuda.mem_get_info()[0] < 5 * size * 2:
        pytest.skip("needs 22 GB of free GPU memory")
    a = torch.arange(2048, device="cuda").half().repeat(2**20 + 1)[:size]
    out = vector_add(a, a, variant)
    for first in range(0, size, 2**28):
        part = slice(first, first + 2**28)
        assert torch.equal(out[part], a[part] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 31), (9, 33), (1, 100_003), (600_001, 3)])
def test_matrix_add(shape, dtype):
    a, b = random(*shape, dtype=dtype), random(*shape[::-1], dtype=dtype, seed=1).t()
    poison(*shape, dtype=dtype)
    out = matrix_add(a, b)
    assert out.is_contiguous()
    assert torch.equal(out, exact_sum(a, b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 33), (140_001, 2, 3), (2, 300_001, 2), (2, 3, 70_001)])
def test_volume_add(shape, dtype):
    a, b = random(*shape, dtype=dtype), random(*shape[::-1], dtype=dtype, seed=1).permute(2, 1, 0)
    poison(*shape, dtype=dtype)
    out = volume_add(a, b)
    assert out.is_contiguous()
    assert torch.equal(out, exact_sum(a, b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (1_000_003,), (7, 0), (3, 5, 7, 11)])
def test_sigmoid(shape, dtype):
    x = random(*shape, dtype=dtype) * 5
    poison(*shape, dtype=dtype)
    out, expected = sigmoid(x), torch.sigmoid(x.double())
    assert out.shape == x.shape
    # The exponential is the fast one: its error grows with |x| and stays below 32 units of float32 here.
    tolerance = torch.finfo(dtype).eps + 32 * 2**-24
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-7)


def test_sigmoid_far_out():
    x = torch.tensor([-1e4, -89.0, 0.0, 89.0, 1e4, float("inf"), float("-inf"), float("nan")], device="cuda")
    expected = torch.tensor([0, 0, 0.5, 1, 1, 1, 0, float("nan")], device="cuda")
    torch.testing.assert_close(sigmoid(x), expected, equal_nan=True)


def test_empty():
    assert vector_add(torch.empty(0, device="cuda"), torch.empty(0, device="cuda")).shape == (0,)
    assert matrix_add(torch.empty(0, 3, device="cuda"), torch.empty(0, 3, device="cuda")).shape == (0, 3)
    assert volume_add(torch.empty(2, 0, 3, device="cuda"), torch.empty(2, 0, 3, device="cuda")).shape == (2, 0, 3)


def test_streams_and_graphs():
    a, b = random(100_003), random(100_003, seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = sigmoid(vector_add(a, b))
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(out, torch.sigmoid(a + b), rtol=1e-5, atol=1e-7)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sigmoid(vector_add(a, b))
    a.copy_(random(100_003, seed=2))
    graph.replay()
    torch.testing.assert_close(out, torch.sigmoid(a + b), rtol=1e-5, atol=1e-7)


def test_compiled_by_torch():
    a, b = random(3, 5), random(3, 5, seed=1)
    compiled = torch.compile(lambda a, b: sigmoid(matrix_add(a, b)) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, b), torch.sigmoid(a + b) * 2, rtol=1e-5, atol=1e-7)
