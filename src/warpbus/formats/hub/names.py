"""Names of models on hubs: `THUDM/chatglm2-6b`, `THUDM/chatglm2-6b@v1.0`, `modelscope:ZhipuAI/chatglm2-6b`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from warpbus.errors import UsageError

Source = Literal["huggingface", "modelscope"]
SOURCES: tuple[Source, ...] = get_args(Source)

_CACHED = re.compile(r"models--([A-Za-z0-9._-]+?)--([A-Za-z0-9._-]+)")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


@dataclass(frozen=True)
class ModelName:
    """A model on a hub. Names become folders of the cache: only what is harmless there gets this far.

    Attributes:
        source: the hub.
        repository: owner and model, `THUDM/chatglm2-6b`.
        revision: a branch, a tag or a commit; None is the hub's default branch.
    """

    source: Source
    repository: str
    revision: str | None = None

    @property
    def short(self) -> str:
        """The model without its owner."""
        return self.repository.partition("/")[2]

    def __str__(self) -> str:
        prefix = "" if self.source == "huggingface" else f"{self.source}:"
        return f"{prefix}{self.repository}" + ("" if self.revision is None else f"@{self.revision}")


def parse_name(text: str, *, revision: str | None = None, source: str | None = None) -> ModelName | None:
    """The model on a hub that a text names, or None where it is a path.

    A directory or file that is there is a path, and so is all that has not the form of a name.

    Args:
        text: `OWNER/MODEL`, with `modelscope:` or `huggingface:` before it where `source` does not say that, and with
            `@REVISION` behind it where `revision` does not say that.
        revision: see `ModelName`; with it, or with a source, the text cannot be a path.
        source: the hub.

    Raises:
        UsageError: the text, with a source or a revision, is not a name, or tells them twice and differently.
    """
    given = next((known for known in SOURCES if known == source), None)
    if source is not None and given is None:
        raise UsageError(f"source {source!a} is not known: expected {' or '.join(SOURCES)}")
    prefix, colon, rest = text.partition(":")
    named = next((known for known in SOURCES if colon and known == prefix), None)
    is_name = named is not None or given is not None or revision is not None
    if not is_name and Path(text).exists():
        return None
    repository, at, tail = (rest if named is not None else text).partition("@")
    owner, _, model = repository.partition("/")
    if not (_is_part(owner) and _is_part(model)):
        if is_name:
            raise UsageError(f"{text!a} is no name of a model on a hub: expected one such as THUDM/chatglm2-6b")
        return None
    if named is not None and given is not None and named != given:
        raise UsageError(f"{text} is on {named}, but source is {given}: leave one of them out")
    if at and revision is not None and tail != revision:
        raise UsageError(f"{text} names the revision {tail!a}, but revision is {revision!a}: leave one of them out")
    wanted = tail if at else revision
    if wanted is not None and not _is_revision(wanted):
        raise UsageError(f"{wanted!a} is no revision: expected a branch, a tag or a commit after the @ of {repository}")
    return ModelName(named or given or "huggingface", repository, wanted)


def _is_part(text: str) -> bool:
    return _PART.fullmatch(text) is not None and ".." not in text and "--" not in text


def _is_revision(text: str) -> bool:
    return _REVISION.fullmatch(text) is not None and all(
        part and not part.startswith(".") and ".." not in part for part in text.split("/")
    )


def cached_name(directory: Path) -> str | None:
    """The name on Hugging Face of a model in its cache, `OWNER/MODEL`; None for another directory."""
    found = (_CACHED.fullmatch(part) for part in directory.parts)
    return next((f"{match[1]}/{match[2]}" for match in found if match), None)
