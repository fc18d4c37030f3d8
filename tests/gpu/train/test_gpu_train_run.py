"""Whole training runs on a GPU: glm-poet and adapters for it, in 16 bits, on quantized weights, in FP8, compiled."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from warpbus.demo import data_path, model_path
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.adapters import Lora, Prefix, load_adapter
from warpbus.models.layers import CausalAttention
from warpbus.models.layers.prefixed import PrefixedAttention
from warpbus.train import TrainingProgress, TrainingSettings, results, train
from warpbus.train.dataset import assemble, pack, tokenize
from warpbus.train.loss import summed_cross_entropy
from warpbus.train.plan import plan_training
from warpbus.train.run import _TrainingRun

pytestmark = pytest.mark.gpu

LORA = TrainingSettings.of(
    "lora", steps=12, length=256, rows_per_step=8, rows_at_once=4, warmup=2, dtype="bfloat16", save_every=5
)
PTUNING = replace(LORA, method="ptuning", prefix_tokens=32, learning_rate=1e-2)
FULL = replace(LORA, method="full", learning_rate=1e-4)


def run(output: Path, settings: TrainingSettings, **options: Any) -> tuple[dict[str, Any], list[TrainingProgress]]:
    steps: list[TrainingProgress] = []
    data = data_path("spring.jsonl")
    summary = train(
        model_path(), output, data=data, valid=data, settings=settings, device="cuda", report=steps.append, **options
    )
    return summary, steps


@pytest.mark.parametrize(
    "settings",
    [
        FULL,
        replace(FULL, recompute=2),
        replace(FULL, fp8=True),
        LORA,
        replace(LORA, quantize="w4a16-g64"),
        replace(LORA, quantize="w4a16-g64", recompute=1, dropout=0.1),
        replace(LORA, dtype="float32"),
        replace(LORA, fp8=True),
        PTUNING,
        replace(PTUNING, quantize="w4a16-g64"),
        replace(PTUNING, dtype="float32", recompute=1),
    ],
    ids=[
        "full",
        "full-recompute",
        "full-fp8",
        "lora",
        "qlora",
        "qlora-recompute-dropout",
        "lora-float32",
        "lora-fp8",
        "ptuning",
        "ptuning-w4",
        "ptuning-float32-recompute",
    ],
)
def test_the_loss_falls(settings: TrainingSettings, tmp_path: Path) -> None:
    if settings.fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs sm_89")
    summary, steps = run(tmp_path / "out", settings)
    assert all(math.isfinite(step.loss) for step in steps)
    assert steps[-1].loss < steps[0].loss
    assert summary["valid_loss"] < steps[0].loss
    assert "cpu" not in summary["device"]
    log = json.loads((tmp_path / "out" / "training-log.json").read_text(encoding="utf-8"))
    assert all(entry["gradient_norm"] > 0 for entry in log)


@pytest.mark.parametrize("settings", [FULL, LORA, PTUNING], ids=["full", "lora", "ptuning"])
def test_the_best_step_is_written(settings: TrainingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = (3.0, 1.0, 2.0)

    def validate(run: _TrainingRun, rows: object) -> float:
        at = tmp_path / f"at-{run.course.step}"
        results.write(at, run.inputs, run.method, {}, [], run.group, overwrite=False)
        return losses[run.course.step - 1]

    monkeypatch.setattr(_TrainingRun, "_validate", validate)
    summary, _ = run(tmp_path / "out", replace(settings, steps=3, valid_every=1, save_every=2, keep="best"))
    assert (summary["best_step"], summary["valid_loss"]) == (2, 1.0)

    def weights(name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.safetensors")}

    assert weights("out") == weights("at-2") != weights("at-3")
    assert not (tmp_path / "out.training").exists()


def test_compiled_it_learns_the_same(tmp_path: Path) -> None:
    _, plain = run(tmp_path / "plain", replace(FULL, steps=4, rows_at_once=8))
    _, compiled = run(tmp_path / "compiled", replace(FULL, steps=4, rows_at_once=8, compile=True))
    assert [step.loss for step in compiled] == pytest.approx([step.loss for step in plain], abs=0.03)


@pytest.mark.parametrize("settings", [LORA, PTUNING], ids=["lora", "ptuning"])
def test_what_is_written_has_the_loss_of_the_training(settings: TrainingSettings, tmp_path: Path) -> None:
    summary, _ = run(tmp_path / "out", settings)
    checkpoint = Checkpoint(model_path())
    model = load_model(checkpoint, device="cuda", dtype=torch.bfloat16)
    adapter = load_adapter(tmp_path / "out", model.config, device="cuda")
    documents = tokenize(data_path("spring.jsonl"), model_path(), checkpoint.config, length=256)
    rows = assemble(documents, pack(documents, range(len(documents)), 256), 256).to(torch.device("cuda"))
    if isinstance(adapter, Lora):
        for path, part in adapter.parts.items():
            weight = model.get_submodule(path).weight
            assert isinstance(weight, torch.Tensor)
            weight.data = (weight.float() + part.b @ part.a).to(weight.dtype)
    total = 0.0
    for start in range(0, len(rows.tokens), 8):
        picked = slice(start, start + 8)
        context = CausalAttention(rows.documents[picked])
        if isinstance(adapter, Prefix):
            context = PrefixedAttention(adapter.keys_lthd, adapter.values_lthd, rows.documents[picked])
        with torch.no_grad():
            hidden = model.hidden(rows.tokens[picked], rows.positions[picked], context)
            total += float(summed_cross_entropy(hidden, model.head, rows.targets[picked]))
    assert total / int((rows.targets != -100).sum()) == pytest.approx(summary["valid_loss"], abs=0.03)


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    def stop(progress: TrainingProgress) -> None:
        if progress.step == 7:
            raise KeyboardInterrupt

    data = data_path("spring.jsonl")
    with pytest.raises(KeyboardInterrupt):
        train(model_path(), tmp_path / "out", data=data, settings=LORA, device="cuda", report=stop)
    kept = torch.load(tmp_path / "out.training" / "state.pt", weights_only=True)
    assert kept["step"] == 5
    assert {tensor.device.type for tensor in kept["model"].values()} == {"cpu"}
    # With a GPU's sums, another run is not the same to the last bit.
    _, steps = run(tmp_path / "out", LORA)
    _, whole = run(tmp_path / "whole", LORA)
    assert [step.step for step in steps] == list(range(6, 13))
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in whole[5:]], abs=0.03)


def test_a_dry_run_measures_the_gpu() -> None:
    found = plan_training(model_path(), data_path("spring.jsonl"), LORA, torch.device("cuda", 0))
    assert found.device == torch.cuda.get_device_name(0)
    assert found.flops_per_second is not None
    assert found.flops_per_second > 1e12
    times = [need.time for need in found.needs if need.time is not None]
    assert len(times) == len(found.needs)
    assert all(0 < time.least < time.most for time in times)
    assert [time.least for time in times] == sorted((time.least for time in times), reverse=True)
