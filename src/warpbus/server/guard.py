"""Middleware before the routes: API keys, host names, limits of size and time, and the access log.

Plain ASGI, so that streams are not buffered.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warpbus.server.admission import Admission
from warpbus.server.failures import response_of
from warpbus.server.generation import ENDING, RequestRecord, server_ends
from warpbus.server.logs import FIELDS
from warpbus.server.metrics import Metrics
from warpbus.server.options import LOOPBACK_NAMES, ServerOptions
from warpbus.server.request_error import RequestError

_access = logging.getLogger("warpbus.access")

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_MOST_NAMED = 10
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_SALT = "cache_salt"  # of a scope's state


class AccessLog:
    """The outermost layer: gives each request an id and logs one line at its end, never a text or a key."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        name = asked if _REQUEST_ID.fullmatch(asked) else f"req-{uuid.uuid4().hex}"
        record = RequestRecord.begin(scope)
        status = 0

        async def send_labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = name
                headers["request-id"] = name  # as Anthropic's clients read it
                headers["x-content-type-options"] = "nosniff"
                if record.ignored:
                    headers["warning"] = f'299 - "unknown fields were ignored: {_joined(record.ignored)}"'
            await send(message)

        try:
            await self._app(scope, receive, send_labelled)
        except asyncio.CancelledError:
            # Only the end of the server cancels a request, and only one that its answer does not inform.
            record.error = record.error or ENDING
            if not status:
                await response_of(server_ends(), scope["path"])(scope, receive, send_labelled)
        finally:
            if status >= 400:
                self._metrics.refused.labels(record.model or "", str(status)).inc()
            # Monitoring requests every few seconds would hide the others.
            level = logging.DEBUG if scope["path"] in ("/health", "/ready", "/metrics") else logging.INFO
            fields = _fields(scope, name, status, record)
            _access.log(level, "%s", _line(fields), extra={FIELDS: fields})


def _fields(scope: Scope, name: str, status: int, record: RequestRecord) -> dict[str, Any]:
    """The logged fields of a request; times in seconds."""
    found: dict[str, Any] = {
        "client": scope["client"][0] if scope.get("client") else "-",
        "method": scope["method"],
        "path": scope["path"][:200].encode("unicode_escape").decode().replace(" ", "%20"),
        "status": status or 499,
        "id": name,
    }
    if record.model is not None:
        found["model"] = record.model
    if record.prompt_tokens:
        found |= {
            "prompt": record.prompt_tokens,
            "cached": record.cached_tokens,
            "output": record.output_tokens,
            "ttft": None if record.first_token is None else round(record.first_token, 3),
        }
    if record.ignored:
        found["ignored"] = _joined(record.ignored)
    if record.error:
        found["error"] = record.error
    return {**found, "time_s": round(time.monotonic() - record.started, 3)}


def _line(fields: dict[str, Any]) -> str:
    """The same as text."""
    shown = {**fields, "time": f"{fields['time_s']:.3f}s"}
    if "ttft" in fields:
        shown["ttft"] = "-" if fields["ttft"] is None else f"{fields['ttft']:.3f}s"
    del shown["time_s"]
    words = [str(shown.pop(name)) for name in ("client", "method", "path", "status")]
    return " ".join([*words, *(f"{name}={value}" for name, value in shown.items())])


def _joined(fields: list[str]) -> str:
    """The names of some fields, which a client has chosen, without spaces, quotes and characters beyond ASCII."""
    shown = [re.sub(r"[^\w.-]", "?", name[:80], flags=re.ASCII) for name in fields[:_MOST_NAMED]]
    return ",".join(shown + ["..."] * (len(fields) > _MOST_NAMED))


class Guard:
    """Refuses requests that are not allowed, before any work.

    Args:
        app: the guarded application.
        options: of the server.
        is_open: whether a path needs no key.
        generates: whether requests to a path wait for admission to the engine.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: ServerOptions,
        is_open: Callable[[str], bool],
        generates: Callable[[str], bool] = lambda path: False,
    ) -> None:
        self._app = app
        self._options = options
        self._is_open = is_open
        self._generates = generates
        self._admission = Admission()
        self._keys = [_digest(key) for key in options.api_keys]
        self._separate_keys = len(self._keys) > 1 and not options.share_prefixes
        names = {*LOOPBACK_NAMES, options.host, *options.allowed_hosts} if options.loopback else set()
        self._hosts: Collection[str] = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._admit(scope)
            body = await self._read(scope, receive)
        except RequestError as error:
            await response_of(error, scope["path"])(scope, receive, send)
            return
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        if not self._generates(scope["path"]):
            await self._app(scope, replay, send)
            return
        async with self._admission.slot(scope) as slot:

            def send_without_slot(message: Message) -> Awaitable[None]:
                slot.release()  # a client that does not read an error must not hold up others
                return send(message)

            await self._app(scope, replay, send_without_slot)

    def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            # RFC 9112, 6.1: a proxy may have seen another end of the request than this server does.
            raise RequestError(
                400, "Content-Length and Transfer-Encoding are both given: send one of them", closes=True
            )
        host = headers.get("host", "")
        if self._hosts and _without_port(host) not in self._hosts:
            raise RequestError(
                403,
                "the Host header names another machine: call the server by localhost, or start it with --allowed-host",
                kind="permission_error",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if (
            origin is not None
            and scope["method"] not in _SAFE_METHODS
            and origin != f"{scope['scheme']}://{host}"
            and not {"*", origin} & set(self._options.allow_origins)
        ):
            raise RequestError(
                403,
                "pages of other origins may not call this server: start it with --allow-origin",
                kind="permission_error",
                code="origin_not_allowed",
            )
        if not self._keys or self._is_open(scope["path"]):
            return
        number = self._key_number(headers)
        if number is None:
            raise RequestError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY, or as X-Api-Key: KEY",
                kind="authentication_error",
                code="invalid_api_key",
            )
        if self._separate_keys:
            # Not the number: blocks on a disk may outlive the list of keys.
            scope.setdefault("state", {})[_SALT] = self._keys[number]

    def _key_number(self, headers: Headers) -> int | None:
        """The index of the request's API key among the accepted ones; None without a valid key."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            given = headers.get("x-api-key", "")
        found = _digest(given.strip()) if given else b""
        # All keys are compared, as digests of one length, so that the time reveals nothing.
        same = [hmac.compare_digest(found, key) for key in self._keys]
        return same.index(True) if any(same) else None

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Read the body; refuse it as soon as it is too long or too slow."""
        limit = self._options.max_body_bytes
        declared = Headers(scope=scope).get("content-length", "0")
        # The length of the text first: converting thousands of digits would take long.
        if len(declared) > 18 or (declared.isdecimal() and int(declared) > limit):
            raise _too_long(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self._options.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RequestError(400, "the client left before its request was complete", code="incomplete")
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise _too_long(limit)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            seconds = self._options.body_timeout
            raise RequestError(
                408, f"the body did not arrive in {seconds:g} s", code="body_timeout", closes=True
            ) from None


def _too_long(limit: int) -> RequestError:
    return RequestError(413, f"the body has more than {limit:,} bytes, the limit", code="body_too_large")


def cache_salt(scope: Scope, given: str | None = None) -> bytes:
    """The salt that separates the prefix cache of one API key from the others; empty if all keys share it.

    Args:
        given: a request's own salt, which separates it from requests with another one or none.
    """
    salt: bytes = scope["state"].get(_SALT, b"")
    return salt if given is None else salt + hashlib.sha256(given.encode("utf-8", "surrogatepass")).digest()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _without_port(host: str) -> str:
    name = host.lower().rpartition(":")[0] if re.search(r":\d+$", host) else host.lower()
    return name.removeprefix("[").removesuffix("]").removesuffix(".")
