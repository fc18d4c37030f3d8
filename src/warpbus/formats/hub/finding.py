"""`find_model` and `pull`: from a model's name to a directory that has it."""

import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any

from warpbus.errors import CheckpointError, DownloadError, UsageError, WarpbusError
from warpbus.formats.files import FileLock, check_space, read_json
from warpbus.formats.hub.cache import CachedRepository
from warpbus.formats.hub.names import ModelName, parse_name
from warpbus.formats.hub.needed import CONFIG, MAX_SMALL_BYTES, is_index, shards, small_files, weights_file
from warpbus.formats.hub.repository import Repository, open_repository
from warpbus.formats.hub.transfer import RemoteFile, Stopped, Transfer, partial_of

DEMO = "demo"
"""The name of the model that the package brings along."""

_DEMO_DIRECTORY = Path(__file__).parents[2] / "demo" / "glm-poet"

TOGETHER = 4
"""Files that are brought at the same time: one connection seldom fills a line."""

Progress = Callable[[int, int], None]
"""Called with the bytes that are there and the bytes of all files."""

Check = Callable[[dict[str, Any]], object]
"""Called with a `config.json` before weights are brought; what it raises keeps them from coming."""


@dataclass(frozen=True)
class Pulled:
    """A model that is on the disk now.

    Attributes:
        name: what it was asked by.
        commit: the state of the repository.
        directory: where it is.
        files: how many it has.
        nbytes: of all files.
        downloaded: bytes that were not on the disk before.
    """

    name: ModelName
    commit: str
    directory: Path
    files: int
    nbytes: int
    downloaded: int

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "name": self.name.repository,
            "source": self.name.source,
            "revision": self.name.revision,
            "commit": self.commit,
            "directory": str(self.directory),
            "files": self.files,
            "bytes": self.nbytes,
            "downloaded_bytes": self.downloaded,
        }


def find_model(
    name: str | Path,
    *,
    revision: str | None = None,
    source: str | None = None,
    download: bool = True,
    progress: Progress | None = None,
    check: Check | None = None,
) -> Path:
    """The directory of a model.

    `DEMO` is the packaged model. Another path is itself, whether or not there is something. A name on a hub is looked
    for on the disk; only if it is not there, complete, the network is asked. So what a branch has become meanwhile is
    not noticed: `pull` asks.

    Args:
        name: a path, or a name as `parse_name` understands it, such as `THUDM/chatglm2-6b`.
        revision: a branch, a tag or a commit, where it is not in the name.
        source: the hub, where it is not in the name.
        download: False: what is not on the disk is not brought.
        progress: called while files arrive.
        check: asked before weights are brought; not of a model that is on the disk, which says so itself when it is
            loaded.

    Raises:
        WarpbusError: what `check` raises, with the model's name before it.
        UsageError: the name is none, or contradicts the other arguments.
        DownloadError: the model is not on the disk, and the hub does not give it.
        CheckpointError: what the hub has is no model that Warpbus reads, or the packaged model is missing.
        StorageError: the disk is full or cannot be written.
    """
    if name == DEMO:
        if not _DEMO_DIRECTORY.exists():
            raise CheckpointError(f"{_DEMO_DIRECTORY}: the packaged demo is incomplete: install warpbus again")
        return _DEMO_DIRECTORY
    named = None if isinstance(name, Path) else parse_name(name, revision=revision, source=source)
    if named is None:
        return Path(name)
    found = CachedRepository(named).find()
    if found is not None:
        return found
    if not download:
        raise DownloadError(f"{named}: is not on this disk: get it with `warpbus pull {named}`")
    return _bring(named, progress, check).directory


def pull(
    name: str, *, revision: str | None = None, source: str | None = None, progress: Progress | None = None
) -> Pulled:
    """Ask a hub what it has under a name, and bring what of it is not on the disk.

    Files that were cut go on where they stopped, and each is kept only if it has the hash that the hub lists. The model
    appears when all of them are there. Arguments and errors: see `find_model`.
    """
    named = parse_name(name, revision=revision, source=source)
    if named is None:
        raise UsageError(f"{name!a} is a path, or no name of a model on a hub: expected one such as THUDM/chatglm2-6b")
    return _bring(named, progress, None)


def _bring(name: ModelName, progress: Progress | None, check: Check | None) -> Pulled:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise DownloadError(f"{name}: not downloaded, since HF_HUB_OFFLINE is set: unset it, or give a directory")
    repository = open_repository(name)
    cached = CachedRepository(name)
    cached.make()
    lock = FileLock(cached.directory / ".warpbus.lock", cached.directory, wait=True)
    try:
        return _bring_files(name, repository, cached, progress, check)
    finally:
        lock.release()


def _bring_files(
    name: ModelName,
    repository: Repository,
    cached: CachedRepository,
    progress: Progress | None,
    check: Check | None,
) -> Pulled:
    listed = repository.files
    weights = weights_file(listed)
    if CONFIG not in listed or weights is None:
        lacks = CONFIG if CONFIG not in listed else "model.safetensors or pytorch_model.bin, whole or in shards"
        raise DownloadError(f"{name}: has no {lacks}: expected a model in Hugging Face's layout")
    small = [listed[file] for file in small_files(listed)]
    needed = [*small, listed[weights]]
    for file in needed if is_index(weights) else small:
        if file.size > MAX_SMALL_BYTES:
            raise DownloadError(f"{name}: {file.name} has {file.size:,} bytes, more than such a file needs: refused")
    downloaded = 0
    if check is not None:
        downloaded += _transfer(repository, cached, [listed[CONFIG]], None)
        _check(name, cached.blob(listed[CONFIG]), check)
    if is_index(weights):
        downloaded += _transfer(repository, cached, [listed[weights]], None)
        parts = shards(cached.blob(listed[weights]), weights)
        missing = [part for part in parts if part not in listed]
        if missing:
            raise DownloadError(f"{name}: {missing[0]}, named by {weights}, is not there: the repository is damaged")
        needed += [listed[part] for part in parts]
    downloaded += _transfer(repository, cached, needed, progress)
    # Whoever looks for the configuration finds everything else there.
    needed.sort(key=lambda file: file.name == CONFIG)
    directory = cached.publish(repository.commit, repository.revision, needed)
    return Pulled(name, repository.commit, directory, len(needed), sum(file.size for file in needed), downloaded)


def _check(name: ModelName, config: Path, check: Check) -> None:
    read = read_json(config)
    if not isinstance(read, dict):
        raise CheckpointError(f"{name}: {CONFIG} is no JSON object: the repository is damaged")
    try:
        check(read)
    except WarpbusError as error:
        raise type(error)(f"{name}: {error}") from None


def _transfer(
    repository: Repository, cached: CachedRepository, files: list[RemoteFile], progress: Progress | None
) -> int:
    """Bring what is not there of some files, several at a time; the number of bytes that came.

    Raises:
        DownloadError: one of them cannot be had; the others' transfers are given up, to go on another time.
        StorageError: they do not fit on the disk.
    """
    blobs = {file.key: file for file in files}  # the same content may have two names
    total = sum(file.size for file in blobs.values())
    absent = [file for file in blobs.values() if not cached.has(file)]
    begun = sum(_bytes_of(partial_of(cached.blob(file))) for file in absent)
    remaining = max(sum(file.size for file in absent) - begun, 0)
    check_space(cached.directory / "blobs", remaining)
    there = total - sum(file.size for file in absent)
    lock = Lock()

    def arrived(count: int) -> None:
        nonlocal there
        with lock:
            there += count
            if progress is not None:
                progress(there, total)

    stop = Event()
    hub, refused = repository.connection, repository.refused
    transfers = [Transfer(hub, refused, file, cached.blob(file), arrived, stop) for file in absent]
    with ThreadPoolExecutor(TOGETHER, "download") as pool:
        running = [pool.submit(transfer.run) for transfer in transfers]
        try:
            ended, _ = wait(running, return_when=FIRST_EXCEPTION)
        finally:
            # An error of one, or Ctrl-C here: the others are not waited for.
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    errors = [future.exception() for future in ended]
    for error in errors:
        if error is not None and not isinstance(error, Stopped):
            raise error
    return remaining


def _bytes_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
