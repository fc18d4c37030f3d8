"""Mixtures of experts on a CPU with activations in 8 bits: one call computes the experts of a layer."""

import pytest
import torch
from quantized_files import HF
from torch import nn

from warpbus.engine import Engine, request
from warpbus.models import random_model
from warpbus.models.families import family_of
from warpbus.models.layers import MoE, QuantizedLinear
from warpbus.models.layers.cpu_experts import CpuStackedExperts
from warpbus.qtensor import Scheme

W4 = Scheme.parse("w4a16-g32")
PROMPT = list(range(3, 40))
AIR = HF | {
    "model_type": "glm4_moe",
    "num_hidden_layers": 3,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 3,
    "topk_group": 2,
}
QWEN = HF | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}


@pytest.fixture(params=[AIR, QWEN], ids=["glm4_moe", "qwen3_moe"])
def tiny_moe(request):
    return family_of(request.param).config(request.param)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, MoE)]


def small_model(config, **options):
    return random_model(config, W4, "cpu", torch.float32, **options)


@pytest.mark.parametrize("tokens", [1, 3, 30])
def test_a_layer_is_the_sum_of_its_experts(tiny_moe, tokens):
    model = small_model(tiny_moe, int8_activations=True)
    layers = layers_of(model)
    assert layers
    for layer in layers:
        assert isinstance(layer.experts, CpuStackedExperts)
        x = torch.randn(1, tokens, tiny_moe.hidden_size)
        one_by_one = layer(x, residual=x)  # with gradients each expert is computed by itself
        with torch.inference_mode():
            together = layer(x, residual=x)
        torch.testing.assert_close(together, one_by_one.detach(), rtol=1e-4, atol=1e-4)


def test_weights_and_results_are_those_of_float_activations_but_for_rounding(tiny_moe):
    rounding, exact = small_model(tiny_moe, int8_activations=True), small_model(tiny_moe)
    for one, other in zip(layers_of(rounding), layers_of(exact), strict=True):
        assert isinstance(other.experts, nn.ModuleDict)
        for number, expert in enumerate(other.experts.values()):
            for name in ("gate_up", "down"):
                kept, wanted = one.experts.matrices(name).expert(number).unpack(), getattr(expert, name).weight
                assert torch.equal(kept.codes(), wanted.codes())
                assert torch.equal(kept.scales, wanted.scales)
        x = torch.randn(1, 20, tiny_moe.hidden_size)
        with torch.inference_mode():
            found, wanted = one(x), other(x)
        # Rounding moves inputs and inner features of the experts by about 1 %; the routing is that of the exact x.
        assert 1e-4 < float((found - wanted).norm() / wanted.norm()) < 0.03


def test_experts_that_differ_stay_apart(tiny_moe):
    model = small_model(tiny_moe)
    layer = layers_of(model)[0]
    for number, expert in enumerate(layer.experts.values()):
        for name in ("gate_up", "down"):
            weight, int8 = getattr(expert, name).weight, (number, name) != (1, "down")
            expert.add_module(name, QuantizedLinear(weight, dtype=torch.float32, int8_activations=int8))
    layer.stack()
    assert isinstance(layer.experts, nn.ModuleDict)
    with torch.inference_mode():
        assert bool(layer(torch.randn(1, 2, tiny_moe.hidden_size)).isfinite().all())


def test_a_sequence_gets_the_same_tokens_alone_and_in_a_batch(tiny_moe):
    model = small_model(tiny_moe, int8_activations=True)

    def answers(prompts):
        engine = Engine(model)
        asked = [request(prompt, tokens=12) for prompt in prompts]
        for each in asked:
            engine.add(each)
        while engine.has_work:
            engine.step()
        return [list(each.token_ids) for each in asked]

    prompts = [PROMPT, PROMPT[5:], PROMPT[::-1]]
    together = answers(prompts)
    assert [answers([prompt])[0] for prompt in prompts] == together
