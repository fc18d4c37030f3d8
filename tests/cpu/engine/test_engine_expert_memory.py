"""Which experts stay on a GPU where not all of them fit, by the plan."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warpbus.engine import plan as planning
from warpbus.engine.expert_memory import OffloadableExperts
from warpbus.engine.plan import Stored, check_host_memory, least_memory, plan_memory
from warpbus.errors import DeviceError, UsageError
from warpbus.models import SHAPES, MoESpec
from warpbus.qtensor import Scheme

GB = 10**9
W4 = Scheme.parse("w4a16-g128")
FLASH = Stored.uniform(SHAPES["glm-4.7-flash"], torch.bfloat16, W4)
AIR = Stored.uniform(SHAPES["glm-4.5-air"], torch.bfloat16, W4)


def expert_bytes(stored):
    """Of the routed experts of all layers."""
    sizes = stored.sizes
    matrices = [
        f"layers.{index}.{each.name}.weight" for index, each in stored.config.matrices if each.expert is not None
    ]
    return sum(sizes[name] for name in matrices)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_layers_share_the_offloaded_experts_evenly(counts, data):
    experts = OffloadableExperts(tuple(counts), tuple(7 for _ in counts), tuple(False for _ in counts))
    total = data.draw(st.integers(0, experts.most))
    found = experts.spread(total)
    assert sum(found) == total
    assert all(0 <= own <= most for own, most in zip(found, counts, strict=True))
    # A layer has fewer than another only where it has no more, or where one is left over.
    room = [own for own, most in zip(found, counts, strict=True) if own < most]
    assert not room or max(found) - min(room) <= 1
    assert experts.nbytes(found) == 7 * total


@pytest.mark.parametrize(("stored", "memory"), [(FLASH, 8), (FLASH, 16), (AIR, 24), (AIR, 48)])
def test_as_few_experts_as_fit_are_offloaded(stored, memory):
    plan = plan_memory(stored, memory * GB, max_num_seqs=1)
    sizes = stored.sizes
    layers = sum(size for name, size in sizes.items() if name.startswith("layers."))
    assert plan.parts["layers"] + plan.host_bytes == layers
    assert plan.total <= memory * GB
    counts = [layer.mlp.router.experts if isinstance(layer.mlp, MoESpec) else 0 for layer in stored.config.all_layers]
    assert all(own < most or own == most == 0 for own, most in zip(plan.offloaded, counts, strict=True))
    moe = [own for own, most in zip(plan.offloaded, counts, strict=True) if most]
    assert max(moe) - min(moe) <= 1
    each = expert_bytes(stored) // sum(counts)
    assert plan.host_bytes == sum(plan.offloaded) * each
    assert memory * GB - plan.total < 2 * each  # one expert more would not fit
    assert (plan.context, plan.prefill_tokens, plan.embedding_on_cpu) == (8192, 2048, True)
    assert f"{sum(plan.offloaded):,} experts in pinned memory of the host" in str(plan)
    assert plan.to_json()["host_bytes"] == plan.host_bytes


def test_stacking_needs_the_layer_with_most_experts_on_the_gpu_again():
    experts = OffloadableExperts((0, 7, 9), (0, 100, 50), (False, True, False))
    assert experts.stacking_bytes(()) == experts.stacking_bytes((0, 0, 0)) == 900
    assert experts.stacking_bytes((0, 7, 2)) == 400
    assert OffloadableExperts((), (), ()).stacking_bytes(()) == 0


def test_experts_with_activations_of_8_bits_are_stacked():
    experts = Stored.uniform(SHAPES["glm-4.7-flash"], torch.bfloat16, Scheme.parse("w8a8-fp8")).offloadable
    assert experts.most == 0
    assert experts.stacking_bytes(()) == (64 + 1) * (3 * 2048 * 1536 + 4 * (2 * 1536 + 2048))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unquantized_experts_are_stacked_in_16_bits(dtype):
    stored = Stored.uniform(SHAPES["glm-4.7-flash"], dtype, None)
    experts = stored.offloadable
    layer = (64 + 1) * 3 * 2048 * 1536 * 2
    assert experts.most == 0
    assert experts.stacking_bytes(()) == (layer if dtype == torch.bfloat16 else 0)
    if dtype == torch.bfloat16:
        assert plan_memory(stored, 80 * GB, max_num_seqs=1).parts["workspace"] > layer


@pytest.mark.parametrize("memory", [48, 60])
def test_the_workspace_holds_what_stacking_takes(memory):
    """The experts of a layer of GLM-4.5-Air are more than the activations of a piece."""
    plan = plan_memory(AIR, memory * GB, max_num_seqs=1)
    assert bool(plan.offloaded) == (memory == 48)
    stacking = AIR.offloadable.stacking_bytes(plan.offloaded)
    assert 0.85 * GB < stacking < plan.parts["workspace"] < 1.1 * stacking
    assert plan.total <= memory * GB


def test_a_model_that_fits_offloads_nothing():
    plan = plan_memory(FLASH, 24 * GB, max_num_seqs=1)
    assert (plan.offloaded, plan.host_bytes, plan.embedding_on_cpu) == ((), 0, False)
    assert "pinned" not in str(plan)


def test_a_context_that_is_asked_for_is_kept():
    plan = plan_memory(FLASH, 8 * GB, max_model_len=65536, max_num_seqs=2)
    assert plan.context == 65536
    assert sum(plan.offloaded) > sum(plan_memory(FLASH, 8 * GB, max_num_seqs=2).offloaded)


@pytest.mark.parametrize("stored", [FLASH, AIR])
def test_the_least_memory_has_one_expert_per_layer(stored):
    least = least_memory(stored, max_num_seqs=1)
    plan = plan_memory(stored, least, max_num_seqs=1)
    assert plan.offloaded == stored.offloadable.counts
    with pytest.raises(UsageError, match=r"give memory \d+\.\dGB"):
        plan_memory(stored, least - 10**8, max_num_seqs=1)


def test_what_the_kernels_do_not_take_stays_on_the_gpu():
    config = FLASH.config
    assert Stored(config, torch.bfloat16, {}).offloadable.most == 0
    assert replace(FLASH, dtype=torch.float32).offloadable.most == 0
    w8a8 = Stored.uniform(config, torch.bfloat16, Scheme.parse("w8a8-int8"))
    assert w8a8.offloadable.most == 0
    name = "layers.3.mlp.experts.5.down.weight"
    mixed = replace(FLASH, quantized={**FLASH.quantized, name: Scheme.parse("w8a16-g128")})
    assert mixed.offloadable.counts[3] == 0
    assert mixed.offloadable.most == FLASH.offloadable.most - 63
    with pytest.raises(UsageError, match=r"memory is 24\.00 GB, but the model needs 3\d\.\d\d GB"):
        plan_memory(w8a8, 24 * GB, max_num_seqs=1)


def test_an_unquantized_mixture_is_reported_to_be_quantized():
    plain = Stored(FLASH.config, torch.bfloat16, {})
    with pytest.raises(UsageError, match="quantize it: it fits with w4a16-g128 and a context of 8,192"):
        plan_memory(plain, 8 * GB, max_num_seqs=1)


def test_main_memory_has_to_hold_the_experts(monkeypatch):
    plan = plan_memory(FLASH, 8 * GB, max_num_seqs=1)
    monkeypatch.setattr(planning, "free_memory", lambda device: 10 * GB)
    with pytest.raises(DeviceError, match=r"do not fit on the GPU and need 10\.\d\d GB of pinned main memory; 10\.00"):
        check_host_memory(plan)
    monkeypatch.setattr(planning, "free_memory", lambda device: 12 * GB)
    check_host_memory(plan)
    monkeypatch.setattr(planning, "free_memory", lambda device: None)
    check_host_memory(plan)


def test_long_prompts_have_room_for_the_keys_and_values_of_all_heads():
    def workspace(context):
        return plan_memory(FLASH, 40 * GB, max_model_len=context, max_num_seqs=1).parts["workspace"]

    latent, heads, piece = 2 * 576, 2 * 20 * (192 + 256 + 256), 2048
    assert workspace(32768) - workspace(4096) == 28672 * (latent + heads)
    assert workspace(65536) - workspace(32768) == 32768 * latent + 65536 * piece * 3
    chosen = plan_memory(FLASH, 24 * GB, max_num_seqs=1)
    assert chosen.context > 65536
    assert chosen.parts["workspace"] > 32768 * heads + chosen.context * (latent + piece * 3)
    assert sum(chosen.parts.values()) <= 24 * GB
