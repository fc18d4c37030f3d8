"""The pool's page: GPUs, leases, queue and events, and how they were over the last hour. It only shows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.middleware import Middleware

import warpbus
from warpbus.errors import WarpbusError
from warpbus.server import failures
from warpbus.server.guard import AccessLog, Guard
from warpbus.server.listening import address, bind, make_server
from warpbus.server.metrics import CONTENT_TYPE, Metrics
from warpbus.server.options import ServerOptions
from warpbus.server.page import page_router
from warpbus.server.pool_metrics import pool_metrics
from warpbus.server.request_error import RequestError

Status = Callable[[], Awaitable[dict[str, Any]]]
"""A function that returns a pool's status: the dictionary of its broker."""

SHARED = ("base.css", "dom.js", "first.js", "language.js", "mark.svg", "request.js")

_SECONDS = 5.0
_KEPT = 3600.0
_MOVES = 500
# Several pages ask at once; the pool is asked once for all of them.
_FRESH = 0.5
_PLAIN = {"cache-control": "no-store"}
_log = logging.getLogger("warpbus.server")


class History:
    """Samples of a pool's GPUs at even intervals, and its moves, of the last hour; bounded whatever the pool does.

    Args:
        seconds: between samples.
        kept: seconds that a sample is kept.
    """

    def __init__(self, seconds: float = _SECONDS, kept: float = _KEPT) -> None:
        self.seconds = seconds
        self._kept = kept
        self._samples: deque[dict[str, Any]] = deque(maxlen=max(1, round(kept / seconds)))
        self._moves: dict[tuple[Any, ...], dict[str, Any]] = {}

    def add(self, status: dict[str, Any]) -> None:
        """Keep what a status says of memory and utilisation, and moves that are new in it."""
        now = float(status["now"])
        if self._samples and now < self._samples[-1]["time"]:
            # Another clock: nothing of before can be put on one line with it.
            self._samples.clear()
            self._moves.clear()
        gpus = {gpu["name"]: [gpu["used"], gpu["measured_memory"], gpu["utilization"]] for gpu in status["gpus"]}
        self._samples.append({"time": now, "gpus": gpus})
        since = now - self._kept
        while self._samples[0]["time"] < since:
            self._samples.popleft()
        for event in status["events"]:
            if event["kind"] == "moved":
                self._moves[event["time"], event["lease"], event["source"], event["target"]] = event
        recent = [(name, move) for name, move in self._moves.items() if move["time"] >= since]
        self._moves = dict(recent[-_MOVES:])

    def as_json(self) -> dict[str, Any]:
        """`samples` are {"time", "gpus": {name: [reserved bytes, measured bytes or null, utilisation or null]}}."""
        return {"seconds": self.seconds, "samples": list(self._samples), "moves": list(self._moves.values())}


class Pool:
    """A pool as the page sees it: its latest status, which all readers share, and its history."""

    def __init__(self, status: Status, history: History) -> None:
        self.history = history
        self._ask = status
        self._lock = asyncio.Lock()
        self._latest: dict[str, Any] = {}
        self._asked = -float("inf")

    async def status(self) -> dict[str, Any]:
        """The status, at most half a second old. RequestError (503) where the pool does not answer."""
        async with self._lock:
            if time.monotonic() - self._asked > _FRESH:
                try:
                    self._latest = await self._ask()
                except WarpbusError as error:
                    raise RequestError(503, str(error), kind="service_unavailable", code="pool_unavailable") from None
                self._asked = time.monotonic()
            return self._latest

    async def sample(self) -> None:
        """Add to the history for as long as this runs; while the pool does not answer there is a gap."""
        answers = True
        while True:
            try:
                self.history.add(await self.status())
                answers = True
            except RequestError as error:
                if answers:
                    _log.warning("%s", error)
                answers = False
            except Exception:
                _log.exception("the pool's status was not understood")
            await asyncio.sleep(self.history.seconds)


def create_pool_app(status: Status, options: ServerOptions, history: History | None = None) -> FastAPI:
    """The application: the page, `GET /api/status`, `GET /api/history` and `GET /metrics` for Prometheus.

    Args:
        status: asks the pool; WarpbusError where it does not answer.
        options: of the server.
        history: to keep samples in.
    """
    pool = Pool(status, history or History())

    @asynccontextmanager
    async def sampling(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(pool.sample())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    app = FastAPI(
        title="Warpbus pool",
        version=warpbus.__version__,
        middleware=[
            Middleware(AccessLog, metrics=Metrics()),
            Middleware(Guard, options=options, is_open=_is_open),
        ],
        lifespan=sampling,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    failures.install(app)

    @app.get("/api/status")
    async def pool_status() -> JSONResponse:
        return JSONResponse(await pool.status(), headers=_PLAIN)

    @app.get("/api/history")
    async def pool_history() -> JSONResponse:
        return JSONResponse(pool.history.as_json(), headers=_PLAIN)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(pool_metrics(await pool.status()), media_type=CONTENT_TYPE, headers=_PLAIN)

    app.include_router(page_router("pool_page", SHARED))
    return app


def _is_open(path: str) -> bool:
    """Needs no key: the page's files, which hold no secret."""
    return path == "/" or path.startswith("/page/")


def serve_pool_page(status: Status, options: ServerOptions, *, ready: Callable[[str], None]) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Args:
        status: asks the pool.
        options: of the server.
        ready: called with the server's address once it listens.

    Raises:
        UsageError: the port is in use, or certificates cannot be used.
    """
    options.check_tls()
    listening = bind(options)
    try:
        asyncio.run(_serve(status, options, lambda: ready(address(listening, options)), listening))
    finally:
        listening.close()


async def _serve(status: Status, options: ServerOptions, ready: Callable[[], None], listening: Any) -> None:
    server = make_server(create_pool_app(status, options), options)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    ready()
    await server.serve([listening])
