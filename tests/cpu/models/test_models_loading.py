"""Checkpoints to decoders: plain and quantized ones, and files that do not fit."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from warpbus.errors import CheckpointError, TensorError, UnknownArchitectureError, UsageError
from warpbus.formats import Checkpoint, quantization_config, to_tensors
from warpbus.models import Decoder, load_layer, load_model, quantized_parameters, read_config, tensor_map
from warpbus.models.families import family_of
from warpbus.models.layers import QuantizedEmbedding, QuantizedLinear
from warpbus.qtensor import QTensor, Scheme

LINEARS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")

HF: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 50,
    "eos_token_id": 2,
}
TOKENS = torch.arange(12).view(2, 6)


def random_tensors(values: dict[str, Any]) -> dict[str, Tensor]:
    """Weights for a config.json, by the checkpoint's names, float32."""
    config = family_of(values).config(values)
    generator = torch.Generator().manual_seed(5)
    parameters = dict(Decoder(config).named_parameters())
    tensors = {}
    for parameter, names in tensor_map(config).items():
        shape = parameters[parameter].shape
        fused = torch.randn(shape, generator=generator) * 64**-0.5
        if parameter.endswith("norm.weight"):
            fused += 1
        rows = config.attention.qkv_rows if ".qkv." in parameter else (shape[0] // len(names),) * len(names)
        parts = fused.split(rows if len(names) > 1 else (shape[0],))
        tensors.update({name: part.clone() for name, part in zip(names, parts, strict=True)})
    return tensors


def write(directory: Path, values: dict[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(values))
    return Checkpoint(directory)


def model_of(kind: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    values = {**HF, "model_type": kind, **changes}
    return values, random_tensors(values)


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(checkpoint, device="cpu", dtype=dtype)


def quantized(
    values: dict[str, Any], tensors: dict[str, Tensor], scheme: Scheme, keep: str = "lm_head"
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Random codes in place of each linear layer whose name does not contain `keep`.

    Returns:
        config.json, the quantized checkpoint's tensors, and the plain tensors that mean the same.
    """
    generator = torch.Generator().manual_seed(6)
    packed, plain = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight") or keep in name:
            packed[name] = plain[name] = tensor
            continue
        out, columns = tensor.shape
        groups = scheme.groups(columns)
        codes = torch.randint(0, scheme.max_code + 1, (out, columns), generator=generator)
        scales = (torch.rand(out, groups, generator=generator) * 0.4 / scheme.max_code + 0.01).half()
        zeros = None if scheme.symmetric else torch.randint(0, scheme.max_code, (out, groups), generator=generator)
        matrix = QTensor.from_codes(scheme, codes, scales, zeros)
        packed.update(to_tensors(name.removesuffix(".weight"), matrix))
        plain[name] = matrix.dequantize(torch.float32)
    return {**values, "quantization_config": quantization_config(scheme, ["lm_head"])}, packed, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_are_cast_and_without_gradients(tmp_path: Path, dtype: torch.dtype) -> None:
    values, tensors = model_of("glm")
    model = load(write(tmp_path, values, tensors), dtype)
    assert not model.training
    for parameter in model.parameters():
        assert (parameter.dtype, parameter.device.type, parameter.requires_grad) == (dtype, "cpu", False)
    names = [f"model.layers.1.self_attn.{part}_proj.bias" for part in "qkv"]
    expected = torch.cat([tensors[name] for name in names]).to(dtype)
    assert torch.equal(model.get_parameter("layers.1.attention.qkv.bias"), expected)


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w4a16-g32-asym", "w8a16", "w3a16-g32"])
@pytest.mark.parametrize("kind", ["glm", "qwen3"])
def test_quantized_layers_give_the_logits_of_their_dequantized_weights(tmp_path: Path, kind: str, scheme: str) -> None:
    values, tensors = model_of(kind)
    config, packed, plain = quantized(values, tensors, Scheme.parse(scheme))
    model = load(write(tmp_path / "quantized", config, packed))
    reference = load(write(tmp_path / "plain", values, plain))
    for name in LINEARS:
        layer = model.layers[1].get_submodule(name)
        assert isinstance(layer, QuantizedLinear)
        assert (layer.scales.dtype, str(layer.scheme)) == (torch.float16, scheme)
    assert isinstance(model.head, torch.nn.Linear)
    with torch.no_grad():
        expected = reference(TOKENS)
        assert expected.std() > 0.1
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
    state = [*model.parameters(), *model.buffers()]
    assert not any(tensor.is_meta for tensor in state)


MIXED = {
    "o_proj": Scheme.parse("w8a8-fp8"),
    "gate_up_proj": Scheme.parse("w8a16"),
    "layers.1.mlp.down_proj": Scheme.parse("w8a8-int8"),
    "_proj": Scheme.parse("w4a16-g32"),
}


def mixed(
    values: dict[str, Any], tensors: dict[str, Tensor], schemes: dict[str, Scheme]
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """As `quantized`; a matrix has the scheme of the first key that ends its name."""
    packed, plain, chosen = {}, {}, {}
    for name, tensor in tensors.items():
        prefix = name.removesuffix(".weight")
        scheme = next((scheme for end, scheme in schemes.items() if prefix.endswith(end)), None)
        if scheme is None or name.endswith("bias"):
            packed[name] = plain[name] = tensor
            continue
        chosen[prefix] = scheme
        _, stored, same = quantized(values, {"a_proj.weight": tensor}, Scheme(scheme.bits, scheme.group_size))
        if scheme.activations is None:
            packed |= {name.replace("a_proj", prefix): part for name, part in stored.items()}
            plain[name] = same["a_proj.weight"]
        else:
            codes = torch.randint(-9, 10, tensor.shape, generator=torch.Generator().manual_seed(len(name)))
            matrix = QTensor.from_values(scheme, codes.to(scheme.dtype), torch.full((len(tensor),), 0.01))
            packed |= to_tensors(prefix, matrix)
            plain[name] = matrix.dequantize()
    return {**values, "quantization_config": quantization_config(chosen, ["lm_head"])}, packed, plain


@pytest.mark.parametrize("kind", ["glm", "qwen3"])
def test_layers_may_have_different_schemes(tmp_path: Path, kind: str) -> None:
    values, tensors = model_of(kind)
    schemes = MIXED if kind == "glm" else MIXED | {"up_proj": MIXED["gate_up_proj"], "gate_proj": MIXED["gate_up_proj"]}
    config, packed, plain = mixed(values, tensors, dict(sorted(schemes.items(), key=lambda one: -len(one[0]))))
    checkpoint = write(tmp_path / "quantized", config, packed)
    model = load(checkpoint)
    reference = load(write(tmp_path / "plain", values, plain))
    found = quantized_parameters(checkpoint, read_config(checkpoint))
    assert {name: str(scheme) for name, scheme in found.items() if name.startswith("layers.1.")} == {
        "layers.1.attention.qkv.weight": "w4a16-g32",
        "layers.1.attention.o.weight": "w8a8-fp8",
        "layers.1.mlp.gate_up.weight": "w8a16",
        "layers.1.mlp.down.weight": "w8a8-int8",
    }
    for parameter, scheme in found.items():
        layer = model.get_submodule(parameter.removesuffix(".weight"))
        assert isinstance(layer, QuantizedLinear)
        assert layer.scheme == scheme
        assert torch.equal(layer.weight.dequantize(torch.float32), reference.get_parameter(parameter))
    with torch.no_grad():
        expected = reference(TOKENS)
        assert 0 < (model(TOKENS) - expected).norm() < 0.05 * expected.norm()  # the rounded activations


def test_parts_of_a_fused_matrix_have_one_scheme(tmp_path: Path) -> None:
    values, tensors = model_of("glm")
    config, packed, _ = mixed(values, tensors, {"v_proj": Scheme(8, None), "_proj": Scheme(4, 32)})
    message = r"q_proj w4a16-g32, .*k_proj w4a16-g32, .*v_proj w8a16: expected one scheme, .* one matrix"
    with pytest.raises(CheckpointError, match=message):
        load(write(tmp_path, config, packed))


def test_a_quantized_matrix_that_no_group_has(tmp_path: Path) -> None:
    values, tensors = model_of("glm")
    config, packed, _ = quantized(values, tensors, Scheme.parse("w4a16-g32"))
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*down_proj$"]
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj\.weight: is stored quantized, but no group"):
        load(write(tmp_path, config, packed))


def test_a_layer_may_stay_unquantized(tmp_path: Path) -> None:
    values, tensors = model_of("llama")
    config, packed, plain = quantized(values, tensors, Scheme.parse("w4a16-g32"), keep="layers.0.")
    model = load(write(tmp_path / "quantized", config, packed))
    assert isinstance(model.layers[0].attention.qkv, torch.nn.Linear)
    assert isinstance(model.layers[1].attention.qkv, QuantizedLinear)
    with torch.no_grad():
        torch.testing.assert_close(
            model(TOKENS), load(write(tmp_path / "plain", values, plain))(TOKENS), rtol=1e-5, atol=1e-5
        )


def test_a_quantized_model_does_not_depend_on_the_file(tmp_path: Path) -> None:
    values, tensors = model_of("glm")
    config, packed, _ = quantized(values, tensors, Scheme.parse("w4a16-g32"))
    model = load(write(tmp_path, config, packed))
    with torch.no_grad():
        before = model(TOKENS)
        weights = tmp_path / "model.safetensors"
        with weights.open("r+b") as file:
            file.write(bytes(weights.stat().st_size))
        assert torch.equal(model(TOKENS), before)


@pytest.mark.parametrize("scheme", [None, "w4a16-g32"])
def test_load_layer_is_the_layer_of_load_model(tmp_path: Path, scheme: str | None) -> None:
    values, tensors = model_of("glm4")
    if scheme is not None:
        values, tensors, _ = quantized(values, tensors, Scheme.parse(scheme))
    checkpoint = write(tmp_path, values, tensors)
    config = read_config(checkpoint)
    whole = load(checkpoint).layers[1].state_dict()
    layer = load_layer(checkpoint, config, 1, device="cpu", dtype=torch.float32)
    assert not layer.training
    assert layer.state_dict().keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in layer.state_dict().items())


@pytest.mark.parametrize("index", [-1, 2])
def test_a_layer_that_does_not_exist(tmp_path: Path, index: int) -> None:
    checkpoint = write(tmp_path, *model_of("glm"))
    with pytest.raises(UsageError, match=f"layer {index}: expected 0 to 1"):
        load_layer(checkpoint, read_config(checkpoint), index, device="cpu", dtype=torch.float32)


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """The tensor before is gone when the next is asked for: a large model needs no second copy of itself."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    class Watched(Checkpoint):
        def tensor(self, name: str, *, expected: tuple[int, ...] | None = None) -> Tensor:
            nonlocal most
            tensor = super().tensor(name, expected=expected)
            alive[:] = [reference for reference in alive if reference() is not None]
            alive.append(weakref.ref(tensor))
            most = max(most, len(alive))
            return tensor

    write(tmp_path, *model_of("llama"))
    model = load(Watched(tmp_path))
    # The one that has just been read, and the one before if the caller's name still holds it.
    assert most <= 2
    assert model.config.num_layers == 2


def test_progress_counts_the_bytes_of_the_file(tmp_path: Path) -> None:
    values, tensors = model_of("glm")
    values, tensors, _ = quantized(values, tensors, Scheme.parse("w4a16-g32-asym"))
    checkpoint = write(tmp_path, values, tensors)
    seen: list[tuple[int, int]] = []
    load_model(checkpoint, device="cpu", dtype=torch.float32, progress=lambda done, total: seen.append((done, total)))
    done = [first for first, _ in seen]
    assert done == sorted(done)
    assert seen[-1] == (checkpoint.total_bytes, checkpoint.total_bytes)


def test_tied_head(tmp_path: Path) -> None:
    values, tensors = model_of("llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors
    model = load(write(tmp_path, values, tensors))
    assert model.head.weight is model.embedding.weight
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert load(write(tmp_path, values, tensors)).head.weight.shape == (50, 64)
    tensors["lm_head.weight"][3, 3] += 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs from the embedding"):
        load(write(tmp_path, values, tensors))


def test_known_extras_are_skipped(tmp_path: Path) -> None:
    values, tensors = model_of("llama")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    assert load(write(tmp_path, values, tensors)).config.family == "llama"


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_missing_tensor(tmp_path: Path, name: str) -> None:
    values, tensors = model_of("glm")
    del tensors[name]
    with pytest.raises(TensorError, match=rf"{tmp_path}: .*{name}.* missing"):
        load(write(tmp_path, values, tensors))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.mlp.down_proj.weight", (64, 95)),
        ("model.layers.0.self_attn.k_proj.weight", (32, 64)),
        ("model.layers.0.self_attn.k_proj.bias", (1,)),
        ("model.embed_tokens.weight", (64,)),
        ("model.norm.weight", (64, 1)),
    ],
)
def test_wrong_shape(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    values, tensors = model_of("glm")
    tensors[name] = torch.zeros(shape)
    with pytest.raises(TensorError, match=rf"{tmp_path}: {name}: expected shape .* found \[{shape[0]}"):
        load(write(tmp_path, values, tensors))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_weights_that_are_not_floating_point(tmp_path: Path, dtype: torch.dtype) -> None:
    values, tensors = model_of("glm")
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = torch.zeros(tensors[name].shape).to(dtype)
    with pytest.raises(TensorError, match=f"{name}: expected floating point"):
        load(write(tmp_path, values, tensors))


def test_unexpected_weights_are_listed(tmp_path: Path) -> None:
    values, tensors = model_of("llama")
    for letter in "abcde":
        tensors[f"model.adapter_{letter}.weight"] = torch.zeros(2)
    checkpoint = write(tmp_path, values, tensors)
    with pytest.raises(CheckpointError, match=r"model\.adapter_a\.weight, .*adapter_c\.weight and 2 more"):
        load(checkpoint)
    with pytest.raises(CheckpointError, match="adapter_a"):
        load_layer(checkpoint, read_config(checkpoint), 0, device="cpu", dtype=torch.float32)


def test_a_bias_that_config_json_does_not_mention(tmp_path: Path) -> None:
    values, tensors = model_of("glm")
    values["attention_bias"] = False
    with pytest.raises(CheckpointError, match=r"unexpected weights .*k_proj\.bias"):
        load(write(tmp_path, values, tensors))


def test_packed_weights_without_quantization_config(tmp_path: Path) -> None:
    values, tensors = model_of("glm")
    _, packed, _ = quantized(values, tensors, Scheme.parse("w4a16-g32"))
    with pytest.raises(CheckpointError, match=r"unexpected weights .*weight_packed"):
        load(write(tmp_path, values, packed))


def test_half_of_a_fused_matrix_quantized(tmp_path: Path) -> None:
    values, tensors = model_of("glm")
    config, packed, _ = quantized(values, tensors, Scheme.parse("w4a16-g32"), keep="layers.0.self_attn.v_proj")
    with pytest.raises(CheckpointError, match=r"q_proj\.weight, .*v_proj\.weight: some of these are quantized"):
        load(write(tmp_path, config, packed))


def test_quantized_matrix_of_the_wrong_shape(tmp_path: Path) -> None:
    values, tensors = model_of("glm")
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 64)
    config, packed, _ = quantized(values, tensors, Scheme.parse("w4a16-g32"))
    with pytest.raises(TensorError, match=r"layers\.0\.mlp\.down_proj\.weight: expected shape \[64, 96\]"):
        load(write(tmp_path, config, packed))


def test_quantized_embedding(tmp_path: Path) -> None:
    values, tensors = model_of("glm")
    config, packed, _ = quantized(values, tensors, Scheme.parse("w4a16-g32"))
    matrix = QTensor.from_codes(Scheme.parse("w4a16-g32"), torch.zeros(50, 64, dtype=torch.int64), torch.ones(50, 2))
    del packed["model.embed_tokens.weight"]
    packed.update(to_tensors("model.embed_tokens", matrix))
    model = load(write(tmp_path / "embedding", config, packed))
    assert isinstance(model.embedding, QuantizedEmbedding)
    assert torch.equal(model.embed(torch.tensor([0, 49])), torch.full((2, 64), -8.0))
    del packed["model.norm.weight"]
    packed.update({name: tensor.clone() for name, tensor in to_tensors("model.norm", matrix).items()})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: only linear layers"):
        load(write(tmp_path / "norm", config, packed))


@pytest.mark.parametrize("model_type", ["gpt2", None, 3, ["glm"]])
def test_unknown_architecture_lists_what_is_supported(tmp_path: Path, model_type: object) -> None:
    values, tensors = model_of("glm")
    checkpoint = write(tmp_path, {**values, "model_type": model_type}, tensors)
    with pytest.raises(
        UnknownArchitectureError, match=r"is not supported: expected one of chatglm, glm, glm4, glm4_moe,"
    ):
        read_config(checkpoint)


def test_config_errors_name_the_directory(tmp_path: Path) -> None:
    values, tensors = model_of("glm")
    checkpoint = write(tmp_path, {**values, "hidden_size": 0}, tensors)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: config\.json: hidden_size: .* found 0"):
        read_config(checkpoint)


def test_stop_ids_of_generation_config_come_first(tmp_path: Path) -> None:
    values, tensors = model_of("glm", eos_token_id=7)
    checkpoint = write(tmp_path, values, tensors)
    assert read_config(checkpoint).stop_ids == (7,)
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [5, 6, 5]}')
    assert read_config(checkpoint).stop_ids == (5, 6)
    generation.write_text('{"eos_token_id": null}')
    assert read_config(checkpoint).stop_ids == (7,)
    generation.write_text('{"eos_token_id": "5"}')
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: generation_config\.json: eos_token_id"):
        read_config(checkpoint)


def test_stop_ids_past_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, *model_of("glm", eos_token_id=[4, 151329]))
    assert read_config(checkpoint).stop_ids == (4,)


def test_the_file_itself_is_not_changed(tmp_path: Path) -> None:
    values, tensors = model_of("glm")
    model = load(write(tmp_path, values, tensors))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
