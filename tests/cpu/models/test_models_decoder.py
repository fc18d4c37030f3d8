"""The shared decoder where transformers has no counterpart: packed documents, fresh weights, quantized layers."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from dense_configs import dense_config, with_traits

from warpbus.models import Decoder, ModelConfig, RopeConfig
from warpbus.models.layers import BranchedAttention, CausalAttention, LayerNorm, QuantizedLinear, RMSNorm
from warpbus.qtensor import QTensor, Scheme

CONFIG = dense_config(
    family="glm4",
    vocab_size=40,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=96,
    norm_eps=1e-5,
    rope=RopeConfig(theta=1e4, rotary_dim=16, interleaved=True),
    max_context=64,
    qkv_bias=True,
    output_norms=True,
)


def fresh(config: ModelConfig = CONFIG) -> Decoder:
    model = Decoder(config)
    model.initialize(torch.Generator().manual_seed(1), std=0.1)
    return model.eval()


@torch.no_grad()
def test_packed_documents_do_not_see_each_other() -> None:
    model = fresh()
    tokens = torch.randint(0, 40, (1, 11), generator=torch.Generator().manual_seed(2))
    documents = torch.tensor([[0] * 4 + [1] * 7])
    positions = torch.tensor([[*range(4), *range(7)]])
    packed = model(tokens, positions, CausalAttention(documents))
    apart = torch.cat((model(tokens[:, :4]), model(tokens[:, 4:])), dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(packed[:, 4:], model(tokens)[:, 4:], atol=1e-3)


@torch.no_grad()
def test_branches_see_what_they_share_and_themselves() -> None:
    model = fresh()
    tokens = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(2))
    branches = torch.tensor([[0] * 4 + [1] * 3 + [2] * 5, [1] * 6 + [2] * 4 + [-1] * 2])  # the second has no beginning
    positions = torch.tensor([[*range(4), *range(4, 7), *range(4, 9)], [*range(6), *range(4), 0, 0]])
    found = model(tokens, positions, BranchedAttention(branches))
    for row, places in ((0, [*range(7)]), (0, [*range(4), *range(7, 12)]), (1, [*range(6)]), (1, [*range(6, 10)])):
        alone = model(tokens[row : row + 1, places])[0]
        torch.testing.assert_close(found[row, places], alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[0, 7:], model(tokens[:1])[0, 7:], atol=1e-3)


@torch.no_grad()
def test_later_tokens_change_nothing_before_them() -> None:
    model = fresh()
    tokens = torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, 6] = 30
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:], atol=1e-3)


def test_initialize_draws_what_it_says() -> None:
    model = fresh(with_traits(CONFIG, hidden_size=256, ffn_size=512))
    layer = model.layers[1]
    assert torch.equal(layer.mlp_output_norm.weight, torch.ones(256))
    assert torch.equal(layer.attention.qkv.bias, torch.zeros(256))
    assert layer.mlp.gate_up.weight.std().item() == pytest.approx(0.1, rel=0.02)
    assert layer.mlp.down.weight.std().item() == pytest.approx(0.1 / 6**0.5, rel=0.02)


def test_initialize_of_other_norms_and_mlps() -> None:
    model = fresh(
        with_traits(CONFIG, layer_norm=True, gated=False, mlp_bias=True, output_bias=True, normed_residual=2.0)
    )
    layer = model.layers[1]
    assert torch.equal(layer.mlp_norm.weight, torch.ones(64))
    for bias in (layer.mlp_norm.bias, layer.mlp.up.bias, layer.mlp.down.bias, model.final_norm.bias):
        assert not bias.any()
    assert layer.mlp.up.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert layer.mlp.down.weight.std().item() == pytest.approx(0.1 / 6**0.5, rel=0.05)
    assert model.config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_tied_head_is_counted_once() -> None:
    config = replace(CONFIG, tie_embeddings=True)
    model = fresh(config)
    assert model.head.weight is model.embedding.weight
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_norm_takes_its_mean_in_float32() -> None:
    norm = RMSNorm(4, 1e-5).half()
    x = torch.full((1, 4), 1000.0, dtype=torch.float16)
    assert torch.equal(norm(x), torch.ones(1, 4, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_layer_norm_is_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    norm = LayerNorm(16, 1e-5)
    norm.weight.data, norm.bias.data = torch.randn(2, 16, generator=generator)
    norm, x = norm.to(dtype), (1000 + 50 * torch.randn(3, 16, generator=generator)).to(dtype)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = expected * norm.weight.double() + norm.bias.double()
    assert norm(x).dtype == dtype
    torch.testing.assert_close(
        norm(x).double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3 if dtype == torch.float16 else 1e-12
    )


def test_quantized_linear_is_the_linear_of_its_weight() -> None:
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (24, 64), generator=generator)
    matrix = QTensor.from_codes(Scheme.parse("w4a16-g32"), codes, torch.rand(24, 2, generator=generator))
    bias = torch.rand(24, generator=generator)
    layer = QuantizedLinear(matrix, bias)
    x = torch.randn(3, 5, 64, generator=generator)
    torch.testing.assert_close(layer(x), x @ matrix.dequantize().T + bias)
    assert set(layer.state_dict()) == {"qweight", "scales", "bias"}
    assert torch.equal(layer.weight.codes(), codes.to(torch.uint8))


def test_a_model_without_memory_imports_no_compiler() -> None:
    """Its import takes longer than that of all else that a small model needs."""
    program = """
import sys, torch
from warpbus.demo import model_path
from warpbus.formats import Checkpoint
from warpbus.models import Decoder, read_config
with torch.device("meta"):
    Decoder(read_config(Checkpoint(model_path(), weights=False)))
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
