"""The training loop that each process runs: steps, validation, checkpoints, and writing the result.

Checkpoints are in `<output>.training/`; the result is written to `<output>` at the end. A run that is started again
with the same settings, by any number of processes, resumes from the last checkpoint.
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
from warpbus.train.balance import ExpertBalance
from warpbus.train.compiling import compile_layers
from warpbus.train.dataset import IGNORED, PackedBatch, assemble, pack
from warpbus.train.inputs import Inputs
from warpbus.train.memory import check_main_memory
from warpbus.train.methods import FullMethod, prepare
from warpbus.train.settings import TrainingSettings
from warpbus.train.sharding import clip_gradients, distribute
from warpbus.train.state import Course, Identity, StateFile
from warpbus.train.stopping import STOPPING, Signals

_VALIDATED_AT_ONCE = 16


@dataclass(frozen=True)
class TrainingTask:
    """The arguments of a run; see `warpbus.train.train`.

    Attributes:
        processes: how many of the run's processes this machine has; 1 if that is unknown, on a cluster.
    """

    model: Path
    output: Path
    data: Path
    valid: Path | None
    settings: TrainingSettings
    workers: int
    overwrite: bool
    processes: int


@dataclass(frozen=True)
class TrainingStarted:
    """The state of a run before its first step.

    Attributes:
        step: steps that an interrupted run has done already.
        steps: total number of steps.
        trained: number of trainable parameters.
        parameters: number of parameters of the model.
        documents: number of training documents.
        epochs: passes over them in the whole run.
        settings: of the run, with the numbers of steps.
        random: whether it starts from random weights, because the model has none.
    """

    step: int
    steps: int
    trained: int
    parameters: int
    documents: int
    epochs: float
    settings: TrainingSettings
    random: bool = False


@dataclass(frozen=True)
class TrainingProgress:
    """The figures of a step.

    Attributes:
        valid_loss: None if the model was not validated after the step.
        expert_load: the tokens of the busiest expert divided by the mean, of the layer where that is largest; None if
            no experts are trained.
    """

    step: int
    steps: int
    loss: float
    learning_rate: float
    tokens_per_second: float
    valid_loss: float | None = None
    expert_load: float | None = None


@dataclass(frozen=True)
class Halted:
    """The run stopped because of signal `number`, with a checkpoint after `step` steps."""

    number: int
    step: int


@dataclass(frozen=True)
class Finished:
    """The result is written; `summary` is the content of its `training.json`."""

    summary: dict[str, Any]


def work(group: Group, send: Send, task: TrainingTask) -> None:
    """Run the training loop in one process.

    Args:
        send: receives `TrainingStarted` and, after each step, `TrainingProgress` from the first process, and `Halted`
            or `Finished` from each process. If it is a `JobPipe`, signal numbers are received through it; otherwise
            this process handles signals itself.
    """
    _TrainingRun(group, send, task).go()


class _TrainingRun:
    """The training loop in one process."""

    def __init__(self, group: Group, send: Send, task: TrainingTask) -> None:
        self.group, self.send, self.task = group, send, task
        workers = task.workers // group.world
        self.inputs = inputs = Inputs.read(task.model, task.data, task.settings, workers)
        self.settings = settings = inputs.settings
        if group.device.type == "cpu":
            check_main_memory(inputs.config, settings, group.world, task.processes, scheme=inputs.scheme)
        self.valid: PackedBatch | None = None
        self.held_out: dict[str, int] = {}  # numbers of validation documents
        documents = inputs.batches.documents
        self.identity = Identity(
            asdict(settings), documents.digest(), repr(inputs.config), weights=inputs.weights_digest()
        )
        if task.valid is not None:
            held_out = inputs.held_out(task.valid, workers)
            self.held_out = {f"valid_{name}": number for name, number in held_out.counts().items()}
            self.valid = assemble(held_out, pack(held_out, range(len(held_out)), settings.length), settings.length)
            if settings.keep == "best":  # other validation data may select another step
                self.identity = replace(self.identity, valid=held_out.digest())
        self.method = prepare(inputs.checkpoint, inputs.config, settings, documents, group.device)
        self.trained = sum(parameter.numel() for parameter in self.method.trained().values())
        self.parallel = distribute(self.method, self.method.model.layers, settings, group)
        trained = self.method.trained()  # after sharding
        self.optimizer = _optimizer(list(trained.values()), settings, group.device)
        self.balance: ExpertBalance | None = None
        if inputs.config.has_experts and isinstance(self.method, FullMethod):
            self.balance = ExpertBalance(self.method.model, settings.balance_speed, group)
        self.parameters = trained if self.balance is None else trained | self.balance.biases
        if settings.compile:
            compile_layers(self.method.model.layers)
        self.state = StateFile(task.output)
        self.course = Course()

    def go(self) -> None:
        self._resume()
        if self.group.is_first:
            self.send(
                TrainingStarted(
                    step=self.course.step,
                    steps=self.settings.steps,
                    trained=self.trained,
                    parameters=self.inputs.config.num_parameters,
                    documents=len(self.inputs.batches.documents),
                    epochs=self._epochs(),
                    settings=self.settings,
                    random=not self.inputs.checkpoint.names(),
                )
            )
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
        """Run all remaining steps.

        Args:
            stopping: returns the number of a caught signal, or 0.

        Returns:
            the number of the signal that stopped the run; 0 if all steps are done.
        """
        settings, group, course = self.settings, self.group, self.course
        tokens = settings.rows_per_step * settings.length
        before = time.monotonic()
        for rows in _ahead(self.inputs.batches.steps(course.step, settings.steps, group.rank, group.world)):
            rate = settings.rate(course.step)
            losses, norm, number = self._update(rows, rate, stopping())
            loss = losses["loss"]
            load = None if self.balance is None else self.balance.update()
            course.step += 1
            seconds = time.monotonic() - before
            last = course.step == settings.steps
            entry = {"step": course.step, **losses, "learning_rate": rate, "gradient_norm": norm}
            entry["seconds"] = seconds
            if load is not None:
                entry["expert_load"] = load
            if self.valid is not None and (course.step % settings.valid_every == 0 or last):
                entry["valid_loss"] = self._validate(self.valid)
            course.log.append(entry)
            course.seconds += time.monotonic() - before
            if not last and settings.keep == "best" and "valid_loss" in entry and course.best_step == course.step:
                self.state.save_best(course, self.parameters, writes=group.is_first)
            if not last and (number or course.step % settings.save_every == 0):
                self._save()
            if group.is_first:
                speed, validated = tokens / seconds, entry.get("valid_loss")
                self.send(TrainingProgress(course.step, settings.steps, loss, rate, speed, validated, load))
            if number and not last:
                return number
            before = time.monotonic()
        return 0

    def _update(self, rows: PackedBatch, rate: float, stopping: int) -> tuple[dict[str, float], float, int]:
        """One optimizer step.

        Returns:
            the mean loss of the targets, "loss", and if it is trained that of multi-token prediction, "mtp_loss"; the
            gradient norm; both over all processes; and the number of a signal that one of them caught, or 0.
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
                    # DDP and FSDP average gradients over the processes: undo that, since `targets` counts all of them.
                    (loss * group.world / targets).backward()
                total += loss.detach()
        norm = clip_gradients(list(self.parameters.values()), settings.clip)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        flags = [float(stopping == number) for number in STOPPING]
        predicted = self.method.take_predicted()
        if predicted is not None:
            total -= settings.mtp_weight * predicted[0]
        own = [total[None], torch.zeros(2, device=group.device) if predicted is None else predicted]
        summed = group.sum(torch.cat((*own, torch.tensor(flags, device=group.device))))
        mean = float(summed[0] / targets)
        losses = {"loss": mean}
        if predicted is not None:
            losses["mtp_loss"] = float(summed[1] / summed[2].clamp(min=1))
        if not math.isfinite(mean) or not math.isfinite(norm):
            raise self._numeric_error(self.course.step + 1, f"the loss is {mean}, the gradient norm {norm}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        asked = [int(number) for number, count in zip(STOPPING, summed[3:].tolist(), strict=True) if count]
        return losses, norm, next(iter(asked), 0)

    def _loss(self, compute: Callable[..., Tensor], rows: PackedBatch, picked: slice) -> Tensor:
        device, own = self.group.device, rows.pick(picked)
        # Rows with a single document need no mask, and purely causal attention has faster kernels. This is computed on
        # the CPU, before the rows are copied, to avoid a synchronization.
        alone = bool((own.documents == own.documents[:, :1]).all())
        own = own.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"):
            return compute(own.tokens, own.targets, own.positions, None if alone else own.documents)

    def _numeric_error(self, step: int, found: str) -> NumericError:
        kept = f"; the last checkpoint is {self.state.path}" if self.state.exists() else ""
        advice = "check the initial weights, or start again with a lower --learning-rate"
        return NumericError(f"step {step}: {found}: {advice}{kept}")

    def _unsynchronized(self) -> AbstractContextManager[None]:
        """A block in which DDP does not all-reduce gradients; the last micro-batch of a step does.

        FSDP2 reduces the gradients of every micro-batch, since each process stores only its shard.
        """
        return self.parallel.no_sync() if isinstance(self.parallel, DistributedDataParallel) else nullcontext()

    def _dropout(self) -> AbstractContextManager[None]:
        """A block in which dropout is seeded by the step, so that a resumed run drops the same elements."""
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
            # FSDP needs all processes in every forward pass: a process without rows computes one and ignores its loss.
            total[0] += self._loss(self.method, rows, picked if len(own) else slice(0, 1)) * bool(len(own))
            total[1] += (own != IGNORED).sum()
        self.method.train()
        if isinstance(self.method, FSDPModule):
            # Parameters stay gathered, in 16 bits, until a backward pass: none follows, and they may be written now.
            self.method.reshard()
        group.sum(total)
        mean = float(total[0] / total[1])
        if not math.isfinite(mean):
            raise self._numeric_error(self.course.step, f"the validation loss is {mean}")
        return mean

    def _save(self) -> None:
        try:
            self.state.save(self.course, self.identity, self.parameters, self.optimizer, writes=self.group.is_first)
        except StorageError as error:
            if not self.state.exists():
                raise
            raise StorageError(f"{error}; the last checkpoint is kept: run the same command to resume") from error

    def _resume(self) -> None:
        if self.group.is_first:
            self.state.tidy()
        course = self.state.load(self.identity, self.parameters, self.optimizer)
        step = 0 if course is None else course.step
        if not self.group.smallest(step) == -self.group.smallest(-step) == step:
            raise UsageError(
                f"{self.state.directory}: the processes see different checkpoints: use an OUTPUT on storage that all "
                "machines share"
            )
        self.course = course or self.course
        if self.group.is_first:
            self.state.tidy_best(self.course)

    def _finish(self) -> dict[str, Any]:
        """Write the result and remove the checkpoints."""
        summary = self._summary()
        if self.group.world > 1:
            self._save()  # saving is collective: after an error in the first process alone it is no longer possible
        task, course = self.task, self.course
        try:
            if self.settings.keep == "best" and course.best_step != course.step:
                self.state.take_best(course, self.parameters)
            results.write(task.output, self.inputs, self.method, summary, course.log, self.group, task.overwrite)
        except (CheckpointError, StorageError, KeyboardInterrupt):
            if self.group.world == 1:
                self._save()  # the parameters of the best or the last step, to write them later
            raise
        self.group.barrier()
        if self.group.is_first:
            self.state.remove()
        return summary

    def _epochs(self) -> float:
        """Passes over the data in the whole run."""
        return self.settings.steps / self.inputs.batches.steps_per_epoch()

    def _summary(self) -> dict[str, Any]:
        settings, course, device = self.settings, self.course, self.group.device
        best, best_step = course.best or (None, None)
        last = course.log[-1].get("valid_loss") if course.log else None
        recent = course.log[-50:]
        figures: dict[str, float] = {
            name: sum(entry[name] for entry in recent) / len(recent)
            for name in ("loss", "mtp_loss", "expert_load")
            if name in recent[-1]
        }
        return {
            "run": course.run,
            "settings": {**asdict(settings), "targets": list(settings.targets)},
            "parameters": self.inputs.config.num_parameters,
            "trained": self.trained,
            **self.inputs.batches.documents.counts(),
            **self.held_out,
            "epochs": self._epochs(),
            "tokens": settings.steps * settings.rows_per_step * settings.length,
            "seconds": course.seconds,
            **figures,
            "valid_loss": best if settings.keep == "best" else last,
            "best_valid_loss": best,
            "best_step": best_step,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "processes": self.group.world,
            "torch": torch.__version__,
        }


def _optimizer(trained: list[nn.Parameter], settings: TrainingSettings, device: torch.device) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019); biases and norms have no weight decay."""
    decaying = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")


def _ahead(batches: Iterator[PackedBatch]) -> Iterator[PackedBatch]:
    """Prepare the next batches in a thread while the device computes the current one."""
    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, batches, None) for _ in range(4))
        while (rows := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, batches, None))
            yield rows


@contextmanager
def _seeded(what: tuple[int, ...], device: torch.device) -> Iterator[None]:
    """A block in which torch's generators are seeded by `what`; their state is restored afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest()))
        yield
