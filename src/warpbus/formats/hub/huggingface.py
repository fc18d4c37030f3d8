"""Models of Hugging Face, through `huggingface_hub`: its cache, tokens, requests, retries and errors.

Large files do not come through its `hf_hub_download`, which downloads a file again from the first byte after its
process was killed, and compares no hash over plain HTTP. They are streamed, by the library's `http_get`, to a partial
file that outlives the process, and compared with the SHA-256 that the hub lists. `hf_hub_download` then finds them
among the blobs of its cache and links them.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any, Self
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants, errors

from warpbus.errors import DownloadError, UsageError, WarpbusError
from warpbus.formats.files import FileLock, check_space, replace_file, storage_error
from warpbus.formats.hub.names import ModelName
from warpbus.formats.hub.needed import CONFIG, Progress, is_complete, is_plain

TOGETHER = 4
"""Files that are downloaded at the same time: one connection seldom saturates a network."""

MAX_FILE_BYTES = 2**50

_SHA256_DIGITS = 64
_KEY = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_DEFAULT_BRANCH = "main"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Of httpx or httpx2, whichever this version of the library uses.
TRANSPORT_ERROR: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]


def find_cached(name: ModelName) -> Path | None:
    """The directory of a model in the library's cache if it is complete; the network is not used."""
    config = huggingface_hub.try_to_load_from_cache(name.repository, CONFIG, revision=name.revision)
    directory = Path(config).parent if isinstance(config, str) else None
    return directory if directory is not None and is_complete(directory) else None


class HuggingFaceRepository:
    """A model of Hugging Face or of a mirror of it; see `needed.Repository`.

    Raises:
        DownloadError: the hub cannot be reached, or does not give access to such a model or revision.
        UsageError: HF_ENDPOINT is not an address, or a token would be sent to it unencrypted.
    """

    def __init__(self, name: ModelName) -> None:
        self._name = name
        self._revision = name.revision or _DEFAULT_BRANCH
        self._folder = Path(constants.HF_HUB_CACHE) / f"models--{name.repository.replace('/', '--')}"
        check_endpoint()
        with self._translated():
            self._commit, files = _listing(name, self._revision)
        self.directory = self._folder / "snapshots" / self._commit
        self.sizes = {file: size for file, (size, _) in files.items()}
        self._keys = {file: key for file, (_, key) in files.items()}

    @property
    def commit(self) -> str:
        """See `needed.Repository`: the commit, 40 hexadecimal digits."""
        return self._commit

    def fetch(self, names: Iterable[str], progress: Progress | None = None) -> int:
        """See `needed.Repository`. Two processes that fetch the same model take turns."""
        wanted = list(names)
        blobs = {self._blob(name): name for name in wanted}  # files of the same content share one
        sizes = {blob: self.sizes[name] for blob, name in blobs.items()}
        with self._translated(), self._locked():
            there = sum(_bytes_of(blob, size) for blob, size in sizes.items())
            check_space(self._folder / "blobs", sum(sizes.values()) - there)
            meter = _Download(there, sum(sizes.values()), progress)
            absent = [name for blob, name in blobs.items() if not blob.exists()]
            meter.run(self._stream, [name for name in absent if len(self._keys[name]) == _SHA256_DIGITS])
            meter.run(self._link, wanted)
        return meter.received

    def publish(self) -> None:
        """See `needed.Repository`."""
        if self._revision != self.commit:
            reference = self._folder / "refs" / self._revision
            with self._locked():
                replace_file(reference, lambda file: file.write_text(self.commit, encoding="ascii"))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other downloads of the same model waiting."""
        (self._folder / "blobs").mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._folder / ".warpbus.lock", self._folder, wait=True)
        try:
            yield
        finally:
            lock.release()

    def _blob(self, name: str) -> Path:
        return self._folder / "blobs" / self._keys[name]

    def _stream(self, name: str, meter: "_Download") -> None:
        """Download a large file to its place among the blobs, from where an earlier download stopped."""
        # Not at the top: it takes longer to import than a model takes to be found on the disk.
        from huggingface_hub.file_download import http_get

        blob, size = self._blob(name), self.sizes[name]
        file = _partial_of(blob)
        url = huggingface_hub.hf_hub_url(self._name.repository, name, revision=self.commit)
        with file.open("ab+") as stream:
            if stream.tell() > size:
                stream.truncate(0)
            http_get(
                url,
                stream,
                resume_size=stream.seek(0, os.SEEK_END),
                headers=huggingface_hub.utils.build_hf_headers(),  # type: ignore[attr-defined]
                expected_size=size,
                displayed_filename=name,
                tqdm_class=meter.bar,
            )
            os.fsync(stream.fileno())
            stream.seek(0)
            sound = hashlib.file_digest(stream, "sha256").hexdigest() == self._keys[name]
        if not sound:
            file.unlink()
            raise DownloadError(
                f"{name}: what {hub_host()} sent does not have the SHA-256 that it lists, so it was not kept: run the "
                "same command again, or use another source"
            )
        file.replace(blob)

    def _link(self, name: str, meter: "_Download") -> None:
        """Let a file appear in the directory; a small one is downloaded."""
        repository, revision = self._name.repository, self.commit
        huggingface_hub.hf_hub_download(repository, name, revision=revision, tqdm_class=meter.bar)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Let errors of the library, the network and the disk become ours."""
        try:
            yield
        except WarpbusError:
            raise
        except (TRANSPORT_ERROR, OSError, ValueError) as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> WarpbusError:
        # The library wraps what went wrong while it asked about a file.
        wrapped = isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None
        cause = error.__cause__ if wrapped else error
        repository, host = self._name.repository, hub_host()
        page = f"{constants.ENDPOINT}/{repository}"
        has_token = huggingface_hub.get_token() is not None
        if isinstance(cause, errors.GatedRepoError):
            who = "the token's account" if has_token else "your account, and set HF_TOKEN to a token of it"
            return DownloadError(f"{repository}: is gated: accept its terms at {page} with {who}")
        if isinstance(cause, errors.RepositoryNotFoundError):
            advice = "the token's account may not see it" if has_token else "set HF_TOKEN if it is private"
            return DownloadError(
                f"{repository}: there is no such directory, and no such model on {host}: check the name; {advice}"
            )
        if isinstance(cause, errors.RevisionNotFoundError):
            return DownloadError(f"{repository}: has no revision {self._revision} on {host}: see {page}")
        if isinstance(cause, errors.HfHubHTTPError):
            status = cause.response.status_code
            return DownloadError(f"{repository}: {host} answers {status}: try again later, or use another source")
        if isinstance(cause, OSError) and cause.errno is not None:
            return storage_error(self._folder, cause, needed=0)
        return DownloadError(
            f"{repository}: the connection to {host} failed ({one_line(cause)}): check the network, "
            "HTTPS_PROXY, and HF_ENDPOINT for a mirror, and run the same command again, which continues where this one "
            "stopped; or give a directory with the model"
        )


class _Download:
    """Downloads files in threads and counts the bytes of all of them.

    Attributes:
        received: bytes that have arrived.
    """

    def __init__(self, there: int, total: int, progress: Progress | None) -> None:
        self._there, self._total, self._progress = there, total, progress
        self._lock, self._stop = Lock(), Event()
        self.received = 0
        self.bar: Any = partial(_Bar, self)
        """In the place of a tqdm class, which the library calls for each file."""

    def add(self, count: int) -> None:
        """Count bytes that have arrived, or, below 0, bytes that were discarded.

        Raises:
            InterruptedError: another download has failed, so this one has to stop.
        """
        if self._stop.is_set():
            raise InterruptedError
        with self._lock:
            self._there += count
            self.received += count
            if self._progress is not None:
                self._progress(self._there, self._total)

    def run(self, download: "Callable[[str, _Download], None]", names: list[str]) -> None:
        """Download files, several at a time; the first error, or Ctrl-C, stops the others."""
        with ThreadPoolExecutor(TOGETHER, "download") as pool:
            downloads = [pool.submit(download, name, self) for name in names]
            try:
                for done in as_completed(downloads):
                    done.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise


class _Bar:
    """The methods of a progress bar that the library needs; it counts only what arrives."""

    def __init__(self, meter: _Download, **_: object) -> None:
        self._meter = meter

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, count: float | None = 1) -> None:
        self._meter.add(int(count or 0))


def _listing(name: ModelName, revision: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """The commit of a revision, and the size and key of each file: its SHA-256, or Git's SHA-1 for a small one.

    Raises:
        DownloadError: the answer is not that of a hub. Keys and commit become names of files, so they are checked.
    """
    try:
        info = huggingface_hub.HfApi().model_info(name.repository, revision=revision, files_metadata=True)
        files = {
            file.rfilename: (file.size, file.lfs.sha256 if file.lfs else file.blob_id)
            for file in info.siblings or []
            if is_plain(file.rfilename)
        }
        sound = all(0 <= (size or 0) <= MAX_FILE_BYTES and _KEY.fullmatch(key or "") for size, key in files.values())
        if not sound or not _KEY.fullmatch(info.sha or ""):
            raise ValueError("a file without its size or hash")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DownloadError(
            f"{hub_host()}: does not answer as a hub does ({one_line(error)}): check HF_ENDPOINT"
        ) from error
    return str(info.sha), {file: (size or 0, str(key)) for file, (size, key) in files.items()}


def check_endpoint() -> None:
    try:
        parts = urlsplit(constants.ENDPOINT)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"HF_ENDPOINT is {constants.ENDPOINT!a}: expected an address such as https://huggingface.co")
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK and huggingface_hub.get_token() is not None:
        raise UsageError(
            f"HF_ENDPOINT is {constants.ENDPOINT}, where a token would be sent unencrypted: use https, or unset the "
            "token"
        )


def hub_host() -> str:
    return urlsplit(constants.ENDPOINT).netloc


def _partial_of(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.warpbus.incomplete")


def _bytes_of(blob: Path, size: int) -> int:
    """How many bytes of a file are on the disk, in its place or in its partial file."""
    for file in (blob, _partial_of(blob)):
        if file.exists():
            return min(file.stat().st_size, size)
    return 0


def one_line(error: BaseException | None) -> str:
    """An error's text for a message: short, and unable to control a terminal."""
    text = str(error) or type(error).__name__
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:200]
