"""Quantizing GLM-4.7-Flash: the matrices of latents, each calibrated on what enters it."""

from pathlib import Path

import pytest
import torch
from quantization_models import divergence, loaded, run, write_model
from torch import Tensor, nn

from warpbus.engine import Engine
from warpbus.formats import Checkpoint
from warpbus.models import quantized_parameters
from warpbus.models.layers import CausalAttention, QuantizedLinear

CONFIG = {
    "model_type": "glm4_moe_lite",
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 24,
    "head_dim": 8,  # another name of qk_rope_head_dim
    "qk_rope_head_dim": 8,
    "partial_rotary_factor": 1.0,
    "v_head_dim": 40,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
ATTENTION = ("qkv_a", "q_b", "kv_b", "o")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("latent") / "model", **CONFIG)


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_every_matrix_is_quantized_and_the_model_generates(model: Path, tmp_path: Path, algorithm: str) -> None:
    report = run(model, tmp_path / "out", algorithm)
    assert [result.name for result in report.layers][:4] == [f"layers.0.attention.{name}" for name in ATTENTION]
    original, small = loaded(model), loaded(tmp_path / "out")
    schemes = quantized_parameters(Checkpoint(tmp_path / "out"), small.config)
    for index, matrix in small.config.matrices:
        linear = small.layers[index].get_submodule(matrix.name)
        weight = original.layers[index].get_submodule(matrix.name).weight
        assert isinstance(linear, nn.Linear if matrix.dequantized else QuantizedLinear), matrix.name
        found = linear.weight.dequantize(torch.float32) if isinstance(linear, QuantizedLinear) else linear.weight
        assert 0 < (found - weight).norm() < 0.25 * weight.norm(), matrix.name
        assert f"layers.{index}.{matrix.name}.weight" in schemes
    for name in ("q_a_norm", "kv_a_norm"):
        one, other = (each.layers[1].get_parameter(f"attention.{name}.weight") for each in (original, small))
        assert torch.equal(one, other)
    assert divergence(model, tmp_path / "out") < 0.2
    prompt = [11, 12, 13, 14, 15]
    (answer,) = Engine(small, max_model_len=64).decode([prompt], 12)
    with torch.no_grad():
        scores = small(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 : -1]
    assert list(answer) == scores.argmax(-1).tolist()


def test_what_calibration_is_worth(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "gptq")
    run(model, tmp_path / "rtn", "rtn")
    assert divergence(model, tmp_path / "gptq") < 0.8 * divergence(model, tmp_path / "rtn")


@torch.no_grad()
def test_the_stages_of_latents_are_what_enters_their_matrices(model: Path) -> None:
    """Calibration sees what the forward pass multiplies by each matrix."""
    decoder, seen = loaded(model), {}
    layer = decoder.layers[1]
    for matrix in layer.spec.matrices[:4]:

        def note(module: nn.Module, inputs: tuple[Tensor, ...], reads: str = matrix.reads) -> None:
            seen[reads] = inputs[0]

        layer.get_submodule(matrix.name).register_forward_pre_hook(note)
    tokens = torch.arange(20, 50)[None]
    entered: list[Tensor] = []
    layer.register_forward_pre_hook(lambda module, inputs: entered.extend(inputs[:1]))
    decoder(tokens)
    assert len(seen) == 4
    positions = torch.arange(30)[None]
    angles = decoder.rotary(positions, torch.float32)
    for stage, expected in list(seen.items()):
        found = layer.enter(stage, entered[0], 1, positions, angles, CausalAttention())
        torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_processes_give_the_same_bits(model: Path, tmp_path: Path, algorithm: str) -> None:
    run(model, tmp_path / "one", algorithm)
    run(model, tmp_path / "two", algorithm, processes=2)
    one, two = (sorted((tmp_path / name).glob("*.safetensors")) for name in ("one", "two"))
    assert one
    assert [file.read_bytes() for file in one] == [file.read_bytes() for file in two]
