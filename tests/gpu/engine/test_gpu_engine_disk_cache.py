"""Evicted blocks of a GPU's cache on a disk: they come back with the same bits, also after a restart."""

import pytest
import torch
from gpu_engine_models import GPU, finish, model_of

from warpbus.engine.blocks import BLOCK
from warpbus.engine.disk_cache import DiskSpace
from warpbus.engine.engine import Engine, request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

PROMPTS = [[(7 * at + 31 * which) % 1000 for at in range(12 * BLOCK + 1)] for which in range(4)]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
def test_blocks_come_back(kv_dtype, tmp_path):
    model, space = model_of(), DiskSpace(tmp_path, 1 << 30, "fingerprint")
    assert model.final_norm.weight.device == GPU

    def contents(engine):
        """The bytes of each block in the cache, by key."""
        torch.cuda.synchronize()
        rows = engine._instance.cache.rows()
        keyed = engine._scheduler._blocks.keyed().items()
        return {key: [part[block].to("cpu", copy=True) for part in rows] for block, key in keyed}

    computed = {}
    for restarted in (False, True):
        engine = Engine(model, max_model_len=16 * BLOCK, cache_tokens=16 * BLOCK, kv_dtype=kv_dtype, disk=space)
        for ids in PROMPTS:
            engine._memory.host.disk.wait(60, all_of_them=True)
            asked = request(ids, tokens=4)
            finish(engine, [asked])
            assert asked.cached_tokens == (12 * BLOCK if restarted else 0)
            for key, parts in contents(engine).items():
                for part, known in zip(parts, computed.setdefault(key, parts), strict=True):
                    assert torch.equal(part, known)
        engine.save()
        assert engine.stats().disk_hits == restarted * len(PROMPTS) * 12 * BLOCK
        engine.close()
