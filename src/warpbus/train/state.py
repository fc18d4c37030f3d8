"""Checkpoints of a run: trained parameters, optimizer moments, and progress.

A checkpoint is one file of unsharded tensors, independent of the number of processes and the sharding, so that a run
can be resumed with others. Frozen parameters are not in it. With `keep="best"` a second file, named by its step, holds
the parameters of the best validation; it exists whenever a checkpoint refers to it.
"""

import secrets
import shutil
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from warpbus.errors import CheckpointError, UsageError
from warpbus.formats.files import read_json, replace_file
from warpbus.train.settings import TrainingSettings
from warpbus.train.sharding import part_of, whole

_MOMENTS = ("exp_avg", "exp_avg_sq")
_KEYS = {"run", "step", "seconds", "log", "settings", "data", "config", "model", "optimizer"}


@dataclass
class Course:
    """The progress of a run.

    Attributes:
        run: a random identifier.
        step: number of finished steps.
        seconds: training time over all sessions.
        log: one entry per step.
    """

    run: str = field(default_factory=lambda: secrets.token_hex(8))
    step: int = 0
    seconds: float = 0.0
    log: list[dict[str, float]] = field(default_factory=list)

    @property
    def best(self) -> tuple[float, int] | None:
        """The lowest validation loss and its step, the first one in case of a tie; None without validation."""
        validated = [(entry["valid_loss"], int(entry["step"])) for entry in self.log if "valid_loss" in entry]
        return min(validated, default=None)

    @property
    def best_step(self) -> int | None:
        """The step with the lowest validation loss; None without validation."""
        return None if self.best is None else self.best[1]


@dataclass(frozen=True)
class Identity:
    """The inputs of a run, which have to be the same when it is resumed.

    Attributes:
        settings: the `TrainingSettings` as a dict.
        data: digest of the training documents.
        config: the model config.
        valid: digest of the validation documents, if they decide which step is kept.
        weights: digest of the model's weights, if there are any.
    """

    settings: dict[str, Any]
    data: str
    config: str
    valid: str | None = None
    weights: str | None = None

    def changes(self, before: Mapping[str, Any]) -> list[str]:
        """The differences to a saved state, in words."""
        was = {**asdict(TrainingSettings()), **before["settings"]}  # an old state may lack new settings
        changed = [
            f"{name} was {was[name]}"
            for name, value in self.settings.items()
            if was[name] != value and not TrainingSettings.may_change(name)
        ]
        if before["data"] != self.data:
            changed.append("the data changed")
        if None not in (self.valid, before.get("valid")) and before["valid"] != self.valid:
            changed.append("the validation data changed")
        if before["config"] != self.config:
            changed.append("the model changed")
        elif None not in (self.weights, before.get("weights")) and before["weights"] != self.weights:
            changed.append("the weights of the model changed")
        return changed


class StateFile:
    """The checkpoint `state.pt` in the directory `<output>.training`, and `best-N.pt` of the best step N.

    Args:
        output: the output directory of the run.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.directory = output.with_name(output.name + ".training")
        self.path = self.directory / "state.pt"
        self._saved_best: int | None = None  # the best step according to the state on disk

    def exists(self) -> bool:
        return self.path.exists()

    def finished(self, settings: TrainingSettings) -> dict[str, Any] | None:
        """The summary of a run with these settings that wrote its output but was killed before it removed this state;
        None if there is no such run."""
        summary = read_json(self.output / "training.json")
        if not isinstance(summary, dict) or not self.exists():
            return None
        state = self._load()
        # What was computed from the data.
        computed = {"steps": not settings.steps, "warmup": settings.warmup is None}
        settings = replace(settings, **{name: state["settings"][name] for name, each in computed.items() if each})
        same = not Identity(asdict(settings), state["data"], state["config"]).changes(state)
        return summary if same and state["run"] == summary.get("run") else None

    def tidy(self) -> None:
        """Remove partial files of killed processes."""
        if not self.directory.is_dir():
            return
        for left in self.directory.glob(".*.partial-*"):
            left.unlink(missing_ok=True)
        for left in _halves(self.output.parent, self.output.name):
            shutil.rmtree(left, ignore_errors=True)

    def remove(self) -> None:
        """Remove the state, and its directory if it is empty then.

        `state.pt` is removed first: if the process is killed here, the next run to the same output removes the rest.
        """
        self.path.unlink(missing_ok=True)
        self._drop_best(())
        with suppress(OSError):
            self.directory.rmdir()

    def save(
        self,
        course: Course,
        identity: Identity,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        writes: bool,
    ) -> None:
        """Write a checkpoint atomically; every process calls it, and the one with `writes` writes.

        Args:
            parameters: those that the run changes, by name; those with gradients have moments in the optimizer.

        Raises:
            StorageError: it cannot be written; the previous checkpoint is kept.
        """
        model, moments = {}, {}
        for name, parameter in parameters.items():
            # One at a time: a GPU may not have memory for all gathered parameters.
            moments_of = {key: optimizer.state[parameter][key] for key in _MOMENTS if parameter.requires_grad}
            parts = {"parameter": parameter, **moments_of}
            full = {key: whole(tensor) for key, tensor in parts.items()}
            if writes:
                full = {key: tensor.cpu() for key, tensor in full.items()}
                model[name] = full.pop("parameter")
                if full:
                    moments[name] = full
        if writes:
            state = {**asdict(course), **asdict(identity), "model": model, "optimizer": moments}
            replace_file(self.path, lambda path: _write(state, path))
            self._saved_best = course.best_step
            self._drop_best((course.best_step,))

    def save_best(self, course: Course, parameters: Mapping[str, nn.Parameter], *, writes: bool) -> None:
        """Write the parameters after the current step, which is the best so far; called and raises as `save`.

        The file of the best step in `state.pt` is kept, because a killed run resumes from `state.pt`.
        """
        model = {}
        for name, parameter in parameters.items():
            full = whole(parameter)
            if writes:
                model[name] = full.cpu()
        if writes:
            replace_file(self._best(course.step), lambda path: _write({"run": course.run, "model": model}, path))
            self._drop_best((course.step, self._saved_best))

    def take_best(self, course: Course, parameters: Mapping[str, nn.Parameter]) -> None:
        """Load the parameters of the best step; every process calls it.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        try:
            _put(self._load_best(course), parameters)
        except (KeyError, RuntimeError) as error:
            raise self._damaged(self._best(course.best_step), error) from None

    def tidy_best(self, course: Course) -> None:
        """Remove files that a killed run wrote after its last checkpoint."""
        self._drop_best((course.best_step,))

    def load(
        self,
        identity: Identity,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> Course | None:
        """Load the checkpoint into parameters and optimizer; None if there is none.

        Raises:
            CheckpointError: it is damaged, or the file of the best step is damaged or missing.
            UsageError: it belongs to a run of another identity.
        """
        if not self.exists():
            return None
        state = self._load()
        if changed := identity.changes(state):
            raise UsageError(
                f"{self.directory}: the interrupted run had other settings ({', '.join(changed)}): "
                "use the same to resume it, or delete the directory to start over"
            )
        try:
            self._fill(state, parameters, optimizer)
        except (KeyError, RuntimeError) as error:
            raise self._damaged(self.path, error) from None
        course = Course(state["run"], state["step"], state["seconds"], state["log"])
        # There is no file of the last step, after which the result is written.
        if identity.settings["keep"] == "best" and course.best_step not in (None, identity.settings["steps"]):
            self._load_best(course)
        self._saved_best = course.best_step
        return course

    def _fill(
        self, state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        names = {parameter: name for name, parameter in parameters.items()}
        moments = {}
        _put(state["model"], parameters)
        groups = optimizer.state_dict()["param_groups"]
        for group, numbered in zip(optimizer.param_groups, groups, strict=True):
            for parameter, number in zip(group["params"], numbered["params"], strict=True):
                kept = state["optimizer"][names[parameter]]
                moments[number] = {key: part_of(kept[key], parameter) for key in _MOMENTS}
                moments[number]["step"] = torch.tensor(float(state["step"]))
        optimizer.load_state_dict({"state": moments, "param_groups": groups})

    def _load(self) -> dict[str, Any]:
        return self._read(self.path, _KEYS)

    def _load_best(self, course: Course) -> dict[str, Any]:
        path = self._best(course.best_step)
        found = self._read(path, {"run", "model"})
        if found["run"] != course.run:
            raise self._damaged(path, KeyError(found["run"]))
        model: dict[str, Any] = found["model"]
        return model

    def _read(self, path: Path, keys: set[str]) -> dict[str, Any]:
        try:
            # Memory-mapped: each process reads only what it needs.
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            missing = keys - set(found)
        except Exception as error:  # torch.load of a damaged file can raise any exception
            raise self._damaged(path, error) from None
        if missing:
            raise self._damaged(path, KeyError(min(missing)))
        return found

    def _best(self, step: int | None) -> Path:
        return self.directory / f"best-{step}.pt"

    def _drop_best(self, but: Container[int | None]) -> None:
        for path in self.directory.glob("best-*.pt"):
            step = path.stem.removeprefix("best-")
            if step.isdecimal() and int(step) not in but:
                path.unlink(missing_ok=True)

    def _damaged(self, path: Path, error: Exception) -> CheckpointError:
        found = "missing" if isinstance(error, FileNotFoundError) else f"damaged ({type(error).__name__})"
        return CheckpointError(f"{path}: {found}: delete {self.directory} to start over")


def _put(model: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(part_of(model[name], parameter))


def _write(state: Mapping[str, Any], path: Path) -> None:
    # With a Python file object the error says that the disk is full.
    with path.open("wb") as file:
        torch.save(state, file)


def _halves(directory: Path, name: str) -> list[Path]:
    """The partial directories and files of `name`: `.name.partial-` and a number, or a part of one."""
    return [path for path in directory.iterdir() if path.name.startswith((f".{name}.partial-", f"..{name}.partial-"))]
