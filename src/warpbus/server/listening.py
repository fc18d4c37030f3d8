"""Runs the server: the socket, HTTP connections with limits, loading of models, and graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import math
import signal
import socket
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from warpbus.engine.options import ReplicaOptions, ServiceOptions
from warpbus.engine.replicas import start_service
from warpbus.errors import UsageError
from warpbus.models import Progress
from warpbus.server.app import create_app
from warpbus.server.failures import response_of
from warpbus.server.generation import RunningGenerations
from warpbus.server.options import ServerOptions
from warpbus.server.registry import RETRY_SECONDS, Models
from warpbus.server.request_error import RequestError
from warpbus.server.tracing import tracer

_IDLE_SECONDS = 30
# At the end of the server, clients whose requests are not done have so long to receive the error.
_SECONDS_TO_TELL = 5


@dataclass(frozen=True)
class ModelToServe:
    """A model directory and the model's name in requests; the names and directories of its adapters.

    Attributes:
        alias: another name that requests may give; None: there is none.
    """

    name: str
    directory: Path
    adapters: tuple[tuple[str, str], ...] = ()
    alias: str | None = None


def serve(
    wanted: abc.Sequence[ModelToServe],
    options: ServerOptions,
    service: ServiceOptions,
    *,
    progress: Callable[[str], Progress],
    ready: Callable[[str], None],
    replicas: ReplicaOptions | None = None,
) -> None:
    """Serve models until SIGINT or SIGTERM; then running requests are given `options.shutdown_timeout` to finish.

    The server accepts requests at once, and answers 503 until a model is loaded.

    Args:
        wanted: the models, loaded one after another.
        options: of the server.
        service: the options of each model, except for its adapters.
        progress: for a model's name, the callback for the progress of loading.
        ready: called with the server's address when all models are loaded.
        replicas: how many engines each model has; by default one.

    Raises:
        UsageError: the port is in use, certificates cannot be used, OpenTelemetry is missing, or as `start_service`.
        WarpbusError: a model could not be loaded; see `start_service`.
    """
    options.check_tls()
    with contextlib.ExitStack() as closing:
        traced = None if options.otlp_endpoint is None else closing.enter_context(tracer(options.otlp_endpoint))
        listening = closing.enter_context(bind(options))
        copies = replicas or ReplicaOptions()
        asyncio.run(_serve(listening, wanted, options, service, copies, traced, progress=progress, ready=ready))


def bind(options: ServerOptions) -> socket.socket:
    """The listening socket. UsageError if host and port are not available."""
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"--port {options.port}: something listens at {options.host}:{options.port} already; give another "
                "port, or 0 for a free one"
            ) from None
        if error.errno == errno.EACCES:
            raise UsageError(f"--port {options.port}: not allowed ({error.strerror}); give one above 1023") from None
        raise UsageError(
            f"--host {options.host}: cannot be listened at ({error}); give an address of this machine"
        ) from None


async def _serve(
    listening: socket.socket,
    wanted: abc.Sequence[ModelToServe],
    options: ServerOptions,
    service: ServiceOptions,
    replicas: ReplicaOptions,
    traced: Any,
    *,
    progress: Callable[[str], Progress],
    ready: Callable[[str], None],
) -> None:
    models = Models()
    for one in wanted:
        models.add(one.name, adapters=[name for name, _ in one.adapters], alias=one.alias)
    app = create_app(models, options, traced)
    server = make_server(app, options, app.state.running)
    loop = asyncio.get_running_loop()
    url = address(listening, options)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.handle_exit, number, None)

    async def load() -> None:
        for one in wanted:
            own = replace(service, adapters=one.adapters)
            models.find(one.name).loaded(await start_service(one.directory, own, replicas, progress=progress(one.name)))
        gc.freeze()  # a collection of all that was loaded would stop the streams for a tenth of a second and more
        if not server.should_exit:  # a signal may have closed the socket already
            ready(url)

    loading = asyncio.create_task(load())
    # If a model cannot be loaded, the server ends.
    loading.add_done_callback(lambda task: _stop_if_failed(task, server))
    try:
        await server.serve([listening])
    finally:
        loading.cancel()
        [outcome] = await asyncio.gather(loading, return_exceptions=True)
        await models.close(0.0)
    if isinstance(outcome, Exception):
        raise outcome


def _stop_if_failed(task: asyncio.Task[None], server: uvicorn.Server) -> None:
    if not task.cancelled() and task.exception() is not None:
        server.should_exit = True


def make_server(app: FastAPI, options: ServerOptions, running: RunningGenerations | None = None) -> uvicorn.Server:
    """The uvicorn server of an application; it does not listen yet and leaves signals to its caller.

    Args:
        running: ended when the server has been shutting down for `options.shutdown_timeout`.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        http=partial(_LimitedConnection, most=options.max_connections, seconds=options.body_timeout),  # type: ignore[arg-type]
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=math.ceil(options.shutdown_timeout) + _SECONDS_TO_TELL,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    return _Server(config, options.shutdown_timeout, running)


def address(listening: socket.socket, options: ServerOptions) -> str:
    """The URL of a socket; of one that listens on all interfaces, the URL for this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if options.tls else 'http'}://{host}:{listening.getsockname()[1]}"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, seconds: float, running: RunningGenerations | None) -> None:
        super().__init__(config)
        self._seconds = seconds
        self._running_generations = running

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Uvicorn cancels what runs for too long, and its clients would get no answer.
        timer = None
        if self._running_generations is not None:
            timer = asyncio.get_running_loop().call_later(self._seconds, self._running_generations.end)
        try:
            await super().shutdown(sockets)
        finally:
            if timer is not None:
                timer.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Uvicorn would raise the signal again at its end, and the exit status would not be 0.
        yield


class _Http(h11.Connection):
    """Frames the parts of a streamed response itself: h11 takes as long for each as the system call that sends it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._chunked = False

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        if self._chunked and type(event) is h11.Data and self.our_state is h11.SEND_BODY:
            return [b"%x\r\n" % len(event.data), event.data, b"\r\n"] if event.data else []
        sent = super().send_with_data_passthrough(event)
        if type(event) is h11.Response:
            self._chunked = b"Transfer-Encoding: chunked\r\n" in (sent or ())
        return sent


def _raw_response(error: RequestError) -> bytes:
    """The response to what is no request of the application yet."""
    response = response_of(error, "")
    first = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()
    return first + b"".join(b"%s: %s\r\n" % header for header in response.raw_headers) + b"\r\n" + bytes(response.body)


_INVALID = _raw_response(RequestError(400, "what was sent is not HTTP/1.1", code="invalid_http", closes=True))
_CROWDED = _raw_response(
    RequestError(
        503,
        "too many connections are open: try again later",
        kind="service_unavailable",
        code="too_many",
        retry_after=RETRY_SECONDS,
        closes=True,
    )
)


class _LimitedConnection(H11Protocol):
    """A connection; refused if there are too many.

    It is closed if the head of a request does not arrive in time, and aborted if the client reads nothing for as long:
    a connection that is closed with unsent data would otherwise stay, and count, until the client takes the data.
    """

    def __init__(self, *, most: int, seconds: float, **others: Any) -> None:
        super().__init__(**others)
        self.conn = _Http(h11.SERVER)
        self._most = most
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None  # while there is unsent data

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # `pause_writing` and `resume_writing` are then called whenever there begins and ends to be unsent data.
        transport.set_write_buffer_limits(high=1, low=0)
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.write(_CROWDED)
            transport.close()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        # Uvicorn's own timer stops at the first byte, but a client can send bytes slowly.
        if self._timer is None and self._between_requests():
            self._watch()
        if not self.transport.is_closing():
            super().data_received(data)
        if not self._between_requests():
            self._unwatch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._unwatch_reading()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        self._unwatch_reading()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        # Uvicorn fails if a response was sent already, as to a body that is too long and then malformed.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_INVALID)
        self.transport.close()

    def _should_upgrade(self) -> bool:
        return False  # uvicorn would log twice that WebSockets are missing, also for those that ask for HTTP/2

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        self._timer = self.loop.call_later(self._seconds, self._too_late)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        self._timer = None
        if self._between_requests():
            self.transport.close()

    def _watch_reading(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._reading_timer = self.loop.call_later(self._seconds, self._check_reading, unsent)

    def _unwatch_reading(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def _check_reading(self, unsent: int) -> None:
        """Abort if there is no less unsent data than before."""
        if self.transport.get_write_buffer_size() < unsent:
            self._watch_reading()
        else:
            self.transport.abort()
