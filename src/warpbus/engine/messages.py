"""The messages between the service and the engine's processes. Pickled, on pipes between our own processes only.

Both sides batch: what is sent is a list of commands, or a list of events.
"""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from warpbus.dist import Group
from warpbus.dist.outcome import JobFailure
from warpbus.engine.moving import Moved
from warpbus.engine.options import ServiceOptions
from warpbus.engine.plan import MemoryPlan
from warpbus.engine.sampling_params import Grammar, SamplingParams
from warpbus.engine.sequence import Sequence, TextPiece
from warpbus.engine.stats import Stats
from warpbus.models import Progress

Query = Literal["stats", "sleep", "wake", "forget"]


@dataclass(frozen=True)
class Add:
    """To the engine: a request. With several processes `params` has a seed, so that all draw the same numbers."""

    number: int
    prompt: list[int]
    params: SamplingParams
    adapter: str | None = None
    cache_salt: bytes = b""


@dataclass(frozen=True)
class Abort:
    """To the engine: drop a request."""

    number: int


@dataclass(frozen=True)
class Ask:
    """To the engine: a query, or an action for which it must have no work; `Reply` has the same number."""

    number: int
    query: Query


@dataclass(frozen=True)
class CompileGrammar:
    """From the engine's first process to the others: begin to compile the grammar of a request that comes later."""

    grammar: Grammar


@dataclass(frozen=True)
class MoveTo:
    """To the engine: move to another GPU; `Reply` has the same number."""

    number: int
    device: str


@dataclass(frozen=True)
class UseAdapters:
    """To the engine: have these adapters, (name, directory) of each; `Reply` has the same number."""

    number: int
    adapters: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Stop:
    """To the engine: end the process."""


@dataclass(frozen=True)
class Shrink:
    """To the engine, which has had no work for a while: return the memory of the prefix cache."""


Command = Add | Abort | Ask | CompileGrammar | MoveTo | UseAdapters | Stop | Shrink


@dataclass(frozen=True)
class Loading:
    """From the engine: how many bytes of its weights are read, and how many there are."""

    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    """From the engine: it accepts commands. `plan` is that of its memory, if there is one."""

    max_model_len: int
    plan: MemoryPlan | None = None


@dataclass(frozen=True)
class StepResults:
    """From the engine: the results of a step, with the numbers of the requests."""

    pieces: list[tuple[int, TextPiece]]

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        # Pickling 256 pieces as plain tuples takes a third of the time, and unpickling two thirds.
        return _unpickled_results, ([(number, tuple(piece)) for number, piece in self.pieces],)


def _unpickled_results(pieces: abc.Sequence[tuple[int, tuple[Any, ...]]]) -> StepResults:
    return StepResults([(number, TextPiece._make(piece)) for number, piece in pieces])


@dataclass(frozen=True)
class RequestFailed:
    """From the engine: it refused a request, or the request failed by itself; it has ended."""

    number: int
    failure: JobFailure


@dataclass(frozen=True)
class Reply:
    """From the engine: the answer to `Ask`, `MoveTo` or `UseAdapters`."""

    number: int
    answer: Stats | Moved | JobFailure | None


Event = Loading | Ready | StepResults | RequestFailed | Reply


class ServedEngine(Protocol):
    """The part of `warpbus.engine.Engine` that the serving process uses."""

    max_model_len: int
    plan: MemoryPlan | None

    @property
    def has_work(self) -> bool:
        """Sequences wait or run."""
        ...

    def add(self, sequence: Sequence, /) -> None:
        """Queue a sequence. Raises `UsageError` or `ContextLengthError` if it is refused."""
        ...

    def abort(self, sequence: Sequence, /) -> None:
        """Drop a sequence; it gets no further tokens."""
        ...

    def step(self) -> list[tuple[Sequence, TextPiece]]:
        """Compute some tokens. A sequence that failed by itself has an `error` and has ended."""
        ...

    def stats(self) -> Stats:
        """Counters and gauges."""
        ...

    def shrink(self, *, keep: bool = True) -> None:
        """Return the cache memory that no sequence needs; without `keep`, main memory forgets its blocks, too."""
        ...

    def save(self) -> None:
        """Write what the next process can use to the disk, if there is one; the last call."""
        ...

    def sleep(self) -> None:
        """Offload the model and return the device's memory; only without work."""
        ...

    def wake(self) -> None:
        """Load the model to the device again."""
        ...


LoadEngine = Callable[[Path, ServiceOptions, Group, Progress], ServedEngine]
"""`load(model, options, group, progress)`: creates the warm engine of a process of `group`; a module-level function."""
