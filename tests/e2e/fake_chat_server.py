"""A server that answers the chat page with what a test wrote down: no model, and nothing left to chance."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from warpbus.server.page import page_router


class FakeChatServer:
    """`answer` comes `pieces` characters at a time; `failures` (status, error, headers) come first, one a request."""

    def __init__(self) -> None:
        self.url = ""
        self.go = threading.Event()
        self.reset()
        self.app = FastAPI()
        self.app.include_router(page_router())
        self.app.get("/v1/models")(self._list_models)
        self.app.get("/health")(self._health)
        self.app.post("/v1/chat/completions")(self._complete)

    def reset(self) -> None:
        """As new, for the next test."""
        self.models: list[dict[str, Any]] = [
            {"id": "glm-4-9b-chat", "max_model_len": 8192, "tools": True, "reasoning": True},
            {"id": "glm-poet", "max_model_len": 512, "default_sampling_params": {"temperature": 0.8, "top_p": 0.9}},
        ]
        self.key: str | None = None
        self.healthy = True
        self.answer = "Hello."
        self.reasoning = ""  # before the answer
        self.calls: list[tuple[str, str]] = []  # (name, arguments) behind the answer
        self.pieces = 4
        self.delay = 0.0  # seconds between two pieces
        self.finish = "stop"
        self.stream_error: dict[str, Any] | None = None  # in the stream, instead of its end
        self.failures: list[tuple[int, dict[str, Any], dict[str, str]]] = []
        self.requests: list[dict[str, Any]] = []  # bodies of the questions
        self.left = 0  # streams whose reader went away
        self.hold_after: int | None = None  # pieces after which the stream waits for `go`
        self.go.clear()

    def _refusal(self, request: Request) -> JSONResponse | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "no such key", "code": "invalid_api_key"}}, 401)

    async def _list_models(self, request: Request) -> Any:
        return self._refusal(request) or {"object": "list", "data": self.models}

    async def _health(self, request: Request) -> Any:
        return JSONResponse({"status": "ok" if self.healthy else "restarting"}, 200 if self.healthy else 503)

    async def _complete(self, request: Request) -> Any:
        if refusal := self._refusal(request):
            return refusal
        self.requests.append(json.loads(await request.body()))
        if self.failures:
            status, error, headers = self.failures.pop(0)
            return JSONResponse({"error": error}, status, headers)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        def event(**chunk: Any) -> str:
            return f"data: {json.dumps({'object': 'chat.completion.chunk', **chunk}, ensure_ascii=False)}\n\n"

        pieces = [self.answer[at : at + self.pieces] for at in range(0, len(self.answer), self.pieces)]
        try:
            yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
            for at in range(0, len(self.reasoning), self.pieces):
                yield event(
                    choices=[{"index": 0, "delta": {"reasoning_content": self.reasoning[at : at + self.pieces]}}]
                )
            for number, piece in enumerate(pieces):
                while number == self.hold_after and not self.go.is_set():
                    await asyncio.sleep(0.01)
                if self.delay:
                    await asyncio.sleep(self.delay)
                yield event(choices=[{"index": 0, "delta": {"content": piece}, "finish_reason": None}])
            for number, (name, arguments) in enumerate(self.calls):
                call = {"index": number, "id": f"call-{number}", "type": "function"}
                call["function"] = {"name": name, "arguments": arguments}
                yield event(choices=[{"index": 0, "delta": {"tool_calls": [call]}}])
            if self.stream_error:
                yield event(error=self.stream_error)
                return
            yield event(choices=[{"index": 0, "delta": {}, "finish_reason": self.finish}])
            usage: dict[str, Any] = {
                "prompt_tokens": 812,
                "completion_tokens": len(pieces),
                "total_tokens": 812 + len(pieces),
            }
            if self.reasoning:
                usage["completion_tokens_details"] = {"reasoning_tokens": len(self.reasoning) // self.pieces}
            yield event(choices=[], usage={**usage, "prompt_tokens_details": {"cached_tokens": 768}})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left += 1
            raise


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The address of `app`, served in a thread on a free port of this machine."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.02)
        if not thread.is_alive():
            raise RuntimeError("the server did not start")
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


@contextmanager
def fake_chat_server() -> Iterator[FakeChatServer]:
    fake = FakeChatServer()
    with serving(fake.app) as fake.url:
        yield fake
        fake.go.set()
