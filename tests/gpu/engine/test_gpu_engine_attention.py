"""A piece of a prompt attends to all that is stored before it, whatever kernel torch has for its heads."""

from dataclasses import replace

import pytest
import torch
from dense_configs import with_traits
from gpu_engine_models import GPU, SMALL
from torch import Tensor

from warpbus.engine.attention import ChunkSpan, PrefillAttention
from warpbus.engine.blocks import BLOCK
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.positions import RopeAngles
from warpbus.models.layers import Rotary, rotate

TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-3}
LENGTH, START = 300, 2 * BLOCK + 5


def expected_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of `[tokens, heads, head_dim]` in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [64, 80, 128, 20])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_the_second_piece_sees_the_first(dtype: torch.dtype, size: int, kv_heads: int) -> None:
    rope = replace(SMALL.rope, rotary_dim=size // 2)
    config = with_traits(SMALL, num_layers=1, num_heads=8, num_kv_heads=kv_heads, head_dim=size, rope=rope)
    count = -(-LENGTH // BLOCK)
    cache = KVCache(config, count, device=GPU, dtype=dtype)
    cache.commit(count)
    for part in cache.layers[0]:
        if part is not None:
            part.fill_(100.0)  # what nobody wrote is poison where it is read
    qkv = torch.randn(LENGTH, 8 + 2 * kv_heads, size, device=GPU).to(dtype)
    blocks = torch.randperm(count).int()
    found = []
    for start, end in ((0, START), (START, LENGTH)):
        positions = torch.arange(start, end, dtype=torch.int32)
        slots = blocks[positions // BLOCK].long() * BLOCK + positions % BLOCK
        angles = RopeAngles(Rotary(config.rope).table(LENGTH, GPU), positions.to(GPU))
        span = ChunkSpan(0, end - start, start, blocks.to(GPU) if start else None)
        attention = PrefillAttention(config, angles, cache, slots.to(GPU), [span])
        found.append(attention.attend_fused(0, qkv[start:end].flatten(-2)[None])[0])
    angles = Rotary(config.rope)(torch.arange(LENGTH, device=GPU)[None], torch.float32)
    q, k, v = qkv[None].split((8, kv_heads, kv_heads), dim=2)
    turned = (rotate(x.float(), angles, config.rope.interleaved)[0] for x in (q, k))
    expected = expected_of(*turned, v[0]).flatten(-2)
    error = (torch.cat(found).double() - expected).abs().max()
    assert error < TOLERANCES[dtype] * expected.abs().max()
