"""The cases of `attention` on the CPU: shapes, bytes, and the same answer as the peer's from the same numbers."""

import pytest
import torch

from warpbus.bench import attention
from warpbus.bench.attention import ATTENTION
from warpbus.bench.cases import Run
from warpbus.errors import UsageError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(attention, "copy_bandwidth", lambda device: 1e9)


def settings(**changes):
    return Run(**{"device": CPU, "command": "warpbus bench x", "quick": True, **changes})


def test_how_many_cases_there_are():
    assert len(ATTENTION.cases(settings(quick=False))) == 4 * (3 + 1) * 3
    assert len(ATTENTION.cases(settings())) == 2 * 3
    assert len(ATTENTION.cases(settings(sizes=(100,), variants=("int8",)))) == 3
    with pytest.raises(UsageError, match=r"--variant int3: there is no such variant: choose among .*, int4$"):
        ATTENTION.cases(settings(variants=("int3",)))


@pytest.mark.parametrize(("variant", "bytes_a_vector"), [("auto", 256), ("int8", 132), ("fp8", 132)])
def test_what_a_case_reads(variant, bytes_a_vector):
    case = ATTENTION.cases(settings(sizes=(40,), variants=(variant,)))[1]()
    assert case.parameters == {
        "heads": 32,
        "kv_heads": 2,
        "context": 40,
        "batch": 8,
        "dtype": "float16",
        "variant": variant,
    }
    assert case.touched == 2 * 8 * 2 * 40 * bytes_a_vector + 8 * (36 + 32) * 128 * 2
    qkv, q, cache, keys, values = case.make()
    assert qkv.shape == (8, 36 * 128)
    assert keys.shape == values.shape == (8, 2, 40, 128)
    assert cache.keys.shape == cache.values.shape == (16, 2, 32, 128)
    assert sorted(cache.table.flatten().tolist()) == list(range(16))
    assert (cache.key_scales is None) == (variant == "auto")
    if variant != "auto":
        numbers = cache.keys.float() * cache.key_scales[..., None]
        assert 0.5 < numbers.std() < 1.5
        assert cache.key_scales.shape == (16, 2, 32)
    (rival,) = case.rivals
    assert rival.name == "SDPA"
    assert rival.call(qkv, q, cache, keys, values).shape == (8, 32, 1, 128)


def test_ours_answers_with_the_cache_and_the_new_token():
    """With the new token's key and value in the cache, and its query rotated, torch says the same."""
    case = ATTENTION.cases(settings(sizes=(40,)))[1]()
    qkv, _, cache, keys, values = case.make()
    answer = case.ours(qkv, None, cache, keys, values)
    assert answer.shape == (8, 32, 128)
    table = attention._rotary_table(40, 64, CPU)
    cos, sin = table[39].chunk(2)
    q = qkv[:, : 32 * 128].view(8, 32, 1, 128).float()
    even, odd = q[..., :64:2], q[..., 1:64:2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    q = torch.cat([turned, q[..., 64:]], dim=-1).half()
    new = [stored[cache.table[:, 1].long(), :, 39 % 32] for stored in (cache.keys, cache.values)]
    assert torch.equal(new[1], qkv.view(8, 36, 128)[:, 34:])
    keys[:, :, 39], values[:, :, 39] = new
    expected = case.rivals[0].call(qkv, q, cache, keys, values)[:, :, 0]
    assert (answer.float() - expected.float()).norm() / expected.float().norm() < 5e-3
