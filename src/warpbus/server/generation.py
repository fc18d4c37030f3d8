"""The answers of one HTTP request: generated at once, timed, counted, and aborted when the client disconnects.

Knows nothing of the HTTP form of answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import abc
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.types import Receive

from warpbus.engine import SamplingParams, TextPiece
from warpbus.server.failures import ClientGoneError
from warpbus.server.metrics import Metrics
from warpbus.server.registry import RETRY_SECONDS, Model
from warpbus.server.request_error import RequestError

T = TypeVar("T")

ENDING = "server_ends"
"""The code of the error that a request gets from a server that ends."""


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one answer.

    Attributes:
        silent: the prompt is computed, and its log probabilities are told, but nothing is answered.
    """

    prompt: list[int]
    params: SamplingParams
    cache_salt: bytes = b""
    silent: bool = False


@dataclass
class RequestRecord:
    """What the access log records of a request, besides its HTTP line.

    Attributes:
        ignored: unknown fields of its body.
        error: why a stream ended with an error; None if it did not.
    """

    model: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token: float | None = None
    ignored: list[str] = field(default_factory=list)
    error: str | None = None
    started: float = field(default_factory=time.monotonic)


class RunningGenerations:
    """All generations of a server that run, so that they can be ended with it."""

    def __init__(self) -> None:
        self._all: set[Generations] = set()
        self._over = False

    def end(self) -> None:
        """End all of them, and each that begins later, with the error of a server that ends."""
        self._over = True
        for generations in self._all:
            generations.end()

    @property
    def count(self) -> int:
        """How many HTTP requests generate now."""
        return len(self._all)

    @contextmanager
    def including(self, generations: Generations) -> Iterator[None]:
        """A block in which some generations run."""
        self._all.add(generations)
        if self._over:
            generations.end()
        try:
            yield
        finally:
            self._all.discard(generations)


class Generations:
    """The answers to several requests, as pieces in the order of their arrival.

    Args:
        model: generates the answers.
        requests: one per answer.
        timeout: the most seconds for all answers.
        metrics, record: updated with the answers.
        running: of the server.
    """

    def __init__(
        self,
        model: Model,
        requests: abc.Sequence[GenerationRequest],
        *,
        timeout: float,
        metrics: Metrics,
        record: RequestRecord,
        running: RunningGenerations,
    ) -> None:
        self._model = model
        self._requests = requests
        self._deadline = time.monotonic() + timeout
        self._metrics = metrics
        self._record = record
        self._running = running
        # Bounded by the number of answers: for a slow client, the service merges pieces instead.
        self._queue: asyncio.Queue[tuple[int, TextPiece | Exception]] = asyncio.Queue(len(requests))
        self._ends = False

    def end(self) -> None:
        """End the answers: behind the pieces that wait, `pieces` raises the error of a server that ends."""
        self._ends = True
        if self._queue.empty():
            self._queue.put_nowait((0, server_ends()))

    async def pieces(self) -> AsyncIterator[tuple[int, TextPiece]]:
        """Indices of requests and their pieces; the last piece of each request has a finish reason.

        Closing the iterator aborts all requests.

        Raises:
            WarpbusError: as `Service.generate` and its answers; RequestError after `timeout` or `end`.
        """
        with self._running.including(self):
            tasks = [asyncio.create_task(self._follow(index, request)) for index, request in enumerate(self._requests)]
            try:
                running = len(tasks)
                while running:
                    index, piece = await self._next()
                    running -= piece.finish_reason is not None
                    yield index, piece
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _next(self) -> tuple[int, TextPiece]:
        if self._ends and self._queue.empty():
            raise server_ends()
        try:
            index, piece = await asyncio.wait_for(self._queue.get(), self._deadline - time.monotonic())
        except TimeoutError:
            raise RequestError(
                408, "the answer takes longer than the server allows: ask for fewer tokens", code="timeout"
            ) from None
        if isinstance(piece, Exception):
            raise piece
        return index, piece

    async def _follow(self, index: int, request: GenerationRequest) -> None:
        timer = _AnswerTimer(self._model.name, request, self._metrics, self._record)
        try:
            async with aclosing(self._model.generate(request.prompt, request.params, request.cache_salt)) as answer:
                async for piece in answer:
                    if request.silent:
                        piece = replace(piece, text="", token_ids=(), logprobs=None, finish_reason="length")
                    timer.record_piece(piece)
                    if piece.finish_reason == "abort":
                        raise _aborted()
                    await self._queue.put((index, piece))
                    if piece.finish_reason is not None:
                        return
            raise _aborted()
        except Exception as error:
            await self._queue.put((index, error))


class _AnswerTimer:
    """Records the times and token counts of one answer."""

    def __init__(self, name: str, request: GenerationRequest, metrics: Metrics, record: RequestRecord) -> None:
        self._name = name
        self._metrics = metrics
        self._record = record
        self._started = self._last = time.monotonic()
        self._first = 0.0
        self._tokens = 0
        metrics.prompt_tokens.labels(name).inc(len(request.prompt))
        metrics.prompt_sizes.labels(name).observe(len(request.prompt))

    def record_piece(self, piece: TextPiece) -> None:
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
    """The result of `work`. If the client disconnects first, `work` is cancelled and ClientGoneError raised."""
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
    """Return when the client disconnects. The body of the request must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def server_ends() -> RequestError:
    """The error of a request that a server does not finish before it ends."""
    return RequestError(
        503,
        "the server ends, and this request was not done in time: send it again",
        kind="service_unavailable",
        code=ENDING,
        retry_after=RETRY_SECONDS,
    )


def _aborted() -> RequestError:
    return RequestError(
        503,
        "the answer was called off by the server: try again",
        kind="service_unavailable",
        code="aborted",
        retry_after=1,
    )
