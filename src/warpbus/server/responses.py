"""HTTP responses of generation: complete, or as a stream of server-sent events, in the format of an endpoint."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import abc
from contextlib import aclosing, suppress
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from warpbus.engine import TextPiece
from warpbus.server.failures import as_request_error
from warpbus.server.generation import (
    GenerationRequest,
    Generations,
    RequestRecord,
    RunningGenerations,
    disconnected,
    unless_gone,
)
from warpbus.server.metrics import Metrics
from warpbus.server.options import ServerOptions
from warpbus.server.registry import Model
from warpbus.server.request_error import RequestError
from warpbus.server.sse import Event, encode

Json = dict[str, Any]


_HEARTBEAT = b": waiting\n\n"


class Form(Protocol):
    """The format of an endpoint's answers. One object per HTTP request; `index` is the number of an answer in it."""

    @property
    def last(self) -> bytes:
        """What ends a stream that has not failed."""

    def opening(self, usage: Usage) -> list[Json]:
        """The first events of a stream."""

    def events(self, index: int, piece: TextPiece, usage: Usage) -> abc.Sequence[Event]:
        """The events of a piece, which `usage` counts already."""

    def closing(self, usage: Usage) -> list[Json]:
        """The last events of a stream."""

    def failure(self, error: RequestError, usage: Usage) -> Json:
        """The last event of a stream that fails."""

    def whole(self, answers: abc.Sequence[abc.Sequence[TextPiece]], usage: Usage) -> Json | list[Json]:
        """The body of a response that is not streamed."""


class Usage:
    """The token counts of a request. A prompt with several answers counts once."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0
        self._cached: dict[int, int] = {}

    def add(self, prompt: int, piece: TextPiece) -> None:
        """Add a piece of an answer to a prompt; the first piece says what was cached before the request."""
        self.output_tokens += len(piece.token_ids)
        self._cached.setdefault(prompt, piece.cached_tokens)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts found in the prefix cache."""
        return sum(self._cached.values())


class Responder:
    """Responds to the generation requests of one server.

    Args:
        options: of the server.
        metrics: updated with the answers.

    Attributes:
        running: what it generates now.
    """

    def __init__(self, options: ServerOptions, metrics: Metrics) -> None:
        self.options = options
        self.metrics = metrics
        self.running = RunningGenerations()

    async def gather(
        self, request: Request, model: Model, requests: abc.Sequence[GenerationRequest]
    ) -> tuple[list[list[TextPiece]], Usage]:
        """The pieces of one answer to each prompt, and the token counts. Raises: as `respond`."""
        pieces, usage = self._generate(request, model, requests, 1)
        return await _collect(request, pieces, len(requests)), usage

    def _generate(
        self, request: Request, model: Model, requests: abc.Sequence[GenerationRequest], per_prompt: int
    ) -> tuple[_CountedPieces, Usage]:
        record: RequestRecord = request.scope["state"]["record"]
        counts = Usage(sum(len(each.prompt) for each in requests[::per_prompt]))
        record.prompt_tokens = counts.prompt_tokens
        generations = Generations(
            model,
            requests,
            timeout=self.options.request_timeout,
            metrics=self.metrics,
            record=record,
            running=self.running,
        )
        return _CountedPieces(generations, counts, per_prompt, record), counts

    async def respond(
        self,
        request: Request,
        model: Model,
        form: Form,
        requests: abc.Sequence[GenerationRequest],
        *,
        per_prompt: int,
        stream: bool,
    ) -> Response:
        """Generate, and return the response.

        Args:
            requests: the answers to the first prompt, then those to the next.
            per_prompt: how many answers each prompt gets.
            stream: as server-sent events.

        Raises:
            WarpbusError: as `Generations.pieces`, before anything is sent.
            ClientGoneError: the client disconnected.
        """
        pieces, counts = self._generate(request, model, requests, per_prompt)
        if not stream:
            return JSONResponse(form.whole(await _collect(request, pieces, len(requests)), counts))
        try:
            # An error before the first heartbeat gets its own HTTP status; after it, the stream has begun.
            first = await unless_gone(request.receive, pieces.take(self.options.heartbeat))
        except BaseException:
            await pieces.aclose()
            raise
        return EventStream(pieces, first, form, counts, self.options.heartbeat)


class _CountedPieces:
    """The pieces of all answers of a request, counted in its usage and for the access log."""

    def __init__(self, generations: Generations, usage: Usage, per_prompt: int, record: RequestRecord) -> None:
        self._generations = generations
        self._usage = usage
        self._per_prompt = per_prompt
        self._record = record

    async def take(self, patience: float = math.inf) -> tuple[int, TextPiece] | None:
        """See `Generations.take`."""
        found = await self._generations.take(patience)
        if found is not None:
            index, piece = found
            self._usage.add(index // self._per_prompt, piece)
            self._record.cached_tokens = self._usage.cached_tokens
        return found

    async def aclose(self) -> None:
        """See `Generations.aclose`."""
        await self._generations.aclose()


async def _collect(request: Request, pieces: _CountedPieces, count: int) -> list[list[TextPiece]]:
    """All pieces of each answer. ClientGoneError if the client disconnects first."""
    answers: list[list[TextPiece]] = [[] for _ in range(count)]

    async def take_all() -> None:
        with suppress(StopAsyncIteration):
            while True:
                found = await pieces.take()
                if found is not None:
                    answers[found[0]].append(found[1])

    async with aclosing(pieces):
        await unless_gone(request.receive, take_all())
    return answers


class EventStream(Response):
    """A stream of server-sent events; if it fails midway, the last one says why.

    Ends, and calls the answers off, when the client leaves.

    Args:
        pieces: of the answers.
        first: the first piece; None if there is none yet, after `heartbeat` seconds.
        form: the format of the events.
        usage: counts the pieces.
        heartbeat: seconds without an event after which a comment is sent.
    """

    def __init__(
        self,
        pieces: _CountedPieces,
        first: tuple[int, TextPiece] | None,
        form: Form,
        usage: Usage,
        heartbeat: float,
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._pieces = pieces
        self._first = first
        self._form = form
        self._usage = usage
        self._heartbeat = heartbeat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        writing = asyncio.ensure_future(self._write(send, scope))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((writing, gone), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for task in (writing, gone):
                task.cancel()
            await asyncio.gather(writing, gone, return_exceptions=True)
            await self._pieces.aclose()

    async def _write(self, send: Send, scope: Scope) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_part(send, encode(self._form.opening(self._usage)))
        if self._first is None:
            await _send_part(send, _HEARTBEAT)
        more = True
        while more:
            data, more = await self._next(scope)
            if data or not more:
                await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _next(self, scope: Scope) -> tuple[bytes, bool]:
        """The next part of the stream, and whether more parts follow."""
        form, usage = self._form, self._usage
        try:
            found, self._first = self._first or await self._pieces.take(self._heartbeat), None
            return _HEARTBEAT if found is None else encode(form.events(*found, usage)), True
        except StopAsyncIteration:
            return encode(form.closing(usage)) + form.last, False
        except Exception as error:
            await self._pieces.aclose()
            failure = as_request_error(error, scope["path"])
            record: RequestRecord = scope["state"]["record"]
            record.error = failure.code or failure.kind
            return encode([form.failure(failure, usage)]), False


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def new_id(kind: str, separator: str = "-") -> str:
    """An id of a response, such as chatcmpl-..."""
    return f"{kind}{separator}{uuid.uuid4().hex}"
