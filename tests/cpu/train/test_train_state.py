"""Runs that are killed or stopped, and go on with another number of processes, or sharded otherwise."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from warpbus.dist import Group
from warpbus.errors import StorageError, UsageError
from warpbus.train import Stopped, TrainingProgress, TrainingSettings, TrainingStarted, job, train
from warpbus.train.state import StateFile

WriteLines = Callable[..., Path]
FULL = TrainingSettings(
    steps=7, length=32, rows_per_step=4, rows_at_once=4, learning_rate=5e-3, warmup=2, save_every=2, valid_every=3
)
LORA = replace(FULL, method="lora", rank=4)
SECONDS = 180.0

# What a run does until it is killed: it hangs while it writes its second state, of which half is there.
PROGRAM = """
import sys, time
from pathlib import Path
import torch
from warpbus.train import TrainingSettings, train

save = torch.save

def hang(content, file):
    if content["step"] < 4:
        return save(content, file)
    file.write(b"half")
    file.flush()
    Path(sys.argv[4]).touch()
    time.sleep(600)

torch.save = hang
model, output, data = map(Path, sys.argv[1:4])
train(model, output, data=data, valid=data, settings=TrainingSettings(**eval(sys.argv[5])), device="cpu")
"""


def log(output: Path) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((output / "training-log.json").read_text(encoding="utf-8"))
    return found


def curve(entries: list[dict[str, float]], name: str = "loss") -> list[float]:
    return [entry[name] for entry in entries if name in entry]


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def stop_after(step: int) -> Callable[[TrainingProgress], None]:
    def report(progress: TrainingProgress) -> None:
        if progress.step == step:
            raise KeyboardInterrupt

    return report


def test_killed_while_it_saves_it_goes_on_with_two_processes(blank_model: Path, tmp_path: Path, data: Path) -> None:
    output, flag, program = tmp_path / "out", tmp_path / "flag", tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    arguments = [*map(str, (program, blank_model, output, data, flag)), repr(vars(FULL))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.Popen([sys.executable, *arguments], env=environment, text=True, stderr=subprocess.PIPE)
    wait_for(flag.exists, killed)
    # Meanwhile nobody else may train to the same place.
    with pytest.raises(StorageError, match="another process is writing it"):
        train(blank_model, output, data=data, settings=FULL, device="cpu")
    killed.kill()
    killed.communicate()
    assert len(list((tmp_path / "out.training").iterdir())) == 2
    # As if it had been killed once more, while it wrote its result.
    for name in (".out.partial-1", "..out.partial-1.partial-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    begun: list[TrainingStarted] = []
    sharded = replace(FULL, sharding="fsdp", rows_at_once=1)
    summary = train(
        blank_model, output, data=data, valid=data, settings=sharded, device="cpu", processes=2, begun=begun.append
    )
    assert (begun[0].step, summary["processes"]) == (2, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "flag", "out", "program.py"]
    train(blank_model, tmp_path / "whole", data=data, valid=data, settings=FULL, device="cpu")
    for name in ("loss", "valid_loss", "learning_rate", "gradient_norm"):
        assert curve(log(output), name) == pytest.approx(curve(log(tmp_path / "whole"), name), abs=1e-5), name


def test_two_processes_that_are_stopped_are_followed_by_one(tiny_model: Path, tmp_path: Path, data: Path) -> None:
    """The steps are many and long, so that the signal comes in time, however slow this process is."""
    output = tmp_path / "out"
    settings = replace(LORA, steps=100, rows_per_step=64, rows_at_once=64, save_every=1000)

    def stop(progress: TrainingProgress) -> None:
        if progress.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    sharded = replace(settings, sharding="fsdp", rows_at_once=1)
    with pytest.raises(Stopped, match=r"stopped by SIGTERM: \d+ steps saved in .*state\.pt") as raised:
        train(tiny_model, output, data=data, settings=sharded, device="cpu", processes=2, report=stop)
    assert raised.value.signal == signal.SIGTERM
    done = raised.value.step
    kept = torch.load(tmp_path / "out.training" / "state.pt", weights_only=True)
    assert kept["step"] == done >= 1
    # What is not trained is not in it.
    assert all(name.endswith((".a", ".b")) for name in kept["model"])
    losses: dict[Path, list[float]] = {output: curve(kept["log"]), tmp_path / "whole": []}
    for directory, found in losses.items():

        def report(progress: TrainingProgress, found: list[float] = found) -> None:
            found.append(progress.loss)
            if progress.step == done + 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(tiny_model, directory, data=data, settings=settings, device="cpu", report=report)
    found, expected = losses.values()
    assert len(found) == done + 3
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_step_end_and_saves(
    number: signal.Signals, blank_model: Path, tmp_path: Path, data: Path
) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def stop(progress: TrainingProgress) -> None:
        if progress.step == 2:
            os.kill(os.getpid(), number)

    settings = replace(FULL, save_every=100)
    with pytest.raises(Stopped) as raised:
        train(blank_model, tmp_path / "out", data=data, settings=settings, device="cpu", report=stop)
    assert (raised.value.signal, raised.value.step) == (number, 3)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    begun: list[TrainingStarted] = []
    train(blank_model, tmp_path / "out", data=data, settings=settings, device="cpu", begun=begun.append)
    assert begun[0].step == 3
    train(blank_model, tmp_path / "whole", data=data, settings=settings, device="cpu")
    assert curve(log(tmp_path / "out")) == curve(log(tmp_path / "whole"))


def test_what_only_changes_how_it_is_computed_may_change(blank_model: Path, tmp_path: Path, data: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        train(blank_model, output, data=data, settings=FULL, device="cpu", report=stop_after(3))
    with pytest.raises(UsageError, match=r"\(seed was 0\)"):
        train(blank_model, output, data=data, settings=replace(FULL, seed=1), device="cpu")
    other = replace(FULL, rows_at_once=1, save_every=5, recompute=2, sharding="fsdp")
    train(blank_model, output, data=data, settings=other, device="cpu")
    train(blank_model, tmp_path / "whole", data=data, settings=FULL, device="cpu")
    assert curve(log(output)) == pytest.approx(curve(log(tmp_path / "whole")), abs=1e-5)


def test_killed_after_it_had_written_all(
    tiny_model: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"

    class Killed(BaseException):
        pass

    def kill(state: StateFile) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(StateFile, "remove", kill)
        with pytest.raises(Killed):
            train(tiny_model, output, data=data, settings=LORA, device="cpu")
    assert StateFile(output).exists()
    written = json.loads((output / "training.json").read_text(encoding="utf-8"))
    with pytest.raises(StorageError, match="exists and is not empty"):
        train(tiny_model, output, data=data, settings=replace(LORA, rank=3), device="cpu")
    steps: list[TrainingProgress] = []
    assert train(tiny_model, output, data=data, settings=LORA, device="cpu", report=steps.append) == written
    assert steps == []
    assert not (tmp_path / "out.training").exists()
    # What another run has left beside it is none of its.
    with pytest.raises(StorageError, match="exists and is not empty"):
        train(tiny_model, output, data=data, settings=LORA, device="cpu")


def test_rows_that_cannot_be_shared_are_refused_before_anything_starts(
    tiny_model: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*given: Any, **options: Any) -> None:
        raise AssertionError("processes are started")

    for name in ("Processes", "ClusterProcesses", "work"):
        monkeypatch.setattr(job, name, start)
    settings = replace(LORA, rows_per_step=3)
    reported = "--rows 3: not divisible by the 2 processes: give a multiple of 2"
    for cluster in (None, "auto"):
        with pytest.raises(UsageError, match=reported):
            train(
                tiny_model,
                tmp_path / "out",
                data=data,
                settings=settings,
                device="cpu",
                processes=2,
                cluster=cluster,
            )
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(job, "joined_group", lambda device: nullcontext(Group(0, 2, torch.device("cpu"))))
    with pytest.raises(UsageError, match=reported):
        train(tiny_model, tmp_path / "out", data=data, settings=settings, device="cpu")
    assert not (tmp_path / "out.training").exists()


def test_the_command_ends_with_the_signals_code(tiny_model: Path, tmp_path: Path, data: Path) -> None:
    arguments: list[Any] = [
        "train",
        tiny_model,
        tmp_path / "out",
        "--data",
        data,
        "--method",
        "lora",
        "--device",
        "cpu",
    ]
    arguments += ["--steps", 100_000, "--length", 32, "--rows", 4, "--workers", 1, "--save-every", 1]
    command = [sys.executable, "-m", "warpbus", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)
    wait_for((tmp_path / "out.training" / "state.pt").exists, process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert "stopped by SIGINT" in said
    assert "run the same command to resume" in " ".join(said.split())
    assert "Traceback" not in said
