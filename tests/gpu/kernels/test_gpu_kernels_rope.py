"""Rotary positions and the cache's write on a GPU: against float64, every variant of the family and kind of cache."""

import pytest
import torch

from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.kernels.reference.cache import quantize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CODES = [torch.int8, torch.float8_e4m3fn]
# tokens, heads, kv_heads, head_dim, rotary_dim, interleaved, tokens of a block
CASES = [
    (1, 32, 2, 128, 64, True, 32),  # ChatGLM2
    (154, 32, 2, 128, 64, True, 32),
    (99, 8, 2, 128, 128, False, 16),  # Llama, Qwen
    (10, 3, 1, 64, 64, False, 256),
    (7, 2, 2, 256, 64, False, 32),
    (6, 9, 3, 80, 40, False, 64),  # rotary_dim / 2 is no multiple of 8
    (6, 9, 3, 10, 6, True, 16),
    (4, 5, 5, 7, 4, False, 32),
    (3, 4, 1, 16, 0, True, 128),
    (5, 4, 2, 264, 64, True, 32),  # without a kernel
]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def poison(*shape, dtype):
    """NaN in the memory that the next outputs of this shape are given."""
    held = [torch.full(shape, float("nan"), dtype=dtype, device="cuda") for _ in range(2)]
    del held


def table(rotary, positions):
    exponents = torch.arange(rotary // 2, device="cuda") / max(rotary // 2, 1)
    angles = torch.arange(positions, device="cuda")[:, None] * 10_000**-exponents
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def cache(dtype, blocks, kv_heads, block, size, pad=0):
    """Keys, values and, for codes, their scales: the second of two layers, in rows of `size + pad`."""
    shape = (blocks, 2, 2, kv_heads, block)
    data = torch.full((*shape, size + pad), 7.0, device="cuda").to(dtype)[:, 1, ..., pad:]
    scales = torch.full(shape, 9.0, device="cuda")[:, 1]
    return [data[:, 0], data[:, 1], *((scales[:, 0], scales[:, 1]) if dtype in CODES else (None, None))]


def by_token(cache):
    """A cache as a list of slots, `[blocks * B, kv_heads, ...]`."""
    return cache.float().transpose(1, 2).flatten(0, 1)


def places(tokens, blocks, block):
    """Positions of tokens, their slots in any order, and the slots of nobody."""
    slots = torch.randperm(blocks * block, device="cuda")
    return torch.randint(0, 3 * tokens, (tokens,), device="cuda").int(), slots[:tokens], slots[tokens:]


def rotate_exact(x, angles, interleaved):
    rotary = angles.shape[-1]
    cos, sin = angles.double()[:, None].chunk(2, dim=-1)
    wide = x.double()
    turning = wide[..., :rotary]
    first, second = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([joined, wide[..., rotary:]], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_rotation(case, dtype):
    tokens, heads, kv_heads, size, rotary, interleaved, block = case
    qkv, angles = random(tokens, (heads + 2 * kv_heads) * size, dtype=dtype), table(rotary, 3 * tokens)
    count = tokens // block + 2
    for pad in (0, 1):
        keys, values, *_ = cache(dtype, count, kv_heads, block, size, pad)
        positions, slots, others = places(tokens, count, block)
        poison(tokens, heads, size, dtype=dtype)
        poison(tokens, kv_heads, size, dtype=dtype)
        q, k, v = rope_and_cache(qkv, angles, positions, slots, keys, values, heads=heads, interleaved=interleaved)
        parts = qkv.unflatten(-1, (-1, size)).split((heads, kv_heads, kv_heads), dim=1)
        for turned, part in ((q, parts[0]), (k, parts[1])):
            expected = rotate_exact(part, angles[positions.long()], interleaved)
            error = ((turned.double() - expected).norm() / expected.norm()).item()
            assert error < torch.finfo(dtype).eps / 2 + 4 * 2**-24
        assert torch.equal(v, parts[2])
        for written, new in ((keys, k), (values, v)):
            assert torch.equal(by_token(written)[slots], new.float())
            assert (by_token(written)[others] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales(case, code, dtype):
    tokens, heads, kv_heads, size, rotary, interleaved, block = case
    qkv, angles = random(tokens, (heads + 2 * kv_heads) * size, dtype=dtype), table(rotary, 3 * tokens)
    qkv[0, heads * size :] = 0
    count = tokens // block + 2
    for pad in (0, 1):
        keys, values, *scales = cache(code, count, kv_heads, block, size, pad)
        positions, slots, others = places(tokens, count, block)
        _, k, v = rope_and_cache(
            qkv, angles, positions, slots, keys, values, *scales, heads=heads, interleaved=interleaved
        )
        for codes, scale, new in zip((keys, values), scales, (k, v), strict=True):
            here = by_token(scale)[slots]
            if size <= 256:
                # On the CPU: on a GPU torch multiplies by 1 / 127 where the kernel and the CPU divide.
                expected, expected_scale = quantize(new.cpu(), code)
                assert torch.equal(here.cpu(), expected_scale)
                assert torch.equal(by_token(codes)[slots].cpu(), expected.float())
            assert (here[0] == 0).all()
            assert (by_token(scale)[others] == 9).all()
            assert (by_token(codes)[others] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("case", CASES)
def test_fixed_scales(case, code, dtype):
    tokens, heads, kv_heads, size, rotary, interleaved, block = case
    qkv, angles = random(tokens, (heads + 2 * kv_heads) * size, dtype=dtype), table(rotary, 3 * tokens)
    count = tokens // block + 2
    fixed = tuple(torch.rand(kv_heads, device="cuda") * 0.02 + 0.005 for _ in range(2))  # some codes are cut off
    keys, values, *scales = cache(code, count, kv_heads, block, size, 0)
    positions, slots, others = places(tokens, count, block)
    _, k, v = rope_and_cache(
        qkv, angles, positions, slots, keys, values, *scales, fixed, heads=heads, interleaved=interleaved
    )
    for codes, scale, new, own in zip((keys, values), scales, (k, v), fixed, strict=True):
        assert torch.equal(by_token(scale)[slots], own.expand(tokens, kv_heads))
        expected, _ = quantize(new.cpu(), code, own.cpu())
        assert torch.equal(by_token(codes)[slots].cpu(), expected.float())
        assert (by_token(scale)[others] == 9).all()
        assert (by_token(codes)[others] == 7).all()


def test_every_e4m3_and_what_lies_between():
    every = torch.arange(127, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn).float()
    between = (every[1:] + every[:-1]) / 2
    x = torch.cat([every, between, torch.nextafter(between, every[:-1]), torch.nextafter(between, every[1:])])
    vectors = torch.stack([x, -x]).flatten().unfold(0, 7, 7)
    vectors = torch.cat([vectors, torch.full_like(vectors[:, :1], 448.0)], dim=-1)  # the scale is 1
    qkv = vectors.repeat(1, 3)
    keys, values, *scales = cache(torch.float8_e4m3fn, len(vectors) // 32 + 1, 1, 32, 8)
    slots = torch.arange(len(vectors), device="cuda")
    rope_and_cache(qkv, table(0, len(vectors)), slots.int(), slots, keys, values, *scales, heads=1, interleaved=True)
    assert (by_token(scales[1])[slots] == 1).all()
    assert torch.equal(by_token(values)[slots, 0], vectors.to(torch.float8_e4m3fn).float())


def test_nan_is_not_hidden():
    qkv = random(2, 12 * 16)
    qkv[1, 10 * 16 + 3] = float("nan")  # in the first of two heads of values
    keys, values, *scales = cache(torch.int8, 1, 2, 16, 16)
    slots = torch.arange(2, device="cuda")
    rope_and_cache(qkv, table(16, 2), slots.int(), slots, keys, values, *scales, heads=8, interleaved=True)
    assert by_token(scales[1])[:2].isnan().tolist() == [[False, False], [True, False]]
    assert not scales[0].isnan().any()


def test_strided_input_and_empty():
    keys, values, *_ = cache(torch.float16, 2, 2, 16, 16)
    qkv = random(3, 2, 8 * 16, dtype=torch.float16)[:, 1]
    both = torch.tensor([[1, 17], [2, 30], [3, 5]], device="cuda")
    positions, slots = both.int()[:, 0], both[:, 1]
    q, k, _ = rope_and_cache(qkv, table(8, 8), positions, slots, keys, values, heads=4, interleaved=False)
    expected = rotate_exact(qkv.unflatten(-1, (8, 16))[:, :4], table(8, 8)[1:4], False)
    assert ((q.double() - expected).norm() / expected.norm()).item() < 1e-3
    assert torch.equal(by_token(keys)[slots], k.float())
    none = (qkv[:0], table(8, 8), positions[:0], slots[:0])
    empty = rope_and_cache(*none, keys, values, heads=4, interleaved=False)
    assert [tuple(x.shape) for x in empty] == [(0, 4, 16), (0, 2, 16), (0, 2, 16)]


def test_without_a_kernel_nothing_waits():
    qkv, angles = random(5, 8 * 264, dtype=torch.float16), table(64, 15)
    keys, values, *scales = cache(torch.float8_e4m3fn, 2, 2, 32, 264)
    positions, slots, _ = places(5, 2, 32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rope_and_cache(qkv, angles, positions, slots, keys, values, *scales, heads=4, interleaved=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_streams_and_graphs():
    qkv, angles = random(18, 36 * 128, dtype=torch.bfloat16), table(64, 54)
    first, second = (cache(torch.float8_e4m3fn, 2, 2, 32, 128) for _ in range(2))
    positions, slots, _ = places(18, 2, 32)

    def call(into):
        return rope_and_cache(qkv, angles, positions, slots, *into, heads=32, interleaved=True)

    graph = torch.cuda.CUDAGraph()
    call(first)
    with torch.cuda.graph(graph):
        q, k, _ = call(first)
    qkv.copy_(random(18, 36 * 128, dtype=torch.bfloat16, seed=1))
    graph.replay()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other_q, other_k, _ = call(second)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(q, other_q)
    assert torch.equal(k, other_k)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(first, second, strict=True))
