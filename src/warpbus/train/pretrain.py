"""Training a decoder from fresh or from existing weights, on one device or several.

The run keeps its state in `<output>.training/` and writes the model to `<output>` when it ends. Started again with
the same settings, it goes on from the last checkpoint.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from warpbus.dist import Group, joined_group
from warpbus.errors import CheckpointError, NumericError, StorageError, UsageError
from warpbus.formats import Checkpoint, CheckpointWriter, read_schemes
from warpbus.formats.files import replace_file
from warpbus.models import Decoder, ModelConfig, load_model, read_config
from warpbus.models.layers import CausalAttention
from warpbus.models.saving import named_tensors
from warpbus.train.curve import draw_curve
from warpbus.train.dataset import IGNORED, Batches, Documents, Rows, assemble, pack, tokenize
from warpbus.train.settings import TrainingSettings

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
_VALIDATED_AT_ONCE = 16


@dataclass(frozen=True)
class Progress:
    """What is known after a step; `valid_loss` where the model was validated."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    tokens_per_second: float
    valid_loss: float | None = None


class _SummedLoss(nn.Module):
    """Cross-entropy summed over a batch's targets, in nats."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        logits = self.model(tokens, positions, CausalAttention(documents))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def train(
    model: Path,
    output: Path,
    *,
    data: Path,
    valid: Path | None = None,
    settings: TrainingSettings,
    device: str = "auto",
    workers: int = 1,
    overwrite: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Train the model in the directory `model`, fresh where it holds no weights, and write it to `output`.

    The weights are trained in float32 and written in bfloat16.

    Args:
        model: `config.json`, tokenizer, and weights to go on from if there are any; its other files are copied.
        output: a new directory.
        data: `.jsonl` of conversations or texts, or `.txt`.
        valid: held-out data of the same form.
        settings: how to train.
        device: "auto", "cpu", "cuda" or "cuda:N"; with several processes each takes the GPU of its local rank.
        workers: processes to tokenize with, shared by all that train.
        overwrite: replace the model in `output` if there is one.
        report: called in the first process after each step.

    Returns:
        what `training.json` in `output` says: settings, losses, tokens, seconds, device.

    Raises:
        UsageError: if the output exists, the settings do not fit the model, or an interrupted run there had others.
        CheckpointError: if the model is not understood, or the state of an interrupted run is damaged.
        DataError: if a data file is missing or malformed.
        DeviceError: if the device is not there.
        NumericError: if the loss is not finite; the state of the last checkpoint is kept.
        StorageError: if a file cannot be written; what was trained is kept where there is room for it.
    """
    if output.exists():
        if not output.is_dir():
            raise UsageError(f"{output}: is a file: name a directory that does not exist yet")
        if any(output.iterdir()) and not overwrite:
            raise UsageError(f"{output}: exists already: choose another output or pass --overwrite")
        if any(output.iterdir()) and not (output / "config.json").is_file():
            raise UsageError(f"{output}: holds no model, so it is not overwritten: choose another output")
    parent = next(directory for directory in output.resolve().parents if directory.is_dir())
    if not os.access(parent, os.W_OK):
        raise StorageError(f"{output}: {parent} may not be written to: choose another output")
    with joined_group(device) as group:
        return _Run(model, output, data, valid, settings, group, workers, overwrite).go(report)


class _Run:
    """One process's part of a run."""

    def __init__(
        self,
        source: Path,
        output: Path,
        data: Path,
        valid: Path | None,
        settings: TrainingSettings,
        group: Group,
        workers: int,
        overwrite: bool,
    ) -> None:
        self.source, self.output, self.group, self.overwrite = source, output, group, overwrite
        self.work = output.with_name(output.name + ".training")
        if settings.rows_per_step % group.world:
            raise UsageError(
                f"--rows {settings.rows_per_step}: {group.world} processes cannot share them equally: "
                f"give a multiple of {group.world}"
            )
        checkpoint = Checkpoint(source, weights=any(_weight_files(source)))
        config = read_config(checkpoint)
        if read_schemes(checkpoint.config).distinct():
            raise UsageError(f"{source}: a quantized model cannot be trained: give the one that it was made from")
        length = settings.length
        if length > config.max_context:
            raise UsageError(f"--length {length}: the positions of {source} end at {config.max_context}: lower it")

        def read(path: Path) -> Documents:
            documents = tokenize(path, source, checkpoint.config, length=length, workers=workers // group.world)
            if documents.tokens.max() >= config.vocab_size:
                raise CheckpointError(
                    f"{source}: its tokenizer knows more tokens than the {config.vocab_size} that config.json says: "
                    "check that they belong together"
                )
            return documents

        documents = read(data)
        self.valid: Rows | None = None
        if valid is not None:
            held_out = read(valid)
            self.valid = assemble(held_out, pack(held_out, range(len(held_out)), length), length)
        self.batches = Batches(documents, length, settings.rows_per_step, settings.seed)
        if settings.steps == 0:
            settings = replace(settings, steps=max(1, round(settings.epochs * self.batches.steps_per_epoch())))
        self.settings = settings
        self.config = checkpoint.config
        self.model = _initial_model(checkpoint, config, settings.seed, group.device)
        self.optimizer = _optimizer(self.model, settings, group.device)
        loss: nn.Module = _SummedLoss(self.model)
        if group.world > 1:
            loss = DistributedDataParallel(loss, device_ids=[group.device] if group.device.type == "cuda" else None)
        self.parallel = loss
        self.loss: Callable[..., Tensor] = torch.compile(loss) if settings.compile else loss
        self.step, self.seconds, self.log = 0, 0.0, list[dict[str, float]]()

    def go(self, report: Callable[[Progress], None]) -> dict[str, Any]:
        self._resume()
        settings, group = self.settings, self.group
        if group.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        tokens = settings.rows_per_step * settings.length
        before = time.monotonic()
        for rows in _ahead(self.batches.steps(self.step, settings.steps, group.rank, group.world)):
            rate = settings.rate(self.step)
            loss = self._update(rows.to(group.device), rate)
            self.step += 1
            seconds = time.monotonic() - before
            last = self.step == settings.steps
            entry = {"step": self.step, "loss": loss, "learning_rate": rate, "seconds": seconds}
            if self.valid is not None and (self.step % settings.valid_every == 0 or last):
                entry["valid_loss"] = self._validate(self.valid)
            self.log.append(entry)
            self.seconds += time.monotonic() - before
            if self.step % settings.save_every == 0 and not last:
                self._save_state()
            if group.is_first:
                speed = tokens / seconds
                report(Progress(self.step, settings.steps, loss, rate, speed, entry.get("valid_loss")))
            before = time.monotonic()
        summary = self._summary()
        if group.is_first:
            try:
                self._write(summary)
            except StorageError:
                self._save_state()
                raise
        group.barrier()
        return summary

    def _update(self, rows: Rows, rate: float) -> float:
        """One optimizer step; returns the mean loss of its targets over all processes."""
        settings, group = self.settings, self.group
        targets = group.sum((rows.targets != IGNORED).sum())
        total = torch.zeros((), device=group.device)
        pieces = math.ceil(len(rows.tokens) / settings.rows_at_once)
        for index in range(pieces):
            piece = slice(index * settings.rows_at_once, (index + 1) * settings.rows_at_once)
            # DDP averages gradients over the processes: undo that, since the sum is divided by all targets.
            with nullcontext() if index == pieces - 1 else self._unsynchronized():
                with torch.autocast(group.device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
                    loss = self.loss(
                        rows.tokens[piece], rows.targets[piece], rows.positions[piece], rows.documents[piece]
                    )
                (loss * group.world / targets).backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        mean = float(group.sum(total) / targets)
        if not math.isfinite(mean) or not math.isfinite(float(norm)):
            raise self._numeric_error(self.step + 1, f"the loss is {mean}, the gradient's norm {float(norm)}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return mean

    def _numeric_error(self, step: int, found: str) -> NumericError:
        state = self.work / "state.pt"
        kept = f"; {state} has the last state that was saved" if state.exists() else ""
        advice = "check the weights that it began with, or start again with a lower --learning-rate"
        return NumericError(f"step {step}: {found}: {advice}{kept}")

    def _unsynchronized(self) -> AbstractContextManager[None]:
        """Within it, DDP keeps gradients to itself: the last piece of a step sends them all."""
        return self.parallel.no_sync() if isinstance(self.parallel, DistributedDataParallel) else nullcontext()

    @torch.no_grad()
    def _validate(self, rows: Rows) -> float:
        """The mean loss of the held-out targets."""
        settings, group = self.settings, self.group
        total = torch.zeros(2, dtype=torch.float64, device=group.device)
        compute = _SummedLoss(self.model)
        stride = group.world * min(_VALIDATED_AT_ONCE, settings.rows_at_once)
        for start in range(group.rank, len(rows.tokens), stride):
            picked = slice(start, start + stride, group.world)
            parts = (rows.tokens, rows.targets, rows.positions, rows.documents)
            tokens, targets, positions, documents = (part[picked].to(group.device) for part in parts)
            with torch.autocast(group.device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
                total[0] += compute(tokens, targets, positions, documents)
            total[1] += (targets != IGNORED).sum()
        group.sum(total)
        mean = float(total[0] / total[1])
        if not math.isfinite(mean):
            raise self._numeric_error(self.step, f"the validation loss is {mean}")
        return mean

    def _save_state(self) -> None:
        if not self.group.is_first:
            return
        state = {
            "settings": asdict(self.settings),
            "data": self.batches.documents.digest(),
            "config": repr(self.model.config),
            "step": self.step,
            "seconds": self.seconds,
            "log": self.log,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        replace_file(self.work / "state.pt", lambda path: torch.save(state, path))

    def _resume(self) -> None:
        path = self.work / "state.pt"
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location=self.group.device, weights_only=True)
        except Exception as error:  # a damaged file can make the unpickler raise anything
            raise CheckpointError(f"{path}: damaged ({type(error).__name__}): delete it to start anew") from None
        before = state["settings"]
        changed = [
            f"{key} was {before.get(key)}" for key, now in asdict(self.settings).items() if before.get(key) != now
        ]
        if state["data"] != self.batches.documents.digest():
            changed.append("the data were others")
        if state["config"] != repr(self.model.config):
            changed.append("the model was another")
        if changed:
            raise UsageError(
                f"{self.work}: an interrupted run with other settings ({', '.join(changed)}): "
                "use those to go on, or delete it to start anew"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.log = state["step"], state["seconds"], state["log"]

    def _summary(self) -> dict[str, Any]:
        cuda = self.group.device.type == "cuda"
        return {
            "settings": asdict(self.settings),
            "parameters": self.model.config.num_parameters,
            "documents": len(self.batches.documents),
            "epochs": self.settings.steps / self.batches.steps_per_epoch(),
            "tokens": self.settings.steps * self.settings.rows_per_step * self.settings.length,
            "seconds": self.seconds,
            "loss": sum(entry["loss"] for entry in self.log[-50:]) / max(1, len(self.log[-50:])),
            "valid_loss": self.log[-1].get("valid_loss") if self.log else None,
            "device": torch.cuda.get_device_name(self.group.device) if cuda else "cpu",
            "processes": self.group.world,
            "torch": torch.__version__,
        }

    def _write(self, summary: dict[str, Any]) -> None:
        curve, state = self.work / "training.png", self.work / "state.pt"
        replace_file(curve, lambda path: draw_curve(self.log, path))
        config = dict(self.config)
        config["torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"] = "bfloat16"
        written = {"config.json": config, "training.json": summary, "training-log.json": self.log}
        left_out = {*_weight_files(self.source), *(self.source / name for name in (*written, curve.name))}
        bytes_ = torch.bfloat16.itemsize * self.model.config.num_parameters
        with CheckpointWriter(self.output, overwrite=self.overwrite, expected_bytes=bytes_) as writer:
            for name, tensor in named_tensors(self.model, torch.bfloat16):
                writer.add(name, tensor)
            for file in sorted(self.source.iterdir()):
                if file.is_file() and file not in left_out:
                    writer.copy_file(file)
            for name, content in written.items():
                writer.write_json(name, content)
            writer.copy_file(curve)
            writer.finish()
        curve.unlink()
        state.unlink(missing_ok=True)
        if not any(self.work.iterdir()):
            self.work.rmdir()


def _weight_files(directory: Path) -> Iterator[Path]:
    return (file for pattern in _WEIGHT_FILES for file in directory.glob(pattern))


def _initial_model(checkpoint: Checkpoint, config: ModelConfig, seed: int, device: torch.device) -> Decoder:
    """The weights to begin with: those of the checkpoint, or fresh ones if it has none."""
    if checkpoint.names():
        model = load_model(checkpoint, device=device, dtype=torch.float32)
    else:
        model = Decoder(config)
        # Drawn on the CPU, so that every device and every process begins with the same weights.
        model.initialize(torch.Generator().manual_seed(seed))
    return model.to(device).train().requires_grad_(True)


def _optimizer(model: Decoder, settings: TrainingSettings, device: torch.device) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019); biases and norms do not decay."""
    decaying = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")


def _ahead(batches: Iterator[Rows]) -> Iterator[Rows]:
    """Make the next batches in a thread while the device works on this one."""
    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, batches, None) for _ in range(4))
        while (rows := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, batches, None))
            yield rows
