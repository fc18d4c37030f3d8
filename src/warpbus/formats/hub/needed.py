"""Which files of a repository a model needs: configuration, vocabulary, templates, licence, and one form of weights.

Code is never among them. Weights are those that `Checkpoint` would read: `.bin` only where there are no safetensors.
"""

import json
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from warpbus.errors import CheckpointError
from warpbus.formats.checkpoint import shards_by_tensor

CONFIG = "config.json"

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
    "*.model",
    "*.tiktoken",
    "*LICENSE*",
)
# In the order in which `Checkpoint` looks for them.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")

MAX_SMALL_BYTES = 2**28


def small_files(names: Collection[str]) -> list[str]:
    """Those that go along with the weights, sorted."""
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in _SMALL))


def weights_file(names: Collection[str]) -> str | None:
    """The file of all weights, or the index of their files; None if there is neither."""
    return next((name for name in _WEIGHTS if name in names), None)


def is_index(name: str) -> bool:
    """Whether a file says where the weights are, and has none itself."""
    return name.endswith(".index.json")


def shards(index: Path, name: str) -> list[str]:
    """The files that an index names, sorted.

    Raises:
        CheckpointError: if it is none, or names files elsewhere.
    """
    try:
        parsed = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: is not JSON that can be read: the repository is damaged") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{name}: expected a JSON object, found {type(parsed).__name__}")
    return sorted(set(shards_by_tensor(name, parsed).values()))


def is_complete(directory: Path) -> bool:
    """Whether a directory has a configuration and all its weights. Downloads may have been cut, ours or others'."""
    if not (directory / CONFIG).is_file():
        return False
    weights = weights_file([name for name in _WEIGHTS if (directory / name).is_file()])
    if weights is None:
        return False
    try:
        parts = shards(directory / weights, weights) if is_index(weights) else []
    except CheckpointError:
        return False
    return all((directory / part).is_file() for part in parts)
