"""`wna16_embedding` on the CPU: packed or not, all numbers of bits; what is refused."""

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import SchemeError, TensorError
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.wna16_embedding import wna16_embedding
from warpbus.qtensor import QTensor, Scheme

SCHEMES = ["w2a16-asym", "w3a16-g64", "w4a16-g32", "w5a16-g128", "w8a16", "w8a16-g128", "w8a16-g32-asym"]
DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def quantized(scheme="w8a16-g128", n=37, k=128, dtype=torch.float32):
    scheme = Scheme.parse(scheme)
    shape = n, scheme.groups(k)
    codes = torch.randint(0, scheme.max_code + 1, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, scheme.max_code + 1, shape, dtype=torch.uint8)
    scales = ((torch.rand(shape) + 0.5) / scheme.max_code).to(dtype)
    return QTensor.from_codes(scheme, codes, scales, None if scheme.symmetric else zeros)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_have_the_bits_of_the_dequantized_matrix_packed_or_not(scheme, dtype):
    weight, tokens = quantized(scheme), torch.randint(0, 37, (3, 5))
    expected = weight.dequantize(dtype)[tokens]
    assert torch.equal(wna16_embedding(tokens, weight, dtype), expected)
    packed = pack(weight, dtype)
    assert torch.equal(wna16_embedding(tokens, packed, dtype), expected)
    assert torch.equal(wna16_embedding(tokens.t(), packed, dtype), expected.transpose(0, 1))


def test_a_matrix_that_is_not_packed_gives_any_dtype():
    weight, tokens = quantized("w8a16", k=33), torch.tensor([36, 0, 36])
    assert torch.equal(wna16_embedding(tokens, weight, torch.float32), weight.dequantize(torch.float32)[tokens])


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_tokens_give_no_rows(shape):
    tokens, weight = torch.empty(shape, dtype=torch.int64), quantized()
    for form in (weight, pack(weight, torch.float16)):
        assert wna16_embedding(tokens, form, torch.float16).shape == (*shape, 128)


def test_a_token_beyond_the_vocabulary_is_an_error_on_the_cpu():
    with pytest.raises(IndexError):
        wna16_embedding(torch.tensor([37]), quantized(), torch.float16)


@pytest.mark.parametrize("scheme", ["w8a16-g128", "w4a16-g32-asym"])
def test_the_operator_satisfies_torch(scheme):
    weight = pack(quantized(scheme), torch.bfloat16)
    group = weight.scheme.group_size
    arguments = torch.tensor([3, 1]), weight.codes, weight.scales, weight.zeros, 37, 128, weight.scheme.bits, group
    opcheck(torch.ops.warpbus.wna16_embedding.default, arguments)


def test_what_does_not_fit_is_refused():
    weight = quantized()
    with pytest.raises(TensorError, match=r"tokens are torch\.int32, expected torch\.int64"):
        wna16_embedding(torch.zeros(1, dtype=torch.int32), weight, torch.float16)
    with pytest.raises(TensorError, match=r"tokens is on meta"):
        wna16_embedding(torch.zeros(1, dtype=torch.int64, device="meta"), weight, torch.float16)
    with pytest.raises(TensorError, match="the dtype of the packed weight"):
        wna16_embedding(torch.tensor([0]), pack(weight, torch.float16), torch.float32)
    values = QTensor.from_values(Scheme.parse("w8a8-int8"), torch.ones(4, 8, dtype=torch.int8), torch.ones(4))
    with pytest.raises(TensorError, match="wna16_embedding: the weight is w8a8-int8"):
        wna16_embedding(torch.tensor([0]), values, torch.float16)


def test_single_rows_of_a_trellis_are_refused():
    scheme = Scheme.parse("w2a16-trellis")
    weight = QTensor(scheme, torch.zeros(16, 8, dtype=torch.int32), torch.ones(16, 1), None, (16, 128))
    with pytest.raises(SchemeError, match="single rows of w2a16-trellis"):
        weight.take(torch.tensor([0]))
