"""`ResumableCheckpoint`: a model directory that is written part by part and can be resumed after a crash.

Until the model is complete its parts are in `OUTPUT.quantization/`:

    run.json                  the identity of the run, and its SHA-256
    PART.safetensors          the tensors of a part
    PART.json                 size and checksum of that file, and facts about the part from the caller
    order.json, model/        while `finish` runs

Every file is written under a temporary name, synced and renamed, PART.json last, so that a part is complete or missing.
`finish` moves the parts into `model/` and renames that to OUTPUT. If it is killed, its changes are undone when the
checkpoint is opened again.
"""

import hashlib
import json
import queue
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor

from warpbus.cuda.staging import PinnedStaging
from warpbus.errors import StorageError, TensorError, UsageError
from warpbus.formats.files import (
    FileLock,
    check_space,
    check_target,
    put_in_place,
    read_json,
    storage_error,
    sync,
    write_json,
    write_new,
)
from warpbus.formats.identity import differences
from warpbus.formats.parts import OTHERS, RUN, FinishedParts
from warpbus.formats.safetensors_io import can_store, shown
from warpbus.formats.writer import INDEX, shard_index, shard_name

WAITING = 2
"""Maximum number of parts that wait for the disk, besides the one that is being written."""

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_ORDER, _MODEL = "order.json", "model"


@dataclass(frozen=True)
class _Waiting:
    """A part waiting to be written; `ready` are the CUDA events after which its GPU tensors are complete."""

    part: str
    tensors: dict[str, Tensor]
    ready: dict[torch.device, torch.cuda.Event]
    facts: Any


class ResumableCheckpoint(FinishedParts):
    """A checkpoint that is written part by part, in the background, by one process at a time.

    Use it in a `with` statement, or call `close`: waiting parts are written then, and the lock is released. Parts of
    another identity are removed only with `restart`.

    Args:
        output: the model directory to create. Missing parents are created.
        identity: everything that determines the result, as JSON.
        overwrite: replace an existing model; it is removed only after the new one is in its place.
        restart: remove the parts of an earlier run, whatever its identity.
        expected_bytes: total bytes to be written; free space is checked, counting parts that exist already.

    Attributes:
        found: "nothing", "finished parts" of the same identity, or "removed parts" after a restart.
        found_parts: number of those parts.

    Raises:
        UsageError: there are finished parts of another identity; the message lists the differences.
        StorageError: another process writes the same output; the output exists without `overwrite`, or is not a model;
            or the directory is used for something else, cannot be written, or has too little space.
    """

    found: Literal["nothing", "finished parts", "removed parts"]
    found_parts: int

    def __init__(
        self,
        output: str | Path,
        *,
        identity: Mapping[str, Any],
        overwrite: bool = False,
        restart: bool = False,
        expected_bytes: int | None = None,
    ) -> None:
        super().__init__(output)
        self.output = Path(output).resolve()
        self._overwrite = overwrite
        self._error: BaseException | None = None
        self._queue: queue.Queue[_Waiting | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(self.output, error, needed=0) from error
        self._lock = FileLock(self.output.with_name(f".{self.directory.name}.lock"), self.output)
        try:
            self._open(json.loads(json.dumps(identity)), restart, expected_bytes)
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise storage_error(self.directory, error, needed=0) from error
            raise
        self._is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def commit(self, part: str, tensors: Mapping[str, Tensor], facts: Any = None) -> None:
        """Queue a finished part for writing; returns immediately unless `WAITING` parts are queued already.

        Args:
            part: its name, of letters, digits, "_", "." and "-". An existing part is replaced.
            tensors: on any device; they must not be changed afterwards. GPU tensors are copied when they are written.
            facts: JSON that `facts` returns later.

        Raises:
            UsageError: the name is not a valid file name, or the checkpoint is closed.
            TensorError: the format has no such dtype.
            StorageError: an earlier part could not be written; finished parts are kept.
        """
        self._require_open()
        if not _PART.fullmatch(part) or part in OTHERS:
            raise UsageError(f"part {shown(part)!r}: expected letters, digits, '_', '.' and '-'")
        for name, tensor in tensors.items():
            if not can_store(tensor.dtype):
                raise TensorError(f"tensor {shown(name)}: safetensors has no type for {tensor.dtype}")
        ready = {}
        for device in {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}:
            ready[device] = torch.cuda.Event()
            ready[device].record(torch.cuda.current_stream(device))
        self._raise_error()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="checkpoint", daemon=True)
            self._thread.start()
        held = {name: tensor.detach() for name, tensor in tensors.items()}
        self._queue.put(_Waiting(part, held, ready, json.loads(json.dumps(facts))))

    def drain(self) -> None:
        """Wait until all parts are on the disk. Raises StorageError as `commit` does."""
        self._queue.join()
        self._raise_error()

    def finish(
        self,
        config: Mapping[str, Any],
        files: Sequence[tuple[str, Path | bytes]],
        order: Sequence[str],
        left_out: Sequence[str] = (),
    ) -> Path:
        """Assemble the model from the parts and move it to the output.

        Args:
            config: content of `config.json`.
            files: further files of the model: paths in it, and their sources or contents.
            order: the parts of the model, in the order in which they become shards.
            left_out: the other parts, which are removed with the directory.

        Returns:
            The model directory.

        Raises:
            UsageError: `order` and `left_out` do not name every part once, or the path of a file is not in the model or
                not unique.
            TensorError: two parts have a tensor of the same name.
            CheckpointError: a part is damaged, or a file to copy does not exist.
            StorageError: something cannot be written; the parts and a model to be overwritten are kept.
        """
        self._require_open()
        self.drain()
        if sorted([*order, *left_out]) != self.parts():
            named = sorted([*order, *left_out])
            raise UsageError(f"{self.directory}: order names {named}, committed were {self.parts()}")
        shards = {part: shard_name(number, len(order)) for number, part in enumerate(order)}
        names = [*shards.values(), "config.json", INDEX, *(name for name, _ in files)]
        if len(set(names)) != len(names) or not all(map(_is_inside, names)):
            raise UsageError(f"{self.output}: files {names}: expected names, or names in one folder, each once")
        weight_map: dict[str, str] = {}
        total_bytes = 0
        for part in order:
            for name, entry in self.read(part).items():
                if name in weight_map:
                    raise TensorError(f"tensor {shown(name)} is in two parts of {self.directory}")
                weight_map[name] = shards[part]
                total_bytes += entry.nbytes
        try:
            check_target(self.output, overwrite=self._overwrite)
            self._build(config, files, shards, shard_index(weight_map, total_bytes))
            put_in_place(self.directory / _MODEL, self.output, self._aside("replaced"))
            self._forget()
        except BaseException as error:
            with suppress(OSError):
                self._undo()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise storage_error(self.output, error, needed=0) from error
            raise
        self.close()
        return self.output

    def discard(self) -> None:
        """Remove all parts and close. Raises StorageError if they cannot be removed."""
        self._require_open()
        self._queue.join()
        try:
            self._forget()
        except OSError as error:
            raise storage_error(self.directory, error, needed=0) from error
        self.close()

    def close(self) -> None:
        """Write the waiting parts, keep all parts, and release the lock. A second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        self._lock.release()

    def _open(self, identity: dict[str, Any], restart: bool, expected_bytes: int | None) -> None:
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        shutil.rmtree(self._aside("removed"), ignore_errors=True)
        if self._aside("replaced").exists():  # the last run was killed while it overwrote a model
            if self.output.exists():
                shutil.rmtree(self._aside("replaced"))
            else:
                self._aside("replaced").rename(self.output)
        run = read_json(self.directory / RUN)
        kept_for = run.get("sha256") if isinstance(run, dict) else None
        if kept_for is None and self.directory.exists():
            if not self.directory.is_dir() or any(self.directory.iterdir()):
                raise StorageError(
                    f"{self.directory}: is in the way of the finished parts, and holds something else: "
                    "move it, or name another output"
                )
            self.directory.rmdir()
        resumes = kept_for == digest and not restart
        if resumes:
            self._undo()
        check_target(self.output, overwrite=self._overwrite)
        self.found, self.found_parts = "nothing", len(self.parts())
        if self.found_parts:
            self.found = "finished parts" if resumes else "removed parts"
        if kept_for is not None and not resumes:
            # A model that was being assembled holds the parts: they are in its directory until it is complete.
            if not restart and (self.found_parts or (self.directory / _MODEL).exists()):
                raise UsageError(
                    f"{self.output}: {self.directory} holds finished parts of a run that differs: "
                    f"{'; '.join(differences(run.get('identity'), identity))}: use the same to go on, "
                    "or start over with restart=True, which removes them"
                )
            self._forget()
        if not self.directory.exists():
            # Renamed once it has its run.json, so that a directory without one belongs to something else.
            created = self._aside("created")
            shutil.rmtree(created, ignore_errors=True)
            created.mkdir()
            write_json(created / RUN, {"sha256": digest, "identity": identity})
            sync(created)
            created.rename(self.directory)
            sync(self.directory.parent)
        for file in self.directory.glob(".*.partial-*"):
            file.unlink()
        if expected_bytes is not None:
            there = sum(self.tensors_file(part).stat().st_size for part in self.parts())
            check_space(self.output, expected_bytes - there)

    def _build(
        self,
        config: Mapping[str, Any],
        files: Sequence[tuple[str, Path | bytes]],
        shards: Mapping[str, str],
        index: Mapping[str, Any],
    ) -> None:
        """Assemble the model in a separate directory; `_undo` reverts this."""
        model = self.directory / _MODEL
        names = ["config.json", INDEX, *shards.values(), *(name for name, _ in files)]
        outermost = {Path(name).parts[0] for name in names}
        write_json(self.directory / _ORDER, {"parts": list(shards), "files": sorted(outermost)})
        sync(self.directory)
        model.mkdir()
        write_json(model / "config.json", config)
        write_json(model / INDEX, index)
        for name, content in files:
            (model / name).parent.mkdir(exist_ok=True)
            write_new(model / name, content)
        for part, shard in shards.items():
            self.tensors_file(part).rename(model / shard)
        sync(model)

    def _undo(self) -> None:
        """Revert an interrupted `finish`."""
        order = read_json(self.directory / _ORDER)
        if order is None:
            return
        model = self.directory / _MODEL
        moved = not any(self.tensors_file(part).exists() for part in order["parts"])
        if moved and not model.exists() and self.output.is_dir():
            # The model was moved to the output, and is complete unless it was changed since.
            if sorted(file.name for file in self.output.iterdir()) != order["files"]:
                self._forget()
                return
            self.output.rename(model)
        for number, part in enumerate(order["parts"]):
            shard = model / shard_name(number, len(order["parts"]))
            if shard.exists():
                shard.rename(self.tensors_file(part))
        sync(self.directory)
        shutil.rmtree(model, ignore_errors=True)
        (self.directory / _ORDER).unlink()

    def _forget(self) -> None:
        """Remove the directory: at once under its name, then file by file."""
        if self.directory.exists():
            removed = self._aside("removed")
            self.directory.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
        self._sound.clear()

    def _work(self) -> None:
        """The background thread; after an error it discards what is queued."""
        while (waiting := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self.write(waiting.part, _on_host(waiting), waiting.facts)
            except BaseException as error:
                self._error = error
            finally:
                del waiting  # free its tensors
                self._queue.task_done()
        self._queue.task_done()

    def _raise_error(self) -> None:
        if isinstance(self._error, OSError):
            raise StorageError(
                f"{self._error}; finished parts kept in {self.directory}: {len(self.parts())}: "
                "run the same command to resume"
            ) from self._error
        if self._error is not None:
            raise self._error

    def _require_open(self) -> None:
        if not self._is_open:
            raise UsageError(f"{self.output}: this checkpoint is finished or closed: open it again")

    def _aside(self, what: str) -> Path:
        return self.output.with_name(f".{self.directory.name}.{what}")


def discard_parts(output: str | Path) -> None:
    """Remove the finished parts of an interrupted run, if there are any.

    Args:
        output: the output of the run.

    Raises:
        StorageError: another process is writing to it, or the parts cannot be removed.
    """
    parts = FinishedParts(output)
    if not parts.begun:
        return
    lock = FileLock(parts.directory.with_name(f".{parts.directory.name}.lock"), Path(output))
    try:
        removed = parts.directory.with_name(f".{parts.directory.name}.removed")
        parts.directory.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    except OSError as error:
        raise storage_error(parts.directory, error, needed=0) from error
    finally:
        lock.release()


def _on_host(waiting: _Waiting) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous; copies from a GPU overlap with its computation."""
    copied = {name: tensor.contiguous() for name, tensor in waiting.tensors.items() if tensor.device.type == "cpu"}
    for device, ready in waiting.ready.items():
        own = {name: tensor for name, tensor in waiting.tensors.items() if tensor.device == device}
        copied |= _from_gpu(own, device, ready)
    return {name: copied[name] for name in waiting.tensors}


def _from_gpu(tensors: Mapping[str, Tensor], device: torch.device, ready: torch.cuda.Event) -> dict[str, Tensor]:
    """Copy tensors to the CPU, all at once: one by one, the hundreds of a layer with experts would keep Python busy,
    and so the thread that gives the GPU its work."""
    # The largest elements come first, so that each tensor is aligned.
    ordered = sorted(tensors, key=lambda name: -tensors[name].element_size())
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        together = torch.cat([tensors[name].reshape(-1).view(torch.uint8) for name in ordered])
        parts = PinnedStaging(device).get(together).split([tensors[name].nbytes for name in ordered])
    return {
        name: part.view(tensors[name].dtype).view(tensors[name].shape)
        for name, part in zip(ordered, parts, strict=True)
    }


def _is_inside(name: str) -> bool:
    """Whether a path is that of a file in a directory, or in a folder of it."""
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts and 1 <= len(path.parts) <= 2
