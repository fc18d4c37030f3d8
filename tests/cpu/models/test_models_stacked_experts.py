"""Experts that are arranged for the kernels, some of them offloaded: here in main memory, all of them."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from stacked_models import SMALL, W4, config_of, experts_of, model_of

from warpbus.errors import UsageError
from warpbus.formats import Checkpoint
from warpbus.models import load_model, placement
from warpbus.models.layer_spec import MLPSpec, MoESpec, RouterSpec
from warpbus.models.layers import QuantizedLinear
from warpbus.models.random_checkpoint import write_random_checkpoint
from warpbus.qtensor import Scheme

TOKENS = torch.arange(24)[None]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("offloaded", [1, 4])
@torch.no_grad()
def test_a_model_with_offloaded_experts_computes_the_same(shared, offloaded):
    config = config_of(5, shared=shared)
    here, far = model_of(config), model_of(config, offloaded=offloaded)
    assert torch.equal(far(TOKENS), here(TOKENS))
    for experts in experts_of(far):
        stacked = experts.matrices("down")
        assert (experts.offloaded, experts.resident) == (offloaded, 5 - offloaded + shared)
        assert (stacked.count, stacked.resident) == (5 + shared, experts.resident)
        assert sorted(experts.order) == list(range(5 + shared))
        assert experts.slots.tolist() == experts.order
        assert [experts.order[number] for number in range(5)] == sorted(experts.order[:5])
        assert len(experts.counts) == 5
        if shared:
            assert experts.order[5] == experts.resident - 1
    assert [each.slots for each in experts_of(here)] == [None, None]


@torch.no_grad()
def test_the_shared_expert_is_a_view_of_its_slot():
    model = model_of(config_of(4), offloaded=2)
    mlp = model.layers[-1].mlp
    slot = mlp.experts.matrices("gate_up").expert(mlp.experts.order[4])
    assert isinstance(mlp.shared.gate_up, QuantizedLinear)
    assert mlp.shared.gate_up.form.codes.data_ptr() == slot.codes.data_ptr()


@torch.no_grad()
def test_experts_change_places():
    model = model_of(config_of(6), offloaded=3)
    expected = model(TOKENS)
    for experts in experts_of(model):
        before = [experts.matrices("gate_up").expert(slot).codes.clone() for slot in experts.order]
        experts.exchange(5, 0)
        experts.exchange(3, 2)
        assert [experts.order[expert] < experts.resident for expert in range(6)] == [
            False,
            True,
            False,
            True,
            False,
            True,
        ]
        assert experts.slots.tolist() == experts.order
        for slot, codes in zip(experts.order, before, strict=True):
            assert torch.equal(experts.matrices("gate_up").expert(slot).codes, codes)
    assert torch.equal(model(TOKENS), expected)


@pytest.mark.parametrize(("offloaded", "wrong"), [(2, (0, 1)), (2, (5, 4)), (0, (3, 0))])
def test_only_experts_on_both_sides_change_places(offloaded, wrong):
    (experts,) = experts_of(model_of(config_of(6, layers=1), offloaded=offloaded))
    with pytest.raises(UsageError, match="expected an offloaded expert and one that is not"):
        experts.exchange(*wrong)


def test_experts_that_differ_cannot_be_offloaded():
    config = config_of(3, shared=False)
    assert not model_of(config, schemes=[Scheme.parse("w8a16-g32")]).layers[-1].mlp.stacked
    with pytest.raises(UsageError, match="1 experts of a layer cannot be offloaded: quantize them, all"):
        model_of(config, schemes=[W4, Scheme.parse("w8a16-g32")], offloaded=1)


def test_which_parameters_are_of_offloaded_experts():
    config = config_of(4)
    counts = (0, 1, 2)
    names = [name for name in config.parameters if config.is_offloaded(name, counts)]
    assert {tuple(name.split(".")[1:5:3]) for name in names} == {("1", "3"), ("2", "2"), ("2", "3")}
    assert not any(config.is_offloaded(name, ()) for name in config.parameters)


@torch.no_grad()
def test_a_checkpoint_is_loaded_with_offloaded_experts(tmp_path, monkeypatch):
    """Matrices are packed here as for a GPU; each layer is stacked as soon as it is read."""
    monkeypatch.setattr(placement, "gpu_has_kernels", lambda device: True)
    moe = MoESpec(RouterSpec(16, 4, "softmax"), MLPSpec(96), None)
    config = replace(SMALL, layers=(replace(SMALL.layers[0], mlp=moe),) * 2)
    write_random_checkpoint(tmp_path / "model", config, torch.float16, device="cpu")
    load = partial(load_model, Checkpoint(tmp_path / "model"), device="cpu", dtype=torch.float16, layer_scheme=W4)
    here, far = load(), load(offloaded=(10, 3))
    assert [each.offloaded for each in experts_of(far)] == [10, 3]
    assert torch.equal(far(TOKENS), here(TOKENS))
