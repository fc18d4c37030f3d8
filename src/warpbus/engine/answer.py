"""What has come of one request: the pieces that wait for its consumer, and when things happened."""

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
    """When things happened to a request, in seconds of `time.monotonic()`; None for what has not happened.

    Attributes:
        arrived: `Service.generate` was called.
        prompt_tokens: of the prompt.
        first_token: the first token came from the engine.
        finished: the last token came from the engine.
        cached_tokens: of the prompt's, those found in the cache.
        output_tokens: how many have come.
    """

    arrived: float
    prompt_tokens: int
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    output_tokens: int = 0


class Inbox:
    """Where the service puts what comes, for one consumer of the same event loop."""

    def __init__(self, times: RequestTimes) -> None:
        self.times = times
        self._pieces: list[TextPiece] = []
        self._error: WarpbusError | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, piece: TextPiece, when: float) -> None:
        """Take a piece that came at the time `when`; the last one has a finish reason."""
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
        """End with an error, which is raised once what has come before it is taken."""
        self._error, self._ended = error, True
        self._wake()

    async def take(self) -> TextPiece:
        """All that has come since the last call, as one piece.

        Raises:
            StopAsyncIteration: there is no more to come.
            WarpbusError: that of `fail`, once.
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
    """One request's pieces, as `Service.generate` gives them.

        async with service.generate(prompt, params) as answer:
            async for piece in answer:
                ...

    Pieces that wait are merged into one; the last has a `finish_reason`. Leaving the block, `aclose`, or dropping the
    object calls the request off where it still runs. Giving up a wait for a piece (a timeout) loses nothing. Belongs to
    the service's event loop and to one consumer.

    Attributes:
        times: `RequestTimes`, filled in as pieces come.

    Raises:
        EngineDiedError: while iterating: the engine's process died.
        UnavailableError: while iterating: the service was closed before the answer had ended.
        UsageError: while iterating: the engine refuses the request, for example for its grammar.
        NumericError, UnavailableError, WarpbusError: while iterating: this request failed (see `Engine.step`).
    """

    def __init__(self, inbox: Inbox, leave: Callable[[], None]) -> None:
        self.times = inbox.times
        self._inbox = inbox
        self._leave = leave

    async def __anext__(self) -> TextPiece:
        return await self._inbox.take()

    async def aclose(self) -> None:
        """Call the request off, if it still runs."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def __del__(self) -> None:
        self._leave()


def merge(pieces: abc.Sequence[TextPiece]) -> TextPiece:
    """Successive pieces of one request as one; at least one."""
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
    )
