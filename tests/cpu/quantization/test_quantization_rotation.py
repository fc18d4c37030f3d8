"""The residual stream rotated: the model computes the same."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from warpbus.errors import UsageError
from warpbus.models import Decoder, ModelConfig
from warpbus.models.config import RopeConfig
from warpbus.models.layers import RMSNorm
from warpbus.qtensor import Scheme
from warpbus.quantization.algorithms import rtn
from warpbus.quantization.rotation import check_rotatable, rotate_ends, rotate_layer, rotation

GLM = ModelConfig(
    family="glm",
    vocab_size=120,
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=80,
    norm_eps=1e-5,
    rope=RopeConfig(1e4, 8, interleaved=True),
    max_context=64,
    qkv_bias=True,
)
LLAMA = replace(GLM, family="llama", rope=RopeConfig(1e4, 16, interleaved=False), qkv_bias=False)
QWEN = replace(LLAMA, family="qwen3", qk_norm=True, output_bias=True, hidden_size=64)
TOKENS = torch.randint(0, 120, (2, 17), generator=torch.Generator().manual_seed(7))


class WideNorm(RMSNorm):
    """As its parent, but in the dtype of its input: the parent's float32 would hide what is to be seen."""

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def random_model(config, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    model = Decoder(config)
    model.initialize(generator, std=0.1)
    for name, module in list(model.named_modules()):
        if isinstance(module, RMSNorm):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, WideNorm(len(module.weight), module.eps))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model.to(dtype).requires_grad_(False).eval()


def rotate(model, q):
    for layer in model.layers:
        rotate_layer(layer, q)
    rotate_ends(model.embedding, model.final_norm, model.head, q)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 96, 384, 512])
def test_a_rotation_is_orthogonal(size):
    q = rotation(size, seed=0)
    assert q.dtype == torch.float64
    assert torch.allclose(q @ q.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert torch.equal(q, rotation(size, seed=0))
    assert size < 4 or not torch.equal(q, rotation(size, seed=1))


def test_powers_of_two_give_hadamard_matrices():
    q = rotation(256, seed=3)
    assert torch.allclose(q.abs(), torch.full((256, 256), 1 / 16, dtype=torch.float64), atol=1e-15)
    assert 0.4 < (q > 0).double().mean() < 0.6
    assert set(q.sign().sum(0).abs().tolist()) != {0.0, 256.0}  # with random signs: no column stands out


@pytest.mark.parametrize("config", [GLM, LLAMA, QWEN], ids=lambda config: config.family)
def test_the_model_computes_the_same(config):
    model = random_model(config)
    expected, hidden = model(TOKENS), model.embed(TOKENS)
    q = rotation(config.hidden_size, seed=1)
    rotate(model, q)
    assert (model(TOKENS) - expected).abs().max() < 1e-9 * expected.abs().max()
    assert torch.allclose(model.embed(TOKENS), hidden @ q)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight") and "q_norm" not in name and "k_norm" not in name:
            assert (parameter == 1).all(), name


def test_a_layer_by_itself_in_bfloat16():
    """Rounding to the parameters' dtype happens once, after computing in float32."""
    wide, narrow = random_model(GLM).layers[0], random_model(GLM).to(torch.bfloat16).layers[0]
    wide.load_state_dict(narrow.state_dict())
    q = rotation(48, seed=2)
    rotate_layer(wide, q)
    rotate_layer(narrow, q)
    for name, parameter in narrow.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.allclose(parameter.double(), wide.get_parameter(name), rtol=2**-8, atol=1e-6), name


def test_outliers_are_spread():
    """A channel that stands out, in what is read and what is written, costs the codes of its whole group."""
    model = random_model(replace(GLM, hidden_size=128))
    layer, scheme = model.layers[0], Scheme.parse("w4a16-g128")
    layer.attention.qkv.weight[:, 5] *= 30

    def error(weight):
        return float((rtn(weight, scheme, scale_dtype=torch.float32).dequantize() - weight).norm() / weight.norm())

    before = error(layer.attention.qkv.weight.float())
    rotate_layer(layer, rotation(128, seed=0))
    after = error(layer.attention.qkv.weight.float())
    assert after < 0.8 * before


def test_what_cannot_be_rotated_is_refused():
    config = replace(GLM, family="glm4", output_norms=True)
    check_rotatable(GLM)
    with pytest.raises(UsageError, match=r"^glm-4-0414: its sublayers' outputs are normed"):
        check_rotatable(config, "glm-4-0414")
    model = Decoder(config)
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(UsageError, match="quantize it without rotation"):
        rotate_layer(model.layers[0], rotation(48, seed=0))
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    tied = Decoder(replace(GLM, tie_embeddings=True))
    with pytest.raises(UsageError, match=r"^the head is tied to the embedding"):
        rotate_ends(tied.embedding, tied.final_norm, tied.head, rotation(48, seed=0))
    tied.head.weight = nn.Parameter(tied.head.weight.clone())
    rotate_ends(tied.embedding, tied.final_norm, tied.head, rotation(48, seed=0))
