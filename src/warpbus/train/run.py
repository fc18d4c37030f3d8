"""The course of a training run in each of its processes: steps, validations, checkpoints, and what is written at last.

The run keeps its state in `<output>.training/` and writes its result to `<output>` when it ends. Started again with
the same settings, by any number of processes, it goes on from the last checkpoint.
"""

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from warpbus.dist import Group, Send
from warpbus.errors import CheckpointError, NumericError, StorageError, UsageError
from warpbus.train import results
from warpbus.train.compiling import compile_layers
from warpbus.train.dataset import IGNORED, PackedBatch, assemble, pack
from warpbus.train.inputs import Inputs
from warpbus.train.methods import prepare
from warpbus.train.settings import TrainingSettings
from warpbus.train.sharding import clip_gradients, distribute
from warpbus.train.state import Course, Identity, StateFile
from warpbus.train.stopping import STOPPING, Signals

_VALIDATED_AT_ONCE = 16


@dataclass(frozen=True)
class TrainingTask:
    """What to train, on what, and how; see `warpbus.train.train`."""

    model: Path
    output: Path
    data: Path
    valid: Path | None
    settings: TrainingSettings
    workers: int
    overwrite: bool


@dataclass(frozen=True)
class TrainingStarted:
    """What is known before the first step.

    Attributes:
        step: how many steps an interrupted run has done already.
        steps: how many there are in all.
        trained, parameters: how many numbers are trained, and how many the model has.
    """

    step: int
    steps: int
    trained: int
    parameters: int


@dataclass(frozen=True)
class TrainingProgress:
    """What is known after a step; `valid_loss` where the model was validated."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    tokens_per_second: float
    valid_loss: float | None = None


@dataclass(frozen=True)
class Halted:
    """The state is saved after `step` steps, since the signal `number` came."""

    number: int
    step: int


@dataclass(frozen=True)
class Finished:
    """The result is written; `summary` is what its `training.json` says."""

    summary: dict[str, Any]


def work(group: Group, send: Send, task: TrainingTask) -> None:
    """One process's part of a run.

    Args:
        send: gets `TrainingStarted` and, after each step, `TrainingProgress` from the first process, and `Halted` or
            `Finished` from each process. If it is a `JobPipe`, signal numbers are received through it; otherwise this
            process handles signals itself.
    """
    _TrainingRun(group, send, task).go()


class _TrainingRun:
    """One process's part of a run."""

    def __init__(self, group: Group, send: Send, task: TrainingTask) -> None:
        self.group, self.send, self.task = group, send, task
        workers = task.workers // group.world
        self.inputs = inputs = Inputs.read(task.model, task.data, task.settings, workers)
        self.settings = settings = inputs.settings
        self.valid: PackedBatch | None = None
        documents = inputs.batches.documents
        self.identity = Identity(asdict(settings), documents.digest(), repr(inputs.config))
        if task.valid is not None:
            held_out = inputs.held_out(task.valid, workers)
            self.valid = assemble(held_out, pack(held_out, range(len(held_out)), settings.length), settings.length)
            if settings.keep == "best":  # by losses on other data another step may be the best
                self.identity = replace(self.identity, valid=held_out.digest())
        self.method = prepare(inputs.checkpoint, inputs.config, settings, documents, group.device)
        self.trained = sum(parameter.numel() for parameter in self.method.trained().values())
        self.parallel = distribute(self.method, self.method.model.layers, settings, group)
        self.parameters = self.method.trained()  # as they are now, which may be parts
        self.optimizer = _optimizer(list(self.parameters.values()), settings, group.device)
        if settings.compile:
            compile_layers(self.method.model.layers)
        self.state = StateFile(task.output)
        self.course = Course()

    def go(self) -> None:
        self._resume()
        if self.group.is_first:
            parameters = self.inputs.config.num_parameters
            self.send(TrainingStarted(self.course.step, self.settings.steps, self.trained, parameters))
        if self.group.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        heard = getattr(self.send, "heard", None)
        if heard is not None:
            number = self._steps(lambda: next(iter(heard(0.0)), 0))
        else:
            with Signals() as signals:
                number = self._steps(lambda: signals.caught)
        self.send(Halted(number, self.course.step) if number else Finished(self._finish()))

    def _steps(self, stopping: Callable[[], int]) -> int:
        """All steps that are left; `stopping` tells a signal's number, or 0.

        Returns:
            the number of the signal after which the state was saved; 0 if all steps are done.
        """
        settings, group, course = self.settings, self.group, self.course
        tokens = settings.rows_per_step * settings.length
        before = time.monotonic()
        for rows in _ahead(self.inputs.batches.steps(course.step, settings.steps, group.rank, group.world)):
            rate = settings.rate(course.step)
            loss, norm, number = self._update(rows, rate, stopping())
            course.step += 1
            seconds = time.monotonic() - before
            last = course.step == settings.steps
            entry = {"step": course.step, "loss": loss, "learning_rate": rate, "gradient_norm": norm}
            entry["seconds"] = seconds
            if self.valid is not None and (course.step % settings.valid_every == 0 or last):
                entry["valid_loss"] = self._validate(self.valid)
            course.log.append(entry)
            course.seconds += time.monotonic() - before
            if not last and settings.keep == "best" and "valid_loss" in entry and course.best_step == course.step:
                self.state.save_best(course, self.parameters, writes=group.is_first)
            if not last and (number or course.step % settings.save_every == 0):
                self._save()
            if group.is_first:
                speed = tokens / seconds
                self.send(TrainingProgress(course.step, settings.steps, loss, rate, speed, entry.get("valid_loss")))
            if number and not last:
                return number
            before = time.monotonic()
        return 0

    def _update(self, rows: PackedBatch, rate: float, stopping: int) -> tuple[float, float, int]:
        """One optimizer step.

        Returns:
            the mean loss of its targets and the norm of its gradient, over all processes, and the number of the signal
            that one of them got, or 0.
        """
        settings, group = self.settings, self.group
        targets = group.sum((rows.targets != IGNORED).sum().to(group.device, non_blocking=True))
        total = torch.zeros((), device=group.device)
        pieces = math.ceil(len(rows.tokens) / settings.rows_at_once)
        with self._dropout():
            for index in range(pieces):
                piece = slice(index * settings.rows_at_once, (index + 1) * settings.rows_at_once)
                with nullcontext() if index == pieces - 1 else self._unsynchronized():
                    loss = self._loss(self.parallel, rows, piece)
                    # Gradients are averaged over the processes: undo that, since the sum is divided by all targets.
                    (loss * group.world / targets).backward()
                total += loss.detach()
        norm = clip_gradients(list(self.parameters.values()), settings.clip)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        flags = [float(stopping == number) for number in STOPPING]
        summed = group.sum(torch.cat((total[None], torch.tensor(flags, device=group.device))))
        mean = float(summed[0] / targets)
        if not math.isfinite(mean) or not math.isfinite(norm):
            raise self._numeric_error(self.course.step + 1, f"the loss is {mean}, the gradient's norm {norm}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        asked = [int(number) for number, count in zip(STOPPING, summed[1:].tolist(), strict=True) if count]
        return mean, norm, next(iter(asked), 0)

    def _loss(self, compute: Callable[..., Tensor], rows: PackedBatch, picked: slice) -> Tensor:
        device, own = self.group.device, rows.pick(picked)
        # Rows of one document each need no mask, and what is only causal has quicker kernels. It is looked up where the
        # rows are made: no one waits for the GPU.
        alone = bool((own.documents == own.documents[:, :1]).all())
        own = own.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"):
            return compute(own.tokens, own.targets, own.positions, None if alone else own.documents)

    def _numeric_error(self, step: int, found: str) -> NumericError:
        kept = f"; {self.state.path} has the last state that was saved" if self.state.exists() else ""
        advice = "check the weights that it began with, or start again with a lower --learning-rate"
        return NumericError(f"step {step}: {found}: {advice}{kept}")

    def _unsynchronized(self) -> AbstractContextManager[None]:
        """Within it, DDP keeps gradients to itself: the last piece of a step sends them all.

        FSDP2 sends those of every piece, since it has room for a part of them alone.
        """
        return self.parallel.no_sync() if isinstance(self.parallel, DistributedDataParallel) else nullcontext()

    def _dropout(self) -> AbstractContextManager[None]:
        """Within it, what is left out follows from the step, so that a run that goes on leaves out the same."""
        if not self.settings.dropout:
            return nullcontext()
        return _seeded((self.settings.seed, self.course.step, self.group.rank), self.group.device)

    @torch.no_grad()
    def _validate(self, rows: PackedBatch) -> float:
        """The mean loss of the held-out targets."""
        settings, group = self.settings, self.group
        total = torch.zeros(2, dtype=torch.float64, device=group.device)
        self.method.eval()
        stride = group.world * min(_VALIDATED_AT_ONCE, settings.rows_at_once)
        for start in range(0, len(rows.tokens), stride):
            picked = slice(start + group.rank, start + stride, group.world)
            own = rows.targets[picked]
            # Sharded layers are computed by all processes at once: one that has no row left takes part with a row.
            total[0] += self._loss(self.method, rows, picked if len(own) else slice(0, 1)) * bool(len(own))
            total[1] += (own != IGNORED).sum()
        self.method.train()
        if isinstance(self.method, FSDPModule):
            # What is whole, and in 16 bits, until a backward pass: none follows, and this may be what is written.
            self.method.reshard()
        group.sum(total)
        mean = float(total[0] / total[1])
        if not math.isfinite(mean):
            raise self._numeric_error(self.course.step, f"the validation loss is {mean}")
        return mean

    def _save(self) -> None:
        self.state.save(self.course, self.identity, self.parameters, self.optimizer, writes=self.group.is_first)

    def _resume(self) -> None:
        if self.group.is_first:
            self.state.tidy()
        course = self.state.load(self.identity, self.parameters, self.optimizer)
        step = 0 if course is None else course.step
        if not self.group.smallest(step) == -self.group.smallest(-step) == step:
            raise UsageError(
                f"{self.state.directory}: not all processes see the same state: give an OUTPUT that all machines share"
            )
        self.course = course or self.course
        if self.group.is_first:
            self.state.tidy_best(self.course)

    def _finish(self) -> dict[str, Any]:
        """Write the result, and remove the state."""
        summary = self._summary()
        if self.group.world > 1:
            self._save()  # parts are gathered by all: what fails in the first alone cannot be saved any more
        task, course = self.task, self.course
        try:
            if self.settings.keep == "best" and course.best_step != course.step:
                self.state.take_best(course, self.parameters)
            results.write(task.output, self.inputs, self.method, summary, course.log, self.group, task.overwrite)
        except (CheckpointError, StorageError, KeyboardInterrupt):
            if self.group.world == 1:
                self._save()  # of the best step or the last: there is none to go on with
            raise
        self.group.barrier()
        if self.group.is_first:
            self.state.remove()
        return summary

    def _summary(self) -> dict[str, Any]:
        settings, course, device = self.settings, self.course, self.group.device
        best, best_step = course.best or (None, None)
        last = course.log[-1].get("valid_loss") if course.log else None
        recent = [entry["loss"] for entry in course.log[-50:]]
        return {
            "run": course.run,
            "settings": {**asdict(settings), "targets": list(settings.targets)},
            "parameters": self.inputs.config.num_parameters,
            "trained": self.trained,
            "documents": len(self.inputs.batches.documents),
            "epochs": settings.steps / self.inputs.batches.steps_per_epoch(),
            "tokens": settings.steps * settings.rows_per_step * settings.length,
            "seconds": course.seconds,
            "loss": sum(recent) / max(1, len(recent)),
            "valid_loss": best if settings.keep == "best" else last,
            "best_valid_loss": best,
            "best_step": best_step,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "processes": self.group.world,
            "torch": torch.__version__,
        }


def _optimizer(trained: list[nn.Parameter], settings: TrainingSettings, device: torch.device) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019); biases and norms do not decay."""
    decaying = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")


def _ahead(batches: Iterator[PackedBatch]) -> Iterator[PackedBatch]:
    """Make the next batches in a thread while the device works on this one."""
    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, batches, None) for _ in range(4))
        while (rows := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, batches, None))
            yield rows


@contextmanager
def _seeded(what: tuple[int, ...], device: torch.device) -> Iterator[None]:
    """Within it torch's random numbers follow from `what`; outside they are what they would have been."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest()))
        yield
