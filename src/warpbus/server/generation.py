"""The answers of one HTTP request: generated at once, timed, counted, and aborted when the client disconnects.

Knows nothing of the HTTP form of answers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import abc
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from warpbus.engine import SamplingParams, TextPiece
from warpbus.server.failures import ClientGoneError
from warpbus.server.metrics import Metrics
from warpbus.server.registry import RETRY_SECONDS, AnswerProtocol, Model
from warpbus.server.request_error import RequestError

T = TypeVar("T")

Receiver = Callable[[int, TextPiece], Awaitable[None]]
Idle = Callable[[], Awaitable[None]]

ENDING = "server_ends"
"""The code of the error that a request gets from a server that ends."""

_RECORD = "record"  # of a scope's state


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one answer.

    Attributes:
        silent: the prompt is computed, and its log probabilities are returned, but no token is generated.
    """

    prompt: list[int]
    params: SamplingParams
    cache_salt: bytes = b""
    silent: bool = False


@dataclass
class RequestRecord:
    """The fields of the access log for a request, besides its HTTP line.

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

    @classmethod
    def begin(cls, scope: Scope) -> RequestRecord:
        """A new record for a request."""
        record = scope.setdefault("state", {})[_RECORD] = cls()
        return record

    @staticmethod
    def of(scope: Scope) -> RequestRecord:
        """The record that `begin` has made for the request."""
        record: RequestRecord = scope["state"][_RECORD]
        return record


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
    """The answers to several requests, whose pieces are handed to a receiver as they arrive.

    The task that waits for an answer calls the receiver itself. While the receiver takes a piece, the service merges
    those that follow.

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
        self._waiter: asyncio.Future[None] | None = None
        self._receiver: Receiver | None = None
        self._received = asyncio.Event()  # there is a receiver
        self._arrived = False
        self._last = 0.0  # when a receiver had taken a piece
        self._error: Exception | None = None
        self._ends = False
        self._left = len(requests)
        self._closing = ExitStack()
        self._closing.enter_context(running.including(self))
        # All requests are handed to the engine before this returns: a task would do so after those of other requests.
        timers = [_AnswerTimer(model.name, request, metrics, record) for request in requests]
        self._answers: list[AnswerProtocol] = []
        try:
            for request in requests:
                self._answers.append(model.generate(request.prompt, request.params, request.cache_salt))
        except Exception as error:
            self._error = error
        self._tasks = [
            asyncio.create_task(self._follow(index, answer, silent=request.silent, timer=timer))
            for index, (answer, request, timer) in enumerate(zip(self._answers, requests, timers, strict=False))
        ]

    def end(self) -> None:
        """End the answers: `arrival` and `run` raise the error of a server that ends."""
        self._ends = True
        self._wake()

    async def arrival(self, patience: float) -> bool:
        """Wait for the first piece, at most `patience` seconds; whether there is one.

        Raises:
            WarpbusError: as `Service.generate` and its answers; RequestError after `timeout` or `end`.
        """
        until = self._loop.time() + patience
        while not self._arrived:
            self._check()
            if self._loop.time() >= until:
                return False
            await self._wait(until)
        self._check()
        return True

    async def run(self, receiver: Receiver, patience: float = math.inf, idle: Idle | None = None) -> None:
        """Hand all pieces to a receiver, and return when all answers have ended. To be called once.

        Args:
            receiver: called with the index of a request and its next piece, in the task of this answer: pieces of other
                answers may arrive before it returns. The last piece of each request has a finish reason.
            patience: seconds without a piece after which `idle` is called.

        Raises:
            WarpbusError: as `arrival`.
            Exception: of the receiver.
        """
        self._receiver, self._last = receiver, self._loop.time()
        self._received.set()
        while self._left:
            self._check()
            due = self._last + patience
            if idle is None or self._loop.time() < due:
                await self._wait(due)
            else:
                await idle()
                self._last = self._loop.time()

    async def aclose(self) -> None:
        """Abort the requests that still run."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for answer in self._answers:
            await answer.aclose()  # its task may not have begun
        self._closing.close()

    async def _wait(self, until: float) -> None:
        """Wait for `_wake`, for the time `until`, or for the deadline."""
        self._waiter = self._loop.create_future()
        timer = self._loop.call_at(min(until, self._deadline), self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._ends:
            raise server_ends()
        if self._loop.time() >= self._deadline:
            raise RequestError(
                408, "the answer takes longer than the server allows: ask for fewer tokens", code="timeout"
            )

    async def _first_receiver(self) -> Receiver:
        self._arrived = True
        self._wake()
        await self._received.wait()
        assert self._receiver is not None
        return self._receiver

    async def _follow(self, index: int, answer: AnswerProtocol, *, silent: bool, timer: _AnswerTimer) -> None:
        try:
            async with aclosing(answer):
                async for piece in answer:
                    if silent:
                        piece = piece._replace(text="", token_ids=(), logprobs=None, finish_reason="length")
                    timer.record_piece(piece)
                    if piece.finish_reason == "abort":
                        raise _aborted()
                    receive = self._receiver or await self._first_receiver()
                    await receive(index, piece)
                    self._last = self._loop.time()
                    if piece.finish_reason is not None:
                        break
                else:
                    raise _aborted()
            self._left -= 1
        except Exception as error:
            self._error = self._error or error
        if self._error is not None or not self._left:
            self._wake()


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
