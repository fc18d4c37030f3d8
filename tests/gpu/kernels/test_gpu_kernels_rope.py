"""Rotary positions and the cache's write on a GPU: against float64, every variant of the family and kind of cache."""

import pytest
import torch

from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.kernels.reference import rope as reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CODES = [torch.int8, torch.float8_e4m3fn]
# batch, tokens, heads, kv_heads, head_dim, rotary_dim, interleaved, start
CASES = [
    (1, 1, 32, 2, 128, 64, True, 0),  # ChatGLM2
    (2, 77, 32, 2, 128, 64, True, 5),
    (3, 33, 8, 2, 128, 128, False, 9),  # Llama, Qwen
    (2, 5, 3, 1, 64, 64, False, 3),
    (1, 7, 2, 2, 256, 64, False, 0),
    (2, 3, 9, 3, 80, 40, False, 4),  # rotary_dim / 2 is no multiple of 8
    (2, 3, 9, 3, 10, 6, True, 4),
    (1, 4, 5, 5, 7, 4, False, 1),
    (1, 3, 4, 1, 16, 0, True, 2),
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


def cache(dtype, rows, kv_heads, capacity, size, pad=0):
    """Keys, values and, for codes, their scales, in rows of `size + pad` that hold the tokens before the heads."""
    made = [torch.full((rows, capacity, kv_heads, size + pad), 7.0, device="cuda").to(dtype) for _ in range(2)]
    scales = [torch.full((rows, kv_heads, capacity), 9.0, device="cuda") if dtype in CODES else None for _ in range(2)]
    return [tensor.transpose(1, 2)[..., pad:] for tensor in made] + scales


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
    batch, tokens, heads, kv_heads, size, rotary, interleaved, start = case
    qkv, angles = random(batch, tokens, (heads + 2 * kv_heads) * size, dtype=dtype), table(rotary, start + tokens + 3)
    for pad in (0, 1):
        keys, values, *_ = cache(dtype, batch + 1, kv_heads, start + tokens + 2, size, pad)
        poison(batch, tokens, heads, size, dtype=dtype)
        poison(batch, tokens, kv_heads, size, dtype=dtype)
        q, k, v = rope_and_cache(qkv, angles, start, keys, values, heads=heads, interleaved=interleaved)
        parts = qkv.unflatten(-1, (-1, size)).split((heads, kv_heads, kv_heads), dim=2)
        here = angles[start : start + tokens]
        for turned, part in ((q, parts[0]), (k, parts[1])):
            expected = rotate_exact(part, here, interleaved)
            assert ((turned.double() - expected).norm() / expected.norm()).item() < torch.finfo(
                dtype
            ).eps / 2 + 4 * 2**-24
        assert torch.equal(v, parts[2])
        for written, new in ((keys, k), (values, v)):
            assert torch.equal(written[:batch, :, start : start + tokens], new.transpose(1, 2))
            assert (written[:batch, :, :start] == 7).all()
            assert (written[:, :, start + tokens :] == 7).all()
            assert (written[batch] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales(case, code, dtype):
    batch, tokens, heads, kv_heads, size, rotary, interleaved, start = case
    qkv, angles = random(batch, tokens, (heads + 2 * kv_heads) * size, dtype=dtype), table(rotary, start + tokens)
    qkv[0, 0, heads * size :] = 0
    for pad in (0, 1):
        keys, values, *scales = cache(code, batch + 1, kv_heads, start + tokens + 2, size, pad)
        _, k, v = rope_and_cache(qkv, angles, start, keys, values, *scales, heads=heads, interleaved=interleaved)
        for codes, scale, new in zip((keys, values), scales, (k, v), strict=True):
            here = slice(start, start + tokens)
            # On the CPU: on a GPU torch multiplies by 1 / 127 where the kernel and the CPU divide.
            expected, expected_scale = reference.quantize(new.transpose(1, 2).cpu(), code)
            assert torch.equal(scale[:batch, :, here].cpu(), expected_scale)
            assert torch.equal(codes[:batch, :, here].float().cpu(), expected.float())
            assert (scale[0, :, start] == 0).all()
            assert (scale[batch] == 9).all()
            assert (scale[:, :, start + tokens :] == 9).all()
            assert (codes[batch].float() == 7).all()
            assert (codes[:, :, start + tokens :].float() == 7).all()


def test_every_e4m3_and_what_lies_between():
    every = torch.arange(127, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn).float()
    between = (every[1:] + every[:-1]) / 2
    x = torch.cat([every, between, torch.nextafter(between, every[:-1]), torch.nextafter(between, every[1:])])
    vectors = torch.stack([x, -x]).flatten().unfold(0, 7, 7)
    vectors = torch.cat([vectors, torch.full_like(vectors[:, :1], 448.0)], dim=-1)  # the scale is 1
    qkv = vectors.repeat(1, 3)[None]
    keys, values, *scales = cache(torch.float8_e4m3fn, 1, 1, len(vectors), 8)
    rope_and_cache(qkv, table(0, len(vectors)), 0, keys, values, *scales, heads=1, interleaved=True)
    assert (scales[1] == 1).all()
    assert torch.equal(values[0, 0].float(), vectors.to(torch.float8_e4m3fn).float())


def test_nan_is_not_hidden():
    qkv = random(1, 2, 12 * 16)
    qkv[0, 1, 10 * 16 + 3] = float("nan")  # in the first of two heads of values
    keys, values, *scales = cache(torch.int8, 1, 2, 2, 16)
    rope_and_cache(qkv, table(16, 2), 0, keys, values, *scales, heads=8, interleaved=True)
    assert scales[1].isnan().tolist() == [[[False, True], [False, False]]]
    assert not scales[0].isnan().any()


def test_strided_input_and_empty():
    keys, values, *_ = cache(torch.float16, 2, 2, 8, 16)
    qkv = random(3, 2, 8 * 16, dtype=torch.float16).transpose(0, 1)
    q, _, _ = rope_and_cache(qkv, table(8, 8), 1, keys, values, heads=4, interleaved=False)
    expected = rotate_exact(qkv.unflatten(-1, (8, 16))[:, :, :4], table(8, 8)[1:4], False)
    assert ((q.double() - expected).norm() / expected.norm()).item() < 1e-3
    empty = rope_and_cache(qkv[:, :0], table(8, 8), 8, keys, values, heads=4, interleaved=False)
    assert [tuple(x.shape) for x in empty] == [(2, 0, 4, 16), (2, 0, 2, 16), (2, 0, 2, 16)]


def test_streams_and_graphs():
    qkv, angles = random(2, 9, 36 * 128, dtype=torch.bfloat16), table(64, 32)
    first, second = (cache(torch.float8_e4m3fn, 2, 2, 32, 128) for _ in range(2))

    def call(into):
        return rope_and_cache(qkv, angles, 3, *into, heads=32, interleaved=True)

    graph = torch.cuda.CUDAGraph()
    call(first)
    with torch.cuda.graph(graph):
        q, k, _ = call(first)
    qkv.copy_(random(2, 9, 36 * 128, dtype=torch.bfloat16, seed=1))
    graph.replay()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other_q, other_k, _ = call(second)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(q, other_q)
    assert torch.equal(k, other_k)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(first, second, strict=True))
