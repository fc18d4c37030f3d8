"""The settings of a training run."""

import math
from dataclasses import dataclass, fields
from typing import Any

from warpbus.errors import UsageError
from warpbus.formats.peft import MAX_RANK
from warpbus.formats.ptuning import MAX_TOKENS
from warpbus.qtensor import Scheme

METHODS = ("full", "lora", "ptuning")

# Settings that change how a run is computed but not its result: they may change when a run is resumed.
_FREE = ("rows_at_once", "compile", "recompute", "sharding", "save_every")

# Settings of a single method.
_ONLY = {"lora": ("rank", "alpha", "dropout", "targets"), "ptuning": ("prefix_tokens",)}

# Defaults for adapters: small batches, a higher learning rate, and no weight decay.
_ADAPTER = {"rows_per_step": 16, "rows_at_once": 4, "warmup": 20, "weight_decay": 0.0}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {**_ADAPTER, "learning_rate": 3e-4},
    "ptuning": {**_ADAPTER, "learning_rate": 1e-2},
}


@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters of a run. Only settings of `may_change` may differ when a run is resumed.

    Attributes:
        method: "full" trains all weights; "lora" trains low-rank adapters (Hu et al., 2021, arXiv:2106.09685), which is
            QLoRA on a quantized base (Dettmers et al., 2023, arXiv:2305.14314); "ptuning" trains a prefix of keys and
            values (P-Tuning v2; Liu et al., 2021, arXiv:2110.07602).
        steps: optimizer steps; 0 means `epochs` passes over the data.
        epochs: passes over the data if `steps` is 0.
        length: tokens per row; longer documents are truncated.
        rows_per_step: rows per optimizer step, over all processes.
        rows_at_once: rows per forward pass of a process (micro-batch); gradients are accumulated.
        learning_rate: peak value, after a linear warm-up of `warmup` steps; a cosine decays it to
            `final_rate * learning_rate`.
        weight_decay: of matrices; biases and norms have none.
        clip: maximum gradient norm.
        compile: use `torch.compile` for the layers (`warpbus.train.compiling`).
        dtype: "bfloat16" for mixed precision, or "float32". Trained parameters and optimizer states are float32;
            frozen weights have this dtype.
        fp8: multiply the matrices of the layers in FP8 (`warpbus.train.fp8`).
        recompute: recompute the activations of every n-th layer in the backward pass (activation checkpointing); 0: of
            no layer.
        sharding: "ddp": each process has the whole model; "fsdp": each has a shard of all weights, gradients and
            optimizer states (FSDP2).
        valid_every, save_every: steps between validations and between checkpoints.
        keep: the weights to write: "last", after the last step, or "best", after the step with the lowest validation
            loss.
        seed: of initial weights, shuffling and dropout.
        rank, alpha, dropout, targets: of "lora": the rank, the scaling times the rank, the dropout rate of the inputs,
            and the names of the matrices (all by default).
        prefix_tokens: of "ptuning": length of the prefix in tokens.
        quantize: of "lora" and "ptuning": a scheme such as "w4a16-g64" that the matrices of the layers are rounded to
            while loading. Not for models that are quantized already.

    Raises:
        UsageError: a setting is out of range, or conflicts with another one.
    """

    method: str = "full"
    steps: int = 0
    epochs: float = 1.0
    length: int = 512
    rows_per_step: int = 128
    rows_at_once: int = 128
    learning_rate: float = 1e-3
    final_rate: float = 0.05
    warmup: int = 200
    weight_decay: float = 0.1
    clip: float = 1.0
    compile: bool = False
    dtype: str = "float32"
    fp8: bool = False
    recompute: int = 0
    sharding: str = "ddp"
    valid_every: int = 250
    save_every: int = 500
    keep: str = "last"
    seed: int = 0
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    prefix_tokens: int = 64
    quantize: str | None = None

    def __post_init__(self) -> None:
        least = {"steps": 0, "length": 2, "rows_per_step": 1, "rows_at_once": 1, "warmup": 0, "valid_every": 1}
        least |= {"save_every": 1, "seed": 0, "learning_rate": 0, "final_rate": 0, "weight_decay": 0}
        least |= {"rank": 1, "prefix_tokens": 1, "recompute": 0, "dropout": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= bound):
                raise UsageError(f"{name} is {value}: expected a number of at least {bound}")
        for name in ("epochs", "clip", "alpha"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value}: expected a number above 0")
        # Limits of the adapter formats.
        for name, most in (("rank", MAX_RANK), ("prefix_tokens", MAX_TOKENS)):
            if getattr(self, name) > most:
                raise UsageError(f"{name} is {getattr(self, name)}: expected {most} at most")
        # AdamW changes each weight by about the learning rate: a step above 1 would destroy the model.
        for name in ("learning_rate", "final_rate"):
            if getattr(self, name) > 1:
                raise UsageError(f"{name} is {getattr(self, name)}: expected a number of at most 1")
        if self.dropout >= 1:
            raise UsageError(f"dropout is {self.dropout}: expected a number below 1")
        choices = {"dtype": ("bfloat16", "float32"), "method": METHODS, "sharding": ("ddp", "fsdp")}
        for name, known in (choices | {"keep": ("last", "best")}).items():
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is {getattr(self, name)!r}: expected {', '.join(known[:-1])} or {known[-1]}")
        self._check_quantize()

    def _check_quantize(self) -> None:
        if self.quantize is None:
            return
        if self.method == "full":
            raise UsageError("quantize: quantized weights cannot be trained: use method lora or ptuning, or drop it")
        scheme = Scheme.parse(self.quantize)
        if scheme.activations is not None or not scheme.symmetric:
            raise UsageError(f"quantize is {self.quantize!r}: expected weights only, symmetric, such as w4a16-g64")
        if self.fp8:
            raise UsageError("quantize and fp8: quantized matrices cannot be multiplied in FP8: choose one of the two")

    @classmethod
    def of(cls, method: str, **given: Any) -> "TrainingSettings":
        """Settings for a method, with the method's defaults for those that are None or missing.

        Raises:
            UsageError: as the class; or a setting belongs to another method.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        defaults = {field.name: field.default for field in fields(cls)}
        # Without this check, a forgotten --method lora would train all weights, unnoticed for hours.
        for only, names in _ONLY.items():
            for name in names if method in METHODS and method != only else ():
                if chosen.get(name, defaults[name]) != defaults[name]:
                    raise UsageError(f"{name}: only for method {only}, not {method}: drop it, or use method {only}")
        return cls(method=method, **{**_DEFAULTS.get(method, {}), **chosen})

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then a cosine."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * cosine)

    def check_shared(self, world: int) -> None:
        """Raise UsageError if `rows_per_step` is not a multiple of the number of processes."""
        if self.rows_per_step % world:
            raise UsageError(
                f"--rows {self.rows_per_step}: not divisible by the {world} processes: give a multiple of {world}"
            )

    @classmethod
    def may_change(cls, name: str) -> bool:
        """Whether a setting may change when a run is resumed: it affects how the result is computed, not the result."""
        assert name in {field.name for field in fields(cls)}
        return name in _FREE
