import pytest
import torch
from dense_configs import with_traits
from engine_models import SMALL

from warpbus.cuda.vmm import Arena
from warpbus.engine import kv_cache
from warpbus.engine.blocks import BLOCK
from warpbus.engine.kv_cache import KVCache, stored_dtype, token_bytes
from warpbus.errors import DeviceError, UsageError

CPU = torch.device("cpu")
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 16
VECTORS = LAYERS * 2 * KV_HEADS


def cache_of(count=50, kv_dtype="auto", dtype=torch.float32):
    return KVCache(SMALL, count, device=CPU, dtype=dtype, kv_dtype=kv_dtype)


def parts(cache):
    return [part for layer in cache.layers for part in layer if part is not None]


@pytest.fixture
def small_growth(monkeypatch):
    monkeypatch.setattr(kv_cache, "_GROWTH", 1)


@pytest.mark.parametrize(
    ("kv_dtype", "token"),
    [
        ("auto", VECTORS * HEAD_DIM * 2),
        ("int8", VECTORS * (HEAD_DIM + 4)),
        ("fp8", VECTORS * (HEAD_DIM + 4)),
        ("int4", VECTORS * (HEAD_DIM // 2 + 4)),
    ],
)
def test_it_takes_what_its_tokens_take(kv_dtype, token):
    assert token_bytes(SMALL, torch.float16, kv_dtype) == token
    cache = cache_of(kv_dtype=kv_dtype, dtype=torch.float16)
    assert cache.block_bytes == BLOCK * token
    assert (cache.committed, cache.nbytes) == (0, 0)
    assert cache.commit(50) == cache.committed == 50
    assert 0 <= cache.nbytes - 50 * BLOCK * token < 2 * 2**12


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8", "int4"])
def test_layers_keys_values_and_blocks_are_apart(kv_dtype):
    cache = cache_of(6, kv_dtype)
    cache.commit(6)
    assert len(cache.layers) == LAYERS
    for keys, values, key_scales, value_scales in cache.layers:
        size = HEAD_DIM // 2 if kv_dtype == "int4" else HEAD_DIM
        assert keys.shape == values.shape == (6, KV_HEADS, BLOCK, size)
        assert keys.dtype == values.dtype == stored_dtype(SMALL, kv_dtype, torch.float32)
        if kv_dtype == "auto":
            assert key_scales is value_scales is None
        else:
            assert key_scales.shape == value_scales.shape == (6, KV_HEADS, BLOCK)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, 8, part.shape, generator=generator) for part in parts(cache)]
    for part, numbers in zip(parts(cache), drawn, strict=True):
        part.copy_(numbers)
    for part, numbers in zip(parts(cache), drawn, strict=True):
        assert torch.equal(part.float(), numbers.float())


@pytest.mark.usefixtures("small_growth")
def test_it_grows_where_it_is_and_keeps_what_it_holds():
    cache = cache_of()
    places = [part.data_ptr() for part in parts(cache)]
    assert 3 <= cache.commit(3) < 10
    first = cache.committed
    cache.layers[1][0][2] = 5.0
    assert cache.commit(2) == first
    assert 40 <= cache.commit(40) < 50
    assert cache.commit(50) == 50
    assert cache.layers[1][0][2].eq(5.0).all()
    assert [part.data_ptr() for part in parts(cache)] == places


@pytest.mark.usefixtures("small_growth")
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
def test_it_shrinks_from_the_end_and_what_comes_again_is_zero(kv_dtype):
    cache = cache_of(kv_dtype=kv_dtype)
    cache.commit(40)
    for part in parts(cache):
        part[:40] = 3.0
    cache.shrink(8)
    assert 8 <= cache.committed < 40
    kept = cache.committed
    assert cache.nbytes < 20 * cache.block_bytes
    cache.shrink(45)
    assert cache.committed == kept
    cache.commit(40)
    for part in parts(cache):
        assert part[:8].float().eq(3.0).all()
        assert part[kept:40].float().eq(0.0).all()
    cache.shrink(0)
    assert (cache.committed, cache.nbytes) == (0, 0)


def test_it_takes_more_than_is_asked_for_at_once_but_no_more_than_there_can_be():
    assert cache_of().commit(2) == 50


@pytest.mark.usefixtures("small_growth")
def test_it_does_with_the_memory_there_is(monkeypatch):
    cache = cache_of(kv_dtype="int8")
    cache.commit(4)
    before = cache.committed
    resize = Arena.resize

    def bounded(arena, size):
        if size > 20 * BLOCK * VECTORS * (HEAD_DIM if arena.reserved > 100_000 else 4):
            raise DeviceError("full")
        resize(arena, size)

    monkeypatch.setattr(Arena, "resize", bounded)
    assert cache.commit(30) == before
    assert cache.commit(18) == cache.committed >= 18
    assert cache.commit(48) == cache.committed < 30
    monkeypatch.undo()
    assert cache.commit(48) >= 48


def test_growth_that_memory_does_not_allow_falls_back_to_what_is_needed(monkeypatch):
    """More than is needed is taken at once, if it is there."""
    cache = cache_of()
    resize = Arena.resize

    def bounded(arena, size):
        if size > 10 * cache.block_bytes:
            raise DeviceError("full")
        resize(arena, size)

    monkeypatch.setattr(Arena, "resize", bounded)
    assert cache.commit(7) == 7


def test_closing_returns_all():
    cache = cache_of()
    cache.commit(9)
    cache.close()
    assert (cache.nbytes, cache.layers) == (0, [])


def test_a_kv_dtype_that_is_none_is_refused():
    with pytest.raises(UsageError, match="kv_dtype is 'int3': give auto, int8, fp8, int4, unquantized"):
        stored_dtype(SMALL, "int3", torch.float16)
    with pytest.raises(UsageError, match="kv_dtype is 'int4', and heads have 15 dimensions, an odd number: give int8"):
        stored_dtype(with_traits(SMALL, head_dim=15), "int4", torch.float16)
