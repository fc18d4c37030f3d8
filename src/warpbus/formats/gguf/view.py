"""A directory for a GGUF file, so that it is read like every other model.

The directory is in `$XDG_CACHE_HOME/warpbus/gguf` (by default below `~/.cache`). It holds the `config.json` and the
tokenizer that the file describes, a few megabytes, and a link `model.gguf` to the file itself; no weights are copied.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

from warpbus.errors import StorageError
from warpbus.formats import compressed_tensors
from warpbus.formats.gguf.architectures import Keys, config_of, source_tensors
from warpbus.formats.gguf.file import is_gguf, read_header
from warpbus.formats.gguf.reading import WEIGHTS, quantized_schemes
from warpbus.formats.gguf.vocabulary import stop_ids, vocabulary_files

_VERSION = 5  # of what is written; a directory of another version is not used


def directory_of(path: Path) -> Path:
    """The model directory that stands for a path: one that is made for it if it is a GGUF file, else the path itself.

    Raises:
        CheckpointError: the GGUF file is damaged, or of a kind that is not supported.
        StorageError: the directory cannot be written.
    """
    if not is_gguf(path):
        return path
    file = path.resolve()
    state = file.stat()
    key = hashlib.sha256(f"{_VERSION} {state.st_size} {state.st_mtime_ns} {file}".encode()).hexdigest()[:16]
    directory = _cache() / f"{file.stem}-{key}"
    if not directory.exists():
        _make(directory, file)
    return directory


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "warpbus" / "gguf"


def _make(directory: Path, file: Path) -> None:
    keys = Keys(read_header(file))
    tensors = source_tensors(keys)
    config, stops = config_of(keys, tensors), stop_ids(keys)
    config["eos_token_id"] = stops
    schemes = quantized_schemes(tensors)
    if schemes:
        config["quantization_config"] = compressed_tensors.quantization_config(schemes, [])
        # By their names: some matrices of the file may not be quantized.
        groups = config["quantization_config"]["config_groups"].values()
        named = {target for group in groups for target in group["targets"]} | {"model.embed_tokens"}
        for group in groups:
            if "Linear" in group["targets"]:
                others = [target for target in group["targets"] if target != "Linear"]
                group["targets"] = [name for name in schemes if name not in named] + others
    files = vocabulary_files(keys)
    files["config.json"] = json.dumps(config, indent=2).encode()
    files["generation_config.json"] = json.dumps({"eos_token_id": stops}).encode()
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True, mode=0o700, exist_ok=True)
        for name, content in files.items():
            (partial / name).write_bytes(content)
        (partial / WEIGHTS).symlink_to(file)
        try:
            partial.rename(directory)
        except OSError:
            if not directory.exists():  # another process may have made it
                raise
            shutil.rmtree(partial)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(
            f"{directory}: cannot be written ({error.strerror or error}): set XDG_CACHE_HOME to a directory on a disk "
            "with space"
        ) from error
