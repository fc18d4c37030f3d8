"""Our engine under a load, in this process and without HTTP."""

import statistics
import time
from dataclasses import dataclass

from warpbus.bench.serving_load import Figures, HostTimes, Load, RequestSource, Trace
from warpbus.engine.engine import Engine, request
from warpbus.engine.sequence import Sequence


def drive(engine: Engine, load: Load) -> Figures:
    """Send a load; what the engine kept of earlier prompts is forgotten first, and its memory returned."""
    engine.shrink()
    source, before = RequestSource(load), engine.stats()
    pending: dict[Sequence, Trace] = {}
    traces: list[Trace] = []
    stepping, cache_bytes = 0.0, 0
    start = time.perf_counter()
    now = 0.0
    while pending or not source.exhausted:
        for prompt, trace in source.due(now, len(pending)):
            asked = request(prompt, tokens=load.tokens)
            engine.add(asked)
            pending[asked] = trace
            traces.append(trace)
        if not pending:
            time.sleep(source.wait(now))
            now = time.perf_counter() - start
            continue
        began = time.perf_counter()
        pieces = engine.step()
        ended = time.perf_counter()
        stepping += ended - began
        now = ended - start
        for sequence, piece in pieces:
            pending[sequence].came(now, len(piece.token_ids))
            if piece.finish_reason is not None:
                del pending[sequence]
                cache_bytes = max(cache_bytes, engine.stats().cache_bytes)
    after = engine.stats()
    host = HostTimes(
        after.steps - before.steps,
        stepping,
        after.planning - before.planning,
        after.launching - before.launching,
        after.preemptions - before.preemptions,
        cache_bytes,
    )
    return Figures.of(traces, host)


@dataclass(frozen=True)
class Growth:
    """Steps of a batch that decodes while the cache grows.

    Attributes:
        grown: bytes.
        growing, others: seconds of the steps in which the cache grew, and of those in which it did not.
    """

    grown: int
    growing: list[float]
    others: list[float]

    @property
    def longest(self) -> float:
        """Seconds of the longest step of all, whether the cache grew in it or soon before."""
        return max([*self.growing, *self.others])

    @property
    def median(self) -> float:
        """Seconds of a step in which the cache does not grow."""
        return statistics.median(self.others or self.growing)


def decode_while_growing(engine: Engine, prompts: list[list[int]], tokens: int) -> Growth:
    """Let all prompts decode at once, from a cache that was shrunk; the steps that read prompts are not counted."""
    engine.shrink()
    asked = [request(prompt, tokens=tokens) for prompt in prompts]
    for each in asked:
        engine.add(each)
    while not all(each.token_ids for each in asked):
        engine.step()
    engine.step()  # the first one without prompts, which was launched together with the last one's reading
    first = held = engine.stats().cache_bytes
    growing: list[float] = []
    others: list[float] = []
    while not any(each.finish_reason for each in asked):
        began = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - began
        now = engine.stats().cache_bytes
        (growing if now > held else others).append(seconds)
        held = now
    while engine.has_work:
        engine.step()
    return Growth(held - first, growing, others)
