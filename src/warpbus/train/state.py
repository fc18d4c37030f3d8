"""The state of a run on disk: what is trained, the optimizer's moments, and how far it is.

It is one file of whole tensors, whatever number of processes wrote it and however they shared the model, so that
another number of them can go on. What is not trained is not in it. Beside it, where the best validation counts, is what
was trained then: a file by its step, which is there before a state speaks of it, and as long as one does.
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
    """How far a run is.

    Attributes:
        run: a random name of its own.
        step: how many steps are done.
        seconds: of all sessions together.
        log: an entry a step.
    """

    run: str = field(default_factory=lambda: secrets.token_hex(8))
    step: int = 0
    seconds: float = 0.0
    log: list[dict[str, float]] = field(default_factory=list)

    @property
    def best(self) -> tuple[float, int] | None:
        """The lowest validation loss, and after which step it was; the first one of several that are as low."""
        validated = [(entry["valid_loss"], int(entry["step"])) for entry in self.log if "valid_loss" in entry]
        return min(validated, default=None)

    @property
    def best_step(self) -> int | None:
        """After which step the validation loss was lowest."""
        return None if self.best is None else self.best[1]


@dataclass(frozen=True)
class Identity:
    """What a run may only go on with.

    Attributes:
        settings: of its `TrainingSettings`.
        data: the documents' digest.
        config: the model's.
        valid: the digest of those that it is validated on, where they choose what is kept.
    """

    settings: dict[str, Any]
    data: str
    config: str
    valid: str | None = None

    def changes(self, before: Mapping[str, Any]) -> list[str]:
        """What was another in a state that was saved."""
        was = {**asdict(TrainingSettings()), **before["settings"]}  # it may be older than a setting
        changed = [
            f"{name} was {was[name]}"
            for name, value in self.settings.items()
            if was[name] != value and not TrainingSettings.may_change(name)
        ]
        if before["data"] != self.data:
            changed.append("the data were others")
        if None not in (self.valid, before.get("valid")) and before["valid"] != self.valid:
            changed.append("the validation data were others")
        if before["config"] != self.config:
            changed.append("the model was another")
        return changed


class StateFile:
    """`state.pt` in the directory `<output>.training`, and `best-N.pt` of the best step N.

    Args:
        output: what the run writes in the end.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.directory = output.with_name(output.name + ".training")
        self.path = self.directory / "state.pt"
        self._saved_best: int | None = None  # what the state on the disk goes on with

    def exists(self) -> bool:
        return self.path.exists()

    def finished(self, settings: TrainingSettings) -> dict[str, Any] | None:
        """The summary of the run with these settings that this state is of, if it wrote its output already and was
        killed before it tidied up."""
        summary = read_json(self.output / "training.json")
        if not isinstance(summary, dict) or not self.exists():
            return None
        state = self._load()
        if not settings.steps:  # as many as the data made
            settings = replace(settings, steps=state["settings"]["steps"])
        same = not Identity(asdict(settings), state["data"], state["config"]).changes(state)
        return summary if same and state["run"] == summary.get("run") else None

    def tidy(self) -> None:
        """Remove what killed processes have left half-written."""
        if not self.directory.is_dir():
            return
        for left in self.directory.glob(".*.partial-*"):
            left.unlink(missing_ok=True)
        for left in _halves(self.output.parent, self.output.name):
            shutil.rmtree(left, ignore_errors=True)

    def remove(self) -> None:
        """Remove the state, and its directory if nothing else is in it.

        Killed on the way, it leaves all of the state or none: what is left without `state.pt` is of nobody, and the
        next run to the same output removes it.
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
        """Write it, at once or not at all; every process calls it, and the one that `writes` does.

        Args:
            parameters: what is trained, by name.

        Raises:
            StorageError: if it cannot be written; the one before is still there then.
        """
        model, moments = {}, {}
        for name, parameter in parameters.items():
            # One after the other: a GPU may have no room for all of them.
            parts = {"parameter": parameter, **{key: optimizer.state[parameter][key] for key in _MOMENTS}}
            full = {key: whole(tensor) for key, tensor in parts.items()}
            if writes:
                full = {key: tensor.cpu() for key, tensor in full.items()}
                model[name] = full.pop("parameter")
                moments[name] = full
        if writes:
            state = {**asdict(course), **asdict(identity), "model": model, "optimizer": moments}
            replace_file(self.path, lambda path: _write(state, path))
            self._saved_best = course.best_step
            self._drop_best((course.best_step,))

    def save_best(self, course: Course, parameters: Mapping[str, nn.Parameter], *, writes: bool) -> None:
        """Write what is trained after the step that is done, which is the best so far; called and raises as `save`.

        That of the state on the disk stays, since a run that is killed goes on from there.
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
        """Put what was trained after the best step into the parameters; every process calls it.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        try:
            _put(self._load_best(course), parameters)
        except (KeyError, RuntimeError) as error:
            raise self._damaged(self._best(course.best_step), error) from None

    def tidy_best(self, course: Course) -> None:
        """Remove what a killed run wrote after the state that it goes on from."""
        self._drop_best((course.best_step,))

    def load(
        self,
        identity: Identity,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> Course | None:
        """Put the state into parameters and optimizer; None if there is none.

        Raises:
            CheckpointError: it is damaged, or that of the best step, which is to be kept, is so or missing.
            UsageError: it is of a run of another identity.
        """
        if not self.exists():
            return None
        state = self._load()
        if changed := identity.changes(state):
            raise UsageError(
                f"{self.directory}: an interrupted run with other settings ({', '.join(changed)}): "
                "use those to go on, or delete it to start anew"
            )
        try:
            self._fill(state, parameters, optimizer)
        except (KeyError, RuntimeError) as error:
            raise self._damaged(self.path, error) from None
        course = Course(state["run"], state["step"], state["seconds"], state["log"])
        # Of the last step, after which all is written, there is no file.
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
            # Mapped: each process reads what it needs, and none has all of it in memory.
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            missing = keys - set(found)
        except Exception as error:  # a damaged file can make the unpickler raise anything
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
        return CheckpointError(f"{path}: {found}: delete {self.directory} to start anew")


def _put(model: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(part_of(model[name], parameter))


def _write(state: Mapping[str, Any], path: Path) -> None:
    # Through a file of Python's, an error says that the disk is full.
    with path.open("wb") as file:
        torch.save(state, file)


def _halves(directory: Path, name: str) -> list[Path]:
    """What was to become `name` in a directory: `.name.partial-` and a number, or a part of such a one."""
    return [path for path in directory.iterdir() if path.name.startswith((f".{name}.partial-", f"..{name}.partial-"))]
