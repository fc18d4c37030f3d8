"""Models of ModelScope, through its library `modelscope_hub` (the extra `modelscope`): cache, tokens, resume, SHA-256.

The library keeps the files of a revision in one directory and replaces those that have changed; it draws its own
progress bars.
"""

import importlib
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from warpbus.errors import DownloadError, UsageError
from warpbus.formats.files import check_space, storage_error
from warpbus.formats.hub.names import ModelName
from warpbus.formats.hub.needed import Progress, is_complete, is_plain

_MODEL = "model"  # rather than a data set


def find_cached(name: ModelName) -> Path | None:
    """The directory of a model in the library's cache if it is complete; the network is not used."""
    hub = _library()
    try:
        directory = hub.HubApi(hub.HubConfig()).download_repo(
            name.repository, _MODEL, revision=name.revision, local_files_only=True
        )
    except hub.CacheNotFound:
        return None
    return Path(directory) if is_complete(Path(directory)) else None


class ModelScopeRepository:
    """A model of ModelScope; see `needed.Repository`.

    Raises:
        DownloadError: the hub cannot be reached, or does not give access to such a model or revision.
        UsageError: the extra `modelscope` is not installed.
    """

    def __init__(self, name: ModelName) -> None:
        self._name = name
        self._hub = _library()
        self._config = self._hub.HubConfig()
        self._api = self._hub.HubApi(self._config)
        with self._translated():
            listed = self._api.list_repo_files(name.repository, _MODEL, revision=name.revision)
        files = [file for file in listed if not file.is_dir and is_plain(file.path)]
        self._listing = {file.path: {"Path": file.path, "Size": file.size, "Sha256": file.sha256} for file in files}
        self.sizes = {file.path: file.size for file in files}
        self.directory = self._download([])

    @property
    def commit(self) -> None:
        """See `needed.Repository`: the library tells none."""
        return None

    def fetch(self, names: Iterable[str], progress: Progress | None = None) -> int:
        """See `needed.Repository`. `progress` is called at the end only."""
        wanted = list(names)
        absent = [name for name in wanted if not (self.directory / name).exists()]
        check_space(self.directory, sum(self.sizes[name] for name in absent))
        self._download(wanted)
        total = sum(self.sizes[name] for name in wanted)
        if progress is not None:
            progress(total, total)
        return sum(self.sizes[name] for name in absent)

    def publish(self) -> None:
        """See `needed.Repository`: the directory has the revision's name from the beginning."""

    def _download(self, names: list[str]) -> Path:
        """Download the files that have changed or are absent; the directory."""
        listing = [self._listing[name] for name in names]
        with self._translated():
            return Path(
                self._api.download_repo(self._name.repository, _MODEL, revision=self._name.revision, file_list=listing)
            )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Let errors of the library, the network and the disk become ours."""
        host = urlsplit(self._config.endpoint or "https://www.modelscope.cn").netloc
        try:
            yield
        except self._hub.FileDownloadError as error:
            failed, cause = next(iter(error.failed_files.items()))
            raise DownloadError(
                f"{self._name}: {failed}: {host} did not deliver it ({_one_line(cause)}): check the network and run "
                "the same command again, which continues where this one stopped"
            ) from error
        except self._hub.NotExistError as error:
            raise DownloadError(
                f"{self._name}: there is no such model or revision on {host}: check the name"
            ) from error
        except self._hub.HubError as error:
            raise DownloadError(
                f"{self._name}: {host} cannot be used ({_one_line(error)}): check the network, MODELSCOPE_ENDPOINT "
                "and, for a private model, MODELSCOPE_API_TOKEN; or give a directory with the model"
            ) from error
        except OSError as error:
            raise storage_error(Path(self._config.cache_dir), error, needed=0) from error


def _library() -> Any:
    try:
        hub = importlib.import_module("modelscope_hub")
    except ImportError:
        raise UsageError("models of ModelScope need its library: pip install 'warpbus[modelscope]'") from None
    logging.getLogger("modelscope_hub").setLevel(logging.CRITICAL)  # its errors are raised, too
    return hub


def _one_line(error: BaseException) -> str:
    """The first line of an error, unable to control a terminal.

    Of a failed connection only the beginning: the library appends the Python object and the address of the request.
    """
    text = next(iter(str(error).splitlines()), type(error).__name__)
    text = re.split(r": _?\w+\(host=", text, maxsplit=1)[0]
    return "".join(char if char.isprintable() else " " for char in text)[:200]
