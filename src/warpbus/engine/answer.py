"""The answer to one request in the service's process: the pieces that wait for its consumer, and their times."""

import asyncio
from collections import abc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from warpbus.engine.sequence import TextPiece
from warpbus.errors import WarpbusError


@dataclass
class RequestTimes:
    """The times of a request's events, in seconds of `time.monotonic()`; None before the event.

    Attributes:
        arrived: `Service.generate` was called.
        prompt_tokens: tokens of the prompt.
        first_token: the first token arrived from the engine.
        finished: the last token arrived from the engine.
        cached_tokens: tokens of the prompt found in the prefix cache.
        output_tokens: tokens that have arrived.
    """

    arrived: float
    prompt_tokens: int
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    output_tokens: int = 0


class Inbox:
    """Buffers the pieces of one answer between the service and one consumer in the same event loop.

    Attributes:
        times: of the request.
        adapter: that it names.
        prompt_tokens: tokens of the prompt that probably have to be computed.
    """

    def __init__(self, times: RequestTimes, adapter: str | None = None, prompt_tokens: int = 0) -> None:
        self.times = times
        self.adapter = adapter
        self.prompt_tokens = prompt_tokens
        self._pieces: list[TextPiece] = []
        self._error: WarpbusError | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, piece: TextPiece, when: float) -> None:
        """Append a piece that arrived at the time `when`; the last one has a finish reason."""
        times = self.times
        if piece.token_ids:
            times.output_tokens += len(piece.token_ids)
            if times.first_token is None:
                times.first_token = when
        times.cached_tokens = piece.cached_tokens
        if piece.finish_reason is not None:
            times.finished = when
            self._ended = True
        self._pieces.append(piece)
        self._wake()

    def fail(self, error: WarpbusError) -> None:
        """End with an error, which is raised after the pieces that arrived before it."""
        self._error, self._ended = error, True
        self._wake()

    async def take(self) -> TextPiece:
        """All pieces since the last call, merged into one.

        Raises:
            StopAsyncIteration: the answer has ended.
            WarpbusError: the error of `fail`, once.
        """
        while not self._pieces:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else merge(pieces)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Answer(AsyncIterator[TextPiece]):
    """An async iterator over the pieces of one answer, as `Service.generate` returns it.

        async with service.generate(prompt, params) as answer:
            async for piece in answer:
                ...

    Waiting pieces are merged into one; the last one has a `finish_reason`. Leaving the block, `aclose`, or dropping the
    object aborts a running request. Cancelling a wait for a piece (a timeout) loses nothing. Belongs to the service's
    event loop and to one consumer.

    Attributes:
        times: `RequestTimes`, updated as pieces arrive.

    Raises:
        EngineDiedError: while iterating: the engine's process died.
        UnavailableError: while iterating: the service was closed before the answer had ended.
        UsageError: while iterating: the engine refuses the request, for example for its grammar.
        NumericError, UnavailableError, WarpbusError: while iterating: this request failed (see `Engine.step`).
    """

    def __init__(self, inbox: Inbox, on_close: Callable[[], None]) -> None:
        self.times = inbox.times
        self._inbox = inbox
        self._on_close = on_close

    async def __anext__(self) -> TextPiece:
        return await self._inbox.take()

    async def aclose(self) -> None:
        """Abort the request if it still runs."""
        self._on_close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on_close()

    def __del__(self) -> None:
        self._on_close()


def merge(pieces: abc.Sequence[TextPiece]) -> TextPiece:
    """Merge consecutive pieces of one request, at least one, into one."""
    last = pieces[-1]
    return TextPiece(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=None
        if last.logprobs is None
        else tuple(logprob for piece in pieces for logprob in piece.logprobs or ()),
        finish_reason=last.finish_reason,
        cached_tokens=last.cached_tokens,
        queue_seconds=last.queue_seconds,
        stop_string=last.stop_string,
        prompt_logprobs=next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None),
        pooled=next((piece.pooled for piece in pieces if piece.pooled is not None), None),
    )
