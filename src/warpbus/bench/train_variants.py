"""The variants of `train`: methods, precisions and modes, the shapes, and the settings of each."""

from dataclasses import dataclass, replace
from itertools import product

from warpbus.bench.cases import Run
from warpbus.errors import UsageError
from warpbus.models import SHAPES, ModelConfig
from warpbus.train import TrainingSettings

METHODS = ("full", "lora", "qlora", "ptuning")
PRECISIONS = ("fp32", "tf32", "bf16", "fp8")
MODES = ("eager", "compiled")

ONE_BILLION, TINY = "1b", "tiny"
_GLM = SHAPES["chatglm2-6b"]
SHAPES_OF_TRAINING = {
    # ChatGLM2-6B at half the width, with half its layers.
    ONE_BILLION: _GLM.resized(hidden_size=2048, num_layers=14, num_heads=16, ffn_size=6848),
    TINY: replace(
        _GLM.resized(hidden_size=128, num_layers=2, num_heads=4, head_dim=32, ffn_size=256),
        vocab_size=512,
        rope=replace(_GLM.rope, rotary_dim=16),
        max_context=512,
    ),
    **SHAPES,
}


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        method, precision, mode: of `METHODS`, `PRECISIONS` and `MODES`.
    """

    method: str
    precision: str
    mode: str

    def __str__(self) -> str:
        return f"{self.method}-{self.precision}-{self.mode}"

    @property
    def plain(self) -> "Variant | None":
        """The nearest equivalent in plain PyTorch, which has no weights of few bits and no fp8; None for a prefix."""
        if self.method == "ptuning":
            return None
        method = "lora" if self.method == "qlora" else self.method
        return Variant(method, "bf16" if self.precision == "fp8" else self.precision, self.mode)

    def settings(self, length: int, rows: int, recompute: int, scheme: str, sharding: str) -> TrainingSettings:
        """How `warpbus train` would do it.

        Args:
            rows: of a step, over all GPUs; each takes its own at once.
            scheme: of the weights of "qlora".
        """
        return TrainingSettings(
            method="lora" if self.method == "qlora" else self.method,
            steps=1,
            length=length,
            rows_per_step=rows,
            rows_at_once=rows,
            dtype="bfloat16" if self.precision in ("bf16", "fp8") else "float32",
            fp8=self.precision == "fp8",
            compile=self.mode == "compiled",
            quantize=scheme if self.method == "qlora" else None,
            recompute=recompute,
            sharding=sharding,
            learning_rate=3e-4 if self.method == "full" else 1e-3,
            prefix_tokens=32,
        )


# Rounded weights are multiplied in 16 bits, or on the CPU in 32, and not in fp8.
_KNOWN = {
    str(variant): variant
    for variant in (Variant(*each) for each in product(METHODS, PRECISIONS, MODES))
    if variant.method in ("full", "lora") or variant.precision != "fp8"
}
_DEFAULTS = {
    ONE_BILLION: [f"full-{precision}-{mode}" for precision in PRECISIONS for mode in MODES],
    TINY: ["full-fp32-eager", "full-bf16-eager", "lora-fp32-eager", "qlora-fp32-eager", "ptuning-fp32-eager"],
}
_LARGE = ["lora-bf16-eager", "lora-bf16-compiled", "lora-fp8-compiled", "qlora-bf16-eager", "ptuning-bf16-eager"]


def chosen(run: Run, shape: str) -> tuple[Variant, ...]:
    """The variants that a run asks for, or those of a shape.

    Raises:
        UsageError: one that does not exist.
    """
    return tuple(_KNOWN[name] for name in run.choose_variants(list(_KNOWN), _DEFAULTS.get(shape, _LARGE)))


def scales(variant: Variant) -> bool:
    """Whether it is measured on several GPUs, too, where no variants are asked for."""
    return (variant.method, variant.precision, variant.mode) in (
        ("full", "bf16", "compiled"),
        ("lora", "bf16", "eager"),
    )


def shape_named(name: str, layers: int | None) -> ModelConfig:
    """The shape of a name, with so many layers.

    Raises:
        UsageError: there is no such shape.
    """
    if name not in SHAPES_OF_TRAINING:
        raise UsageError(f"--shape {name}: there is no such shape: choose among {', '.join(SHAPES_OF_TRAINING)}")
    config = SHAPES_OF_TRAINING[name]
    return config.resized(num_layers=layers)
