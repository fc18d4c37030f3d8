"""Mixtures of experts on a GPU: adapters and whole models are trained as on the CPU."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from warpbus.demo import data_path
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.layers import MoE
from warpbus.qtensor import Scheme
from warpbus.train import TrainingProgress, TrainingSettings, train
from warpbus.train.balance import correction_biases
from warpbus.train.lora import LoraLinear, attach_lora

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

FULL = TrainingSettings.of(
    "full",
    steps=8,
    length=128,
    rows_per_step=16,
    rows_at_once=8,
    warmup=2,
    dtype="bfloat16",
    learning_rate=5e-4,
    save_every=100,
)
LORA = TrainingSettings.of(
    "lora", steps=8, length=128, rows_per_step=16, rows_at_once=8, warmup=2, dtype="bfloat16", learning_rate=1e-2
)


def run(
    model: Path, output: Path, settings: TrainingSettings, device: str = "cuda"
) -> tuple[dict[str, Any], list[TrainingProgress]]:
    steps: list[TrainingProgress] = []
    data = data_path("spring.jsonl")
    summary = train(model, output, data=data, valid=data, settings=settings, device=device, report=steps.append)
    return summary, steps


@pytest.mark.parametrize(
    "settings",
    [
        FULL,
        replace(FULL, recompute=1),
        LORA,
        replace(LORA, quantize="w4a16-g64"),
        replace(LORA, quantize="w8a16", recompute=1, dropout=0.1),
        replace(LORA, method="ptuning", prefix_tokens=16, quantize="w4a16-g64"),
    ],
    ids=["full", "full-recompute", "lora", "qlora", "qlora-recompute-dropout", "ptuning-w4"],
)
def test_the_loss_falls(poet_moe: Path, tmp_path: Path, settings: TrainingSettings) -> None:
    summary, steps = run(poet_moe, tmp_path / "out", settings)
    assert all(math.isfinite(step.loss) for step in steps)
    assert summary["valid_loss"] < steps[0].loss
    assert all((step.expert_load is not None) == (settings.method == "full") for step in steps)


def test_float32_learns_what_the_cpu_learns(poet_moe: Path, tmp_path: Path) -> None:
    """Products in TF32 send a few tokens to other experts."""
    settings = replace(FULL, dtype="float32", steps=4)
    _, cpu = run(poet_moe, tmp_path / "cpu", settings, "cpu")
    _, gpu = run(poet_moe, tmp_path / "gpu", settings)
    assert [step.loss for step in gpu] == pytest.approx([step.loss for step in cpu], abs=5e-3)
    assert [step.expert_load for step in gpu] == pytest.approx([step.expert_load for step in cpu], rel=0.05)
    model = load_model(Checkpoint(tmp_path / "gpu"), device="cuda", dtype=torch.bfloat16)
    assert all(bias.dtype == torch.float32 and bias.any() for bias in correction_biases(model).values())


@pytest.mark.parametrize("settings", [FULL, replace(LORA, quantize="w4a16-g64")], ids=["full", "qlora"])
def test_compiled_it_learns_the_same(poet_moe: Path, tmp_path: Path, settings: TrainingSettings) -> None:
    _, plain = run(poet_moe, tmp_path / "plain", replace(settings, steps=4))
    _, compiled = run(poet_moe, tmp_path / "compiled", replace(settings, steps=4, compile=True))
    assert [step.loss for step in compiled] == pytest.approx([step.loss for step in plain], abs=0.03)


def test_gradients_pass_through_stacked_quantized_experts(poet_moe: Path) -> None:
    """The same as through the dequantized matrices, one by one, on the CPU."""
    scheme, gradients = Scheme.parse("w4a16-g64"), []
    tokens = torch.randint(10, 8000, (4, 64), generator=torch.Generator().manual_seed(0))
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        model = load_model(Checkpoint(poet_moe), device=device, dtype=dtype, layer_scheme=scheme)
        assert all(layer.mlp.stacked == (device == "cuda") for layer in model.layers if isinstance(layer.mlp, MoE))
        torch.manual_seed(1)
        trained = attach_lora(model.train(), rank=4, alpha=8.0, targets=("attention.qkv",))
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.b.data = (
                    torch.randn(module.b.shape, generator=torch.Generator().manual_seed(2)).to(device) * 0.02
                )
        model(tokens.to(device)).float().log_softmax(-1)[..., 0].sum().backward()
        gradients.append([parameter.grad.float().cpu() for parameter in trained if parameter.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) == 8
    for found, expected in zip(*gradients, strict=True):
        assert float((found - expected).norm()) < 0.1 * float(expected.norm())
