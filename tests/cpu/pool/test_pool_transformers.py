"""Small models of `transformers` on a CPU pool: the losses and gradients of the CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pool_direct import connected
from torch import Tensor, nn
from transformers import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

REMOTE = "warpbus"


@pytest.fixture
def pool() -> Iterator[None]:
    with connected(1 << 30):
        yield


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=50, decoder_start_token_id=0, **sizes))


def mixture() -> nn.Module:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=50, **sizes, **heads, **experts))


def residual() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}
    return ResNetForImageClassification(ResNetConfig(layer_type="basic", **sizes))


def tokens() -> dict[str, Tensor]:
    return {name: torch.randint(1, 50, (2, 7)) for name in ("input_ids", "labels")}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 2])}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "T5, whose attention learns its mask": (t5, tokens),
    "a mixture of experts": (mixture, tokens),
    "a ResNet": (residual, images),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_as_on_the_cpu(pool: None, name: str, training: bool) -> None:
    def results(device: str) -> list[Any]:
        make, given = MODELS[name]
        torch.manual_seed(0)
        model = make().to(device).train(training)
        inputs = {key: value.to(device) for key, value in given().items()}
        torch.manual_seed(1)  # the device has a generator of its own
        outputs = model(**inputs)
        outputs.loss.backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        return [each.detach().cpu() for each in (outputs.loss, outputs.logits, *gradients, *model.buffers())]

    torch.testing.assert_close(results(REMOTE), results("cpu"), rtol=1e-5, atol=1e-6)
