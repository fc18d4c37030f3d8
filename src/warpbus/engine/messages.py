"""What the service and the engine's processes say to each other. Pickled, on pipes between processes of ours alone.

Both sides collect what there is to say and say it at once: a message is a list of what stands here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from warpbus.dist import Group
from warpbus.dist.outcome import JobFailure
from warpbus.engine.moving import Moved
from warpbus.engine.options import ServiceOptions
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.sequence import Piece, Sequence
from warpbus.engine.stats import Stats
from warpbus.models import Progress

Query = Literal["stats", "sleep", "wake"]


@dataclass(frozen=True)
class Add:
    """To the engine: a request. `params` has a seed, so that all processes draw alike."""

    number: int
    prompt: list[int]
    params: SamplingParams
    adapter: str | None = None
    cache_salt: bytes = b""


@dataclass(frozen=True)
class Abort:
    """To the engine: nobody wants the request any more."""

    number: int


@dataclass(frozen=True)
class Ask:
    """To the engine: a question, or something to do while it has no work; `Reply` has the same number."""

    number: int
    query: Query


@dataclass(frozen=True)
class MoveTo:
    """To the engine: go on on another GPU; `Reply` has the same number."""

    number: int
    device: str


@dataclass(frozen=True)
class Stop:
    """To the engine: leave."""


@dataclass(frozen=True)
class Shrink:
    """To the engine: nobody has wanted anything for a while; it may give back what it keeps for later."""


Command = Add | Abort | Ask | MoveTo | Stop | Shrink


@dataclass(frozen=True)
class Loading:
    """From the engine: how many bytes of its weights have been read, of how many."""

    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    """From the engine: it takes commands."""

    max_model_len: int


@dataclass(frozen=True)
class Step:
    """From the engine: what a step brought, with the numbers of the requests."""

    pieces: list[tuple[int, Piece]]


@dataclass(frozen=True)
class RequestFailed:
    """From the engine: it does not take a request, or the request has failed by itself; nothing more comes of it."""

    number: int
    failure: JobFailure


@dataclass(frozen=True)
class Reply:
    """From the engine: the answer to `Ask` or `MoveTo`."""

    number: int
    answer: Stats | Moved | JobFailure | None


Event = Loading | Ready | Step | RequestFailed | Reply


class ServedEngine(Protocol):
    """What the service wants of an engine (`warpbus.engine.Engine`)."""

    max_model_len: int

    @property
    def has_work(self) -> bool:
        """There are sequences that wait or run."""
        ...

    def add(self, sequence: Sequence, /) -> None:
        """Queue a sequence. Raises `UsageError` or `ContextLengthError` where it is refused."""
        ...

    def abort(self, sequence: Sequence, /) -> None:
        """Forget a sequence; there are no further pieces of it."""
        ...

    def step(self) -> list[tuple[Sequence, Piece]]:
        """Compute some tokens. A sequence that failed by itself has an `error`; nothing more comes of it."""
        ...

    def stats(self) -> Stats:
        """Its counters."""
        ...

    def shrink(self) -> None:
        """Give back the memory that no sequence needs."""
        ...

    def sleep(self) -> None:
        """Give the device's memory back; only without work."""
        ...

    def wake(self) -> None:
        """Get it back."""
        ...


LoadEngine = Callable[[Path, ServiceOptions, Group, Progress], ServedEngine]
"""`load(model, options, group, progress)`: the engine of a process of `group`, warm; a function of a module."""
