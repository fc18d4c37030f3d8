"""LoRA adapters in the format of the PEFT library: `adapter_config.json` and `adapter_model.safetensors` (or `.bin`).

The linear layer `module` of the base model has two matrices,

    base_model.model.<module>.lora_A.weight    [r, in]
    base_model.model.<module>.lora_B.weight    [out, r]

and computes `x W^T + scaling (x A^T) B^T`, where `scaling` is `lora_alpha / r`, or `lora_alpha / sqrt(r)` with
`use_rslora` (Kalajdzievski 2023, arXiv:2312.03732). `rank_pattern` and `alpha_pattern` give single modules an r and an
alpha of their own. `fan_in_fan_out` tells how the base model stores its own matrix, and changes neither of these two.

A setting that changes what is computed in another way is refused by its name, and so is one that is not known.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import CheckpointError, TensorError
from warpbus.formats.checkpoint import Checkpoint, stored_tensors
from warpbus.formats.module_patterns import ModulePattern, is_listed
from warpbus.formats.safetensors_io import shown
from warpbus.formats.writer import CheckpointWriter

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MAX_RANK = 4096
_MAX_PATTERNS, _MAX_REPEATING = 4096, 64

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Settings that were for training, or tell where the adapter comes from.
_NEUTRAL = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
    "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core",
    "merge_weights", "peft_type", "peft_version", "qalora_group_size", "revision", "task_type",
}  # fmt: skip
# Those that are read, or show in the names of the tensors.
_READ = {
    "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "lora_alpha", "modules_to_save", "r", "rank_pattern", "target_modules", "use_rslora",
}  # fmt: skip
_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraSettings:
    """The settings of `adapter_config.json` for the arithmetic, and for the modules that have matrices.

    Attributes:
        base: the model that it was trained on, as the file names it; "" where it does not.
        rank, alpha: of a module that no pattern names.
        rank_stabilized: `use_rslora`.
        ranks, alphas: patterns for the ends of modules' names, the first that matches being the one that counts.
        targets: which modules have matrices: the ends of their names, or a pattern; None where the file does not say.
        excluded: which of them have none.
        layers: the only layers that have any; None: all.
    """

    base: str
    rank: int
    alpha: float
    rank_stabilized: bool
    ranks: tuple[tuple[ModulePattern, int], ...]
    alphas: tuple[tuple[ModulePattern, float], ...]
    targets: tuple[str, ...] | ModulePattern | None
    excluded: tuple[str, ...] | ModulePattern
    layers: frozenset[int] | None

    def rank_of(self, module: str) -> int:
        """The r of a module."""
        return next((rank for pattern, rank in self.ranks if pattern.is_end(module)), self.rank)

    def scaling(self, module: str) -> float:
        """The factor of the product of a module's two matrices."""
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.is_end(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank

    def is_target(self, module: str) -> bool | None:
        """Whether a linear layer of the base model has matrices; None where the file does not say."""
        if self.targets is None:
            return None
        if _matches(module, self.excluded) or not _matches(module, self.targets):
            return False
        if self.layers is None or isinstance(self.targets, ModulePattern):
            return True
        return any(int(part) in self.layers for part in module.split(".") if part.isascii() and part.isdigit())


@dataclass(frozen=True)
class PeftLora:
    """A LoRA adapter on disk, its tensors' headers read and nothing else.

    Attributes:
        file: that has the weights.
        settings: see `LoraSettings`.
        modules: the linear layers of the base model that have matrices, by the names in the file, sorted.
        tensors: of the file.
        prefix: of all their names.
    """

    file: Path
    settings: LoraSettings
    modules: tuple[str, ...]
    tensors: Checkpoint
    prefix: str

    @classmethod
    def open(cls, directory: Path) -> "PeftLora":
        """Read the settings and the names of a directory.

        Raises:
            CheckpointError: if a file is missing, damaged or not understood, or the adapter is not a LoRA or computes
                what is not supported; the message names the setting or the tensor.
        """
        settings = _settings(directory / CONFIG)
        file = next((directory / name for name in WEIGHTS if (directory / name).is_file()), None)
        if file is None:
            raise CheckpointError(f"{directory}: no weights: expected {' or '.join(WEIGHTS)} beside {CONFIG}")
        try:
            tensors = Checkpoint.of_tensors(directory, stored_tensors(file))
        except CheckpointError as error:
            raise type(error)(f"{directory}: {error}") from None
        names = tensors.names()
        if not names:
            raise CheckpointError(f"{file}: it holds no tensors: save the adapter again")
        prefix = _PREFIX if all(name.startswith(_PREFIX) for name in names) else ""
        modules = {_module(file, name.removeprefix(prefix)) for name in names}
        return cls(file, settings, tuple(sorted(modules)), tensors, prefix)

    def shape(self, module: str) -> tuple[int, int, int]:
        """`(out, r, in)` of a module; no tensor is read.

        Raises:
            TensorError: if one of its matrices is missing, is none, or does not fit the other or the settings.
        """
        first, second = f"{self.prefix}{module}{_A}", f"{self.prefix}{module}{_B}"
        shapes = []
        for name in (first, second):
            if name not in self.tensors:
                raise TensorError(f"{self.file}: {shown(name)} is missing: expected both matrices of {shown(module)}")
            shape, dtype = self.tensors.shape(name), self.tensors.dtype(name)
            if len(shape) != 2 or 0 in shape:
                raise TensorError(f"{self.file}: {shown(name)}: expected a matrix, found shape {list(shape)}")
            if dtype not in _FLOATING:
                raise TensorError(
                    f"{self.file}: {shown(name)}: expected floating point of 16 to 64 bits, found {dtype}"
                )
            shapes.append(shape)
        (rank, width), (out, inner) = shapes
        expected = self.settings.rank_of(module)
        if rank != expected:
            raise TensorError(
                f"{self.file}: {shown(first)}: expected {expected} rows, the rank that {CONFIG} gives, found {rank}: "
                "check that the two files belong together"
            )
        if inner != rank:
            raise TensorError(
                f"{self.file}: {shown(second)}: expected {rank} columns, as the other matrix, found {inner}"
            )
        return out, rank, width

    def read(self, module: str) -> tuple[Tensor, Tensor]:
        """The matrices of a module.

        Returns:
            A float32 `[r, in]`, and B float32 `[out, r]` times the scaling.

        Raises:
            TensorError: as `shape`, or if there is a value that is no finite number.
        """
        self.shape(module)
        a, b = (self._finite(f"{self.prefix}{module}{part}") for part in (_A, _B))
        return a, b * self.settings.scaling(module)

    def _finite(self, name: str) -> Tensor:
        tensor = self.tensors.tensor(name).to(torch.float32)
        if not bool(tensor.isfinite().all()):
            raise TensorError(f"{self.file}: {shown(name)}: holds NaN or infinity: the training diverged: use another")
        return tensor


def write_peft(
    directory: Path,
    matrices: Mapping[str, tuple[Tensor, Tensor]],
    settings: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Write a LoRA adapter, which is there complete or not at all.

    Args:
        directory: a new one.
        matrices: `(A, B)` of each module, by its name in the base model.
        settings: of `adapter_config.json`, besides those that say that it is a LoRA for generation.
        overwrite: replace an adapter that is there.

    Raises:
        StorageError: if the directory exists or cannot be written.
    """
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    with CheckpointWriter(
        directory,
        shard_bytes=2**62,  # the format has one file
        overwrite=overwrite,
        expected_bytes=sum(a.nbytes + b.nbytes for a, b in matrices.values()),
        weights=WEIGHTS[0],
        config=CONFIG,
    ) as writer:
        for module, (a, b) in matrices.items():
            writer.add(f"{_PREFIX}{module}{_A}", a)
            writer.add(f"{_PREFIX}{module}{_B}", b)
        writer.write_json(CONFIG, described | dict(settings))
        writer.finish()


def _module(file: Path, name: str) -> str:
    """The linear layer that a tensor belongs to; one of another kind is refused."""
    for part in (_A, _B):
        if name.endswith(part) and len(name) > len(part):
            return name.removesuffix(part)
    if "lora_magnitude" in name:
        reason = "DoRA is not computed: train with use_dora=False"
    elif "lora_embedding_" in name:
        reason = "low-rank changes of the embedding are not computed: leave it out of target_modules"
    elif name.endswith(".bias"):
        reason = 'trained biases are not computed: train with bias="none"'
    elif "lora_" not in name:
        reason = "whole trained weights (modules_to_save) are not computed: train without them"
    else:
        reason = f"expected names that end in {_A} or {_B}"
    raise CheckpointError(f"{file}: {shown(name)}: {reason}")


def _settings(file: Path) -> LoraSettings:
    config = Checkpoint.of_tensors(file.parent, {}).load_json(file.name)
    if config is None:
        raise CheckpointError(f"{file}: there is no such file: expected an adapter that PEFT has saved")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"{file}: peft_type is {_brief(kind)}: of PEFT's adapters only 'LORA' is computed (and of prefixes those "
            "of ChatGLM's P-Tuning v2)"
        )
    if config.get("init_lora_weights") not in _INITIALIZATIONS:
        raise CheckpointError(
            f"{file}: init_lora_weights is {_brief(config['init_lora_weights'])}: training of that kind changes the "
            "base model's own weights: convert the adapter with PEFT's path_initial_model_for_weight_conversion"
        )
    for key, value in config.items():
        if value and key not in _NEUTRAL | _READ:
            raise CheckpointError(
                f"{file}: {shown(key)} is {_brief(value)}, which is not computed: use an adapter without it"
            )
    base, targets = config.get("base_model_name_or_path"), _names(file, config, "target_modules")
    return LoraSettings(
        base=base if isinstance(base, str) else "",
        rank=_rank(file, "r", config.get("r", 8)),
        alpha=_alpha(file, "lora_alpha", config.get("lora_alpha", 8)),
        rank_stabilized=_flag(file, config, "use_rslora"),
        ranks=tuple(
            (pattern, _rank(file, f"rank_pattern: {key}", value))
            for key, pattern, value in _patterns(file, config, "rank_pattern")
        ),
        alphas=tuple(
            (pattern, _alpha(file, f"alpha_pattern: {key}", value))
            for key, pattern, value in _patterns(file, config, "alpha_pattern")
        ),
        targets=None if targets == () else targets,
        excluded=_names(file, config, "exclude_modules"),
        layers=_layers(file, config.get("layers_to_transform")),
    )


def _matches(module: str, names: tuple[str, ...] | ModulePattern) -> bool:
    return names.is_name(module) if isinstance(names, ModulePattern) else is_listed(module, names)


def _rank(file: Path, key: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise _wrong(file, key, value, f"an integer from 1 to {MAX_RANK}")
    return value


def _alpha(file: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e9:
        raise _wrong(file, key, value, "a finite number")
    return float(value)


def _flag(file: Path, config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key) or False
    if value is not True and value is not False:
        raise _wrong(file, key, value, "true or false")
    return bool(value)


def _names(file: Path, config: Mapping[str, Any], key: str) -> tuple[str, ...] | ModulePattern:
    """A list of ends of names, or a pattern; nothing where there is none, or the one that stands for all."""
    value = config.get(key)
    if value is None or value == "all-linear":
        return ()
    if isinstance(value, str):
        return ModulePattern(value, f"{file}: {key}")
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _wrong(file, key, value, "a list of names, or a pattern")
    return tuple(value)


def _patterns(file: Path, config: Mapping[str, Any], key: str) -> list[tuple[str, ModulePattern, object]]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise _wrong(file, key, value, "an object of patterns")
    if len(value) > _MAX_PATTERNS:  # each is compared with every module
        raise _wrong(file, key, value, f"{_MAX_PATTERNS} patterns at most")
    listed = [(shown(name), ModulePattern(name, f"{file}: {key}", most=3), each) for name, each in value.items()]
    if sum(pattern.repeats for _, pattern, _ in listed) > _MAX_REPEATING:
        raise CheckpointError(
            f"{file}: {key}: more than {_MAX_REPEATING} patterns with repetitions, which may take forever to match: "
            "write out the names of the modules instead"
        )
    return listed


def _layers(file: Path, value: object) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    listed = value if isinstance(value, list) else [value]
    if not all(type(index) is int and index >= 0 for index in listed):
        raise _wrong(file, "layers_to_transform", value, "the number of a layer, or a list of them")
    return frozenset(listed)


def _wrong(file: Path, key: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(f"{file}: {key}: expected {expected}, found {_brief(value)}")


def _brief(value: object) -> str:
    text = f"{type(value).__name__} of {len(value)}" if isinstance(value, list | dict) else ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
