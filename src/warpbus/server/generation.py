"""The generations of one request: several answers at once, timed, counted, and called off when nobody wants them.

Knows nothing of how answers look in HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive

from warpbus.engine import Piece, SamplingParams
from warpbus.server.failures import ClientGoneError
from warpbus.server.metrics import Metrics
from warpbus.server.registry import Model
from warpbus.server.request_error import RequestError

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One answer that is wanted."""

    prompt: list[int]
    params: SamplingParams
    cache_salt: bytes = b""


@dataclass
class Record:
    """What the log tells of a request, besides its line."""

    model: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token: float | None = None
    started: float = field(default_factory=time.monotonic)


class Generations:
    """The answers to several jobs, as pieces in the order in which they come.

    Args:
        model: which is asked.
        jobs: what for.
        timeout: seconds that all of it may take.
        metrics, record: are told what happened.
    """

    def __init__(self, model: Model, jobs: Sequence[Job], *, timeout: float, metrics: Metrics, record: Record) -> None:
        self._model = model
        self._jobs = jobs
        self._deadline = time.monotonic() + timeout
        self._metrics = metrics
        self._record = record

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Numbers of jobs and their pieces; each job's last one has a finish reason.

        Leaving the iterator calls all of them off.

        Raises:
            WarpbusError: as `Service.generate` and its answers; RequestError where it takes too long.
        """
        # As many as there are answers: where the client reads slowly, pieces are merged in the service instead.
        queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue(len(self._jobs))
        tasks = [asyncio.create_task(self._follow(index, job, queue)) for index, job in enumerate(self._jobs)]
        try:
            running = len(tasks)
            while running:
                left = self._deadline - time.monotonic()
                try:
                    index, piece = await asyncio.wait_for(queue.get(), left)
                except TimeoutError:
                    raise RequestError(
                        408, "the answer takes longer than the server allows: ask for fewer tokens", code="timeout"
                    ) from None
                if isinstance(piece, Exception):
                    raise piece
                running -= piece.finish_reason is not None
                yield index, piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, index: int, job: Job, queue: asyncio.Queue[tuple[int, Piece | Exception]]) -> None:
        watch = _Watch(self._model.name, job, self._metrics, self._record)
        try:
            async with aclosing(self._model.generate(job.prompt, job.params, job.cache_salt)) as answer:
                async for piece in answer:
                    watch.saw(piece)
                    if piece.finish_reason == "abort":
                        raise _called_off()
                    await queue.put((index, piece))
                    if piece.finish_reason is not None:
                        return
            raise _called_off()
        except Exception as error:
            await queue.put((index, error))


class _Watch:
    """Times and counts one answer."""

    def __init__(self, name: str, job: Job, metrics: Metrics, record: Record) -> None:
        self._name = name
        self._metrics = metrics
        self._record = record
        self._started = self._last = time.monotonic()
        self._first = 0.0
        self._tokens = 0
        metrics.prompt_tokens.labels(name).inc(len(job.prompt))
        metrics.prompt_sizes.labels(name).observe(len(job.prompt))

    def saw(self, piece: Piece) -> None:
        now = time.monotonic()
        metrics, name, count = self._metrics, self._name, len(piece.token_ids)
        if count and not self._tokens:
            self._first = now
            metrics.first_token.labels(name).observe(now - self._started)
            metrics.queue.labels(name).observe(piece.queue_seconds)
            if self._record.first_token is None:
                self._record.first_token = now - self._record.started
        elif count:
            for _ in range(count):
                metrics.between_tokens.labels(name).observe((now - self._last) / count)
        if count:
            self._last = now
            self._tokens += count
            self._record.output_tokens += count
            metrics.generation_tokens.labels(name).inc(count)
        if piece.finish_reason in ("stop", "length"):
            metrics.success.labels(name, piece.finish_reason).inc()
            metrics.whole.labels(name).observe(now - self._started)
            metrics.answer_sizes.labels(name).observe(self._tokens)
            if self._tokens > 1:
                metrics.per_token.labels(name).observe((self._last - self._first) / (self._tokens - 1))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled where the client leaves first: then ClientGoneError."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Return when the client leaves. The request's body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _called_off() -> RequestError:
    return RequestError(
        503,
        "the answer was called off by the server: try again",
        kind="service_unavailable",
        code="aborted",
        retry_after=1,
    )
