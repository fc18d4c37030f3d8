"""Training on several GPUs over NCCL: what one gives, sharded or not, and on with another number after a stop."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from warpbus.demo import data_path, model_path
from warpbus.train import Stopped, TrainingProgress, TrainingSettings, train

pytestmark = pytest.mark.multigpu

LORA = TrainingSettings.of(
    "lora", steps=6, length=256, rows_per_step=8, rows_at_once=2, warmup=2, learning_rate=3e-4, save_every=100
)
PTUNING = replace(LORA, method="ptuning", prefix_tokens=32, learning_rate=5e-3)
FULL = replace(LORA, method="full", learning_rate=1e-4)
METHODS = {"full": FULL, "lora": LORA, "ptuning": PTUNING, "qlora": replace(LORA, quantize="w4a16-g64")}
# Products in TF32 and bfloat16 are summed in another order in fewer rows, and AdamW makes steps of what is left.
TOLERANCE = {"float32": 2e-3, "bfloat16": 3e-2}


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")


def run(output: Path, settings: TrainingSettings, **options: Any) -> list[dict[str, float]]:
    data = data_path("spring.jsonl")
    train(model_path(), output, data=data, valid=data, settings=settings, device="cuda", **options)
    log: list[dict[str, float]] = json.loads((output / "training-log.json").read_text(encoding="utf-8"))
    return log


def losses(log: list[dict[str, float]]) -> list[float]:
    return [*(entry["loss"] for entry in log), log[-1]["valid_loss"]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_two_gpus_learn_what_one_learns(method: str, dtype: str, tmp_path: Path) -> None:
    settings = replace(METHODS[method], dtype=dtype)
    expected = run(tmp_path / "one", settings)
    for sharding in ("ddp", "fsdp"):
        found = run(tmp_path / sharding, replace(settings, sharding=sharding), gpus=2)
        assert losses(found) == pytest.approx(losses(expected), abs=TOLERANCE[dtype]), sharding
        names = sorted(path.name for path in (tmp_path / "one").iterdir())
        assert sorted(path.name for path in (tmp_path / sharding).iterdir()) == names


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_gpus_balance_experts_together(poet_moe: Path, sharding: str, tmp_path: Path) -> None:
    """Products are summed in another order, which sends a few tokens to other experts."""
    found = []
    for gpus in (1, 2):
        settings, data = replace(FULL, dtype="float32", sharding=sharding), data_path("spring.jsonl")
        train(poet_moe, tmp_path / str(gpus), data=data, settings=settings, device="cuda", gpus=gpus)
        found.append(json.loads((tmp_path / str(gpus) / "training-log.json").read_text(encoding="utf-8")))
    one, two = found
    assert [each["loss"] for each in two] == pytest.approx([each["loss"] for each in one], abs=5e-3)
    assert [each["expert_load"] for each in two] == pytest.approx([each["expert_load"] for each in one], rel=0.05)


@pytest.mark.parametrize("settings", [FULL, replace(FULL, fp8=True, dtype="bfloat16")], ids=["plain", "fp8"])
def test_sharded_layers_are_recomputed(settings: TrainingSettings, tmp_path: Path) -> None:
    if settings.fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs sm_89")
    expected = run(tmp_path / "one", settings)
    found = run(tmp_path / "two", replace(settings, sharding="fsdp", recompute=1), gpus=2)
    assert losses(found) == pytest.approx(losses(expected), abs=0.05 if settings.fp8 else TOLERANCE["float32"])


@pytest.mark.parametrize("method", ["full", "lora", "ptuning"])
def test_stopped_on_two_sharded_gpus_it_goes_on_on_one(method: str, tmp_path: Path) -> None:
    """There are more steps than are done before the signal comes."""
    settings, data = replace(METHODS[method], steps=2000, rows_at_once=1), data_path("spring.jsonl")
    options: dict[str, Any] = {"data": data, "device": "cuda"}

    def stop(progress: TrainingProgress) -> None:
        if progress.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    sharded = replace(settings, sharding="fsdp")
    with pytest.raises(Stopped) as raised:
        train(model_path(), tmp_path / "out", settings=sharded, gpus=2, report=stop, **options)
    done = raised.value.step
    kept = torch.load(tmp_path / "out.training" / "state.pt", weights_only=True)
    assert kept["step"] == done >= 1
    losses: dict[Path, list[float]] = {tmp_path / "out": [entry["loss"] for entry in kept["log"]], tmp_path / "one": []}
    for directory, found in losses.items():

        def report(progress: TrainingProgress, found: list[float] = found) -> None:
            found.append(progress.loss)
            if progress.step == done + 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(model_path(), directory, settings=settings, report=report, **options)
    found, expected = losses.values()
    assert len(found) == done + 3
    assert found == pytest.approx(expected, abs=1e-2)


def test_four_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    expected = run(tmp_path / "one", FULL)
    found = run(tmp_path / "four", replace(FULL, sharding="fsdp"), gpus=4)
    assert losses(found) == pytest.approx(losses(expected), abs=TOLERANCE["float32"])
