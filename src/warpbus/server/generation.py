"""The answers of one HTTP request: generated at once, timed, counted, and aborted when the client disconnects.

Knows nothing of the HTTP form of answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import abc
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive

from warpbus.engine import SamplingParams, TextPiece
from warpbus.server.failures import ClientGoneError
from warpbus.server.metrics import Metrics
from warpbus.server.registry import Model
from warpbus.server.request_error import RequestError

T = TypeVar("T")


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one answer."""

    prompt: list[int]
    params: SamplingParams
    cache_salt: bytes = b""


@dataclass
class RequestRecord:
    """What the access log records of a request, besides its HTTP line; `ignored` are unknown fields of its body."""

    model: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token: float | None = None
    ignored: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)


class Generations:
    """The answers to several requests, as pieces in the order of their arrival.

    Args:
        model: generates the answers.
        requests: one per answer.
        timeout: the most seconds for all answers.
        metrics, record: updated with the answers.
    """

    def __init__(
        self,
        model: Model,
        requests: abc.Sequence[GenerationRequest],
        *,
        timeout: float,
        metrics: Metrics,
        record: RequestRecord,
    ) -> None:
        self._model = model
        self._requests = requests
        self._deadline = time.monotonic() + timeout
        self._metrics = metrics
        self._record = record

    async def pieces(self) -> AsyncIterator[tuple[int, TextPiece]]:
        """Indices of requests and their pieces; the last piece of each request has a finish reason.

        Closing the iterator aborts all requests.

        Raises:
            WarpbusError: as `Service.generate` and its answers; RequestError after `timeout`.
        """
        # Bounded by the number of answers: for a slow client, the service merges pieces instead.
        queue: asyncio.Queue[tuple[int, TextPiece | Exception]] = asyncio.Queue(len(self._requests))
        tasks = [
            asyncio.create_task(self._follow(index, request, queue)) for index, request in enumerate(self._requests)
        ]
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

    async def _follow(
        self, index: int, request: GenerationRequest, queue: asyncio.Queue[tuple[int, TextPiece | Exception]]
    ) -> None:
        timer = _AnswerTimer(self._model.name, request, self._metrics, self._record)
        try:
            async with aclosing(self._model.generate(request.prompt, request.params, request.cache_salt)) as answer:
                async for piece in answer:
                    timer.record_piece(piece)
                    if piece.finish_reason == "abort":
                        raise _aborted()
                    await queue.put((index, piece))
                    if piece.finish_reason is not None:
                        return
            raise _aborted()
        except Exception as error:
            await queue.put((index, error))


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


def _aborted() -> RequestError:
    return RequestError(
        503,
        "the answer was called off by the server: try again",
        kind="service_unavailable",
        code="aborted",
        retry_after=1,
    )
