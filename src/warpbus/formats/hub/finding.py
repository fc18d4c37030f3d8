"""`find_model` and `pull`: from a model's name to a directory on the disk."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from warpbus.errors import CheckpointError, DownloadError, UsageError, WarpbusError
from warpbus.formats.files import read_json
from warpbus.formats.gguf.view import directory_of
from warpbus.formats.hub import huggingface, modelscope
from warpbus.formats.hub.names import ModelName, parse_name
from warpbus.formats.hub.needed import CONFIG, Progress, Repository, is_index, shards, small_files, weights_file

DEMO = "demo"
"""The name of the packaged model."""

_DEMO_DIRECTORY = Path(__file__).parents[2] / "demo" / "glm-poet"

MAX_SMALL_BYTES = 2**28
"""The largest file that is accepted beside the weights."""

Check = Callable[[dict[str, Any]], object]
"""Called with a `config.json` before weights are downloaded; an error that it raises prevents the download."""


@dataclass(frozen=True)
class Pulled:
    """A model that is on the disk.

    Attributes:
        name: the name that was asked for.
        commit: the state of the repository; None for ModelScope.
        directory: where the model is.
        files: the number of its files.
        nbytes: the size of all files.
        downloaded: how many bytes were received.
    """

    name: ModelName
    commit: str | None
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

    `DEMO` is the packaged model. A path is returned unchanged, whether or not it exists, unless it is that of a GGUF
    file: the result is then the directory that stands for it (`formats.gguf.view`). A name on a hub is looked up
    in the cache of the hub's library; the network is used only if the cached model is missing or incomplete. A branch
    that has moved since is therefore not noticed: `pull` asks the hub.

    Args:
        name: a path, or a name as `parse_name` understands it, such as `THUDM/chatglm2-6b`.
        revision: a branch, a tag or a commit, where it is not in the name.
        source: the hub, where it is not in the name.
        download: False: a model that is not on the disk is an error.
        progress: called while files arrive.
        check: called before weights are downloaded; not for a model that is on the disk, which is checked when it is
            loaded.

    Raises:
        WarpbusError: errors that `check` raises, preceded by the model's name.
        UsageError: the name is empty, cannot be one, or contradicts the other arguments.
        DownloadError: the model is not on the disk, and the hub does not deliver it.
        CheckpointError: the hub's files are not a model that Warpbus reads, or the packaged model is missing.
        StorageError: the disk is full or cannot be written.
    """
    if name == "":
        raise UsageError("the model's name is empty: give a directory, a name on a hub, or demo")
    if name == DEMO:
        if not _DEMO_DIRECTORY.exists():
            raise CheckpointError(f"{_DEMO_DIRECTORY}: the packaged demo is incomplete: install warpbus again")
        return _DEMO_DIRECTORY
    if Path(name).is_file():
        return directory_of(Path(name))
    named = None if isinstance(name, Path) else parse_name(name, revision=revision, source=source)
    if named is None:
        return Path(name)
    found = (modelscope if named.source == "modelscope" else huggingface).find_cached(named)
    if found is not None:
        return found
    if not download:
        raise DownloadError(f"{named}: is not on this disk: get it with `warpbus pull {named}`")
    return _download(named, progress, check).directory


def pull(
    name: str, *, revision: str | None = None, source: str | None = None, progress: Progress | None = None
) -> Pulled:
    """Ask a hub for the files of a model, and download those that are not on the disk.

    An interrupted download continues where it stopped. Arguments and errors: see `find_model`.
    """
    named = parse_name(name, revision=revision, source=source)
    if named is None:
        raise UsageError(f"{name!a} is a path, or no name of a model on a hub: expected one such as THUDM/chatglm2-6b")
    return _download(named, progress, None)


def _download(name: ModelName, progress: Progress | None, check: Check | None) -> Pulled:
    if constants.HF_HUB_OFFLINE:
        raise DownloadError(f"{name}: not downloaded, since HF_HUB_OFFLINE is set: unset it, or give a directory")
    repository = _open(name)
    sizes = repository.sizes
    weights = weights_file(sizes)
    if CONFIG not in sizes or weights is None:
        lacks = CONFIG if CONFIG not in sizes else "model.safetensors or pytorch_model.bin, whole or in shards"
        raise DownloadError(f"{name}: has no {lacks}: expected a model in Hugging Face's layout")
    needed = small_files(sizes)
    for file in [*needed, weights] if is_index(weights) else needed:
        if sizes[file] > MAX_SMALL_BYTES:
            raise DownloadError(f"{name}: {file} has {sizes[file]:,} bytes, more than such a file needs: refused")
    downloaded = 0
    if check is not None:
        downloaded += repository.fetch([CONFIG])
        _check(name, repository.directory / CONFIG, check)
    parts = [weights]
    if is_index(weights):
        downloaded += repository.fetch([weights])
        parts += shards(repository.directory / weights)
        missing = [part for part in parts if part not in sizes]
        if missing:
            raise DownloadError(f"{name}: {missing[0]}, named by {weights}, is not there: the repository is damaged")
    # The weights come last: a directory that has them has all other files, too.
    downloaded += repository.fetch(needed)
    downloaded += repository.fetch([*needed, *parts], progress)
    repository.publish()
    nbytes = sum(sizes[file] for file in (*needed, *parts))
    return Pulled(name, repository.commit, repository.directory, len(needed) + len(parts), nbytes, downloaded)


def _open(name: ModelName) -> Repository:
    if name.source == "modelscope":
        return modelscope.ModelScopeRepository(name)
    return huggingface.HuggingFaceRepository(name)


def _check(name: ModelName, config: Path, check: Check) -> None:
    read = read_json(config)
    if not isinstance(read, dict):
        raise CheckpointError(f"{name}: {CONFIG} is no JSON object: the repository is damaged")
    try:
        check(read)
    except WarpbusError as error:
        raise type(error)(f"{name}: {error}") from None
