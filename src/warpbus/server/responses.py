"""HTTP responses of generation: complete, or as a stream of server-sent events, in the format of an endpoint."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import abc
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from enum import Enum, auto
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from warpbus.engine import TextPiece
from warpbus.server.failures import as_request_error, body_of
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
from warpbus.server.schema import StreamOptions

Json = dict[str, Any]


class Form(Protocol):
    """The format of an endpoint's answers. One object per HTTP request; `index` is the number of an answer in it."""

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of thinking so far, in all answers."""

    def opening(self) -> list[Json]:
        """The first chunks of a stream."""

    def chunks(self, index: int, piece: TextPiece) -> list[Json]:
        """The chunks of a piece."""

    def whole(self, index: int, pieces: abc.Sequence[TextPiece]) -> Json:
        """The choice of an answer that is not streamed."""

    def wrap(self, choices: list[Json], *, streamed: bool) -> Json:
        """The JSON object around choices."""


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

    def json(self, reasoning_tokens: int) -> Json:
        """OpenAI's `usage`; `reasoning_tokens` are those of the output that are thinking."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        }


class UsageStyle(Enum):
    """Which chunks of a stream have the usage: none, one at the end, or every chunk."""

    NONE = auto()
    LAST = auto()
    EVERY = auto()

    @classmethod
    def of(cls, options: StreamOptions | None) -> UsageStyle:
        """By OpenAI's `stream_options`, of which vLLM's `continuous_usage_stats` needs `include_usage`."""
        if options is None or not options.include_usage:
            return cls.NONE
        return cls.EVERY if options.continuous_usage_stats else cls.LAST


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

    async def respond(
        self,
        request: Request,
        model: Model,
        form: Form,
        requests: abc.Sequence[GenerationRequest],
        *,
        per_prompt: int,
        stream: bool,
        usage: UsageStyle = UsageStyle.NONE,
    ) -> Response:
        """Generate, and return the response.

        Args:
            jobs: the answers to the first prompt, then those to the next.
            per_prompt: how many answers each prompt gets.
            stream: as server-sent events.
            usage: which chunks of a stream have the usage.

        Raises:
            WarpbusError: as `Generations.pieces`, before anything is sent.
            ClientGoneError: the client disconnected.
        """
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
        pieces = _counted(generations.pieces(), counts, per_prompt, record)
        if not stream:
            return await unless_gone(request.receive, _whole(pieces, form, len(requests), counts))
        first = asyncio.ensure_future(anext(pieces))
        try:
            # An error before the first heartbeat gets its own HTTP status; after it, the stream has begun.
            await unless_gone(request.receive, _wait_done(first, self.options.heartbeat))
            if first.done():
                first.result()
        except BaseException:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await pieces.aclose()
            raise
        return EventStream(pieces, first, form, counts, usage, self.options.heartbeat)


async def _wait_done(task: asyncio.Future[Any], seconds: float) -> None:
    await asyncio.wait((task,), timeout=seconds)


async def _counted(
    pieces: AsyncIterator[tuple[int, TextPiece]], usage: Usage, per_prompt: int, record: RequestRecord
) -> AsyncGenerator[tuple[int, TextPiece], None]:
    async with aclosing(pieces):  # type: ignore[type-var]
        async for index, piece in pieces:
            usage.add(index // per_prompt, piece)
            record.cached_tokens = usage.cached_tokens
            yield index, piece


async def _whole(pieces: AsyncGenerator[tuple[int, TextPiece], None], form: Form, count: int, usage: Usage) -> Response:
    answers: list[list[TextPiece]] = [[] for _ in range(count)]
    async with aclosing(pieces):
        async for index, piece in pieces:
            answers[index].append(piece)
    choices = [form.whole(index, found) for index, found in enumerate(answers)]
    return JSONResponse({**form.wrap(choices, streamed=False), "usage": usage.json(form.reasoning_tokens)})


class EventStream(Response):
    """A stream of server-sent events: the chunks, then `[DONE]`; or, if it fails midway, an `error` object.

    Ends, and calls the answers off, when the client leaves.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[tuple[int, TextPiece], None],
        first: asyncio.Future[tuple[int, TextPiece]],
        form: Form,
        usage: Usage,
        style: UsageStyle,
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
        self._style = style
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
            for task in (writing, gone, self._first):
                task.cancel()
            await asyncio.gather(writing, gone, self._first, return_exceptions=True)
            await self._pieces.aclose()

    async def _write(self, send: Send, scope: Scope) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events(scope):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, scope: Scope) -> AsyncIterator[bytes]:
        form = self._form
        before = Usage(self._usage.prompt_tokens).json(0)
        yield b"".join([self._event(chunk, before) for chunk in form.opening()])
        coming = self._first
        try:
            while True:
                done, _ = await asyncio.wait((coming,), timeout=self._heartbeat)
                if not done:
                    yield b": waiting\n\n"
                    continue
                index, piece = coming.result()
                chunks = form.chunks(index, piece)
                so_far = self._usage.json(form.reasoning_tokens)
                found = b"".join([self._event(chunk, so_far) for chunk in chunks])
                if found:
                    yield found
                coming = self._first = asyncio.ensure_future(anext(self._pieces))
        except StopAsyncIteration:
            if self._style is not UsageStyle.NONE:
                yield _encoded({**form.wrap([], streamed=True), "usage": self._usage.json(form.reasoning_tokens)})
            yield b"data: [DONE]\n\n"
        except Exception as error:
            failure = as_request_error(error, scope["path"])
            record: RequestRecord = scope["state"]["record"]
            record.error = failure.code or failure.kind
            yield _encoded(body_of(failure))

    def _event(self, choice: Json, usage: Json) -> bytes:
        chunk = self._form.wrap([choice], streamed=True)
        if self._style is UsageStyle.NONE:
            return _encoded(chunk)
        return _encoded({**chunk, "usage": usage if self._style is UsageStyle.EVERY else None})


def _encoded(content: Json) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def new_id(kind: str) -> str:
    """An id of a response, such as chatcmpl-..."""
    return f"{kind}-{uuid.uuid4().hex}"
