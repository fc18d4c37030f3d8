"""The layer of multi-token prediction: declared, loaded and computed as transformers does, or refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import HF, plain_tensors, write_files
from torch import Tensor

from warpbus.errors import CheckpointError
from warpbus.formats import Checkpoint
from warpbus.models import SHAPES, Decoder, PredictionLayer, load_layer, load_model, random_model, read_config
from warpbus.models.families import family_of
from warpbus.models.layer_spec import MoESpec
from warpbus.models.layers import QuantizedLinear
from warpbus.models.saving import named_tensors
from warpbus.qtensor import Scheme

transformers = pytest.importorskip("transformers")

AIR: dict[str, Any] = HF | {
    "model_type": "glm4_moe",
    "num_hidden_layers": 3,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "num_nextn_predict_layers": 1,
}
FLASH: dict[str, Any] = AIR | {
    "model_type": "glm4_moe_lite",
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 24,
    "head_dim": 16,  # another name of qk_rope_head_dim
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
SPARSE: dict[str, Any] = FLASH | {
    "model_type": "glm_moe_dsa",
    "first_k_dense_replace": 1,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 4,
}
FAMILIES = pytest.mark.parametrize("values", [AIR, FLASH, SPARSE], ids=lambda values: values["model_type"])
PREFIX = "model.layers.3."


def written(directory: Path, values: dict[str, Any], change: Callable[[dict[str, Tensor]], None] | None = None) -> Path:
    tensors = plain_tensors(values, torch.float32)
    if change is not None:
        change(tensors)
    return write_files(directory / "model", values, tensors)


def loaded(directory: Path, *, mtp: bool = True) -> Decoder:
    return load_model(Checkpoint(directory), device="cpu", dtype=torch.float32, mtp=mtp)


@pytest.mark.parametrize(("values", "kind"), [(AIR, "Glm4Moe"), (FLASH, "Glm4MoeLite")], ids=["air", "flash"])
@torch.no_grad()
def test_hidden_states_are_those_of_transformers(
    tmp_path: Path, values: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts of `generate(use_mtp=True)`: its layer 0 is the checkpoint's layer after the last one."""
    directory, tokens = written(tmp_path, values), torch.tensor([[5, 6, 7, 8, 9, 3, 20, 21]])
    named = getattr(transformers, f"{kind}ForCausalLM")
    # transformers knows the layers of published checkpoints only.
    monkeypatch.setattr(named, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*"])
    main = named.from_pretrained(directory, dtype=torch.float32).eval()
    main.config.num_mtp_layers, main.config.mtp_mlp_layer_types = 1, ["sparse"]
    oracle = transformers.modeling_layers.MtpModel.from_pretrained(main).eval()
    hidden = main(tokens, output_hidden_states=True).hidden_states[-1]
    model = loaded(directory)
    assert torch.allclose(model.hidden(tokens), hidden, rtol=0, atol=1e-5)
    positions = torch.arange(1, 8)[None]
    expected = oracle.forward_layer(0, hidden[:, :-1], positions, None, input_ids=tokens[:, 1:])
    found = model.predict(tokens[:, 1:], model.hidden(tokens)[:, :-1])
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    assert torch.allclose(model.logits(found), oracle.shared_head(expected), rtol=0, atol=1e-5)
    # A second draft continues from the first one's hidden states.
    again = oracle.forward_layer(0, expected[:, :-1], positions[:, 1:], None, input_ids=tokens[:, 2:])
    assert torch.allclose(model.predict(tokens[:, 2:], found[:, :-1]), again, rtol=0, atol=1e-5)


@FAMILIES
def test_the_layer_is_loaded_where_it_is_asked_for(tmp_path: Path, values: dict[str, Any]) -> None:
    directory = written(tmp_path, values)
    checkpoint = Checkpoint(directory)
    assert read_config(checkpoint).mtp is None
    config = read_config(checkpoint, mtp="stored")
    assert config == read_config(checkpoint, mtp="required")
    assert config.mtp is not None
    assert isinstance(config.mtp.mlp, MoESpec)
    model, plain = loaded(directory), loaded(directory, mtp=False)
    assert len(model.layers) == 4
    assert len(plain.layers) == 3
    assert isinstance(model.layers[3], PredictionLayer)
    assert torch.equal(model.layers[3].projection.weight, checkpoint.tensor(f"{PREFIX}eh_proj.weight"))
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(tokens))
    layer = load_layer(checkpoint, config, 3, device="cpu", dtype=torch.float32)
    assert torch.equal(layer.get_parameter("output_norm.weight"), checkpoint.tensor(f"{PREFIX}shared_head.norm.weight"))
    # What is saved is what was loaded.
    saved = dict(named_tensors(model, torch.float32))
    assert saved.keys() == set(checkpoint.names())
    assert all(torch.equal(tensor, checkpoint.tensor(name)) for name, tensor in saved.items())


def test_copies_of_the_embedding_and_the_head_are_not_read(tmp_path: Path) -> None:
    def add_copies(tensors: dict[str, Tensor]) -> None:
        tensors[f"{PREFIX}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{PREFIX}shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    model = loaded(written(tmp_path / "copies", AIR, add_copies))
    assert sum(name.startswith("layers.3.") for name, _ in model.named_parameters()) > 10


@FAMILIES
def test_the_parameters_are_those_of_the_table(values: dict[str, Any]) -> None:
    family = family_of(values)
    assert family is not None
    config = family.config(values)
    with torch.device("meta"):
        model = Decoder(config)
    assert {name: tuple(each.shape) for name, each in model.named_parameters()} == config.parameters
    assert config.matrix("layers.3.projection.weight") is None  # never quantized
    assert config.matrix("layers.3.attention.o.weight") is not None
    assert family.config(values | {"num_nextn_predict_layers": 0}) == replace(config, mtp=None)


@pytest.mark.parametrize("name", ["eh_proj.weight", "mlp.experts.4.up_proj.weight", "shared_head.norm.weight"])
def test_a_layer_that_is_announced_and_absent_is_named(tmp_path: Path, name: str) -> None:
    directory = written(tmp_path, AIR, lambda tensors: tensors.__delitem__(PREFIX + name))
    loaded(directory, mtp=False)
    assert read_config(Checkpoint(directory), mtp="stored").mtp is None
    with pytest.raises(CheckpointError) as caught:
        loaded(directory)
    assert str(caught.value) == (
        f"{directory}: {PREFIX}{name}: missing, although config.json announces a layer of multi-token prediction (MTP) "
        "with num_nextn_predict_layers: use a checkpoint that has it, or leave out --speculation mtp or --mtp-weight"
    )


@pytest.mark.parametrize("values", [AIR | {"num_nextn_predict_layers": 0}, HF], ids=["glm4_moe", "glm"])
def test_a_model_without_the_layer_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    directory = written(tmp_path, values)
    with pytest.raises(CheckpointError, match=r"num_nextn_predict_layers: there is no layer of multi-token prediction"):
        loaded(directory)


@pytest.mark.parametrize("count", ["one", -1, True])
def test_a_senseless_number_of_layers_is_refused(tmp_path: Path, count: Any) -> None:
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers: expected"):
        read_config(
            Checkpoint(write_files(tmp_path / "model", AIR | {"num_nextn_predict_layers": count}, plain_tensors(AIR)))
        )


@pytest.mark.parametrize("values", [AIR, FLASH], ids=["glm4_moe", "glm4_moe_lite"])
@torch.no_grad()
def test_random_models_have_it(values: dict[str, Any]) -> None:
    family, tokens = family_of(values), torch.tensor([[5, 6, 7, 8]])
    assert family is not None
    model = random_model(family.config(values), Scheme.parse("w4a16-g32"), "cpu", torch.float32)
    drafted = model.logits(model.predict(tokens[:, 1:], model.hidden(tokens)[:, :-1]))
    assert drafted.shape == (1, 3, 48)
    assert drafted.isfinite().all()
    # The projection is not quantized, the matrices of the decoder layer are.
    quantized = {name for name, module in model.layers[3].named_modules() if isinstance(module, QuantizedLinear)}
    assert "attention.o" in quantized
    assert "projection" not in quantized


@pytest.mark.parametrize("name", ["glm-4.5-air", "glm-4.7-flash"])
def test_the_shapes_can_have_it(name: str) -> None:
    config = SHAPES[name].with_mtp()
    assert config.all_layers[:-1] == config.layers
    assert config.resized(num_layers=2).mtp == config.mtp
    assert config.num_parameters > SHAPES[name].num_parameters + config.layers[-1].num_weights
