"""Models on this disk that came from hubs, in the layout of Hugging Face's cache, which its programs share with us.

A repository has a folder with three in it: `blobs`, each file under its hash; `snapshots`, for each state of the
repository a folder of links into `blobs`; and `refs`, which say what state a branch or tag was when it was last asked
for. Models of ModelScope are kept in the same layout, in a folder of Warpbus; those that its own programs have
brought are found, too.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from warpbus.formats.files import replace_file, storage_error
from warpbus.formats.hub.names import ModelName
from warpbus.formats.hub.needed import is_complete
from warpbus.formats.hub.repository import default_revision, huggingface_home
from warpbus.formats.hub.transfer import RemoteFile

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class CachedRepository:
    """What is on the disk of a model, and where more of it goes."""

    def __init__(self, name: ModelName) -> None:
        self._name = name
        self.directory = _root(name) / f"models--{name.repository.replace('/', '--')}"

    def find(self) -> Path | None:
        """The directory of the model, complete, or None; the network is not asked."""
        revision = default_revision(self._name)
        commit: str | None = revision
        if _COMMIT.fullmatch(revision) is None:
            commit = None
            with suppress(OSError, ValueError):
                commit = (self.directory / "refs" / revision).read_text(encoding="ascii").strip()
        if commit is not None and _COMMIT.fullmatch(commit) and is_complete(self.snapshot(commit)):
            return self.snapshot(commit)
        if self._name.source == "modelscope" and self._name.revision is None:
            return next((path for path in _modelscope_directories(self._name.repository) if is_complete(path)), None)
        return None

    def snapshot(self, commit: str) -> Path:
        """Where a state of the repository is, or is to be."""
        return self.directory / "snapshots" / commit

    def blob(self, file: RemoteFile) -> Path:
        """Where the content of a file is, or is to be."""
        return self.directory / "blobs" / file.key

    def has(self, file: RemoteFile) -> bool:
        """Whether the content of a file is there."""
        try:
            return self.blob(file).stat().st_size == file.size
        except OSError:
            return False

    def make(self) -> None:
        """Make the folders. Raises StorageError where that cannot be."""
        try:
            (self.directory / "blobs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(self.directory, error, needed=0) from error

    def publish(self, commit: str, revision: str, files: list[RemoteFile]) -> Path:
        """Let a state appear, all of whose files are there, and a revision mean it.

        Args:
            files: the last of them makes the directory complete for those who look.

        Raises:
            StorageError: it cannot be written.
        """
        snapshot = self.snapshot(commit)
        try:
            snapshot.mkdir(parents=True, exist_ok=True)
            for file in files:
                _link(self.blob(file), snapshot / file.name)
        except OSError as error:
            raise storage_error(snapshot, error, needed=0) from error
        if revision != commit:
            replace_file(self.directory / "refs" / revision, lambda partial: partial.write_text(commit))
        return snapshot


def _link(blob: Path, place: Path) -> None:
    if place.exists() and place.samefile(blob):
        return
    place.unlink(missing_ok=True)
    place.symlink_to(os.path.relpath(blob, place.parent))


def _root(name: ModelName) -> Path:
    if name.source == "huggingface":
        root = os.environ.get("HF_HUB_CACHE")
        return Path(root).expanduser() if root else huggingface_home() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache") / "warpbus" / "modelscope"


def _modelscope_directories(repository: str) -> list[Path]:
    """Where ModelScope's own programs put a model; some versions write its dots in another way."""
    root = os.environ.get("MODELSCOPE_CACHE")
    hub = Path(root).expanduser() if root else Path.home() / ".cache" / "modelscope" / "hub"
    owner, _, model = repository.partition("/")
    return [
        place / owner / spelled
        for place in (hub / "models", hub, hub / "hub" / "models", hub / "hub")
        for spelled in dict.fromkeys((model, model.replace(".", "___")))
    ]
