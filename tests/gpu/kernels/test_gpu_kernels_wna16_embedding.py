"""`wna16_embedding` on the GPU: the bits of the dequantized matrix, for odd sizes, in graphs, beyond 2^31 elements."""

import itertools

import pytest
import torch
from gpu_random_weights import quantized

from warpbus.kernels.ops.packed import PackedWeight, pack, packed_shapes
from warpbus.kernels.ops.wna16_embedding import wna16_embedding
from warpbus.qtensor import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = [torch.float16, torch.bfloat16]
SCHEMES = [
    f"w{bits}a16{group}{asym}"
    for bits, group, asym in itertools.product((2, 3, 4, 5, 8), ("", "-g32", "-g128"), ("", "-asym"))
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_have_the_bits_of_the_dequantized_matrix(scheme, dtype):
    weight = quantized(scheme, 301, 384)
    tokens = torch.randint(0, 301, (3, 70), device="cuda")
    found = wna16_embedding(tokens, pack(weight, dtype), dtype)
    assert torch.equal(found, weight.dequantize(dtype)[tokens])
    assert torch.equal(found.cpu(), wna16_embedding(tokens.cpu(), weight.to("cpu"), dtype))


@pytest.mark.parametrize("k", [1, 2, 31, 33, 63, 64, 65, 127, 130, 4096])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 15, 16, 17, 100])
def test_odd_sizes(n, k):
    """All rows; what lies behind the result is not written."""
    weight = quantized("w8a16", n, k)
    tokens = torch.arange(n, device="cuda")
    assert torch.equal(
        wna16_embedding(tokens, pack(weight, torch.float16), torch.float16), weight.dequantize(torch.float16)
    )


def test_tokens_need_not_be_contiguous():
    weight = quantized("w8a16-g128", 100, 256)
    tokens = torch.randint(0, 100, (20, 6), device="cuda")
    packed, whole = pack(weight, torch.bfloat16), weight.dequantize(torch.bfloat16)
    assert torch.equal(wna16_embedding(tokens[:, 2:3], packed, torch.bfloat16), whole[tokens[:, 2:3]])
    assert torch.equal(wna16_embedding(tokens.t(), packed, torch.bfloat16), whole[tokens.t()])


def test_a_captured_graph_reads_other_tokens():
    weight = quantized("w8a16-g128", 1000, 512)
    packed, whole = pack(weight, torch.float16), weight.dequantize(torch.float16)
    tokens = torch.zeros(8, 1, dtype=torch.int64, device="cuda")
    wna16_embedding(tokens, packed, torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = wna16_embedding(tokens, packed, torch.float16)
    for _ in range(3):
        tokens.copy_(torch.randint(0, 1000, (8, 1)))
        graph.replay()
        assert torch.equal(found, whole[tokens])


def test_more_than_two_to_the_31_weights():
    """Codes drawn at random; the last rows against those of a matrix of their own."""
    n, k, scheme = 2**19 + 16, 4096, Scheme.parse("w8a16-g128")
    words, shape = packed_shapes(scheme, n, k)
    codes = torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32, device="cuda")
    scales = torch.rand(shape, device="cuda", dtype=torch.float16)
    last = PackedWeight(codes[-(words // (n // 16)) :].clone(), scales[-1:].clone(), None, scheme, (16, k))
    tokens = torch.arange(n - 16, n, device="cuda")
    found = wna16_embedding(tokens, PackedWeight(codes, scales, None, scheme, (n, k)), torch.float16)
    assert torch.equal(found, wna16_embedding(torch.arange(16, device="cuda"), last, torch.float16))


def test_more_than_two_to_the_31_results():
    weight = quantized("w8a16", 100, 4096)
    packed = pack(weight, torch.float16)
    tokens = torch.randint(0, 100, (2**19 + 5,), device="cuda")
    found = wna16_embedding(tokens, packed, torch.float16)
    whole = weight.dequantize(torch.float16)
    assert torch.equal(found[:100], whole[tokens[:100]])
    assert torch.equal(found[-100:], whole[tokens[-100:]])
