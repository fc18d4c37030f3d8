"""The state of a run on disk: what is trained, the optimizer's moments, and how far it is.

It is one file of whole tensors, whatever number of processes wrote it and however they shared the model, so that
another number of them can go on. What is not trained is not in it.
"""

import secrets
import shutil
from collections.abc import Mapping
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


@dataclass(frozen=True)
class Identity:
    """What a run may only go on with.

    Attributes:
        settings: of its `TrainingSettings`.
        data: the documents' digest.
        config: the model's.
    """

    settings: dict[str, Any]
    data: str
    config: str

    def changes(self, before: Mapping[str, Any]) -> list[str]:
        """What was another in a state that was saved."""
        changed = [
            f"{name} was {before['settings'].get(name)}"
            for name, value in self.settings.items()
            if before["settings"].get(name) != value and not TrainingSettings.may_change(name)
        ]
        if before["data"] != self.data:
            changed.append("the data were others")
        if before["config"] != self.config:
            changed.append("the model was another")
        return changed


class StateFile:
    """`state.pt` in the directory `<output>.training`.

    Args:
        output: what the run writes in the end.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.directory = output.with_name(output.name + ".training")
        self.path = self.directory / "state.pt"

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
        for left in _halves(self.directory, self.path.name):
            left.unlink(missing_ok=True)
        for left in _halves(self.output.parent, self.output.name):
            shutil.rmtree(left, ignore_errors=True)

    def remove(self) -> None:
        """Remove the state, and its directory if nothing else is in it."""
        self.path.unlink(missing_ok=True)
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

    def load(
        self,
        identity: Identity,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> Course | None:
        """Put the state into parameters and optimizer; None if there is none.

        Raises:
            CheckpointError: it is damaged.
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
            raise self._damaged(error) from None
        return Course(state["run"], state["step"], state["seconds"], state["log"])

    def _fill(
        self, state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        names = {parameter: name for name, parameter in parameters.items()}
        moments = {}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(part_of(state["model"][name], parameter))
        groups = optimizer.state_dict()["param_groups"]
        for group, numbered in zip(optimizer.param_groups, groups, strict=True):
            for parameter, number in zip(group["params"], numbered["params"], strict=True):
                kept = state["optimizer"][names[parameter]]
                moments[number] = {key: part_of(kept[key], parameter) for key in _MOMENTS}
                moments[number]["step"] = torch.tensor(float(state["step"]))
        optimizer.load_state_dict({"state": moments, "param_groups": groups})

    def _load(self) -> dict[str, Any]:
        try:
            # Mapped: each process reads what it needs, and none has all of it in memory.
            state: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
            missing = _KEYS - set(state)
        except Exception as error:  # a damaged file can make the unpickler raise anything
            raise self._damaged(error) from None
        if missing:
            raise self._damaged(KeyError(min(missing)))
        return state

    def _damaged(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged ({type(error).__name__}): delete it to start anew")


def _write(state: Mapping[str, Any], path: Path) -> None:
    # Through a file of Python's, an error says that the disk is full.
    with path.open("wb") as file:
        torch.save(state, file)


def _halves(directory: Path, name: str) -> list[Path]:
    """What was to become `name` in a directory: `.name.partial-` and a number, or a part of such a one."""
    return [path for path in directory.iterdir() if path.name.startswith((f".{name}.partial-", f"..{name}.partial-"))]
