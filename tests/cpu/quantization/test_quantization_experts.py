"""Quantizing mixtures of experts: each expert on its own tokens, and on all of them where it sees too few."""

import json
from pathlib import Path

import pytest
import torch
from quantization_models import LENGTH, MOE, SAMPLES, calibration, divergence, loaded, run, write_model
from quantization_runs import fingerprint
from torch import Tensor

from warpbus.models.layers import MoE, QuantizedLinear
from warpbus.qtensor import Scheme
from warpbus.quantization import methods
from warpbus.quantization.preflight import Matrix
from warpbus.quantization.report import LEAST_TOKENS

EXPERTS, TOP_K = 6, 2
CONFIG = MOE | {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "use_qk_norm": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("experts") / "model", **CONFIG)


def routed(model: Path, samples: int) -> Tensor:
    """Calibration tokens per expert of the last layer of the unquantized model."""
    decoder = loaded(model)
    counts = torch.zeros(EXPERTS, dtype=torch.int64)

    def count(router: torch.nn.Module, inputs: object, routing: object) -> None:
        counts.add_(torch.bincount(routing.experts.flatten(), minlength=EXPERTS))  # type: ignore[attr-defined]

    mlp = decoder.layers[1].mlp
    assert isinstance(mlp, MoE)
    mlp.router.register_forward_hook(count)
    with torch.no_grad():
        for ids in calibration(samples).sequences:
            decoder(torch.tensor([ids]))
    return counts


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_every_matrix_but_the_router_is_quantized(model: Path, tmp_path: Path, algorithm: str) -> None:
    report = run(model, tmp_path / "out", algorithm)
    assert len(report.layers) == 4 + 2 + 2 * EXPERTS + 2
    original, small = loaded(model), loaded(tmp_path / "out")
    for index, matrix in small.config.matrices:
        linear = small.layers[index].get_submodule(matrix.name)
        assert isinstance(linear, QuantizedLinear), matrix.name
        weight = original.layers[index].get_submodule(matrix.name).weight
        assert (linear.weight.dequantize(torch.float32) - weight).norm() < 0.25 * weight.norm(), matrix.name
    for name in ("router.weight", "router.bias"):
        kept = small.layers[1].mlp.get_parameter(name)
        assert torch.equal(kept, original.layers[1].mlp.get_parameter(name))
        assert kept.dtype == torch.float32
    assert divergence(model, tmp_path / "out") < 0.2
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.1.mlp.gate" in ignored


def test_an_expert_is_calibrated_on_its_own_tokens(model: Path, tmp_path: Path) -> None:
    report = run(model, tmp_path / "out")
    counts = {result.linear: result.routed_tokens for result in report.layers if result.layer == 1}
    assert counts["attention.qkv"] is None
    assert counts["mlp.shared.down"] is None
    found = [counts[f"mlp.experts.{expert}.gate_up"] for expert in range(EXPERTS)]
    assert found == [counts[f"mlp.experts.{expert}.down"] for expert in range(EXPERTS)]
    assert sum(filter(None, found)) == SAMPLES * LENGTH * TOP_K
    # The layers before are quantized when the router chooses: nearly the same tokens as in the original.
    assert all(abs(one - other) < 60 for one, other in zip(found, routed(model, SAMPLES).tolist(), strict=True))


def test_what_calibration_is_worth(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "gptq", samples=120)
    run(model, tmp_path / "rtn", "rtn")
    assert divergence(model, tmp_path / "gptq") < 0.8 * divergence(model, tmp_path / "rtn")


def test_experts_that_see_too_few_tokens_are_calibrated_on_all(model: Path, tmp_path: Path) -> None:
    report = run(model, tmp_path / "out", samples=2)
    counts = [result.routed_tokens for result in report.layers if result.linear.endswith(".gate_up") and result.layer]
    routed_counts = [count for count in counts if count is not None]
    assert len(routed_counts) == EXPERTS
    assert max(routed_counts) < LEAST_TOKENS
    assert divergence(model, tmp_path / "out") < 0.3


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("samples", [2, SAMPLES])
def test_processes_give_the_same_bits(model: Path, tmp_path: Path, samples: int) -> None:
    run(model, tmp_path / "one", samples=samples)
    run(model, tmp_path / "two", samples=samples, processes=2)
    one, two = (sorted((tmp_path / name).glob("*.safetensors")) for name in ("one", "two"))
    assert [file.read_bytes() for file in one] == [file.read_bytes() for file in two]


@pytest.mark.parametrize("experts_bytes", [0, 2_000_000])
def test_experts_solved_at_once_get_the_same_bits(
    model: Path, tmp_path: Path, experts_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(model, tmp_path / "all")
    monkeypatch.setattr(methods, "_EXPERT_BYTES", experts_bytes)
    run(model, tmp_path / "some")
    assert fingerprint(tmp_path / "all") == fingerprint(tmp_path / "some")


@pytest.mark.parametrize(
    ("experts", "rows", "columns", "expected"),
    [
        (1, 4096, 4096, 1),
        (6, 128, 128, 6),
        (64, 3072, 2048, 16),  # GLM-4.7-Flash's gate and up
        (128, 2816, 4096, 4),  # GLM-4.5-Air's
        (256, 4096, 6144, 2),  # GLM-5's
        (7, 6144, 20480, 1),  # none has room beside another
    ],
)
def test_memory_bounds_the_experts_that_are_solved_at_once(
    experts: int, rows: int, columns: int, expected: int
) -> None:
    scheme = Scheme.parse("w4a16-g128")
    matrix = Matrix(1, "mlp.experts.0.gate_up", ("gate_up",), (rows,), columns, torch.bfloat16, scheme, experts)
    assert methods.solved_at_once(matrix) == expected
