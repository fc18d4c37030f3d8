"""Layers whose products may be one launch: the same result as one by one, and which layers can do so."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_configs import dense_config
from stacked_models import config_of, model_of
from torch import Tensor, nn

from warpbus.kernels.ops.packed import pack
from warpbus.models import Decoder, ModelConfig, RopeConfig, decoder
from warpbus.models.layers import Adapted, FusedAttention, QuantizedLinear, Selection, chain
from warpbus.qtensor import Scheme
from warpbus.quantization.algorithms.rtn import rtn

CONFIG = dense_config(
    family="llama",
    vocab_size=40,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    norm_eps=1e-5,
    rope=RopeConfig(theta=1e4, rotary_dim=16, interleaved=False),
    max_context=64,
    qkv_bias=True,
)


class OnlyQueries(FusedAttention):
    """Stands for attention: the queries, with a mark of the layer."""

    def attend_fused(self, layer: int, qkv_btr: Tensor) -> Tensor:
        return qkv_btr[..., :64].contiguous() + layer

    def attend_latent(self, *_: Any) -> Tensor:
        raise NotImplementedError


def quantized(config: ModelConfig = CONFIG, schemes: tuple[str, ...] = ("w4a16-g32",)) -> Decoder:
    """A model whose layers have packed weights; layer i has scheme i, or the last one."""
    model = Decoder(config)
    model.initialize(torch.Generator().manual_seed(1), std=0.1)
    return packed(model.half().eval().requires_grad_(False), schemes)


def packed(model: Decoder, schemes: tuple[str, ...] = ("w4a16-g32",)) -> Decoder:
    for number, layer in enumerate(model.layers):
        scheme = Scheme.parse(schemes[min(number, len(schemes) - 1)])
        for parent in layer.modules():
            for name, linear in list(parent.named_children()):
                if isinstance(linear, nn.Linear):
                    weight = pack(rtn(linear.weight.float(), scheme, scale_dtype=torch.float16), torch.float16)
                    setattr(parent, name, QuantizedLinear(weight, linear.bias))
    return model


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets the CPU have chains; the number of links of each call."""
    lengths: list[int] = []
    original = chain.wna16_chain

    def counting(x: Tensor, elements: list[chain.Element]) -> list[Tensor]:
        lengths.append(len(elements))
        return original(x, elements)

    def fits(x: Tensor, elements: list[chain.Element]) -> bool:
        return len({element.weight.scheme for element in elements if isinstance(element, chain.ChainLink)}) == 1

    monkeypatch.setattr(chain, "fits", fits)
    monkeypatch.setattr(decoder, "may_chain", lambda x: len(x) <= chain.MOST_ROWS)
    monkeypatch.setattr(chain, "wna16_chain", counting)
    return lengths


def one_by_one(model: Decoder, x: Tensor) -> Tensor:
    context = OnlyQueries()
    for index, layer in enumerate(model.layers):
        x = layer(x, index, None, None, context)
    return x


@torch.no_grad()
@pytest.mark.parametrize(
    ("schemes", "lengths"), [(("w4a16-g32",), [4, 4, 3]), (("w4a16-g32", "w8a16", "w4a16-g32"), [3, 3, 3])]
)
def test_chains_change_nothing(counted: list[int], schemes: tuple[str, ...], lengths: list[int]) -> None:
    model = quantized(schemes=schemes)
    x = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(2)).half()
    found = model.transform(x, None, OnlyQueries())
    assert counted == lengths
    assert torch.equal(found, one_by_one(model, x))


@torch.no_grad()
def test_many_tokens_have_no_chains(counted: list[int]) -> None:
    model = quantized()
    x = torch.randn(chain.MOST_ROWS + 1, 1, 64, generator=torch.Generator().manual_seed(2)).half()
    assert torch.equal(model.transform(x, None, OnlyQueries()), one_by_one(model, x))
    assert not counted


@torch.no_grad()
@pytest.mark.parametrize("changed", [{"output_norms": True}, {"norm_kind": "layer"}])
def test_layers_of_another_form_have_no_chains(counted: list[int], changed: dict[str, Any]) -> None:
    spec = CONFIG.layers[0]
    if "norm_kind" in changed:
        spec = replace(spec, norm=replace(spec.norm, kind="layer"))
    else:
        spec = replace(spec, output_norms=True)
    model = quantized(replace(CONFIG, layers=(spec,) * CONFIG.num_layers))
    x = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(2)).half()
    assert torch.equal(model.transform(x, None, OnlyQueries()), one_by_one(model, x))
    assert not counted


@torch.no_grad()
def test_layers_between_without_a_chain_are_computed_alone(counted: list[int]) -> None:
    model = quantized()
    selection = Selection(["an adapter"])
    down = model.layers[1].mlp.down
    pair = torch.randn(4, 96).half(), torch.randn(64, 4).half()
    model.layers[1].mlp.down = Adapted(down, [pair], selection, dtype=torch.float16, device=torch.device("cpu"))
    x = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(2)).half()
    with selection.rows(torch.tensor([1, 0])):
        found, expected = model.transform(x, None, OnlyQueries()), one_by_one(model, x)
    assert counted == [3, 3]
    assert torch.equal(found, expected)
    counted.clear()
    assert torch.equal(model.transform(x, None, OnlyQueries()), one_by_one(model, x))
    assert counted == [4, 4, 3]  # no row has an adapter


@torch.no_grad()
@pytest.mark.parametrize("shared", [False, True])
def test_experts_are_an_element(counted: list[int], shared: bool) -> None:
    model = packed(model_of(config_of(5, shared=shared)))
    x = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(2)).half()
    found = model.transform(x, None, OnlyQueries())
    assert counted == [4, 3, 2]  # o, gate and up, down, qkv; o, experts, qkv; o, experts
    torch.testing.assert_close(found, one_by_one(model, x), rtol=2e-3, atol=2e-3)


@torch.no_grad()
def test_offloaded_experts_are_none(counted: list[int]) -> None:
    model = packed(model_of(config_of(5), offloaded=2))
    x = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(2)).half()
    assert torch.equal(model.transform(x, None, OnlyQueries()), one_by_one(model, x))
    assert counted == [3]  # the dense layer
