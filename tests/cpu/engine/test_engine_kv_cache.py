import pytest
import torch

from warpbus.engine.kv_cache import STEP, KVCache, KVPool, stored_dtype, token_bytes
from warpbus.errors import UsageError
from warpbus.models import ModelConfig, RopeConfig

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


@pytest.mark.parametrize(("kv_dtype", "token"), [("auto", 2 * 2 * 2 * 8 * 2), ("int8", 2 * 2 * 2 * (8 + 4))])
def test_a_pool_takes_what_its_tokens_take(kv_dtype, token):
    assert token_bytes(config(2), torch.float16, kv_dtype) == token
    pool = KVPool(config(2), 37, device=CPU, dtype=torch.float16, kv_dtype=kv_dtype)
    parts = [pool._data] + ([] if pool._scales is None else [pool._scales])
    assert sum(part.nbytes for part in parts) == 37 * token


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_rows_of_a_pool_are_apart_and_move_to_the_front(kv_dtype):
    pool = KVPool(config(2), 41, device=CPU, dtype=torch.float32, kv_dtype=kv_dtype)
    cache = pool.rows(4)
    assert (cache.rows, cache.capacity) == (4, 10)
    generator = torch.Generator().manual_seed(0)
    parts = [part for layer in cache.layers for part in layer if part is not None]
    for part in parts:
        part.copy_(torch.randint(-8, 8, part.shape, generator=generator))
    before = [part.float().clone() for part in parts]
    cache.keep([1, 3])
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part[:2].float(), old[[1, 3]])
    assert pool.rows(1).capacity == 41


def test_a_kv_dtype_that_is_none_is_refused():
    with pytest.raises(UsageError, match="kv_dtype is 'int4': give auto, int8, fp8"):
        stored_dtype("int4", torch.float16)
