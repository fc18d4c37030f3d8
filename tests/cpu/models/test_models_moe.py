"""Mixtures of experts from their files: what is read, what is refused, and the tokens that the engine generates."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import HF, plain_tensors, write_files, write_quantized
from torch import Tensor

from warpbus.engine import Engine, request
from warpbus.errors import CheckpointError, TensorError
from warpbus.formats import Checkpoint
from warpbus.models import Decoder, load_model, read_config
from warpbus.models.adapters import Lora, LowRank
from warpbus.models.cost import forward_flop
from warpbus.models.families import family_of
from warpbus.models.layer_spec import RouterSpec
from warpbus.models.layers import MoE
from warpbus.models.layers.moe import Router
from warpbus.quantization import quantize

transformers = pytest.importorskip("transformers")

AIR: dict[str, Any] = HF | {
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
QWEN: dict[str, Any] = HF | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
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


def parsed(values: dict[str, Any]) -> Any:
    family = family_of(values)
    assert family is not None
    return family.config(values)


def loaded(directory: Path) -> Decoder:
    return load_model(Checkpoint(directory), device="cpu", dtype=torch.float32)


@pytest.fixture
def air(tmp_path: Path) -> Path:
    return write_files(tmp_path / "air", AIR, plain_tensors(AIR))


def test_a_real_config_is_read() -> None:
    """GLM-4.5-Air's shape: a dense layer, then 45 with 128 experts."""
    config = parsed(
        {
            "model_type": "glm4_moe",
            "attention_bias": True,
            "eos_token_id": [151329, 151336, 151338],
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 96,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 46,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "use_qk_norm": False,
            "vocab_size": 151552,
        }
    )
    assert config.has_experts
    assert [len(layer.matrices) for layer in config.layers] == [4] + [2 + 2 * 128 + 2] * 45
    # 106 billion parameters without the layer of multi-token prediction, 12 billion of them for each token.
    assert round(config.num_parameters / 1e9) == 109
    config = replace(config, mtp=None)
    assert round(config.num_parameters / 1e9) == 107
    assert 11e9 < forward_flop(config) / 2 < 13e9


@pytest.mark.parametrize("values", [AIR, QWEN, FLASH], ids=["glm4_moe", "qwen3_moe", "glm4_moe_lite"])
def test_generated_tokens_are_those_of_transformers(tmp_path: Path, values: dict[str, Any]) -> None:
    """Prompts in one batch, so that tokens of several sequences share experts."""
    directory = write_files(tmp_path / "model", values, plain_tensors(values, torch.float32))
    kind = {"glm4_moe": "Glm4Moe", "qwen3_moe": "Qwen3Moe", "glm4_moe_lite": "Glm4MoeLite"}[values["model_type"]]
    oracle = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(directory, dtype=torch.float32).eval()
    prompts = [[5, 6, 7, 8, 9], [11, 12], [20, 21, 22, 23, 24, 25, 26]]
    engine = Engine(loaded(directory), max_model_len=64)
    sequences = [request(prompt, tokens=20) for prompt in prompts]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        with torch.no_grad():
            expected = oracle.generate(
                torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0
            )
        assert list(sequence.token_ids) == expected[0, len(prompt) :].tolist()


def test_a_router_chooses_within_the_best_groups() -> None:
    router = Router(RouterSpec(experts=6, top_k=2, scoring="sigmoid", groups=3, top_groups=1, bias=True), 6)
    with torch.no_grad():
        router.weight.copy_(torch.eye(6))
        router.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 0.3, 0.3]))  # type: ignore[union-attr]
    # Expert 0 scores best, but the two of the last group score more together, by their corrections.
    routing = router(torch.tensor([[3.0, -3.0, 0.0, 0.0, 0.5, 0.4]]))
    assert sorted(routing.experts[0].tolist()) == [4, 5]
    scores = torch.tensor([0.5, 0.4]).sigmoid()
    weights = dict(zip(routing.experts[0].tolist(), routing.weights[0].tolist(), strict=True))
    # The correction decides the choice and is no part of the weight.
    assert weights == pytest.approx({4: float(scores[0] / scores.sum()), 5: float(scores[1] / scores.sum())})


def test_the_correction_of_a_router_stays_in_float32(air: Path) -> None:
    model = load_model(Checkpoint(air), device="cpu", dtype=torch.bfloat16)
    mlp = model.layers[1].mlp
    assert isinstance(mlp, MoE)
    assert mlp.router.bias is not None
    assert (mlp.router.bias.dtype, mlp.router.weight.dtype) == (torch.float32, torch.bfloat16)


def test_incomplete_layers_of_multi_token_prediction_are_kept_and_not_used(tmp_path: Path) -> None:
    tensors = plain_tensors(AIR)
    extra: dict[str, Tensor] = {
        "model.layers.3.eh_proj.weight": torch.ones(128, 256, dtype=torch.float16),
        "model.layers.3.enorm.weight": torch.ones(128, dtype=torch.float16),
    }
    directory = write_files(tmp_path / "model", AIR | {"num_nextn_predict_layers": 1}, tensors | extra)
    tokens = torch.tensor([[5, 6, 7]])
    without = write_files(tmp_path / "without", AIR, tensors)
    with torch.no_grad():
        assert torch.equal(loaded(directory)(tokens), loaded(without)(tokens))
    quantize(directory, tmp_path / "w4", scheme="w4a16-g32", algorithm="rtn", device="cpu")
    written = Checkpoint(tmp_path / "w4")
    assert torch.equal(written.tensor("model.layers.3.eh_proj.weight"), extra["model.layers.3.eh_proj.weight"])
    assert "model.layers.3.eh_proj" in written.config["quantization_config"]["ignore"]
    loaded(tmp_path / "w4")


def test_a_matrix_that_does_not_divide_gets_a_smaller_group(tmp_path: Path, air: Path) -> None:
    report = quantize(air, tmp_path / "w4", scheme="w4a16-g128", algorithm="rtn", device="cpu")
    schemes = {result.name: result.scheme for result in report.layers}
    assert schemes["layers.0.attention.qkv"] == "w4a16-g64"  # 64 columns
    assert schemes["layers.0.mlp.down"] == "w4a16-g32"  # 160 columns
    assert schemes["layers.1.mlp.experts.0.down"] == "w4a16-g32"  # 96 columns
    model = loaded(tmp_path / "w4")
    assert str(model.layers[1].get_submodule("mlp.experts.0.down").scheme) == "w4a16-g32"
    assert str(model.layers[1].get_submodule("mlp.experts.0.gate_up").scheme) == "w4a16-g64"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 4}, "n_group: expected a divisor of n_routed_experts (6), but found 4"),
        ({"topk_group": 4}, "topk_group: expected an integer from 1 to 3, but found 4"),
        ({"topk_group": 1}, "topk_group: expected enough groups of 2 for num_experts_per_tok (3), but found 1"),
        ({"n_group": 6, "topk_group": 6}, "n_group: expected at most 3, groups of two experts or more, but found 6"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok: expected at most n_routed_experts (6), but found 7"),
        ({"n_routed_experts": 0}, "n_routed_experts: expected an integer from 1 to 4096, but found 0"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size: expected an integer from 1 to"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace: expected a number from 0 to 4096, but found -1"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob: expected true or false, but found 'yes'"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor: expected a number from 0.001 to 1000, but found 0"),
    ],
)
def test_senseless_configs_are_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parsed(AIR | changes)
    assert message in str(caught.value)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = plain_tensors(AIR)
    del tensors["model.layers.2.mlp.experts.4.up_proj.weight"]
    directory = write_files(tmp_path / "model", AIR, tensors)
    with pytest.raises(TensorError, match=r"model\.layers\.2\.mlp\.experts\.4\.up_proj\.weight"):
        loaded(directory)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float8_e4m3fn])
def test_a_router_bias_of_another_dtype_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors, name = plain_tensors(AIR), "model.layers.2.mlp.gate.e_score_correction_bias"
    tensors[name] = tensors[name].to(dtype)
    directory = write_files(tmp_path / "model", AIR, tensors)
    with pytest.raises(TensorError, match=rf"{re.escape(name)}: a router bias is {dtype}, expected float32: use a"):
        loaded(directory)


def test_router_biases_of_16_bits_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In one line; they are computed with in float32."""
    tensors = plain_tensors(AIR, torch.float32)
    names = [name for name in tensors if name.endswith("e_score_correction_bias")]
    model = loaded(write_files(tmp_path / "exact", AIR, tensors))
    assert not caplog.records
    rounded = {name: tensors[name].bfloat16() for name in names}
    model = loaded(write_files(tmp_path / "rounded", AIR, tensors | rounded))
    (record,) = caplog.records
    assert f"{names[0]} and {len(names) - 1} more: router biases are torch.bfloat16, expected" in record.getMessage()
    router = model.layers[-1].mlp.router
    assert router.bias.dtype == torch.float32
    assert torch.equal(router.bias, rounded[names[-1]].float())


@pytest.mark.parametrize("single", ["nothing", "down_proj", "experts.0."])
def test_experts_in_one_tensor_are_refused_by_name(tmp_path: Path, single: str) -> None:
    """All of a layer, one kind of matrix, or some experts twice."""
    tensors = plain_tensors(AIR)
    prefix = "model.layers.2.mlp.experts."
    own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        if leaf != single:
            tensors[prefix + leaf] = torch.stack([own[f"{prefix}{number}.{leaf}.weight"] for number in range(6)])
    tensors |= {name: tensor for name, tensor in own.items() if single in name}
    directory = write_files(tmp_path / "model", AIR, tensors)
    with pytest.raises(CheckpointError, match=rf"unexpected weights {re.escape(prefix)}\w+, .* none of that name"):
        loaded(directory)


@torch.no_grad()
def test_an_expert_that_is_not_quantized_among_others(tmp_path: Path) -> None:
    """Whole experts may differ in their form: the logits are those of the weights that both mean."""
    directory, plain = write_quantized(tmp_path / "mixed", AIR, "compressed-tensors", "w4a16-g32", keep="experts.2.")
    whole = write_files(tmp_path / "plain", AIR | {"torch_dtype": "float32"}, plain)
    tokens = torch.randint(0, 40, (2, 11), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(loaded(directory)(tokens), loaded(whole)(tokens), rtol=1e-4, atol=1e-5)


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    tensors = plain_tensors(AIR)
    tensors["model.layers.2.mlp.experts.6.up_proj.weight"] = torch.ones(96, 128, dtype=torch.float16)
    directory = write_files(tmp_path / "model", AIR, tensors)
    with pytest.raises(CheckpointError, match=r"unexpected weights model\.layers\.2\.mlp\.experts\.6\.up_proj\.weight"):
        loaded(directory)


def test_experts_that_are_half_quantized_are_refused(tmp_path: Path, air: Path) -> None:
    quantize(air, tmp_path / "w4", scheme="w4a16-g32", algorithm="rtn", device="cpu")
    checkpoint = Checkpoint(tmp_path / "w4")
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
    prefix = "model.layers.1.mlp.experts.2.up_proj"
    for leaf in ("packed", "scale", "shape"):
        del tensors[f"{prefix}.weight_{leaf}"]
    tensors[f"{prefix}.weight"] = torch.ones(96, 128, dtype=torch.float16)
    directory = write_files(tmp_path / "mixed", dict(checkpoint.config), tensors)
    with pytest.raises(CheckpointError, match=r"experts\.2\.gate_proj.*some of these are quantized and some are not"):
        loaded(directory)


def test_other_families_have_no_experts() -> None:
    with pytest.raises(CheckpointError, match=r"num_experts: a qwen3 model has no experts: use a dense model"):
        parsed(HF | {"model_type": "qwen3", "num_experts": 4})


def test_experts_of_qwen_under_both_names(tmp_path: Path) -> None:
    """transformers 5 writes num_local_experts."""
    values = {key: value for key, value in QWEN.items() if key != "num_experts"} | {"num_local_experts": 5}
    assert parsed(values) == parsed(QWEN)
    directory = write_files(tmp_path / "model", values, plain_tensors(values))
    assert read_config(Checkpoint(directory)).layers[0].mlp.router.experts == 5
    assert json.loads((directory / "config.json").read_text())["num_local_experts"] == 5


def lora(*names: str) -> Lora:
    generator = torch.Generator().manual_seed(2)
    shapes = {matrix.name: matrix.shape for matrix in parsed(AIR).layers[1].matrices}

    def drawn(name: str) -> LowRank:
        rows, columns = shapes[name]
        a, b = (0.3 * torch.randn(shape, generator=generator) for shape in ((2, columns), (rows, 2)))
        return LowRank(a, b)

    return Lora("style", {f"layers.1.{name}": drawn(name) for name in names})


def test_loras_of_attention_and_the_shared_expert(air: Path) -> None:
    """Each request with its own adapter or none, in one batch, as the merged and the plain model by themselves."""
    adapter, prompts = lora("attention.qkv", "mlp.shared.gate_up", "mlp.shared.down"), [[5, 6, 7, 8], [9, 10, 11]]
    sequences = [request(prompt, tokens=12) for prompt in (*prompts, *prompts)]
    for sequence in sequences[2:]:
        sequence.adapter = "style"
    engine = Engine(loaded(air), adapters=[adapter], max_model_len=64)
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    merged = loaded(air)
    with torch.no_grad():
        for name, part in adapter.parts.items():
            merged.get_parameter(f"{name}.weight").add_(part.b @ part.a)
    for sequence in sequences:
        model = loaded(air) if sequence.adapter is None else merged
        with torch.no_grad():
            expected = model(torch.tensor([[*sequence.prompt, *sequence.token_ids]]))[0, len(sequence.prompt) - 1 : -1]
        assert list(sequence.token_ids) == expected.argmax(-1).tolist()
    assert sequences[0].token_ids != sequences[2].token_ids


def test_loras_of_experts_are_refused(air: Path) -> None:
    message = r"^style: layers\.1\.mlp\.experts\.3\.down: LoRAs of routed experts are not supported here: merge it"
    with pytest.raises(CheckpointError, match=message):
        Engine(loaded(air), adapters=[lora("attention.o", "mlp.experts.3.down")])
