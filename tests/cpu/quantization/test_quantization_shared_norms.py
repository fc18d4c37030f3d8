"""AWQ and SmoothQuant where a norm is shared: by experts and their router, and by matrices of latents and indexers."""

import copy
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from quantization_models import LENGTH, divergence, loaded, run, write_model, write_texts
from quantization_runs import Runs, fingerprint

from warpbus.errors import NumericError, TensorError, UsageError
from warpbus.formats import Checkpoint
from warpbus.models import Decoder, quantized_parameters
from warpbus.models.layers import MoE, QuantizedLinear
from warpbus.quantization.folding import fold, fold_shared, powers_of_two, tie
from warpbus.quantization.report import LEAST_TOKENS

EXPERTS = {
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 24,
    "head_dim": 8,  # another name of qk_rope_head_dim
    "qk_rope_head_dim": 8,
    "partial_rotary_factor": 1.0,
    "v_head_dim": 40,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"architectures": ["Glm4MoeForCausalLM"], "use_qk_norm": True} | EXPERTS,
    "glm4_moe_lite": {"architectures": ["Glm4MoeLiteForCausalLM"]} | EXPERTS | LATENT,
    "no-query-latent": {"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"]}
    | EXPERTS
    | LATENT
    | {"q_lora_rank": None, "attention_bias": False},
    "glm_moe_dsa": {"architectures": ["GlmMoeDsaForCausalLM"]}
    | EXPERTS
    | LATENT
    | {"index_n_heads": 4, "index_head_dim": 24, "index_topk": 6},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "attention_bias": False,
        "partial_rotary_factor": 1.0,
        "mlp_only_layers": [0],
    },
}
SCHEMES = {"awq": "w4a16-g32", "smoothquant": "w8a8-int8"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("families")
    return {
        name: write_model(directory / name, dtype=torch.bfloat16, **({"model_type": name} | changes))
        for name, changes in FAMILIES.items()
    }


@torch.no_grad()
def logits(decoder: Decoder) -> torch.Tensor:
    return decoder(torch.randint(10, 380, (4, LENGTH), generator=torch.Generator().manual_seed(9)))


def shared_norms(decoder: Decoder) -> set[tuple[int, str]]:
    norms = {(index, decoder.layers[index].spec.shared_norm(matrix)) for index, matrix in decoder.config.matrices}
    return {(index, norm) for index, norm in norms if norm is not None}


def factors(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).exp()


EXPECTED_NORMS = {
    "glm4_moe": {"mlp_norm"},
    "glm4_moe_lite": {"mlp_norm"},
    "no-query-latent": {"mlp_norm", "attention_norm"},
    "glm_moe_dsa": {"mlp_norm", "attention_norm", "attention.q_a_norm"},
    "qwen3_moe": {"mlp_norm"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_folding_into_a_shared_norm_changes_no_bit_of_the_logits(
    models: dict[str, Path], family: str, dtype: torch.dtype
) -> None:
    decoder = loaded(models[family], dtype)
    expected, before = logits(decoder), copy.deepcopy(dict(decoder.named_parameters()))
    norms = shared_norms(decoder)
    assert {norm for index, norm in norms if index == 1} == EXPECTED_NORMS[family]
    for seed, (index, norm) in enumerate(sorted(norms)):
        layer = decoder.layers[index]
        size = len(layer.get_parameter(f"{norm}.weight"))
        changed = fold_shared(layer, norm, powers_of_two(factors(size, seed)))
        assert set(changed) == {f"{norm}.weight", *layer.spec.unquantized_readers(norm)}
        for name, parameter in changed.items():
            assert not torch.equal(parameter, before[f"layers.{index}.{name}"])
    assert torch.equal(logits(decoder), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folded_model_computes_what_it_did(models: dict[str, Path], family: str) -> None:
    """With factors for the inputs of every matrix, in the order of a run."""
    decoder = loaded(models[family])
    expected, folded = logits(decoder), set()
    for seed, (index, matrix) in enumerate(decoder.config.matrices):
        layer = decoder.layers[index]
        scale = tie(layer.spec, matrix, factors(matrix.columns.length, seed))
        norm = layer.spec.shared_norm(matrix)
        if norm is None:
            fold(layer, matrix.name, scale)
        elif (index, norm) not in folded:
            folded.add((index, norm))
            fold_shared(layer, norm, powers_of_two(scale))
    found = logits(decoder)
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_the_nearest_power_of_two() -> None:
    scale = torch.tensor([1.0, 1.4, 1.42, 3.0, 2.8, 0.7, 0.71, 2.0**-20, 2.0**30, 1e-3])
    expected = torch.tensor([1.0, 1.0, 2.0, 4.0, 2.0, 0.5, 1.0, 2.0**-20, 2.0**30, 2.0**-10])
    assert torch.equal(powers_of_two(scale), expected)


def test_wrong_factors_are_refused(models: dict[str, Path]) -> None:
    layer = loaded(models["glm4_moe"]).layers[1]
    with pytest.raises(UsageError, match=r"^mlp\.experts\.2\.gate_up: other parameters read mlp_norm, too"):
        fold(layer, "mlp.experts.2.gate_up", torch.ones(128))
    with pytest.raises(NumericError, match=r"^mlp_norm: expected powers of two"):
        fold_shared(layer, "mlp_norm", torch.full((128,), 3.0))
    with pytest.raises(TensorError, match=r"^mlp_norm: expected a scale of shape \[128\], found \[64\]"):
        fold_shared(layer, "mlp_norm", torch.ones(64))
    with pytest.raises(NumericError, match=r"^mlp_norm\.weight: out of the range of torch\.float16"):
        fold_shared(layer, "mlp_norm", torch.full((128,), 2.0**-20), stored=torch.float16)


@pytest.mark.parametrize("algorithm", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_is_quantized_and_routing_stays(
    models: dict[str, Path], tmp_path: Path, family: str, algorithm: str
) -> None:
    model = models[family]
    report = run(model, tmp_path / "out", algorithm, scheme=SCHEMES[algorithm])
    original, small = loaded(model), loaded(tmp_path / "out")
    assert len(report.layers) == len(list(small.config.matrices))
    schemes = quantized_parameters(Checkpoint(tmp_path / "out"), small.config)
    for index, matrix in small.config.matrices:
        linear = small.layers[index].get_submodule(matrix.name)
        assert matrix.dequantized or isinstance(linear, QuantizedLinear), matrix.name
        assert f"layers.{index}.{matrix.name}.weight" in schemes
    assert divergence(model, tmp_path / "out") < (0.1 if algorithm == "awq" else 0.02)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    found = []
    for decoder in (original, small):
        layer = decoder.layers[1]
        assert isinstance(layer.mlp, MoE)
        found.append(layer.mlp.router(layer.mlp_norm(x)))
    assert torch.equal(found[0].experts, found[1].experts)
    assert torch.equal(found[0].scores, found[1].scores)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.1.mlp.gate" in ignored


@pytest.mark.parametrize("algorithm", SCHEMES)
def test_experts_that_few_tokens_reach(models: dict[str, Path], tmp_path: Path, algorithm: str) -> None:
    report = run(models["glm4_moe"], tmp_path / "out", algorithm, scheme=SCHEMES[algorithm], samples=2)
    assert max(max(counts) for counts in report.expert_tokens.values()) < LEAST_TOKENS
    assert divergence(models["glm4_moe"], tmp_path / "out") < 0.2


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("family", "algorithm"), [("glm_moe_dsa", "awq"), ("qwen3_moe", "smoothquant")])
def test_processes_give_the_same_bits(models: dict[str, Path], tmp_path: Path, family: str, algorithm: str) -> None:
    for processes in (1, 2):
        output = tmp_path / str(processes)
        run(models[family], output, algorithm, scheme=SCHEMES[algorithm], processes=processes)
    assert fingerprint(tmp_path / "1") == fingerprint(tmp_path / "2")


def test_a_run_that_was_killed_goes_on_to_the_same_bits(runs: Runs, models: dict[str, Path], tmp_path: Path) -> None:
    model, texts = models["glm_moe_dsa"], write_texts(tmp_path / "texts.jsonl")
    settings = ("--calibration", texts, "--scheme", "w4a16-g32", "--algorithm", "awq", "--device", "cpu")
    assert runs.start("quantize", model, tmp_path / "whole", *settings).code == 0
    command = ("quantize", model, tmp_path / "out", *settings)
    first = tmp_path / "out.quantization" / "layer-00000.json"
    assert runs.start(*command, when=first).code == -signal.SIGKILL
    assert first.exists()
    assert runs.start(*command).code == 0
    assert json.loads((tmp_path / "out" / "warpbus-report.json").read_text())["resumed_layers"] == 1
    assert fingerprint(tmp_path / "out") == fingerprint(tmp_path / "whole")
