"""The answers of one HTTP request: generated at once, timed, counted, and aborted when the client disconnects.

Knows nothing of the HTTP form of answers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import abc, deque
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
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
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + timeout
        self._arrived: deque[tuple[int, TextPiece | Exception]] = deque()
        self._unread: dict[int, asyncio.Future[None] | None] = {}  # answers whose last piece has not been read
        self._waiter: asyncio.Future[None] | None = None
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._ends = False
        self._left = len(requests)
        self._closing = ExitStack()
        self._closing.enter_context(running.including(self))
        timers = [_AnswerTimer(model.name, request, metrics, record) for request in requests]
        self._tasks = [
            asyncio.create_task(self._follow(index, model, request, timers[index]))
            for index, request in enumerate(requests)
        ]

    def end(self) -> None:
        """End the answers: behind the pieces that wait, `take` raises the error of a server that ends."""
        self._ends = True
        self._wake()

    async def take(self, patience: float = math.inf) -> tuple[int, TextPiece] | None:
        """The index of a request and its next piece; None if no piece arrives within `patience` seconds.

        The last piece of each request has a finish reason.

        Raises:
            StopAsyncIteration: all answers have ended.
            WarpbusError: as `Service.generate` and its answers; RequestError after `timeout` or `end`.
        """
        if not self._left:
            raise StopAsyncIteration
        if not self._arrived and not self._ends:
            await self._wait(patience)
        if not self._arrived and self._ends:
            raise server_ends()
        if self._loop.time() >= self._deadline:
            raise RequestError(
                408, "the answer takes longer than the server allows: ask for fewer tokens", code="timeout"
            )
        if not self._arrived:
            return None
        index, piece = self._arrived.popleft()
        room = self._unread.pop(index)
        if room is not None and not room.done():
            room.set_result(None)
        if isinstance(piece, Exception):
            raise piece
        self._left -= piece.finish_reason is not None
        return index, piece

    async def aclose(self) -> None:
        """Abort the requests that still run."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._closing.close()

    async def _wait(self, patience: float) -> None:
        """Wait for `_wake`, or for `patience` seconds, or for the deadline.

        The timer of one wait serves the next ones: it is set anew only when it fires.
        """
        self._until = min(self._loop.time() + patience, self._deadline)
        if self._timer is None or self._timer.when() > self._until:
            self._set_timer()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._until, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if self._loop.time() < self._until:
            self._set_timer()
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _put(self, index: int, piece: TextPiece | Exception) -> None:
        """Queue a piece when the previous one of the answer has been read: meanwhile the service merges pieces."""
        if index in self._unread:
            room = self._unread[index] = self._loop.create_future()
            await room
        self._unread[index] = None
        self._arrived.append((index, piece))
        self._wake()

    async def _follow(self, index: int, model: Model, request: GenerationRequest, timer: _AnswerTimer) -> None:
        try:
            async with aclosing(model.generate(request.prompt, request.params, request.cache_salt)) as answer:
                async for piece in answer:
                    if request.silent:
                        piece = piece._replace(text="", token_ids=(), logprobs=None, finish_reason="length")
                    timer.record_piece(piece)
                    if piece.finish_reason == "abort":
                        raise _aborted()
                    await self._put(index, piece)
                    if piece.finish_reason is not None:
                        return
            raise _aborted()
        except Exception as error:
            await self._put(index, error)


class _AnswerTimer:
    """Records the times and token counts of one answer."""

    def __init__(self, name: str, request: GenerationRequest, metrics: Metrics, record: RequestRecord) -> None:
        self._name = name
        self._metrics = metrics
        self._record = record
        self._started = self._last = time.monotonic()
        self._first = 0.0
        self._tokens = 0
        self._token_counts = metrics.token_counts(name)
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
        if count:
            self._token_counts.record(count, now - self._last if self._tokens else None)
            self._last = now
            self._tokens += count
            self._record.output_tokens += count
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
