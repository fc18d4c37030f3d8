"""Experts in pinned memory of the host: the same bits as on the GPU, in graphs, and while experts change places."""

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
from gpu_engine_models import GLM, GPU, PROMPTS, QWEN, W4, model_of
from stacked_models import SMALL as FILE

from warpbus.cuda import rates
from warpbus.cuda.staging import pinned_bytes
from warpbus.engine import Engine, expert_placement
from warpbus.engine.moving import EngineMigration
from warpbus.errors import UsageError
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.layer_spec import MLPSpec, MoESpec, RouterSpec
from warpbus.models.layers import MoE
from warpbus.models.random_checkpoint import write_random_checkpoint
from warpbus.qtensor import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def offloaded(config, count):
    return tuple(count if hasattr(layer.mlp, "router") else 0 for layer in config.layers)


def experts_of(model):
    return [layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, MoE)]


@pytest.mark.parametrize("config", [GLM, QWEN], ids=["glm", "qwen"])
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a16-g32", "w3a16-g32-asym"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_offloaded_experts_give_the_same_bits(config, scheme, dtype):
    """One and two tokens by slot, more of them by tiles of each height."""
    scheme = Scheme.parse(scheme)
    here, far = model_of(config, scheme, dtype), model_of(config, scheme, dtype, offloaded=offloaded(config, 6))
    assert [each.offloaded for each in experts_of(far)] == [6] * len(experts_of(far))
    for each in experts_of(far):
        stacked = each.matrices("gate_up")
        assert stacked.offloaded.codes.device.type == "cpu"
        assert stacked.offloaded.codes.is_pinned()
        assert stacked.weights.codes.is_cuda
    assert not far.waits_for_gpu
    draw = torch.Generator().manual_seed(0)
    for shape in ((1, 1), (2, 1), (3, 5), (2, 40), (2, 200), (4, 600)):
        tokens = torch.randint(0, config.vocab_size, shape, generator=draw).to(GPU)
        assert torch.equal(far(tokens), here(tokens)), shape
    counted = sum(int(each.counts.sum()) for each in experts_of(far))
    assert counted == (1 + 2 + 15 + 80 + 400 + 2400) * sum(
        layer.mlp.router.top_k for layer in config.layers if hasattr(layer.mlp, "router")
    )


@torch.no_grad()
def test_a_checkpoint_is_loaded_with_offloaded_experts(tmp_path):
    moe = MoESpec(RouterSpec(16, 4, "softmax"), MLPSpec(96), None)
    config = replace(FILE, layers=(replace(FILE.layers[0], mlp=moe),) * 2)
    write_random_checkpoint(tmp_path / "model", config, torch.float16, device="cpu")
    checkpoint = Checkpoint(tmp_path / "model")
    load = partial(load_model, checkpoint, device=GPU, dtype=torch.float16, layer_scheme=W4)
    here, far = load(), load(offloaded=(10, 3))
    assert [each.offloaded for each in experts_of(far)] == [10, 3]
    tokens = torch.arange(40, device=GPU)[None]
    assert torch.equal(far(tokens), here(tokens))


@pytest.mark.parametrize("config", [GLM, QWEN], ids=["glm", "qwen"])
@torch.no_grad()
def test_exchanged_experts_give_the_same_bits(config):
    here, far = model_of(config), model_of(config, offloaded=offloaded(config, 5))
    tokens = torch.arange(20, device=GPU)[None]
    expected = here(tokens)
    count = len(experts_of(far)[0].counts)
    for experts in experts_of(far):
        for number in range(min(5, count - 5)):  # no expert twice: one has changed its side by then
            experts.exchange(count - 1 - number, number)
        assert sorted(experts.slots.tolist()) == list(range(len(experts.order)))
        assert experts.slots.tolist() == experts.order
    assert torch.equal(far(tokens), expected)
    assert torch.equal(far(tokens[:, :1]), here(tokens[:, :1]))


@pytest.mark.parametrize("config", [GLM, QWEN], ids=["glm", "qwen"])
def test_the_engine_answers_the_same_while_experts_change_places(config, monkeypatch):
    """By graphs, alone and in a batch."""
    expected = [Engine(model_of(config)).decode([prompt], 96)[0] for prompt in PROMPTS]
    batch = Engine(model_of(config)).decode(PROMPTS, 96)
    monkeypatch.setattr(expert_placement, "WINDOW", 3)
    monkeypatch.setattr(expert_placement, "_LEAST", 0.5)
    model = model_of(config, offloaded=offloaded(config, 6))
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        engine = Engine(model)
        engine.warm()
        assert engine.decode([prompt], 96)[0] == answer
        assert engine._instance.runner.experts.exchanged > 0
    engine = Engine(model)
    assert engine.decode(PROMPTS, 96) == batch
    assert engine._instance.step._graphs is not None
    assert engine._instance.runner.experts.exchanged > 0


def test_an_engine_with_offloaded_experts_does_not_move():
    engine = Engine(model_of(GLM, W4, offloaded=offloaded(GLM, 2)))
    with pytest.raises(UsageError, match="experts are partly offloaded"):
        EngineMigration(engine, torch.device("cuda", 1))


def test_pinned_memory_is_freed():
    memory = pinned_bytes(3_000_001)
    assert memory.is_pinned()
    assert memory.shape == (3_000_001,)
    ones = torch.ones(3_000_001, dtype=torch.uint8, device=GPU)
    memory.copy_(ones)
    part = memory[5:]
    del memory
    gc.collect()
    assert int(part.sum()) == 2_999_996
    assert pinned_bytes(0).shape == (0,)


def test_the_link_is_slower_than_the_memory():
    card = rates.card_of(GPU)
    assert card.memory == torch.cuda.get_device_properties(0).total_memory
    assert 1e9 < card.link < card.bandwidth
