"""The results of a run: a model or an adapter with its log, written whole or not at all."""

import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpbus.dist import Group
from warpbus.errors import StorageError
from warpbus.formats import CheckpointWriter
from warpbus.formats.companions import find_companions
from warpbus.formats.files import check_target, put_in_place, storage_error, sync, write_json
from warpbus.formats.hub.names import cached_name
from warpbus.models.adapters import save_lora, save_prefix
from warpbus.models.saving import named_tensors
from warpbus.train.inputs import Inputs
from warpbus.train.methods import LoraMethod, PrefixMethod, TrainingMethod
from warpbus.train.sharding import whole

SUMMARY, LOG, CURVE = "training.json", "training-log.json", "training.png"
CONFIGS = ("config.json", "adapter_config.json")  # a directory with one of them may be overwritten


def write(
    output: Path,
    inputs: Inputs,
    method: TrainingMethod,
    summary: Mapping[str, Any],
    log: list[dict[str, float]],
    group: Group,
    overwrite: bool,
) -> None:
    """Write what was trained to `output`; every process calls it, and the first writes.

    A whole model is written in bfloat16 with the companions of the source's weights; a LoRA as PEFT has it, and a
    prefix as ChatGLM's P-Tuning has it, both in float32.

    Args:
        summary, log: for `training.json` and `training-log.json`.

    Raises:
        StorageError: if it could not be written; nothing is left then, and what was at `output` is still there.
    """
    # Adapters name their model as others find it: not by its place in the cache of this machine.
    config, source = inputs.config, inputs.checkpoint.directory
    base = cached_name(source) or str(source)
    if isinstance(method, LoraMethod):
        lora, settings = method.lora(output.name), inputs.settings
        if group.is_first:
            with _new_directory(output, overwrite) as partial:
                save_lora(partial, lora, config, base=base, rank=settings.rank, alpha=settings.alpha)
                _write_log(partial, summary, log)
    elif isinstance(method, PrefixMethod):
        prefix = method.prefix(output.name)
        if group.is_first:
            with _new_directory(output, overwrite) as partial:
                save_prefix(partial, prefix, config, base=base)
                _write_log(partial, summary, log)
    else:
        tensors = named_tensors(method.model, torch.bfloat16, whole)
        if group.is_first:
            _write_model(output, inputs, tensors, summary, log, overwrite)
        else:
            deque(tensors, maxlen=0)  # they are gathered from all processes


def _write_model(
    output: Path,
    inputs: Inputs,
    tensors: Iterable[tuple[str, Tensor]],
    summary: Mapping[str, Any],
    log: list[dict[str, float]],
    overwrite: bool,
) -> None:
    source, config = inputs.checkpoint.directory, inputs.checkpoint.config
    dtype = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    written = {"config.json": {**config, dtype: "bfloat16"}, SUMMARY: summary, LOG: log}
    bytes_ = torch.bfloat16.itemsize * inputs.config.num_parameters
    with CheckpointWriter(output, overwrite=overwrite, expected_bytes=bytes_) as writer:
        for name, tensor in tensors:
            writer.add(name, tensor)
        for name, file in find_companions(source).items():
            writer.copy_file(file, name)
        for name, content in written.items():
            writer.write_json(name, content)
        writer.finish()


def _write_log(directory: Path, summary: Mapping[str, Any], log: list[dict[str, float]]) -> None:
    write_json(directory / SUMMARY, summary)
    write_json(directory / LOG, log)


@contextmanager
def _new_directory(output: Path, overwrite: bool) -> Iterator[Path]:
    """A directory to write to, which becomes `output` when the block ends, with `overwrite` in the place of another."""
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        sync(partial)
        check_target(output, overwrite=overwrite, configs=CONFIGS)  # another program may have written it meanwhile
        put_in_place(partial, output, output.with_name(f".{output.name}.replaced-{os.getpid()}"))
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(output, error, needed=0) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
