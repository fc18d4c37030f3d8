"""Requests that are sent as clients would send them, and what they got, for any engine or server.

Closed loop: so many clients, each of which sends its next request when the last one is answered. Open loop: requests
arrive when they like, at the moments of a Poisson process, however busy the engine is. What is open is counted from
the moment at which a request was due, so that a sender that comes late makes nothing look faster.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from warpbus.models import ModelConfig

QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}

_VARIED = 2**31


@dataclass(frozen=True)
class Load:
    """Requests, in the order in which they are sent.

    Attributes:
        prompts: token ids of each.
        tokens: that each one's answer has.
        concurrency: clients of a closed loop.
        arrivals: for an open loop, seconds from the start at which each is due, rising; else empty.
    """

    prompts: Sequence[list[int]]
    tokens: int
    concurrency: int = 0
    arrivals: Sequence[float] = ()


def prompt_end(config: ModelConfig) -> tuple[int, ...]:
    """The token ids that must end each prompt of a model: <sop> for ChatGLM-6B, and none for all others."""
    return () if config.prompt_end is None else (config.prompt_end,)


def random_prompts(count: int, length: int, vocabulary: int, seed: int, end: Sequence[int] = ()) -> list[list[int]]:
    """Prompts of random token ids, no two of which begin alike; all end in `end`, where a model's prompts need that."""
    drawn = random.Random(seed)
    found = [drawn.choices(range(vocabulary), k=length) for _ in range(count)]
    return [[*prompt[: length - len(end)], *end] for prompt in found]


def closed(
    count: int, concurrency: int, *, prompt: int, tokens: int, vocabulary: int, seed: int, end: Sequence[int] = ()
) -> Load:
    """A closed loop of `count` requests of `prompt` random tokens."""
    return Load(random_prompts(count, prompt, vocabulary, seed, end), tokens, concurrency=concurrency)


def poisson(
    count: int, rate: float, *, prompt: int, tokens: int, vocabulary: int, seed: int, end: Sequence[int] = ()
) -> Load:
    """An open loop of `count` requests, `rate` a second on the average."""
    drawn, at = random.Random(_VARIED + seed), 0.0
    arrivals = []
    for _ in range(count):
        at += drawn.expovariate(rate)
        arrivals.append(at)
    return Load(random_prompts(count, prompt, vocabulary, seed, end), tokens, arrivals=arrivals)


@dataclass
class Trace:
    """One request: when it was sent, or due; when something of its answer came; and the tokens of it."""

    sent: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0

    def came(self, when: float, tokens: int) -> None:
        """Note a piece of the answer."""
        self.times.append(when)
        self.tokens += tokens


class RequestSource:
    """Says which requests of a load are to be sent now. `now` is seconds from the start."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._next = 0

    @property
    def exhausted(self) -> bool:
        """All have been sent."""
        return self._next == len(self._load.prompts)

    def due(self, now: float, pending: int) -> list[tuple[list[int], Trace]]:
        """The prompts to send while `pending` are unanswered."""
        load, first = self._load, self._next
        if load.arrivals:
            while not self.exhausted and load.arrivals[self._next] <= now:
                self._next += 1
        else:
            self._next = min(len(load.prompts), first + load.concurrency - pending)
        sent = [load.arrivals[at] if load.arrivals else now for at in range(first, self._next)]
        return [(load.prompts[first + at], Trace(when)) for at, when in enumerate(sent)]

    def wait(self, now: float) -> float:
        """Seconds until one is due by the clock; infinite where none will be."""
        if self.exhausted or not self._load.arrivals:
            return math.inf
        return max(0.0, self._load.arrivals[self._next] - now)


@dataclass(frozen=True)
class HostTimes:
    """The resources of an engine's process that a load took.

    Attributes:
        steps: how many there were.
        stepping, planning, launching: seconds in steps, and those of them in which the host chose who is computed, and
            in which it prepared and launched that.
        preemptions: how often a request gave its blocks back.
        cache_bytes: the most that the cache took.
    """

    steps: int
    stepping: float
    planning: float
    launching: float
    preemptions: int
    cache_bytes: int


@dataclass(frozen=True)
class Figures:
    """The results of the requests of a load.

    Attributes:
        tokens_per_second, requests_per_second: of all answers, from the first request to the last token.
        first_token: seconds from each request to its first token, ascending.
        between_tokens: seconds between what arrived of an answer, of all answers, ascending.
        host: where the engine is in this process.
    """

    tokens_per_second: float
    requests_per_second: float
    first_token: Sequence[float]
    between_tokens: Sequence[float]
    host: HostTimes | None = None

    @classmethod
    def of(cls, traces: Sequence[Trace], host: HostTimes | None = None) -> "Figures":
        """The figures of answers that are complete."""
        seconds = max(trace.times[-1] for trace in traces) - min(trace.sent for trace in traces)
        gaps = [later - earlier for each in traces for earlier, later in zip(each.times, each.times[1:], strict=False)]
        return cls(
            sum(trace.tokens for trace in traces) / seconds,
            len(traces) / seconds,
            sorted(trace.times[0] - trace.sent for trace in traces),
            sorted(gaps),
            host,
        )


def quantile(ascending: Sequence[float], share: float) -> float:
    """The least number that at least this share of them does not exceed."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]
