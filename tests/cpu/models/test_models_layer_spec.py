"""The table of a layer is what the decoder has, and all that a family with unlike layers needs."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_configs import with_traits

from warpbus.engine import Engine, request
from warpbus.errors import UsageError
from warpbus.formats import Checkpoint, CheckpointWriter
from warpbus.models import (
    SHAPES,
    Decoder,
    Family,
    MLPSpec,
    ModelConfig,
    MoESpec,
    RouterSpec,
    TensorMap,
    families,
    load_model,
    tensor_map,
)
from warpbus.models.families import family_of, native
from warpbus.models.layer_spec import LayerSpec
from warpbus.models.parallel import Part
from warpbus.models.saving import named_tensors
from warpbus.quantization import Calibration, quantize

SIZES = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
GLM2 = with_traits(SHAPES["chatglm2-6b"], vocab_size=90, ffn_size=96, **SIZES)
KINDS = {
    "glm": GLM2,
    "glm4": with_traits(GLM2, output_norms=True),
    "qwen3": with_traits(GLM2, qk_norm=True, qkv_bias=False),
    "experts": replace(
        GLM2,
        layers=(
            GLM2.layers[0],
            replace(GLM2.layers[0], mlp=MoESpec(RouterSpec(5, 2, "sigmoid", bias=True), MLPSpec(32), MLPSpec(64))),
        ),
    ),
    "chatglm": with_traits(SHAPES["chatglm-6b"], vocab_size=90, ffn_size=96, **(SIZES | {"num_kv_heads": 4})),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_has_the_parameters_of_the_layer(kind: str) -> None:
    config = KINDS[kind]
    with torch.device("meta"):
        model = Decoder(config)
    for layer, spec in zip(model.layers, config.layers, strict=True):
        assert {name: tuple(each.shape) for name, each in layer.named_parameters()} == spec.parameters
    assert config.num_parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_reads_a_stage_of_its_sublayer(kind: str) -> None:
    spec = KINDS[kind].layers[-1]
    branches = spec.branches
    assert list(branches) == ["attention", "mlp"]
    assert [stage for found in branches.values() for branch in found for stage in branch] == [*spec.stages]
    assert [matrix for stage in spec.stages for matrix in spec.reading(stage)] == [*spec.matrices]
    for matrix in spec.matrices:
        own = next(branch for branch in branches[matrix.name.partition(".")[0]] if matrix.reads in branch)
        # The matrix of a branch's last stage writes to the residual stream, and is sharded by columns.
        assert matrix.is_row_parallel == (matrix.reads == own[-1])


# A family whose MLPs grow from layer to layer: all that has to be written for it.
def _config(values: Mapping[str, Any]) -> ModelConfig:
    dense = native.read(values | {"intermediate_size": values["ffn_sizes"][0]}, "growing", rotary_part=0.5)
    layers = (_with_ffn(dense.layers[0], size) for size in values["ffn_sizes"])
    return replace(dense, layers=tuple(layers))


def _with_ffn(layer: LayerSpec, size: int) -> LayerSpec:
    return replace(layer, mlp=replace(layer.mlp, ffn_size=size))


def _tensors(config: ModelConfig) -> TensorMap:
    return native.tensors(config)


GROWING = Family("growing", ("growing",), _config, _tensors)

CONFIG = {
    "model_type": "growing",
    "vocab_size": 90,
    "hidden_size": 64,
    "ffn_sizes": [96, 224, 160],
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
}


@pytest.fixture
def growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model of the family, with random weights."""
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, GROWING))
    monkeypatch.setitem(families.BY_NAME, "growing", GROWING)
    family = family_of(CONFIG)
    assert family is GROWING
    model = Decoder(family.config(CONFIG))
    model.initialize(torch.Generator().manual_seed(0), std=0.1)
    with CheckpointWriter(tmp_path / "model") as writer:
        writer.write_json("config.json", CONFIG)
        for name, tensor in named_tensors(model, torch.float32):
            writer.add(name, tensor)
        writer.finish()
    return tmp_path / "model"


def generated(model: Decoder) -> list[int]:
    engine = Engine(model, max_model_len=64)
    sequence = request([5, 6, 7, 8], tokens=12)
    engine.add(sequence)
    while engine.has_work:
        engine.step()
    return list(sequence.token_ids)


def test_layers_that_differ_load_generate_and_quantize(growing: Path, tmp_path: Path) -> None:
    model = load_model(Checkpoint(growing), device="cpu", dtype=torch.float32)
    assert [tuple(layer.mlp.down.weight.shape) for layer in model.layers] == [(64, 96), (64, 224), (64, 160)]
    tokens = generated(model)
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7, 8, *tokens]]))[0]
    assert tokens == logits[3:-1].argmax(-1).tolist()
    data = Calibration(tuple(tuple(range(start, start + 24)) for start in range(2, 60, 6)))
    report = quantize(growing, tmp_path / "w4", scheme="w4a16-g32", algorithm="gptq", calibration=data, device="cpu")
    assert len(report.layers) == 12
    small = load_model(Checkpoint(tmp_path / "w4"), device="cpu", dtype=torch.float32)
    for one, other in zip(small.layers, model.layers, strict=True):
        weight = other.mlp.down.weight
        # The rows of another matrix would be as far off as random ones: 1.4.
        assert (one.mlp.down.weight.dequantize(torch.float32) - weight).norm() < 0.3 * weight.norm()


def test_layers_that_differ_are_shared_by_processes(growing: Path) -> None:
    config = family_of(json.loads((growing / "config.json").read_text())).config(CONFIG)  # type: ignore[union-attr]
    parts = [Part(config, rank, 2).config for rank in range(2)]
    for whole, one, other in zip(config.layers, *(part.layers for part in parts), strict=True):
        assert one.mlp.ffn_size + other.mlp.ffn_size == whole.mlp.ffn_size
        assert one.mlp.ffn_size % 32 == 0
    assert {name.rpartition(".")[0] for name in tensor_map(config)} == {
        name.rpartition(".")[0] for name in tensor_map(parts[0])
    }
    with pytest.raises(UsageError, match=r"^4 GPUs: the model has 4 heads and an FFN of 96, .* use at most 3 GPUs$"):
        Part(config, 0, 4)
