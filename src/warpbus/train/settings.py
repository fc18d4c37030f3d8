"""What can be chosen of a training run."""

import math
from dataclasses import dataclass, fields
from typing import Any

from warpbus.errors import UsageError
from warpbus.formats.peft import MAX_RANK
from warpbus.formats.ptuning import MAX_TOKENS
from warpbus.qtensor import Scheme

METHODS = ("full", "lora", "ptuning")

# What changes how a run is computed but not what it learns: it may differ when a run goes on.
_FREE = ("rows_at_once", "compile", "recompute", "sharding", "save_every")

# What one method alone has.
_ONLY = {"lora": ("rank", "alpha", "dropout", "targets"), "ptuning": ("prefix_tokens",)}

# What adapters want otherwise: few rows, larger steps, nothing that pulls what is learnt back to 0.
_ADAPTER = {"rows_per_step": 16, "rows_at_once": 4, "warmup": 20, "weight_decay": 0.0}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {**_ADAPTER, "learning_rate": 3e-4},
    "ptuning": {**_ADAPTER, "learning_rate": 1e-2},
}


@dataclass(frozen=True)
class TrainingSettings:
    """How to train. A run is resumed only with the settings that it began with, but for those of `may_change`.

    Attributes:
        method: "full" trains all weights; "lora" two narrow matrices beside each linear (Hu et al., 2021,
            arXiv:2106.09685), on a quantized base QLoRA (Dettmers et al., 2023, arXiv:2305.14314); "ptuning" keys and
            values in front of every sequence (P-Tuning v2; Liu et al., 2021, arXiv:2110.07602).
        steps: optimizer steps; 0 means `epochs` passes over the data.
        epochs: passes over the data, where `steps` is 0.
        length: tokens in a row; longer documents are cut.
        rows_per_step: rows in a step, over all processes.
        rows_at_once: rows in one forward pass of a process; more are accumulated.
        learning_rate: at its peak; it rises over `warmup` steps and falls along a cosine to `final_rate` of itself.
        clip: the largest norm of a step's gradient.
        compile: use `torch.compile` for the layers (`warpbus.train.compiling`).
        dtype: "bfloat16" for mixed precision, or "float32". What is trained, and its optimizer's state, is float32;
            weights that are not trained are held in this dtype.
        fp8: the layers' linears multiply in FP8 (`warpbus.train.fp8`).
        recompute: activations of every n-th layer are computed again in the backward pass, not kept; 0: of none.
        sharding: between processes: "ddp", each has the whole model, or "fsdp", each has a part of all weights,
            gradients and optimizer states (FSDP2).
        valid_every, save_every: steps between validations and between checkpoints.
        keep: what is written in the end: "last", what is trained after all steps, or "best", after the step with the
            lowest validation loss.
        seed: of fresh weights, of the shuffles and of dropout.
        rank, alpha, dropout, targets: of "lora": rows of the first matrix, scaling times rank, share of inputs left
            out, and the linears by name, all where there is none.
        prefix_tokens: of "ptuning": how many tokens the prefix stands for.
        quantize: of "lora" and "ptuning": a scheme such as "w4a16-g64" that the matrices of the layers are rounded to
            while they are loaded. A model that is quantized already needs none.

    Raises:
        UsageError: if a setting is out of range, or does not go with another one.
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
        # What cannot be saved need not be trained.
        for name, most in (("rank", MAX_RANK), ("prefix_tokens", MAX_TOKENS)):
            if getattr(self, name) > most:
                raise UsageError(f"{name} is {getattr(self, name)}: expected {most} at most")
        # AdamW moves each weight by about the learning rate: above 1, no weight would survive a step.
        for name in ("learning_rate", "final_rate"):
            if getattr(self, name) > 1:
                raise UsageError(f"{name} is {getattr(self, name)}: expected a number of at most 1")
        if self.dropout >= 1:
            raise UsageError(f"dropout is {self.dropout}: expected a share below 1")
        choices = {"dtype": ("bfloat16", "float32"), "method": METHODS, "sharding": ("ddp", "fsdp")}
        for name, known in (choices | {"keep": ("last", "best")}).items():
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is {getattr(self, name)!r}: expected {', '.join(known[:-1])} or {known[-1]}")
        self._check_quantize()

    def _check_quantize(self) -> None:
        if self.quantize is None:
            return
        if self.method == "full":
            raise UsageError("quantize: rounded weights cannot be trained: use method lora or ptuning, or leave it out")
        scheme = Scheme.parse(self.quantize)
        if scheme.activations is not None or not scheme.symmetric:
            raise UsageError(f"quantize is {self.quantize!r}: expected weights only, symmetric, such as w4a16-g64")
        if self.fp8:
            raise UsageError("quantize and fp8: rounded matrices are not multiplied in FP8: choose one of the two")

    @classmethod
    def of(cls, method: str, **given: Any) -> "TrainingSettings":
        """Settings for a method, with its own defaults for those that are None or not given.

        Raises:
            UsageError: as the class, and for a setting of another method.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        defaults = {field.name: field.default for field in fields(cls)}
        # Who forgets --method lora shall not find out after a night that all weights were trained.
        for only, names in _ONLY.items():
            for name in names if method in METHODS and method != only else ():
                if chosen.get(name, defaults[name]) != defaults[name]:
                    raise UsageError(f"{name}: method {method} has none: leave it out, or choose method {only}")
        return cls(method=method, **{**_DEFAULTS.get(method, {}), **chosen})

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then a cosine."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * cosine)

    def check_shared(self, world: int) -> None:
        """UsageError if so many processes cannot share a step's rows equally."""
        if self.rows_per_step % world:
            raise UsageError(
                f"--rows {self.rows_per_step}: {world} processes cannot share them equally: give a multiple of {world}"
            )

    @classmethod
    def may_change(cls, name: str) -> bool:
        """Whether a run may go on with another value of a setting: one that changes how, not what it learns."""
        assert name in {field.name for field in fields(cls)}
        return name in _FREE
