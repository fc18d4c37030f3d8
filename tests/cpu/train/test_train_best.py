"""`keep` best: what is written is what was trained after the step with the lowest validation loss, however it ended."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from warpbus.cli import app
from warpbus.errors import CheckpointError, StorageError, UsageError
from warpbus.train import TrainingProgress, TrainingSettings, TrainingStarted, results, train
from warpbus.train.run import _TrainingRun
from warpbus.train.state import Course, StateFile

WriteLines = Callable[..., Path]
Report = Callable[[TrainingProgress], None]
LORA = TrainingSettings(
    method="lora",
    steps=7,
    length=32,
    rows_per_step=4,
    rows_at_once=4,
    learning_rate=5e-3,
    warmup=2,
    save_every=2,
    valid_every=1,
    rank=4,
    keep="best",
)
SECONDS = 180.0

# What a run does until it is killed: it hangs while it writes its state after step 6, of which half is there.
PROGRAM = """
import sys, time
from pathlib import Path
import torch
from warpbus.train import TrainingSettings, train

save = torch.save

def hang(content, file):
    if content.get("step", 0) < 6:
        return save(content, file)
    file.write(b"half")
    file.flush()
    Path(sys.argv[5]).touch()
    time.sleep(600)

torch.save = hang
model, output, data, valid = map(Path, sys.argv[1:5])
train(model, output, data=data, valid=valid, settings=TrainingSettings(**eval(sys.argv[6])), device="cpu")
"""


def conversations(path: Path, write_lines: WriteLines, answers: tuple[str, ...]) -> Path:
    def conversation(index: int) -> dict[str, object]:
        answer = {"role": "assistant", "content": answers[index % len(answers)]}
        return {"messages": [{"role": "user", "content": f"写诗{index}"}, answer]}

    return write_lines(path, *map(conversation, range(15)))


@pytest.fixture
def data(tmp_path: Path, write_lines: WriteLines) -> Path:
    return conversations(tmp_path / "data.jsonl", write_lines, ("床前明月光", "疑是地上霜", "举头望明月"))


@pytest.fixture
def valid(tmp_path: Path, write_lines: WriteLines) -> Path:
    return conversations(tmp_path / "valid.jsonl", write_lines, ("低头思故乡", "光"))


def weights(directory: Path) -> dict[str, bytes]:
    """The files of a result that are not about it."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix in (".safetensors", ".bin")}


def kept(output: Path) -> list[str]:
    return sorted(path.name for path in output.with_name(f"{output.name}.training").iterdir())


def killed_after(step: int) -> Report:
    def report(progress: TrainingProgress) -> None:
        if progress.step == step:
            raise KeyboardInterrupt

    return report


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`scripted(3.0, 1.0)`: the losses of the validations after steps 1 and 2; what a step trained is in `at-STEP`."""

    def script(*losses: float) -> None:
        def validate(run: _TrainingRun, rows: object) -> float:
            step = run.course.step
            results.write(tmp_path / f"at-{step}", run.inputs, run.method, {}, run.course.log, run.group, True)
            return losses[step - 1]

        monkeypatch.setattr(_TrainingRun, "_validate", validate)

    return script


def test_of_several_that_are_as_low_the_first_one_is_best() -> None:
    course = Course()
    assert (course.best, course.best_step) == (None, None)
    for step, loss in enumerate((3.0, None, 2.0, 2.5, 2.0), 1):
        course.log.append({"step": step} if loss is None else {"step": step, "valid_loss": loss})
    assert (course.best, course.best_step) == ((2.0, 3), 3)


@pytest.mark.parametrize("method", ["full", "lora", "ptuning"])
def test_what_is_written_is_of_the_best_step(
    method: str, tiny_model: Path, tmp_path: Path, data: Path, valid: Path, scripted: Callable[..., None]
) -> None:
    settings = replace(LORA, method=method, prefix_tokens=4, steps=4)
    scripted(3.0, 1.0, 1.0, 2.0)
    summary = train(tiny_model, tmp_path / "best", data=data, valid=valid, settings=settings, device="cpu")
    assert (summary["best_step"], summary["valid_loss"], summary["best_valid_loss"]) == (2, 1.0, 1.0)
    assert summary == json.loads((tmp_path / "best" / "training.json").read_text(encoding="utf-8"))
    assert weights(tmp_path / "best") == weights(tmp_path / "at-2") != weights(tmp_path / "at-4")
    assert not (tmp_path / "best.training").exists()
    log = json.loads((tmp_path / "best" / "training-log.json").read_text(encoding="utf-8"))
    assert [entry["step"] for entry in log] == [1, 2, 3, 4]
    settings = replace(settings, keep="last")
    summary = train(tiny_model, tmp_path / "last", data=data, valid=valid, settings=settings, device="cpu")
    assert (summary["best_step"], summary["valid_loss"], summary["best_valid_loss"]) == (2, 2.0, 1.0)
    assert weights(tmp_path / "last") == weights(tmp_path / "at-4")


def test_a_last_step_that_is_the_best(
    tiny_model: Path, tmp_path: Path, data: Path, valid: Path, scripted: Callable[..., None]
) -> None:
    scripted(4.0, 3.0, 2.0)
    settings = replace(LORA, steps=3)
    summary = train(tiny_model, tmp_path / "best", data=data, valid=valid, settings=settings, device="cpu")
    assert (summary["best_step"], summary["valid_loss"]) == (3, 2.0)
    assert weights(tmp_path / "best") == weights(tmp_path / "at-3")


def test_what_a_state_goes_on_with_stays_as_long_as_the_state(
    tiny_model: Path, tmp_path: Path, data: Path, valid: Path, scripted: Callable[..., None]
) -> None:
    output, settings = tmp_path / "out", replace(LORA, save_every=3)

    def go(report: Report = lambda progress: None, settings: TrainingSettings = settings) -> dict[str, Any]:
        return train(
            tiny_model, output, data=data, valid=valid, settings=settings, device="cpu", report=report, overwrite=True
        )

    scripted(9.0, 8.0, 8.5, 7.0, 6.0, 8.0, 8.0)
    with pytest.raises(KeyboardInterrupt):
        go(killed_after(2))
    assert kept(output) == ["best-2.pt"]  # there is no state yet: the run is going to begin anew
    with pytest.raises(KeyboardInterrupt):
        go(killed_after(5))
    # After step 3 the state was saved; were it to go on from there, step 2 may still be the best.
    assert kept(output) == ["best-2.pt", "best-5.pt", "state.pt"]
    scripted(9.0, 8.0, 8.5, 8.6, 8.7, 8.8, 8.9)
    with pytest.raises(KeyboardInterrupt):
        go(killed_after(4))
    assert kept(output) == ["best-2.pt", "state.pt"]
    # What it cannot go on with is said at once, not after the last step.
    (tmp_path / "out.training" / "best-2.pt").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"best-2\.pt: missing: delete .*out\.training to start over"):
        go()
    (tmp_path / "out.training" / "best-2.pt").write_bytes(b"PK damaged")
    with pytest.raises(CheckpointError, match=r"best-2\.pt: damaged \(.*\): delete .*out\.training to start over"):
        go()
    (tmp_path / "away").rename(tmp_path / "out.training" / "best-2.pt")
    with pytest.raises(UsageError, match=r"\(keep was best\)"):
        go(settings=replace(settings, keep="last"))
    with pytest.raises(UsageError, match=r"\(the validation data changed\)"):
        train(tiny_model, output, data=data, valid=data, settings=settings, device="cpu")
    assert go()["best_step"] == 2
    assert weights(output) == weights(tmp_path / "at-2")
    assert not (tmp_path / "out.training").exists()


def test_a_result_that_cannot_be_written_yet(
    tiny_model: Path,
    tmp_path: Path,
    data: Path,
    valid: Path,
    scripted: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted(3.0, 1.0, 2.0, 2.0)
    settings, output = replace(LORA, steps=4), tmp_path / "out"

    def refuse(*given: object) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patched:
        # Not in `scripted`, which writes results of its own.
        patched.setattr(_TrainingRun, "_finish", lambda run: _finish_with(run, refuse))
        with pytest.raises(StorageError, match="the disk is full"):
            train(tiny_model, output, data=data, valid=valid, settings=settings, device="cpu")
    assert kept(output) == ["best-2.pt", "state.pt"]
    begun: list[TrainingStarted] = []
    summary = train(tiny_model, output, data=data, valid=valid, settings=settings, device="cpu", begun=begun.append)
    assert (begun[0].step, summary["best_step"]) == (4, 2)
    assert weights(output) == weights(tmp_path / "at-2")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("calls", range(4))
def test_killed_while_it_removes_its_state(
    calls: int,
    tiny_model: Path,
    tmp_path: Path,
    data: Path,
    valid: Path,
    scripted: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After each call to the file system there is a state with all that it goes on with, or none."""
    scripted(3.0, 1.0, 2.0, 2.0)
    output, settings = tmp_path / "out", replace(LORA, steps=4)
    remove = StateFile.remove

    def killed(state: StateFile) -> None:
        done = 0

        def counted(call: Callable[..., None]) -> Callable[..., None]:
            def made(path: Path, **options: bool) -> None:
                nonlocal done
                if done == calls:
                    raise Killed
                done += 1
                call(path, **options)

            return made

        with pytest.MonkeyPatch.context() as patched:
            for name in ("unlink", "rmdir"):
                patched.setattr(Path, name, counted(getattr(Path, name)))
            remove(state)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(StateFile, "remove", killed)
        with pytest.raises(Killed):
            train(tiny_model, output, data=data, valid=valid, settings=settings, device="cpu")
    left = [["best-2.pt", "state.pt"], ["best-2.pt"], []]
    assert (kept(output) if output.with_name("out.training").exists() else None) == [*left, None][calls]
    # Under torchrun, where nobody looks first whether all is done already.
    monkeypatch.setenv("WORLD_SIZE", "1")
    begun: list[TrainingStarted] = []
    summary = train(
        *(tiny_model, output), data=data, valid=valid, settings=settings, overwrite=True, begun=begun.append
    )
    assert (begun[0].step, summary["best_step"]) == (0 if calls else 2, 2)
    assert weights(output) == weights(tmp_path / "at-2")
    assert not output.with_name("out.training").exists()


_finish = _TrainingRun._finish


def _finish_with(run: _TrainingRun, write: Callable[..., None]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(results, "write", write)
        return _finish(run)


def test_killed_it_goes_on_with_two_processes(tiny_model: Path, tmp_path: Path, data: Path, valid: Path) -> None:
    """By true losses: a model that has learnt the validation data gets worse on them with every step on others."""
    model, settings = tmp_path / "model", LORA
    first = replace(LORA, method="full", steps=30, keep="last", rank=8)
    train(tiny_model, model, data=valid, settings=first, device="cpu")
    program, flag, output = tmp_path / "program.py", tmp_path / "flag", tmp_path / "out"
    program.write_text(PROGRAM, encoding="utf-8")
    arguments = [*map(str, (program, model, output, data, valid, flag)), repr(vars(settings))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.Popen([sys.executable, *arguments], env=environment, text=True, stderr=subprocess.PIPE)
    end = time.monotonic() + SECONDS
    while not flag.exists():
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    killed.kill()
    killed.communicate()
    whole = train(model, tmp_path / "whole", data=data, valid=valid, settings=settings, device="cpu")
    best = whole["best_step"]
    assert best <= 4  # else there was none to go on with
    assert f"best-{best}.pt" in kept(output)
    begun: list[TrainingStarted] = []
    sharded = replace(settings, sharding="fsdp", rows_at_once=1)
    summary = train(
        model,
        output,
        data=data,
        valid=valid,
        settings=sharded,
        device="cpu",
        processes=2,
        begun=begun.append,
    )
    assert (begun[0].step, summary["processes"], summary["best_step"]) == (4, 2, best)
    assert summary["valid_loss"] == pytest.approx(whole["valid_loss"], abs=1e-5)
    assert not (tmp_path / "out.training").exists()
    name = "adapter_model.safetensors"
    found, expected = load_file(output / name), load_file(tmp_path / "whole" / name)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-4)


def test_a_state_that_is_older_than_the_setting_goes_on(
    tiny_model: Path, tmp_path: Path, data: Path, valid: Path
) -> None:
    output, settings = tmp_path / "out", replace(LORA, keep="last")
    with pytest.raises(KeyboardInterrupt):
        train(tiny_model, output, data=data, settings=settings, device="cpu", report=killed_after(3))
    path = StateFile(output).path
    state = torch.load(path, weights_only=True)
    del state["settings"]["keep"]
    torch.save(state, path)
    with pytest.raises(UsageError, match=r"\(keep was last\)"):
        train(tiny_model, output, data=data, valid=valid, settings=LORA, device="cpu")
    begun: list[TrainingStarted] = []
    train(tiny_model, output, data=data, settings=settings, device="cpu", begun=begun.append)
    assert begun[0].step == 2


def test_the_best_of_what_was_never_validated(tiny_model: Path, tmp_path: Path, data: Path) -> None:
    with pytest.raises(UsageError, match=r"^--keep best needs validation data: give --valid FILE$"):
        train(tiny_model, tmp_path / "out", data=data, settings=LORA, device="cpu")
    with pytest.raises(UsageError, match="keep is 'first': expected last or best"):
        replace(LORA, keep="first")
    assert not (tmp_path / "out.training").exists()


def test_the_command_says_what_it_cut(tiny_model: Path, tmp_path: Path, write_lines: Callable[..., Path]) -> None:
    def conversation(asked: str, answered: str) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}

    lines = conversation("写诗", "床前明月光"), conversation("写诗", "霜" * 40), conversation("光" * 40, "霜")
    words = [
        "train",
        tiny_model,
        tmp_path / "out",
        "--data",
        write_lines(tmp_path / "long.jsonl", *lines),
        "--device",
        "cpu",
    ]
    words += ["--steps", 1, "--length", 32, "--rows", 2, "--workers", 1]
    found = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False, env={"COLUMNS": "200"})
    assert found.exit_code == 0
    said = " ".join(found.output.split())
    assert "data: 3 documents, 1 of them cut to --length 32, 1 left out because no answer begins within it" in said


def test_the_command_says_which_step_it_kept(tiny_model: Path, tmp_path: Path, data: Path, valid: Path) -> None:
    words = ["train", tiny_model, tmp_path / "out", "--data", data, "--method", "lora", "--device", "cpu"]
    words += ["--steps", 2, "--length", 32, "--rows", 4, "--workers", 1, "--valid", valid, "--keep", "best"]
    found = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False, env={"COLUMNS": "160"})
    assert found.exit_code == 0
    assert "after step 2, which was written" in " ".join(found.output.split())
