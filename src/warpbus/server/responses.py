"""HTTP responses of generation: complete, or as a stream of server-sent events, in the format of an endpoint."""

from __future__ import annotations

import asyncio
import uuid
from collections import abc
from contextlib import aclosing
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
        """The end of a stream that has not failed."""

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
    """The token counts of a request. A prompt with several answers counts once.

    Args:
        prompt_tokens: of all prompts.
        per_prompt: how many answers each prompt gets.

    Attributes:
        cached_tokens: tokens of the prompts found in the prefix cache.
    """

    def __init__(self, prompt_tokens: int, per_prompt: int = 1) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0
        self.cached_tokens = 0
        self._per_prompt = per_prompt
        self._begun: set[int] = set()  # prompts

    def add(self, index: int, piece: TextPiece) -> None:
        """Add a piece of an answer; the first one of a prompt says what was cached before the request."""
        self.output_tokens += len(piece.token_ids)
        prompt = index // self._per_prompt
        if prompt not in self._begun:
            self._begun.add(prompt)
            self.cached_tokens += piece.cached_tokens


class Responder:
    """Responds to the generation requests of one server.

    Args:
        options: of the server.
        metrics: updated with the answers.

    Attributes:
        running: the running generations.
    """

    def __init__(self, options: ServerOptions, metrics: Metrics) -> None:
        self.options = options
        self.metrics = metrics
        self.running = RunningGenerations()

    async def gather(
        self, request: Request, model: Model, requests: abc.Sequence[GenerationRequest]
    ) -> tuple[list[list[TextPiece]], Usage]:
        """The pieces of one answer to each prompt, and the token counts. Raises: as `respond`."""
        generations, usage = self._generate(request, model, requests, 1)
        return await _collect(request, generations, usage, len(requests)), usage

    def _generate(
        self, request: Request, model: Model, requests: abc.Sequence[GenerationRequest], per_prompt: int
    ) -> tuple[Generations, Usage]:
        usage = Usage(sum(len(each.prompt) for each in requests[::per_prompt]), per_prompt)
        record = RequestRecord.of(request.scope)
        record.prompt_tokens = usage.prompt_tokens
        generations = Generations(
            model,
            requests,
            timeout=self.options.request_timeout,
            metrics=self.metrics,
            record=record,
            running=self.running,
        )
        return generations, usage

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
            WarpbusError: as `Generations.arrival`, before anything is sent.
            ClientGoneError: the client disconnected.
        """
        generations, usage = self._generate(request, model, requests, per_prompt)
        if not stream:
            return JSONResponse(form.whole(await _collect(request, generations, usage, len(requests)), usage))
        try:
            # An error before the first heartbeat gets its own HTTP status; after it, the stream has begun.
            arrived = await unless_gone(request.receive, generations.arrival(self.options.heartbeat))
        except BaseException:
            await generations.aclose()
            raise
        return EventStream(generations, form, usage, self.options.heartbeat, late=not arrived)


async def _collect(request: Request, generations: Generations, usage: Usage, count: int) -> list[list[TextPiece]]:
    """All pieces of each answer. ClientGoneError if the client disconnects first."""
    answers: list[list[TextPiece]] = [[] for _ in range(count)]
    record = RequestRecord.of(request.scope)

    async def take(index: int, piece: TextPiece) -> None:
        usage.add(index, piece)
        record.cached_tokens = usage.cached_tokens
        answers[index].append(piece)

    async with aclosing(generations):
        await unless_gone(request.receive, generations.run(take))
    return answers


class EventStream(Response):
    """A stream of server-sent events; if it fails midway, the last one says why.

    Ends, and calls the answers off, when the client leaves.

    Args:
        generations: the answers.
        form: the format of the events.
        usage: counts the pieces.
        heartbeat: seconds without an event after which a comment is sent.
        late: no piece has arrived for so long.
    """

    def __init__(
        self, generations: Generations, form: Form, usage: Usage, heartbeat: float, *, late: bool = False
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._generations = generations
        self._form = form
        self._usage = usage
        self._heartbeat = heartbeat
        self._late = late

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
            await self._generations.aclose()

    async def _write(self, send: Send, scope: Scope) -> None:
        form, usage, record = self._form, self._usage, RequestRecord.of(scope)
        one_at_a_time = asyncio.Lock()

        async def send_piece(index: int, piece: TextPiece) -> None:
            async with one_at_a_time:
                usage.add(index, piece)
                record.cached_tokens = usage.cached_tokens
                await _send_part(send, encode(form.events(index, piece, usage)))

        async def send_heartbeat() -> None:
            if not one_at_a_time.locked():  # otherwise a piece waits for the client
                async with one_at_a_time:
                    await _send_part(send, _HEARTBEAT)

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_part(send, encode(form.opening(usage)))
        if self._late:
            await _send_part(send, _HEARTBEAT)
        try:
            await self._generations.run(send_piece, self._heartbeat, send_heartbeat)
            last = encode(form.closing(usage)) + form.last
        except Exception as error:
            await self._generations.aclose()
            failure = as_request_error(error, scope["path"])
            record.error = failure.code or failure.kind
            last = encode([form.failure(failure, usage)])
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _send_part(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})


def new_id(kind: str, separator: str = "-") -> str:
    """An id of a response, such as chatcmpl-..."""
    return f"{kind}{separator}{uuid.uuid4().hex}"
