"""gather_cache: what comes out is what went in, in order and whatever lies elsewhere; refusals."""

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops.cache import gather_cache
from warpbus.kernels.reference.cache import quantize

CODES = [torch.int8, torch.float8_e4m3fn]
BLOCKS = torch.tensor([4, 0, 3, 2**31 - 1], dtype=torch.int32)  # the last one is not there


def filled(dtype, stored, tokens, kv_heads=3, size=8, block=16):
    """A cache of five blocks, NaN but for the tokens, the values that went in, and scales."""
    values = torch.randn(tokens, kv_heads, size).to(dtype)
    shape = (5, 2, 2, kv_heads, block)
    coded = stored in CODES
    data = torch.full((*shape, size), 0x7F, dtype=torch.uint8).view(stored) if coded else None
    data = torch.full((*shape, size), float("nan"), dtype=dtype) if data is None else data
    scales = torch.full(shape, float("nan")) if coded else None
    cache, scale = data[:, 1, 0], None if scales is None else scales[:, 1, 0]
    for at in range(tokens):
        vector, place = values[at], (BLOCKS[at // block], slice(None), at % block)
        if scale is not None:
            vector, scale[place] = quantize(vector, stored)
            values[at] = (vector.float() * scale[place][..., None]).to(dtype)
        cache[place] = vector
    return cache, scale, values


@pytest.mark.parametrize("indices", [torch.int32, torch.int64])
@pytest.mark.parametrize("stored", [None, *CODES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_in_order(dtype, stored, indices):
    torch.manual_seed(1)
    for tokens in (1, 15, 16, 17, 48):
        cache, scales, wanted = filled(dtype, stored or dtype, tokens)
        found = gather_cache(cache, scales, BLOCKS.to(indices), tokens, dtype)
        assert found.dtype == dtype
        assert found.is_contiguous()
        assert torch.equal(found, wanted)


def test_no_tokens():
    cache, _, _ = filled(torch.float32, torch.float32, 1)
    assert gather_cache(cache, None, BLOCKS, 0, torch.float32).shape == (0, 3, 8)
    assert gather_cache(cache, None, BLOCKS[:0], 0, torch.float32).shape == (0, 3, 8)


def test_what_it_refuses():
    cache, scales, _ = filled(torch.float16, torch.int8, 20)
    with pytest.raises(UsageError, match="tokens is 65, and the blocks hold 64"):
        gather_cache(cache, scales, BLOCKS, 65, torch.float16)
    with pytest.raises(TensorError, match=r"cache has shape \[5, 3, 16\]"):
        gather_cache(cache[..., 0], scales, BLOCKS, 20, torch.float16)
    with pytest.raises(TensorError, match=r"scales does not go with a cache of torch\.int8"):
        gather_cache(cache, None, BLOCKS, 20, torch.float16)
    with pytest.raises(TensorError, match=r"cache is torch\.float16 .* give torch\.float32, torch\.int8"):
        gather_cache(cache.half(), None, BLOCKS, 20, torch.float32)
    with pytest.raises(TensorError, match=r"dtype is torch\.int8"):
        gather_cache(cache, scales, BLOCKS, 20, torch.int8)
    with pytest.raises(TensorError, match=r"blocks are torch\.int16"):
        gather_cache(cache, scales, BLOCKS.short(), 20, torch.float16)


@pytest.mark.parametrize("stored", [torch.float16, torch.int8])
def test_registered_as_torch_wants(stored):
    cache, scales, _ = filled(torch.float16, stored, 20)
    arguments = (cache, scales, BLOCKS[:2], 20, torch.float16)
    checked = opcheck(torch.ops.warpbus.gather_cache.default, arguments)
    assert set(checked.values()) == {"SUCCESS"}
