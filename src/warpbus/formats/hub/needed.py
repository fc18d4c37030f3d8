"""The files of a repository that a model needs: configuration, vocabulary, templates, licence, one form of weights.

Code is never among them. The weights are those that `Checkpoint` reads: `.bin` files only where the repository has no
safetensors.
"""

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from warpbus.errors import CheckpointError
from warpbus.formats.checkpoint import shards_by_tensor
from warpbus.formats.companions import ADDITIONAL_TEMPLATES
from warpbus.formats.files import read_json

CONFIG = "config.json"

Progress = Callable[[int, int], None]
"""Called with the number of bytes on the disk and the number of bytes of all files."""

_SMALL = (
    CONFIG,
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template*.jinja",
    "chat_template.json",
    f"{ADDITIONAL_TEMPLATES}/*.jinja",
    "*.model",
    "*.tiktoken",
    "*LICENSE*",
)
# In the order in which `Checkpoint` looks for them.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_PLAIN = re.compile(rf"({ADDITIONAL_TEMPLATES}/(?=[^/]+\.jinja$))?[A-Za-z0-9_+-][A-Za-z0-9._+-]{{0,254}}")


class Repository(Protocol):
    """A model on a hub, at one state.

    Attributes:
        directory: where its files are on the disk once they are fetched.
        sizes: the size in bytes of each file, by its path; only those of `is_plain`.
    """

    directory: Path
    sizes: dict[str, int]

    @property
    def commit(self) -> str | None:
        """The name of the state, or None where the hub's library does not tell it."""

    def fetch(self, names: Iterable[str], progress: Progress | None = None) -> int:
        """Download files that are not on the disk; the number of bytes received.

        Raises:
            DownloadError: the hub does not deliver a file, or the network fails; the same call continues later.
            StorageError: the disk is full or cannot be written.
        """

    def publish(self) -> None:
        """Let the revision that was asked for mean `directory`, now that all files are there."""


def is_plain(name: str) -> bool:
    """Whether a file that a hub lists is outside all folders, or a chat template in the folder of those, with a name
    that is safe on every file system."""
    return _PLAIN.fullmatch(name) is not None


def small_files(names: Iterable[str]) -> list[str]:
    """The files that go along with the weights, sorted."""
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in _SMALL))


def weights_file(names: Iterable[str]) -> str | None:
    """The file of all weights, or the index of their shards; None if there is neither."""
    there = set(names)
    return next((name for name in _WEIGHTS if name in there), None)


def is_index(name: str) -> bool:
    """Whether a file of `weights_file` is an index of shards."""
    return name.endswith(".index.json")


def shards(index: Path) -> list[str]:
    """The files that an index names, sorted.

    Raises:
        CheckpointError: it is not an index, or names files in other directories.
    """
    parsed = read_json(index)
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{index.name}: expected a JSON object: the repository is damaged")
    return sorted(set(shards_by_tensor(index.name, parsed).values()))


def is_complete(directory: Path) -> bool:
    """Whether a directory has a configuration and all its weights: a download may have been interrupted."""
    weights = weights_file(name for name in _WEIGHTS if (directory / name).is_file())
    if weights is None or not (directory / CONFIG).is_file():
        return False
    try:
        parts = shards(directory / weights) if is_index(weights) else []
    except CheckpointError:
        return False
    return all((directory / part).is_file() for part in parts)
