"""Models of ModelScope, through its library `modelscope_hub` (the extra `modelscope`): cache, tokens, resume, SHA-256,
uploads.

The library keeps the files of a revision in one directory and replaces those that have changed; it draws its own
progress bars.
"""

import importlib
import logging
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from warpbus.errors import DownloadError, UploadError, UsageError, WarpbusError
from warpbus.formats.files import check_space, storage_error
from warpbus.formats.hub.names import ModelName
from warpbus.formats.hub.needed import Progress, is_complete, is_plain

_MODEL = "model"  # rather than a data set
_ENDPOINT = "https://www.modelscope.cn"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


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
        host = urlsplit(self._config.endpoint or _ENDPOINT).netloc
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


def upload(
    files: Mapping[str, Path | bytes], name: ModelName, *, private: bool, message: str, licence: str | None
) -> str:
    """Create the repository if there is none, and commit the files to its main branch; the address of its page.

    Files of more than 64 KB are sent first, and not again if the hub has them. The library commits up to 256 files at
    once.

    Args:
        files, private, message: as `pushing.push`.
        licence: of a repository that is created.

    Raises:
        UsageError: the extra `modelscope` is not installed, there is no token, MODELSCOPE_ENDPOINT is not an address to
            send it to, or a repository is to be created without a licence.
        UploadError: the hub refuses, or cannot be reached.
    """
    hub = _library()
    config = hub.HubConfig()
    endpoint = config.endpoint or _ENDPOINT
    host = urlsplit(endpoint)
    if host.scheme != "https" and host.hostname not in _LOOPBACK:
        raise UsageError(
            f"MODELSCOPE_ENDPOINT is {endpoint}, where a token would be sent unencrypted: expected an address such as "
            f"{_ENDPOINT}"
        )
    if not config.token:
        raise UsageError(
            "no ModelScope token was found: set MODELSCOPE_API_TOKEN to one with write permission, or run "
            "`ms-hub login`"
        )
    api = hub.HubApi(config)
    with tempfile.TemporaryDirectory(prefix="warpbus-push-") as folder, _translated_upload(hub, name, host.netloc):
        for file, content in files.items():
            if isinstance(content, bytes):
                (Path(folder) / file).write_bytes(content)
            else:
                (Path(folder) / file).symlink_to(content.resolve())
        if not api.repo_exists(name.repository, _MODEL):
            if licence is None:
                raise UsageError(
                    f"{name}: the repository is created, for which ModelScope records a licence: name it with --license"
                )
            visibility = "private" if private else "public"
            api.create_repo(name.repository, _MODEL, visibility=visibility, license=licence)
        with redirect_stdout(sys.stderr):  # it prints what it did
            api.upload_folder(name.repository, _MODEL, folder, commit_message=message, use_cache=False)
    return f"{endpoint.rstrip('/')}/models/{name.repository}"


@contextmanager
def _translated_upload(hub: Any, name: ModelName, host: str) -> Iterator[None]:
    """Let errors of the library and the network become ours."""
    try:
        yield
    except WarpbusError:
        raise
    except (hub.AuthenticationError, hub.PermissionDeniedError, hub.NotExistError) as error:
        raise UploadError(
            f"{name}: {host} answers {error.status_code}: the token's account may not write there: check the name, and "
            "that the token may write"
        ) from error
    except (hub.HubError, OSError, ValueError, RuntimeError) as error:
        raise UploadError(
            f"{name}: the upload to {host} failed ({_one_line(error)}): run the same command again; files that arrived "
            "are not sent again"
        ) from error


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
