"""What a mixture of experts takes of a GPU while it is drawn or loaded, by the bytes of all live storages.

Tensors are drawn without memory (`FakeTensorMode`), on a GPU that is not there.
"""

from dataclasses import replace

import pytest
import torch
from live_bytes import LiveBytes
from stacked_models import SMALL, W4
from torch._subclasses.fake_tensor import FakeTensorMode

from warpbus.engine.plan import Stored, plan_memory
from warpbus.formats import Checkpoint
from warpbus.kernels.ops import packed_experts
from warpbus.kernels.ops.packed import PackedWeight, packed_shapes
from warpbus.models import SHAPES, load_model, placement, random, random_model
from warpbus.models.layer_spec import MLPSpec, MoESpec, RouterSpec
from warpbus.models.random_checkpoint import write_random_checkpoint
from warpbus.qtensor import Scheme

GB = 10**9
GPU, HALF = torch.device("cuda", 0), torch.bfloat16
SCHEME = Scheme.parse("w4a16-g128")


def shape(layers):
    """The first layers of GLM-4.7-Flash."""
    return replace(SHAPES["glm-4.7-flash"], layers=SHAPES["glm-4.7-flash"].layers[:layers])


def packed(scheme, linear):
    """A packed weight for a linear, with any codes and scales."""
    size = linear.out_features, linear.in_features
    words, tiles = packed_shapes(scheme, *size)
    codes = torch.empty(words, dtype=torch.int32, device=GPU)
    return PackedWeight(codes, torch.empty(tiles, dtype=HALF, device=GPU), None, scheme, size)


@pytest.fixture
def without_gpu(monkeypatch):
    """Lets tensors be drawn for a GPU."""
    monkeypatch.setattr(random, "remote_backend", lambda device: "fake")  # takes torch's own generator
    monkeypatch.setattr(packed_experts, "pinned_bytes", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    # Random and indexed writes need a real GPU even for tensors without memory.
    drawn = random._RandomTensors
    monkeypatch.setattr(drawn, "normal", lambda self, *shape, std: torch.empty(shape, dtype=HALF, device=GPU))
    monkeypatch.setattr(drawn, "weight", lambda self, scheme, linear: packed(scheme, linear))


@pytest.mark.parametrize("memory", [2.2, 2.5, 8])
def test_drawing_a_model_stays_within_what_is_planned_for_torch(memory, without_gpu):
    """Without room for everything the embedding is on the CPU, and experts are in the memory of the host."""
    config = shape(5)
    stored = Stored.uniform(config, HALF, SCHEME)
    plan = plan_memory(stored, int(memory * GB), max_model_len=2048, max_num_seqs=1)
    assert plan.embedding_on_cpu == bool(plan.offloaded) == (memory < 8)
    with FakeTensorMode(), LiveBytes("cuda") as live:
        model = random_model(
            *(config, SCHEME, GPU, HALF),
            head=plan.head,
            embedding=plan.embedding,
            embedding_device="cpu" if plan.embedding_on_cpu else None,
            offloaded=plan.offloaded,
        )
        left = live.now()
    assert model.embedding.weight.device.type == ("cpu" if plan.embedding_on_cpu else "cuda")
    weights = sum(plan.parts[name] for name in ("layers", "embedding", "head"))
    # Beside parameters there are the tables of slots and the counts.
    assert weights <= left <= weights + 2**16
    stacking = stored.offloadable.stacking_bytes(plan.offloaded)
    assert left <= live.peak <= weights + stacking + 2**16
    # Of torch's memory the plan then leaves the allocator's granularity, and all of the workspace but this.
    assert stacking <= plan.parts["workspace"]


@pytest.mark.parametrize("offloaded", [(), (10, 3, 0)])
def test_loading_a_model_takes_one_layers_experts_more(offloaded, tmp_path, monkeypatch):
    """In main memory, where offloaded experts count as well."""
    monkeypatch.setattr(placement, "gpu_has_kernels", lambda device: True)
    moe = MoESpec(RouterSpec(16, 4, "softmax"), MLPSpec(96), None)
    config = replace(SMALL, layers=(replace(SMALL.layers[0], mlp=moe),) * 3)
    write_random_checkpoint(tmp_path / "model", config, torch.float16, device="cpu")
    checkpoint = Checkpoint(tmp_path / "model")
    stored = Stored.uniform(config, torch.float16, W4)
    with LiveBytes("cpu") as live:
        model = load_model(checkpoint, device="cpu", dtype=torch.float16, layer_scheme=W4, offloaded=offloaded)
        left = live.now()
    assert model.layers[0].mlp.stacked
    experts = stored.offloadable.stacking_bytes(())
    sizes = stored.sizes
    assert sum(sizes.values()) <= left <= sum(sizes.values()) + 2**14
    largest = 4 * 64 * 2 * 96 * 4  # of a matrix while it is rounded and packed: some tensors of 4 bytes per number
    assert live.peak <= left + max(experts, largest)
