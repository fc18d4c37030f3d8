"""`CheckpointWriter`: writes a model directory atomically."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from warpbus.errors import CheckpointError, StorageError, TensorError, UsageError
from warpbus.formats.files import check_space, check_target, put_in_place, storage_error, sync
from warpbus.formats.safetensors_io import can_store, shown, write_file

INDEX = "model.safetensors.index.json"


class CheckpointWriter:
    """Writes a model directory: everything goes to a hidden directory next to it, which `finish` renames.

    Use it in a `with` statement: leaving the block before `finish` has returned removes everything written. A failed
    write does so as well.

    Args:
        directory: the model directory to create. Missing parents are created.
        shard_bytes: maximum size of a file of weights.
        overwrite: replace an existing model; it is removed only after the new one is in its place.
        expected_bytes: bytes to be written; if given, free space is checked first.
        weights: the file name of the weights if there is one shard.
        config: the file that identifies a directory that may be overwritten.

    Raises:
        StorageError: the target exists and `overwrite` is not set, is not a model directory, cannot be written, or has
            too little space.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        shard_bytes: int = 4 * 2**30,
        overwrite: bool = False,
        expected_bytes: int | None = None,
        weights: str = "model.safetensors",
        config: str = "config.json",
    ) -> None:
        self.directory = Path(directory).resolve()
        self._weights = weights
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._names: set[str] = set()
        self._total_bytes = 0
        check_target(self.directory, overwrite=overwrite, configs=(config,))
        self._partial = self.directory.with_name(f".{self.directory.name}.partial-{os.getpid()}")
        try:
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            if self._partial.exists():
                raise StorageError(
                    f"{self._partial}: left over by a run that was killed, or being written by another: "
                    "remove it and try again"
                )
            if expected_bytes is not None:
                check_space(self.directory, expected_bytes)
            self._partial.mkdir()
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self.directory}: cannot be written: {error.strerror or error}") from error
        self._open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to the checkpoint.

        It is kept until its shard is written, so do not change it in place afterwards. At most one shard is in memory.

        Raises:
            TensorError: if the name was added before, or the format has no such dtype.
            StorageError: if a shard could not be written.
        """
        self._require_open()
        if name in self._names:
            raise TensorError(f"tensor {shown(name)} is added twice to {self.directory}")
        if not can_store(tensor.dtype):
            raise TensorError(f"tensor {shown(name)}: safetensors has no type for {tensor.dtype}")
        held = tensor.detach().cpu().contiguous()
        if held.untyped_storage().nbytes() > held.nbytes:
            held = held.clone()  # a slice would keep the storage of the whole tensor
        if self._pending and self._pending_bytes + held.nbytes > self._shard_bytes:
            self._flush()
        self._names.add(name)
        self._pending[name] = held
        self._pending_bytes += held.nbytes

    def copy_file(self, source: Path, name: str | None = None) -> None:
        """Copy a file (a tokenizer and the like).

        Args:
            source: the file.
            name: its path in the model; its own name if None.

        Raises:
            CheckpointError: if there is no such file.
            StorageError: if it could not be written.
        """
        self._require_open()
        if not source.is_file():
            raise CheckpointError(f"{source}: there is no such file to copy")
        name = name or source.name
        with self._writing(name, source.stat().st_size):
            target = self._partial / name
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)
            sync(target)
            sync(target.parent)

    def write_json(self, filename: str, content: object) -> None:
        """Write a JSON file.

        Raises:
            StorageError: if it could not be written.
        """
        self._require_open()
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        with self._writing(filename, len(text.encode())):
            (self._partial / filename).write_text(text, encoding="utf-8")
            sync(self._partial / filename)

    def finish(self, check: Callable[[Path], None] | None = None) -> Path:
        """Write the last shard, name the shards, and move the directory to its final name.

        Args:
            check: called with the directory of the complete model before it is renamed; if it raises, the model is
                discarded.

        Returns:
            The model directory.

        Raises:
            UsageError: no tensor was added.
            StorageError: something could not be written; nothing is left, and a model to be overwritten is kept.
        """
        self._require_open()
        if self._pending:
            self._flush()
        if not self._shards:
            raise UsageError(f"{self.directory}: no tensor was added")
        count = len(self._shards)
        if count == 1:
            with self._writing(self._weights, 0):
                _shard_file(self._partial, 0).rename(self._partial / self._weights)
        else:
            weight_map: dict[str, str] = {}
            for number, names in enumerate(self._shards):
                final = shard_name(number, count)
                weight_map.update(dict.fromkeys(names, final))
                with self._writing(final, 0):
                    _shard_file(self._partial, number).rename(self._partial / final)
            self.write_json(INDEX, shard_index(weight_map, self._total_bytes))
        with self._writing("", 0):
            sync(self._partial)
        if check is not None:
            check(self._partial)
        with self._writing("", 0):
            put_in_place(
                self._partial,
                self.directory,
                self.directory.with_name(f".{self.directory.name}.replaced-{os.getpid()}"),
            )
        self._open = False
        return self.directory

    def abort(self) -> None:
        """Remove everything written; does nothing after `finish`."""
        if self._open:
            self._open = False
            self._pending.clear()
            shutil.rmtree(self._partial, ignore_errors=True)

    def _flush(self) -> None:
        file = _shard_file(self._partial, len(self._shards))
        with self._writing(self._weights, self._pending_bytes):
            write_file(file, self._pending)
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending = {}
        self._pending_bytes = 0

    def _require_open(self) -> None:
        if not self._open:
            raise UsageError(f"{self.directory}: this writer has finished or failed: create a new one")

    @contextmanager
    def _writing(self, filename: str, needed: int) -> Iterator[None]:
        """Turn a failed write into a StorageError and remove everything written."""
        try:
            yield
        except OSError as error:
            self.abort()
            # Free space now counts what was just removed, so what is needed has to count it too.
            raise storage_error(self.directory / filename, error, needed=self._total_bytes + needed) from error


def shard_name(number: int, count: int) -> str:
    """The file name of shard `number`, counted from 0, of `count`."""
    return f"model-{number + 1:05}-of-{count:05}.safetensors"


def shard_index(weight_map: Mapping[str, str], total_bytes: int) -> dict[str, Any]:
    """The content of `INDEX`: the file of each tensor, and the bytes of all tensors."""
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}


def _shard_file(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05}.safetensors"
