"""The checked settings of a training run."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from warpbus.errors import UsageError
from warpbus.formats.peft import MAX_RANK
from warpbus.formats.ptuning import MAX_TOKENS
from warpbus.qtensor import Scheme
from warpbus.train.options import TrainingOptions

METHODS = ("full", "lora", "ptuning")

_LARGEST_SEED = 2**64 - 1  # of torch's generators

# Settings that change how a run is computed but not its result: they may change when a run is resumed.
_FREE = ("rows_at_once", "compile", "recompute", "sharding", "save_every")

# Settings of a single method.
_ONLY = {
    "full": ("balance_speed", "mtp_weight"),
    "lora": ("rank", "alpha", "dropout", "targets"),
    "ptuning": ("prefix_tokens",),
}

# Defaults for adapters: small batches, a higher learning rate, and no weight decay.
_ADAPTER = {"rows_per_step": 16, "rows_at_once": 4, "weight_decay": 0.0}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {**_ADAPTER, "learning_rate": 3e-4},
    "ptuning": {**_ADAPTER, "learning_rate": 1e-2},
}

# Steps of warm-up where none are given: fewer in a run that would hardly reach its learning rate.
_WARMUP = {"full": 200, "lora": 20, "ptuning": 20}


@dataclass(frozen=True)
class TrainingSettings(TrainingOptions):
    """Hyperparameters of a run, checked. Only settings of `may_change` may differ when a run is resumed.

    Raises:
        UsageError: a setting is out of range, or conflicts with another one.
    """

    def __post_init__(self) -> None:
        for name, bound in self.least.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= bound):
                raise UsageError(f"{name} is {value}: expected a number of at least {bound}")
        for name in ("epochs", "clip", "alpha"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value}: expected a number above 0")
        # Limits of the adapter formats and of torch.
        for name, most in (("rank", MAX_RANK), ("prefix_tokens", MAX_TOKENS), ("seed", _LARGEST_SEED)):
            if getattr(self, name) > most:
                raise UsageError(f"{name} is {getattr(self, name)}: expected {most} at most")
        # AdamW changes each weight by about the learning rate: a step above 1 would destroy the model.
        for name in ("learning_rate", "final_rate"):
            if getattr(self, name) > 1:
                raise UsageError(f"{name} is {getattr(self, name)}: expected a number of at most 1")
        if self.dropout >= 1:
            raise UsageError(f"dropout is {self.dropout}: expected a number below 1")
        if self.method == "qlora":
            raise UsageError("method is 'qlora': QLoRA is method lora with --quantize w4a16-g64")
        choices = {"dtype": ("bfloat16", "float32"), "method": METHODS, "sharding": ("ddp", "fsdp")}
        for name, known in (choices | {"keep": ("last", "best")}).items():
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is {getattr(self, name)!r}: expected {', '.join(known[:-1])} or {known[-1]}")
        if self.mtp_weight and self.sharding == "fsdp":
            raise UsageError("mtp_weight: the layer of multi-token prediction cannot be sharded by fsdp: use ddp")
        self._check_quantize()

    def _check_quantize(self) -> None:
        if self.quantize is None:
            return
        if self.method == "full":
            raise UsageError("quantize: quantized weights cannot be trained: use method lora or ptuning, or drop it")
        scheme = Scheme.parse(self.quantize)
        if scheme.activations is not None or scheme.element is not None or not scheme.symmetric:
            raise UsageError(f"quantize is {self.quantize!r}: expected weights only, symmetric, such as w4a16-g64")
        if self.fp8:
            raise UsageError("quantize and fp8: quantized matrices cannot be multiplied in FP8: choose one of the two")

    @classmethod
    def of(cls, method: str, **given: Any) -> "TrainingSettings":
        """Settings for a method, with the method's defaults for those that are None or missing.

        Raises:
            UsageError: as the class; a setting belongs to another method; or both steps and epochs are given.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        if chosen.get("steps") and "epochs" in chosen:
            raise UsageError("steps and epochs both say how long to train: give one of them")
        defaults = {field.name: field.default for field in fields(cls)}
        # Without this check, a forgotten --method lora would train all weights, unnoticed for hours.
        for only, names in _ONLY.items():
            for name in names if method in METHODS and method != only else ():
                if chosen.get(name, defaults[name]) != defaults[name]:
                    raise UsageError(f"{name}: only for method {only}, not {method}: drop it, or use method {only}")
        return cls(method=method, **{**_DEFAULTS.get(method, {}), **chosen})

    def resolved(self, steps_per_epoch: float) -> "TrainingSettings":
        """The settings with the steps and the warm-up of a run over data of so many steps per epoch."""
        # Rounded first: 0.1 * 30 is above 3.
        steps = self.steps or max(1, math.ceil(round(self.epochs * steps_per_epoch, 6)))
        warmup = self.warmup
        if warmup is None:
            warmup = min(_WARMUP[self.method], steps // 10)
        return replace(self, steps=steps, warmup=warmup)

    def rate(self, step: int) -> float:
        """The learning rate of a step of `resolved` settings: linear warm-up, then a cosine."""
        assert self.warmup is not None
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
