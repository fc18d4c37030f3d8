"""What a hub has under a name: its files, with sizes and hashes. Each hub has its own way to say so."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlencode

from warpbus.errors import DownloadError
from warpbus.formats.hub.http import Connection, one_line
from warpbus.formats.hub.names import ModelName
from warpbus.formats.hub.transfer import RemoteFile

MAX_TOKEN_BYTES = 4096
MAX_FILE_BYTES = 2**50
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_PLAIN = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,254}")


@dataclass(frozen=True)
class Repository:
    """A model at one state.

    Attributes:
        connection: to the hub.
        commit: what the state is called, 40 or 64 hexadecimal digits; it never means another one.
        revision: what was asked for: a branch, a tag or the commit.
        files: those at its top, by name. Files in folders belong to other programs.
        refused: what to raise where the hub does not give a file of it.
    """

    connection: Connection
    commit: str
    revision: str
    files: dict[str, RemoteFile]
    refused: Callable[[HTTPError], DownloadError]


def open_repository(name: ModelName) -> Repository:
    """Ask a hub what it has under a name.

    Raises:
        DownloadError: the hub cannot be reached, has no such model or revision, or does not let you have it.
        UsageError: the address of the hub, of the environment, is none.
    """
    return _huggingface(name) if name.source == "huggingface" else _modelscope(name)


def default_revision(name: ModelName) -> str:
    """The revision that a name means: its own, or its hub's default branch."""
    return name.revision or ("main" if name.source == "huggingface" else "master")


def huggingface_home() -> Path:
    """Where Hugging Face's programs keep models and a token: `$HF_HOME`, else `huggingface` in the user's cache."""
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache") / "huggingface"


def _huggingface(name: ModelName) -> Repository:
    # The protocol of huggingface.co, which its mirrors speak too: hf.co/docs/hub/api.
    connection = Connection(os.environ.get("HF_ENDPOINT") or "https://huggingface.co", _huggingface_token())
    revision = default_revision(name)
    refused = partial(_refused_by_huggingface, connection, name, revision)
    try:
        told = connection.json(f"/api/models/{name.repository}/revision/{quote(revision, safe='')}?blobs=true")
    except HTTPError as error:
        with error:
            raise refused(error) from None
    commit, siblings = _field(told, "sha"), _field(told, "siblings")
    if not (isinstance(commit, str) and _SHA1.fullmatch(commit) and isinstance(siblings, list)):
        raise _not_a_listing(connection)
    files = []
    for file in _top_files(connection, siblings, "rfilename"):
        large = file.get("lfs")
        key = large.get("sha256") if isinstance(large, dict) else file.get("blobId")
        files.append((file["rfilename"], file.get("size"), key))
    path = f"/{name.repository}/resolve/{commit}/"
    listed = _remote_files(connection, files, lambda file: path + quote(file))
    return Repository(connection, commit, revision, listed, refused)


def _modelscope(name: ModelName) -> Repository:
    # The public API of modelscope.cn. It names no commit for a branch: what the listing says stands for it.
    connection = Connection(os.environ.get("MODELSCOPE_ENDPOINT") or "https://www.modelscope.cn")
    revision = default_revision(name)
    path = f"/api/v1/models/{name.repository}/repo"

    def refused(error: HTTPError) -> DownloadError:
        return _refused_by_modelscope(connection, name, revision, f"{error.code} {error.reason}")

    try:
        told = connection.json(f"{path}/files?{urlencode({'Revision': revision, 'Recursive': 'True'})}")
    except HTTPError as error:
        with error:
            raise refused(error) from None
    if _field(told, "Code") != 200:
        message = _field(told, "Message")
        raise _refused_by_modelscope(connection, name, revision, message if isinstance(message, str) else "no reason")
    listed = _field(_field(told, "Data"), "Files")
    if not isinstance(listed, list):
        raise _not_a_listing(connection)
    found = [file for file in _top_files(connection, listed, "Path") if file.get("Type") != "tree"]
    files = _remote_files(
        connection,
        [(file["Path"], file.get("Size"), file.get("Sha256")) for file in found],
        lambda file: f"{path}?{urlencode({'Revision': revision, 'FilePath': file})}",
    )
    state = "".join(f"{file.name} {file.size} {file.key}\n" for _, file in sorted(files.items()))
    return Repository(connection, hashlib.sha256(state.encode()).hexdigest(), revision, files, refused)


def _top_files(connection: Connection, listed: list[Any], key: str) -> Iterable[dict[str, Any]]:
    """The files of a listing that are in no folder and have a plain name."""
    for file in listed:
        name = _field(file, key)
        if not isinstance(name, str):
            raise _not_a_listing(connection)
        if name.startswith("/") or "\\" in name or ".." in name.split("/"):
            raise DownloadError(
                f"{connection.host}: lists the file {name!a}, which would be written elsewhere: refused"
            )
        if _PLAIN.fullmatch(name):
            yield file


def _remote_files(
    connection: Connection, listed: list[tuple[str, Any, Any]], path_of: Callable[[str], str]
) -> dict[str, RemoteFile]:
    files = {}
    for name, size, key in listed:
        has_hash = isinstance(key, str) and (_SHA256.fullmatch(key) or _SHA1.fullmatch(key))
        if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES or not has_hash:
            raise DownloadError(f"{connection.host}: lists {name} without its size and hash: try another source")
        files[name] = RemoteFile(name, path_of(name), size, key)
    return files


def _field(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _not_a_listing(connection: Connection) -> DownloadError:
    return DownloadError(f"{connection.host}: does not answer as a hub does (no list of files): check its address")


def _huggingface_token() -> str | None:
    """The user's token: of the environment, or as Hugging Face's own command has stored it."""
    token = os.environ.get("HF_TOKEN", "").strip()
    if token:
        return token
    try:
        with (huggingface_home() / "token").open(encoding="utf-8") as file:
            return file.read(MAX_TOKEN_BYTES).strip() or None
    except (OSError, ValueError):
        return None


def _refused_by_huggingface(connection: Connection, name: ModelName, revision: str, error: HTTPError) -> DownloadError:
    page = f"{connection.endpoint}/{name.repository}"
    kind = error.headers.get("X-Error-Code") if error.headers is not None else None
    if kind == "RevisionNotFound":
        return DownloadError(f"{name.repository}: has no revision {revision} on {connection.host}: see {page}")
    if kind == "GatedRepo":
        who = "the token's account" if connection.has_token else "your account, and set HF_TOKEN to a token of it"
        return DownloadError(f"{name.repository}: is gated: accept its terms at {page} with {who}")
    if error.code == 401:
        advice = (
            "the token is not valid, or its account may not see it"
            if connection.has_token
            else "set HF_TOKEN if it is private"
        )
        return DownloadError(f"{name.repository}: is not on {connection.host}, or is private: check the name; {advice}")
    if error.code == 404 and kind in (None, "RepoNotFound"):
        return DownloadError(
            f"{name.repository}: there is no such directory, and no such model on {connection.host}: check the name"
        )
    return DownloadError(
        f"{name.repository}: {connection.host} answers {error.code} {one_line(error.reason)}: try again later, or "
        "another source"
    )


def _refused_by_modelscope(connection: Connection, name: ModelName, revision: str, reason: str) -> DownloadError:
    return DownloadError(
        f"{name}: {connection.host} gives no files of its revision {revision} ({one_line(reason)}): check the name; a "
        "private model has to be downloaded with ModelScope's own command and given as a directory"
    )
