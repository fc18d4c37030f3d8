import pytest
import torch

from warpbus.engine.attention import FusedPrompt, FusedStep, PromptAttention, StepAttention
from warpbus.engine.kv_cache import KVCache, KVPool
from warpbus.models import ModelConfig, RopeConfig
from warpbus.models.layers import CausalAttention, Rotary, rotate

CPU = torch.device("cpu")


def config(num_kv_heads):
    return ModelConfig(
        family="glm",
        vocab_size=10,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        ffn_size=8,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e4, rotary_dim=8, interleaved=True),
        max_context=4096,
    )


def drawn(batch, tokens, num_kv_heads):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(batch, tokens, heads, 8, generator=generator) for heads in (4, num_kv_heads, num_kv_heads))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("pieces", [(7,), (3, 4), (1, 1, 5)])
def test_a_prompt_in_pieces_attends_as_a_whole(num_kv_heads, pieces):
    q, k, v = drawn(2, 7, num_kv_heads)
    expected = CausalAttention().attend(0, q, k, v, torch.arange(7).expand(2, 7))
    cache = KVCache(config(num_kv_heads), 2, 100, device=CPU, dtype=torch.float32)
    cache.reserve(7)
    start, found = 0, []
    for tokens in pieces:
        part = slice(start, start + tokens)
        positions = torch.arange(start, start + tokens).expand(2, tokens)
        attention = PromptAttention(cache, start, tokens)
        found.append(attention.attend(1, q[:, part], k[:, part], v[:, part], positions))
        start += tokens
    torch.testing.assert_close(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(5, 5), (2, 5), (5, 1)])
def test_steps_attend_to_their_own_row_and_never_to_padding(num_kv_heads, lengths):
    """Rows padded to 5 tokens go on from their own lengths, for 4 steps; each equals its own unpadded row."""
    q, k, v = drawn(2, 9, num_kv_heads)
    cache = KVCache(config(num_kv_heads), 2, 100, device=CPU, dtype=torch.float32)
    cache.reserve(9)
    padded_k, padded_v = k[:, :5].clone(), v[:, :5].clone()
    for row, length in enumerate(lengths):
        padded_k[row, length:] = 1e4
        padded_v[row, length:] = 1e4
    PromptAttention(cache, 0, 5).attend(0, q[:, :5], padded_k, padded_v, torch.arange(5).expand(2, 5))
    for step in range(4):
        at = torch.tensor([[length + step] for length in lengths])
        one = [torch.stack([x[row, at[row]] for row in range(2)]) for x in (q, k, v)]
        found = StepAttention(cache, at[:, 0].tolist()).attend(0, *one, at)
        for row, length in enumerate(lengths):
            end = length + step + 1
            whole = (x[row : row + 1, :end] for x in (q, k, v))
            expected = CausalAttention().attend(0, *whole, torch.arange(end)[None])
            torch.testing.assert_close(found[row, 0], expected[0, -1])


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("auto", 1e-5), ("int8", 0.02), ("fp8", 0.1)])
@pytest.mark.parametrize("lengths", [(5, 5), (2, 5)])
def test_rows_of_a_pool_attend_as_the_rows_alone(lengths, kv_dtype, tolerance):
    """Prompts in two pieces, then steps, from projections that are not rotated; padding is poisoned."""
    shape = config(2)
    qkv = torch.randn(2, 9, (4 + 2 * 2) * 8, generator=torch.Generator().manual_seed(1))
    rotary = Rotary(shape.rope)
    table = rotary.table(64, CPU)
    cache = KVPool(shape, 3 * 20, device=CPU, dtype=torch.float32, kv_dtype=kv_dtype).rows(3)
    padded = qkv[:, :5].clone()
    for row, length in enumerate(lengths):
        padded[row, length:] = 100.0
    found = [FusedPrompt(shape, table, cache, 0, 3).attend_fused(1, padded[:, :3])]
    found.append(FusedPrompt(shape, table, cache, 3, 2).attend_fused(1, padded[:, 3:]))
    prompts = torch.cat(found, dim=1)
    steps = []
    for step in range(4):
        at = torch.tensor([length + step for length in lengths], dtype=torch.int32)
        one = qkv[torch.arange(2), at.long()][:, None]
        steps.append(FusedStep(shape, table, cache, at, 16).attend_fused(1, one))
    positions = torch.arange(9)[None]
    angles = rotary(positions, torch.float32)
    for row, length in enumerate(lengths):
        q, k, v = qkv[row : row + 1].unflatten(-1, (8, 8)).split((4, 2, 2), dim=2)
        q, k = rotate(q, angles, True), rotate(k, angles, True)
        expected = CausalAttention().attend(0, q, k, v, positions)[0].flatten(-2)
        torch.testing.assert_close(prompts[row, :length], expected[:length], atol=tolerance, rtol=tolerance)
        for step, attended in enumerate(steps):
            torch.testing.assert_close(attended[row, 0], expected[length + step], atol=tolerance, rtol=tolerance)
