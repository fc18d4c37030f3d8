"""Scales moved into what precedes a matrix: the layer computes the same."""

import pytest
import torch
from dense_configs import dense_config

from warpbus.errors import NumericError, TensorError, UsageError
from warpbus.models import DecoderLayer
from warpbus.models.config import RopeConfig
from warpbus.models.layers import CausalAttention, Rotary
from warpbus.qtensor import Scheme
from warpbus.quantization.algorithms import rtn
from warpbus.quantization.folding import divide_rows, fold, rescaled, tie

LINEARS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_layers": 1,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_size": 96,
    "norm_eps": 1e-5,
    "max_context": 64,
}
HALF, WHOLE = RopeConfig(1e4, 8, interleaved=True), RopeConfig(1e4, 16, interleaved=False)
CONFIGS = {
    "glm": dense_config("glm", rope=HALF, qkv_bias=True, **SHAPE),
    "glm4": dense_config("glm4", rope=HALF, qkv_bias=True, output_norms=True, **SHAPE),
    "llama": dense_config("llama", rope=WHOLE, **(SHAPE | {"num_kv_heads": 6})),
    "qwen2": dense_config("qwen2", rope=WHOLE, qkv_bias=True, **SHAPE),
    "qwen3": dense_config("qwen3", rope=WHOLE, qk_norm=True, qkv_bias=True, output_bias=True, **SHAPE),
}


def random_layer(config, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layer = DecoderLayer(config.layers[0], config.rope)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return layer.to(dtype).requires_grad_(False)


def outputs(layer, config):
    generator = torch.Generator().manual_seed(1)
    dtype = layer.mlp.down.weight.dtype
    x = torch.randn(2, 9, config.hidden_size, generator=generator).to(dtype)
    positions = torch.arange(9).expand(2, 9)
    return layer(x, 0, positions, Rotary(config.rope)(positions, dtype), CausalAttention())


def output_of(config):
    """A layer's spec, and its matrix with shared inputs."""
    return config.layers[0], config.layers[0].matrix("attention.o")


def random_scale(config, linear, seed=2):
    matrix = config.layers[0].matrix(linear)
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(matrix.columns.length, generator=generator, dtype=torch.float64).exp()
    return tie(config.layers[0], matrix, scale)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("linear", LINEARS)
def test_the_layer_computes_the_same(family, linear):
    config = CONFIGS[family]
    layer = random_layer(config)
    before, expected = {name: value.clone() for name, value in layer.named_parameters()}, outputs(layer, config)
    scale = random_scale(config, linear)
    folded = fold(layer, linear, scale)
    assert (outputs(layer, config) - expected).abs().max() < 1e-10 * expected.abs().max()
    assert torch.allclose(folded.scale, scale, rtol=1e-12)
    assert torch.equal(folded.weight, before[f"{linear}.weight"] * folded.scale)
    touched = {name for name, value in layer.named_parameters() if not torch.equal(value, before[name])}
    assert touched == {f"{linear}.weight", *folded.changed}
    assert all(torch.equal(layer.get_parameter(name), value) for name, value in folded.changed.items())


@pytest.mark.parametrize("family", CONFIGS)
def test_all_four_in_their_order(family):
    config = CONFIGS[family]
    layer = random_layer(config)
    expected = outputs(layer, config)
    for linear in LINEARS:
        fold(layer, linear, random_scale(config, linear))
    assert (outputs(layer, config) - expected).abs().max() < 1e-10 * expected.abs().max()


def test_what_changes_is_only_what_makes_the_inputs():
    config = CONFIGS["glm"]
    layer = random_layer(config)
    qkv, gate_up = layer.attention.qkv.weight.clone(), layer.mlp.gate_up.weight.clone()
    assert set(fold(layer, "attention.o", random_scale(config, "attention.o")).changed) == {
        "attention.qkv.weight",
        "attention.qkv.bias",
    }
    fold(layer, "mlp.down", random_scale(config, "mlp.down"))
    untouched = sum(config.attention.qkv_rows[:2])
    assert torch.equal(layer.attention.qkv.weight[:untouched], qkv[:untouched])
    assert not torch.equal(layer.attention.qkv.weight[untouched:], qkv[untouched:])
    assert torch.equal(
        layer.mlp.gate_up.weight[: config.layers[0].mlp.ffn_size], gate_up[: config.layers[0].mlp.ffn_size]
    )


def test_a_norms_rounding_is_made_up_for():
    """In bfloat16 the divided weight of a norm is off by up to 1 / 256; the matrix takes that in."""
    config = CONFIGS["glm"]
    layer = random_layer(config, torch.bfloat16)
    norm, weight = layer.attention_norm.weight.double(), layer.attention.qkv.weight.double()
    scale = random_scale(config, "attention.qkv").float()
    folded = fold(layer, "attention.qkv", scale)
    assert folded.weight.dtype == torch.float32
    assert torch.allclose(layer.attention_norm.weight.double() * folded.weight, norm * weight, rtol=1e-6)
    assert torch.allclose(folded.scale, scale, rtol=1 / 128)
    assert not torch.allclose(folded.scale, scale, rtol=1e-5)


def test_a_file_of_a_narrower_dtype():
    """On the CPU a bfloat16 checkpoint is computed in float32: the matrix takes in what the file will round."""
    config = CONFIGS["glm"]
    layer = random_layer(config, torch.float32)
    norm, weight = layer.mlp_norm.weight.double(), layer.mlp.gate_up.weight.double()
    folded = fold(layer, "mlp.gate_up", random_scale(config, "mlp.gate_up"), stored=torch.bfloat16)
    assert layer.mlp_norm.weight.dtype == torch.float32
    assert torch.equal(layer.mlp_norm.weight, layer.mlp_norm.weight.bfloat16().float())
    assert torch.allclose(layer.mlp_norm.weight.double() * folded.weight, norm * weight, rtol=1e-6)
    fold(layer, "attention.o", random_scale(config, "attention.o"), stored=torch.bfloat16)
    values = layer.attention.qkv.weight[sum(config.attention.qkv_rows[:2]) :]
    assert torch.equal(values, values.bfloat16().float())


def test_a_channel_that_the_norm_silences_stays_silent():
    layer = random_layer(CONFIGS["glm"])
    layer.mlp_norm.weight[3] = 0
    scale = random_scale(CONFIGS["glm"], "mlp.gate_up")
    folded = fold(layer, "mlp.gate_up", scale)
    assert layer.mlp_norm.weight[3] == 0
    assert folded.scale[3] == scale[3]


def test_heads_that_share_a_value_are_tied():
    config = CONFIGS["glm"]  # 6 heads, 2 of keys and values: heads 0, 1, 2 share, and 3, 4, 5
    heads = torch.tensor([1.0, 2.0, 6.0, 10.0, 20.0, 60.0])
    tied = tie(*output_of(config), heads[:, None].expand(6, 16).flatten()).view(6, 16)
    assert torch.equal(tied[:, 0], torch.tensor([3.0, 3.0, 3.0, 30.0, 30.0, 30.0]))
    assert torch.equal(tie(*output_of(CONFIGS["llama"]), tied.flatten()), tied.flatten())
    apart = tie(*output_of(config), torch.arange(96.0)).view(2, 3, 16)
    assert torch.equal(apart[0, 0], 16 + torch.arange(16.0))
    with pytest.raises(NumericError, match=r"^attention\.o: its scale differs between heads"):
        fold(random_layer(config), "attention.o", heads[:, None].expand(6, 16).flatten())


@pytest.mark.parametrize("text", ["w4a16-g32", "w3a16-g32-asym", "w8a8-int8"])
def test_rows_of_a_quantized_matrix(text):
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(3))
    scheme = Scheme.parse("w8a16" if text == "w8a8-int8" else text)
    matrix = rtn(weight, scheme, scale_dtype=torch.float32)
    scale = torch.rand(8, generator=torch.Generator().manual_seed(4)) + 0.5
    divided = divide_rows(matrix, torch.arange(16, 24), scale)
    assert torch.equal(divided.qweight, matrix.qweight)
    expected = matrix.dequantize()
    expected[16:] /= scale[:, None]
    assert torch.allclose(divided.dequantize(), expected, rtol=1e-6)
    assert torch.equal(matrix.dequantize()[:16], divided.dequantize()[:16])


def test_quantized_predecessors_leave_the_layer_as_it_is():
    """down's turn comes when gate_up is quantized: its scales are divided, and the layer computes the same."""
    config = CONFIGS["glm"]
    layer = random_layer(config, torch.float32)
    matrix = rtn(layer.mlp.gate_up.weight, Scheme.parse("w4a16-g32"), scale_dtype=torch.float32)
    layer.mlp.gate_up.weight.copy_(matrix.dequantize())
    expected = outputs(layer, config)
    scale = random_scale(config, "mlp.down").float()
    fold(layer, "mlp.down", scale)
    folded = outputs(layer, config)
    size = config.layers[0].mlp.ffn_size
    layer.mlp.gate_up.weight.copy_(divide_rows(matrix, torch.arange(size, 2 * size), scale).dequantize())
    for found in (folded, outputs(layer, config)):
        assert torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max()))


def test_moments_of_divided_inputs():
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(2, 50, 8, generator=generator, dtype=torch.float64)
    scale = torch.rand(8, generator=generator, dtype=torch.float64) + 0.1
    assert torch.allclose(rescaled(y.T @ x, scale), (y / scale).T @ (x / scale))


def test_bad_scales_are_refused():
    config = CONFIGS["glm"]
    layer = random_layer(config, torch.float16)
    with pytest.raises(UsageError, match=r"^mlp\.up: no such linear layer: expected one of attention\.qkv"):
        fold(layer, "mlp.up", torch.ones(64))
    with pytest.raises(TensorError, match=r"^mlp\.down: expected a scale of shape \[96\], found \[64\]"):
        fold(layer, "mlp.down", torch.ones(64))
    for value in (0.0, -1.0, float("nan"), float("inf")):
        scale = torch.ones(96)
        scale[5] = value
        with pytest.raises(NumericError, match=r"^mlp\.down: a channel's scale is not positive and finite"):
            fold(layer, "mlp.down", scale)
    with pytest.raises(NumericError, match=r"^attention_norm\.weight: out of the range of torch\.float16"):
        fold(layer, "attention.qkv", torch.full((64,), 1e-6))
    with pytest.raises(NumericError, match=r"^mlp\.gate_up\.weight: out of the range of torch\.float16"):
        fold(layer, "mlp.down", torch.full((96,), 1e-6))
    matrix = rtn(torch.ones(4, 32), Scheme.parse("w4a16-g32"), scale_dtype=torch.float16)
    with pytest.raises(NumericError, match=r"^scales of a quantized matrix: out of the range of torch\.float16"):
        divide_rows(matrix, torch.tensor([1, 3]), torch.full((2,), 1e-7))
    with pytest.raises(TensorError, match="expected a scale of shape \\[2\\]"):
        divide_rows(matrix, torch.tensor([1, 3]), torch.ones(3))
