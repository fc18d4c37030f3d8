import pytest
import torch

from warpbus.engine.kv_cache import STEP, KVCache, PromptAttention, StepAttention
from warpbus.models import ModelConfig, RopeConfig
from warpbus.models.layers import CausalAttention

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


def test_capacity_grows_in_steps_up_to_the_limit_and_keeps_what_it_holds():
    cache = KVCache(config(2), 2, 3 * STEP + 5, device=CPU, dtype=torch.float32)
    assert (cache.capacity, cache.nbytes) == (0, 0)
    cache.reserve(10)
    assert cache.capacity == STEP
    assert cache.nbytes == 2 * 2 * 2 * 2 * STEP * 8 * 4
    cache.keys[1][1, 1, 9] = 5.0
    cache.reserve(STEP)
    assert cache.capacity == STEP
    cache.reserve(STEP + 1)
    assert cache.capacity == 2 * STEP
    cache.reserve(3 * STEP + 1)
    assert cache.capacity == 3 * STEP + 5
    assert cache.keys[1][1, 1, 9].eq(5.0).all()
    assert cache.keys[1].sum() == 5.0 * 8


def test_keep_drops_the_other_rows():
    cache = KVCache(config(2), 3, 100, device=CPU, dtype=torch.float32)
    cache.reserve(4)
    for row in range(3):
        cache.keys[0][row] = row
        cache.values[1][row] = 10 * row
    cache.keep([2, 0])
    assert cache.keys[0][:, 0, 0, 0].tolist() == [2, 0]
    assert cache.values[1][:, 0, 0, 0].tolist() == [20, 0]
