"""Rotary positions and the cache's write on the CPU: against the models' own rotation, codes and scales, refusals."""

import pytest
import torch

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.models.layers.rope import rotate

HEADS, KV_HEADS, SIZE, CAPACITY = 4, 2, 16, 12
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(rotary, positions=CAPACITY):
    angles = torch.arange(positions)[:, None] * 0.3 ** torch.arange(rotary // 2)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def cache(dtype, rows=2):
    """Keys, values and, for codes, their scales."""
    shape = (rows, KV_HEADS, CAPACITY)
    scales = [torch.full(shape, 9.0) if dtype in LARGEST else None for _ in range(2)]
    return [torch.full((*shape, SIZE), 7.0).to(dtype) for _ in range(2)] + scales


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("rotary", "start"), [(16, 0), (8, 3), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rotates_as_the_models_do(dtype, rotary, start, interleaved):
    qkv, angles = random(2, 5, (HEADS + 2 * KV_HEADS) * SIZE, dtype=dtype), table(rotary)
    keys, values, *_ = cache(dtype)
    q, k, v = rope_and_cache(qkv, angles, start, keys, values, heads=HEADS, interleaved=interleaved)
    parts = qkv.unflatten(-1, (-1, SIZE)).split((HEADS, KV_HEADS, KV_HEADS), dim=2)
    cos, sin = angles[start : start + 5, None].double().chunk(2, dim=-1)
    for turned, part in ((q, parts[0]), (k, parts[1])):
        expected = rotate(part.double(), (cos, sin), interleaved)
        torch.testing.assert_close(turned.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert torch.equal(turned[..., rotary:], part[..., rotary:])
    assert torch.equal(v, parts[2])
    for written, new in ((keys, k), (values, v)):
        assert torch.equal(written[:, :, start : start + 5], new.transpose(1, 2))
        assert (written[:, :, start + 5 :] == 7).all()
        assert (written[:, :, :start] == 7).all()


@pytest.mark.parametrize("code", LARGEST)
def test_codes_and_scales(code):
    qkv = random(1, 3, (HEADS + 2 * KV_HEADS) * SIZE, dtype=torch.float16)
    qkv[0, 1, HEADS * SIZE :] = 0  # keys and values of token 1
    keys, values, key_scales, value_scales = cache(code)
    _, k, v = rope_and_cache(qkv, table(8), 2, keys, values, key_scales, value_scales, heads=HEADS, interleaved=True)
    for codes, scales, new in ((keys, key_scales, k), (values, value_scales, v)):
        new = new.transpose(1, 2).float()
        assert torch.equal(scales[:1, :, 2:5], new.abs().amax(-1) / LARGEST[code])
        restored = codes[:1, :, 2:5].float() * scales[:1, :, 2:5, None]
        # Half a step of an integer; half a unit of the last of three bits of e4m3, or of its subnormals.
        step = 0.5 if code == torch.int8 else 2.0**-10
        bound = step * scales[:1, :, 2:5, None] + (0 if code == torch.int8 else 2.0**-4 * new.abs())
        assert ((restored - new).abs() <= bound * 1.001).all()
        assert (scales[:, :, 3][0] == 0).all()
        assert (codes[0, :, 3].float() == 0).all()
        assert (scales[1] == 9).all()
        assert (scales[0, :, 5:] == 9).all()


def test_nothing_to_rotate():
    keys, values, *_ = cache(torch.float32)
    q, k, v = rope_and_cache(torch.empty(2, 0, 128), table(8), 5, keys, values, heads=4, interleaved=True)
    assert q.shape == (2, 0, 4, SIZE)
    assert k.shape == v.shape == (2, 0, 2, SIZE)
    assert (keys == 7).all()


def test_what_it_refuses():
    qkv, angles = random(2, 5, 128), table(8)
    keys, values, *_ = cache(torch.float32)

    def call(qkv=qkv, angles=angles, start=0, keys=keys, values=values, scales=(None, None), heads=HEADS):
        return rope_and_cache(qkv, angles, start, keys, values, *scales, heads=heads, interleaved=True)

    with pytest.raises(UsageError, match="tokens 8 to 12 do not fit a cache of 12 and a table of 12 positions"):
        call(start=8)
    with pytest.raises(TensorError, match=r"qkv has shape \[2, 5, 128\], keys .* there are 5 heads: give qkv"):
        call(heads=5)
    with pytest.raises(TensorError, match=r"values has shape \[2, 2, 11, 16\], expected \[2, 2, 12, 16\]"):
        call(values=values[:, :, 1:])
    with pytest.raises(TensorError, match=r"key_scales does not go with a cache of torch\.int8: give float32"):
        call(keys=keys.to(torch.int8), values=values.to(torch.int8))
    with pytest.raises(TensorError, match=r"key_scales does not go with a cache of torch\.float32: give None"):
        call(scales=(random(2, 2, 12), random(2, 2, 12)))
    with pytest.raises(
        TensorError, match=r"keys are torch\.float16 with strides .* give both caches in torch\.float32"
    ):
        call(keys=keys.half())
    with pytest.raises(TensorError, match="heads have 16 dimensions and table has 7 columns"):
        call(angles=angles[:, :7])
    with pytest.raises(TensorError, match="table is float16, expected float32"):
        call(angles=angles.half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_registered_as_torch_wants(dtype):
    keys, values, key_scales, value_scales = cache(dtype)
    arguments = (random(2, 5, 128), table(8), 1, keys, values, key_scales, value_scales, HEADS, False)
    checked = torch.library.opcheck(torch.ops.warpbus.rope_and_cache.default, arguments)
    assert set(checked.values()) == {"SUCCESS"}
