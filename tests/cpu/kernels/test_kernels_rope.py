"""Rotary positions and the cache's write on the CPU: against the models' own rotation, codes and scales, refusals."""

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import TensorError
from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.models.layers.rope import rotate

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 16, 16, 3
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}
# Tokens of three sequences: their positions, and where they go: several blocks, not in order.
POSITIONS = torch.tensor([0, 1, 11, 12, 5], dtype=torch.int32)
SLOTS = torch.tensor([32, 33, 15, 16, 0])


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(rotary, positions=20):
    angles = torch.arange(positions)[:, None] * 0.3 ** torch.arange(rotary // 2)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def cache(dtype):
    """Keys, values and, for codes, their scales: the second of two layers."""
    shape = (BLOCKS, 2, 2, KV_HEADS, BLOCK)
    data, scales = torch.full((*shape, SIZE), 7.0).to(dtype), torch.full(shape, 9.0)
    return [data[:, 1, 0], data[:, 1, 1], *((scales[:, 1, 0], scales[:, 1, 1]) if dtype in LARGEST else (None, None))]


def by_token(cache):
    """A cache as a list of slots, `[blocks * BLOCK, kv_heads, ...]`."""
    return cache.transpose(1, 2).flatten(0, 1)


def others():
    return [slot for slot in range(BLOCKS * BLOCK) if slot not in SLOTS.tolist()]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary", [16, 8, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rotates_as_the_models_do(dtype, rotary, interleaved):
    qkv, angles = random(5, (HEADS + 2 * KV_HEADS) * SIZE, dtype=dtype), table(rotary)
    keys, values, *_ = cache(dtype)
    q, k, v = rope_and_cache(qkv, angles, POSITIONS, SLOTS, keys, values, heads=HEADS, interleaved=interleaved)
    parts = qkv.unflatten(-1, (-1, SIZE)).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    cos, sin = angles[POSITIONS.long(), None].double().chunk(2, dim=-1)
    for turned, part in ((q, parts[0]), (k, parts[1])):
        expected = rotate(part.double(), (cos, sin), interleaved)
        torch.testing.assert_close(turned.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert torch.equal(turned[..., rotary:], part[..., rotary:])
    assert torch.equal(v, parts[2])
    for written, new in ((keys, k), (values, v)):
        assert torch.equal(by_token(written)[SLOTS], new)
        assert (by_token(written)[others()] == 7).all()


@pytest.mark.parametrize("code", LARGEST)
def test_codes_and_scales(code):
    qkv = random(5, (HEADS + 2 * KV_HEADS) * SIZE, dtype=torch.float16)
    qkv[1, HEADS * SIZE :] = 0  # keys and values of token 1
    keys, values, *scales = cache(code)
    _, k, v = rope_and_cache(qkv, table(8), POSITIONS, SLOTS, keys, values, *scales, heads=HEADS, interleaved=True)
    for codes, scale, new in ((keys, scales[0], k.float()), (values, scales[1], v.float())):
        here = by_token(scale)[SLOTS]
        assert torch.equal(here, new.abs().amax(-1) / LARGEST[code])
        restored = by_token(codes)[SLOTS].float() * here[..., None]
        # Half a step of an integer; half a unit of the last of three bits of e4m3, or of its subnormals.
        step = 0.5 if code == torch.int8 else 2.0**-10
        bound = step * here[..., None] + (0 if code == torch.int8 else 2.0**-4 * new.abs())
        assert ((restored - new).abs() <= bound * 1.001).all()
        assert (here[1] == 0).all()
        assert (by_token(codes)[SLOTS[1]].float() == 0).all()
        assert (by_token(scale)[others()] == 9).all()
        assert (by_token(codes)[others()].float() == 7).all()


@pytest.mark.parametrize("code", LARGEST)
def test_fixed_scales(code):
    """Codes are the nearest to the vector over its head's scale; what exceeds the largest code becomes it."""
    qkv = random(5, (HEADS + 2 * KV_HEADS) * SIZE)
    fixed = torch.tensor([0.004, 0.02]), torch.tensor([0.03, 0.001])  # heads whose codes are cut off
    keys, values, *scales = cache(code)
    _, k, v = rope_and_cache(
        qkv, table(8), POSITIONS, SLOTS, keys, values, *scales, fixed, heads=HEADS, interleaved=True
    )
    for codes, scale, new, own in ((keys, scales[0], k, fixed[0]), (values, scales[1], v, fixed[1])):
        assert torch.equal(by_token(scale)[SLOTS], own.expand(5, KV_HEADS))
        ratios = (new / own[:, None]).clamp(-LARGEST[code], LARGEST[code])
        expected = (ratios.round() if code == torch.int8 else ratios).to(code)
        assert torch.equal(by_token(codes)[SLOTS].float(), expected.float())
        assert (by_token(scale)[others()] == 9).all()
    assert by_token(keys)[SLOTS, 0].float().abs().amax() == LARGEST[code]


def test_nothing_to_rotate():
    keys, values, *_ = cache(torch.float32)
    none = (torch.empty(0, 128), table(8), POSITIONS[:0], SLOTS[:0])
    q, k, v = rope_and_cache(*none, keys, values, heads=4, interleaved=True)
    assert q.shape == (0, 4, SIZE)
    assert k.shape == v.shape == (0, 2, SIZE)
    assert (keys == 7).all()


def test_what_it_refuses():
    keys, values, *_ = cache(torch.float32)

    def refused(message, **changes):
        given = {
            "qkv": random(5, 128),
            "table": table(8),
            "positions": POSITIONS,
            "slots": SLOTS,
            "keys": keys,
            "values": values,
            "heads": HEADS,
            "interleaved": True,
        }
        with pytest.raises(TensorError, match=message):
            rope_and_cache(**(given | changes))

    refused(r"qkv has shape \[5, 128\], keys .* there are 5 heads: give qkv", heads=5)
    refused("positions has shape", positions=POSITIONS[:4])
    refused("one for each of the 5 tokens", slots=SLOTS[:4])
    refused(r"positions are torch\.int64, expected torch\.int32", positions=POSITIONS.long())
    refused(r"slots are torch\.int32, expected torch\.int64", slots=SLOTS.int())
    refused(r"values has shape \[2, 2, 16, 16\], expected \[3, 2, 16, 16\]", values=values[1:])
    codes = {"keys": keys.to(torch.int8), "values": values.to(torch.int8)}
    refused(r"key_scales does not go with a cache of torch\.int8: give float32", **codes)
    scales = {"key_scales": random(3, 2, 16), "value_scales": random(3, 2, 16)}
    refused(r"key_scales does not go with a cache of torch\.float32: give None", **scales)
    refused(r"value_scales has shape", **codes, **(scales | {"value_scales": random(3, 2, 15)}))
    refused(r"keys is torch\.float16 with strides .* give torch\.float32", keys=keys.half())
    fixed = torch.ones(2), torch.ones(2)
    refused(r"fixed_scales do not go with a cache of torch\.float32: give None", fixed_scales=fixed)
    coded = codes | {"key_scales": random(3, 2, 16), "value_scales": random(3, 2, 16)}
    refused(r"fixed value scales has shape \[3\]", **coded, fixed_scales=(fixed[0], torch.ones(3)))
    refused("fixed key scales is float64", **coded, fixed_scales=(fixed[0].double(), fixed[1]))
    refused("heads have 16 dimensions and table has 7 columns", table=table(8)[:, :7])
    refused("table is float16, expected float32", table=table(8).half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_registered_as_torch_wants(dtype):
    fixed = (torch.ones(2), torch.ones(2)) if dtype == torch.int8 else (None, None)
    arguments = (random(5, 128), table(8), POSITIONS, SLOTS, *cache(dtype), *fixed, HEADS, False)
    checked = opcheck(torch.ops.warpbus.rope_and_cache.default, arguments)
    assert set(checked.values()) == {"SUCCESS"}
