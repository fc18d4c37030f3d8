"""`merge_lora`: a plain model and a LoRA in, a plain model that needs no adapter out, one tensor in memory at once."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpbus.errors import CheckpointError, TensorError, UsageError
from warpbus.formats import Checkpoint, CheckpointWriter, format_of
from warpbus.formats.companions import find_companions
from warpbus.formats.dequantizing import dequantized
from warpbus.formats.files import check_kept
from warpbus.formats.peft import CONFIG, PeftLora
from warpbus.formats.ptuning import is_prefix
from warpbus.models.adapters.sites import placed
from warpbus.models.loading import quantized_parameters, read_config

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many tensors it has been done with, and how many there are."""

_ELEMENTS_AT_ONCE = 2**24
_SMALLEST_SHARD, _LARGEST_SHARD = 2**24, 4 * 2**30
_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Merge:
    """A summary of a merge.

    Attributes:
        matrices: how many were changed.
        rank: the largest of them.
        largest_change: the largest ratio of a change's Frobenius norm to that of the matrix.
        bytes: of all tensors of the output.
    """

    model: str
    adapter: str
    output: str
    matrices: int
    rank: int
    largest_change: float
    bytes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        """A summary in one line."""
        return (
            f"{self.output}: {self.adapter} is in {self.matrices} matrices (rank {self.rank}, changed by at most "
            f"{self.largest_change:.2%}), {self.bytes / 1e6:,.1f} MB"
        )


def merge_lora(
    model: str | Path,
    adapter: str | Path,
    output: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Merge:
    """Write the model that a LoRA makes of a plain one: `W + scaling B A` in place of each W that it changes.

    Sums are computed in float32 and rounded once, to the dtype that the model has. The output appears whole or not at
    all; the tokenizer and the like go along.

    Args:
        model: a model directory, not quantized.
        adapter: a LoRA in PEFT's format.
        output: a new directory.
        overwrite: replace a model that is at `output`.
        progress: see `Progress`.

    Raises:
        UsageError: if the model is quantized, the adapter is no LoRA, or the output would replace one of the two.
        CheckpointError: if the model or the adapter cannot be read, or do not belong together.
        TensorError: if a tensor is missing, has the wrong shape or type, or a sum is nothing that its dtype can hold.
        StorageError: if the output exists or cannot be written.
    """
    started = time.perf_counter()
    checkpoint, lora = _opened(Path(model), Path(adapter), Path(output))
    config = read_config(checkpoint)
    quantized_parameters(checkpoint, config)  # that the files have what the model needs, and nothing else
    modules = {f"{site.module}.weight": module for module, site in placed(lora, config).items()}
    names = checkpoint.names()
    _check(checkpoint, lora, modules)
    largest = max(checkpoint.nbytes(name) for name in names)
    changes = [0.0]
    with CheckpointWriter(
        output,
        shard_bytes=min(max(largest, _SMALLEST_SHARD), _LARGEST_SHARD),
        overwrite=overwrite,
        expected_bytes=checkpoint.total_bytes,
    ) as writer:
        writer.write_json("config.json", checkpoint.config)
        for name, file in find_companions(checkpoint.directory).items():
            writer.copy_file(file, name)
        for done, name in enumerate(names):
            if progress is not None:
                progress("merging", done, len(names))
            tensor = checkpoint.tensor(name)
            if name in modules:
                tensor, change = _merged(name, tensor, *lora.read(modules[name]))
                changes.append(change)
            writer.add(name, tensor)
        if progress is not None:
            progress("merging", len(names), len(names))
        writer.finish()
    return Merge(
        model=str(model),
        adapter=str(adapter),
        output=str(output),
        matrices=len(modules),
        rank=max(lora.shape(module)[1] for module in modules.values()),
        largest_change=max(changes),
        bytes=checkpoint.total_bytes,
        seconds=time.perf_counter() - started,
    )


def _opened(model: Path, adapter: Path, output: Path) -> tuple[Checkpoint, PeftLora]:
    checkpoint = Checkpoint(model)
    format = format_of(checkpoint.config)
    if format is not None:
        raise UsageError(
            f"{model}: is quantized ({format.name}), so its weights cannot take up an adapter: merge into the plain "
            "model that it was made of, then run warpbus quantize on the result"
        )
    checkpoint = dequantized(checkpoint)
    if not adapter.is_dir():
        raise CheckpointError(f"{adapter}: there is no such directory: expected the directory of a LoRA, with {CONFIG}")
    if not (adapter / CONFIG).exists() and is_prefix(adapter):
        raise UsageError(
            f"{adapter}: is a prefix of keys and values (P-Tuning), which no weights can take up: "
            "load it beside the model as an adapter"
        )
    check_kept(output, model, adapter)
    return checkpoint, PeftLora.open(adapter)


def _check(checkpoint: Checkpoint, lora: PeftLora, modules: dict[str, str]) -> None:
    """That the model's matrices are those that the config tells; the adapter's have been compared with it."""
    for name, module in modules.items():
        out, _, width = lora.shape(module)
        found, dtype = checkpoint.shape(name), checkpoint.dtype(name)
        if found != (out, width) or dtype not in _FLOATING:
            raise TensorError(
                f"{checkpoint.directory}: {name}: expected floating point of 16 to 64 bits in shape {[out, width]}, as "
                f"config.json says, found {dtype} in {list(found)}: check that config.json belongs to these weights"
            )


def _merged(name: str, weight: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, float]:
    """The sum in the weight's dtype, and the ratio of the change's norm to that of the weight."""
    merged = torch.empty(weight.shape, dtype=weight.dtype)
    height = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
    change = size = 0.0
    for start in range(0, len(weight), height):
        rows = slice(start, start + height)
        delta, plain = b[rows] @ a, weight[rows].to(torch.float32)
        change, size = change + float(delta.square().sum()), size + float(plain.square().sum())
        merged[rows] = plain.add_(delta)
    if not bool(merged.isfinite().all()):
        raise TensorError(f"{name}: the sum with the adapter has values that {weight.dtype} cannot hold: use bfloat16")
    return merged, (change / size) ** 0.5 if size else float(change > 0)
