"""gather_cache on a GPU: the same numbers as the reference's, for every dtype, block and alignment; graphs."""

import pytest
import torch

from warpbus.kernels.ops.cache import gather_cache
from warpbus.kernels.reference import cache as reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CODES = [torch.int8, torch.float8_e4m3fn]
HEADS = [(2, 128), (1, 64), (32, 128), (3, 80), (4, 256), (2, 16), (5, 24), (2, 7)]


def stored(dtype, kept, blocks, kv_heads, block, size):
    """The values of the second of three layers: random bits that are numbers, and scales."""
    shape = (blocks, 3, 2, kv_heads, block)
    if kept not in CODES:
        return torch.randn(*shape, size, device="cuda").to(dtype)[:, 1, 1], None
    codes = torch.randint(0, 256, (*shape, size), device="cuda", dtype=torch.uint8)
    if kept == torch.float8_e4m3fn:
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    scales = torch.rand(shape, device="cuda") + 0.01
    scales[:, :, :, 0, 0] = 0
    return codes.view(kept)[:, 1, 1], scales[:, 1, 1]


@pytest.mark.parametrize("kept", [None, *CODES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "size"), HEADS)
def test_every_cache(kv_heads, size, dtype, kept):
    for block, tokens in ((32, 1), (32, 31), (32, 32), (32, 1000), (16, 77), (64, 500), (256, 300)):
        count = -(-tokens // block)
        cache, scales = stored(dtype, kept or dtype, count + 4, kv_heads, block, size)
        blocks = torch.full((count + 1,), 2**31 - 1, dtype=torch.int64, device="cuda")  # the last one is not there
        blocks[:count] = torch.randperm(count + 4, device="cuda")[:count]
        wanted = reference.gather_cache(cache, scales, blocks, tokens, dtype)
        for table in (blocks, blocks.int(), blocks.int().repeat_interleave(3)[::3]):
            torch.full_like(wanted, float("nan"))  # poison where the output will be
            found = gather_cache(cache, scales, table, tokens, dtype)
            assert found.shape == (tokens, kv_heads, size)
            assert torch.equal(found, wanted)


def test_no_tokens():
    cache, scales = stored(torch.float16, torch.int8, 2, 2, 32, 64)
    blocks = torch.zeros(1, dtype=torch.int32, device="cuda")
    assert gather_cache(cache, scales, blocks, 0, torch.float16).shape == (0, 2, 64)


def test_a_long_prompt_in_a_graph():
    cache, scales = stored(torch.bfloat16, torch.float8_e4m3fn, 1100, 2, 32, 128)
    blocks = torch.randperm(1100, device="cuda")[:1024].int()
    wanted = gather_cache(cache, scales, blocks, 32_760, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gather_cache(cache, scales, blocks, 32_760, torch.bfloat16)
    graph.replay()
    assert torch.equal(found, wanted)
    assert torch.equal(wanted, reference.gather_cache(cache, scales, blocks, 32_760, torch.bfloat16))
