"""Errors as HTTP responses with OpenAI's error object, or Anthropic's for its API."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from warpbus.errors import (
    ConflictError,
    ContextLengthError,
    EngineDiedError,
    QueueFullError,
    UnavailableError,
    UsageError,
    WarpbusError,
)
from warpbus.server.registry import RETRY_SECONDS
from warpbus.server.request_error import RequestError

_log = logging.getLogger("warpbus.server")

_INVALID = "invalid_request_error"
# The text that pydantic inserts into the location of an error for the member of a union that it tried.
_UNION_MEMBER = re.compile(r"(?:str|int|NamedTool|(?:list|dict|literal|constrained|function)[-\[].*)$")
# The field that holds what is too long for the context.
_PROMPTS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}
# Anthropic's names of them.
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Tags of unions, which pydantic inserts behind the index of an item.
_TAGS = frozenset(
    (
        "function_call",
        "function_call_output",
        "message",
        "reasoning",
        "redacted_thinking",
        "text",
        "thinking",
        "tool_result",
        "tool_use",
    )
)
_HTTP_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ClientGoneError(Exception):
    """The client has closed its connection."""


def as_request_error(error: Exception, path: str) -> RequestError:
    """Any error as a RequestError with an HTTP status; `path` is that of the route, whose fields the error may name."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ContextLengthError):
        return RequestError(400, str(error), param=_PROMPTS.get(path), code="context_length_exceeded")
    if isinstance(error, ConflictError):
        return RequestError(409, str(error), code="conflict")
    if isinstance(error, UsageError):
        return RequestError(400, str(error))
    if isinstance(error, QueueFullError):
        return RequestError(
            429, str(error), kind="rate_limit_error", code="queue_full", retry_after=_retry_after(error)
        )
    if isinstance(error, UnavailableError):
        # An engine that died says itself whether it comes back.
        retry_after = None if isinstance(error, EngineDiedError) and not error.retry_after else _retry_after(error)
        return RequestError(
            503, str(error), kind="service_unavailable", code="engine_unavailable", retry_after=retry_after
        )
    if isinstance(error, WarpbusError):
        return RequestError(500, str(error), kind="server_error")
    _log.error("a request failed", exc_info=error)
    return RequestError(500, "the server failed; its log has the reason", kind="server_error")


def body_of(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    # Text of a client may hold lone surrogates, which UTF-8 cannot encode.
    message = str(error).encode("utf-8", "replace").decode("utf-8")
    return {"error": {"message": message, "type": error.kind, "param": error.param, "code": error.code}}


def anthropic_body_of(error: RequestError) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = _ANTHROPIC_KINDS.get(error.status, _INVALID if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": body_of(error)["error"]["message"]}}


def response_of(error: RequestError, path: str) -> Response:
    """The response for an error of a route."""
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.closes:
        headers["connection"] = "close"
    body = anthropic_body_of(error) if path.startswith("/v1/messages") else body_of(error)
    content = json.dumps(body, ensure_ascii=False).encode()
    return Response(content, error.status, headers, media_type="application/json")


def _methods(app: FastAPI, request: Request) -> set[str]:
    """The methods of all routes of a request's path; the routes themselves know each only its own."""
    found = [route for route in app.routes if route.matches(request.scope)[0] is not Match.NONE]
    # A path of its own, such as /v1/responses/input_tokens, also matches /v1/responses/{name}.
    own = [route for route in found if getattr(route, "path", None) == request.scope["path"]]
    return {method for route in own or found for method in getattr(route, "methods", None) or ()}


def install(app: FastAPI) -> None:
    """Register handlers that turn every error of the app's routes into such a response."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return response_of(_of_validation(error), request.url.path)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        found = RequestError(error.status_code, str(error.detail), kind=_HTTP_KINDS.get(error.status_code, _INVALID))
        if error.status_code == 404:
            found = RequestError(404, f"there is no {request.method} {request.url.path[:200]}", code="not_found")
        elif error.status_code == 405:
            found = RequestError(405, f"{request.url.path[:200]} does not take {request.method}", code="method")
        response = response_of(found, request.url.path)
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["allow"] = ", ".join(sorted(_methods(app, request)))
        return response

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)

    @app.exception_handler(WarpbusError)
    async def failed(request: Request, error: WarpbusError) -> Response:
        return response_of(as_request_error(error, request.url.path), request.url.path)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return response_of(as_request_error(error, request.url.path), request.url.path)


def _of_validation(error: RequestValidationError) -> RequestError:
    """The most specific validation error of a body, with the name of its field: the first one of the innermost.

    Of a union, the member of the given type says more than those of other types, and so does the one that got further
    in a list.
    """
    first = max(error.errors(), key=lambda one: (not _of_type(one), len(one["loc"]), _indices(one["loc"])))
    location = _named_parts(first["loc"][1:])
    field = ".".join(location) or None
    if first["type"] == "json_invalid":
        return RequestError(400, f"the body is not JSON ({first['ctx']['error']}, at {field})", code="invalid_json")
    if field is None and first["type"] in ("model_attributes_type", "model_type", "missing"):
        return RequestError(400, "the body has to be a JSON object, with content-type: application/json")
    message = str(first["msg"]).removeprefix("Value error, ")
    return RequestError(400, f"{field}: {message}" if field else message, param=location[0] if location else None)


def _named_parts(location: Sequence[str | int]) -> list[str]:
    """The fields and indices of a location, without the members of unions."""
    parts = [part for part in location if not _UNION_MEMBER.match(str(part))]
    tags = {at for at in range(1, len(parts) - 1) if parts[at] in _TAGS and isinstance(parts[at - 1], int)}
    return [str(part)[:80] for at, part in enumerate(parts) if at not in tags]


def _of_type(error: dict[str, Any]) -> bool:
    """A validation error says that the value has another type."""
    kind: str = error["type"]
    return kind.endswith("_type") or (kind == "literal_error" and not isinstance(error["input"], str))


def _indices(location: Sequence[str | int]) -> tuple[int, ...]:
    return tuple(part for part in location if isinstance(part, int))


def _retry_after(error: UnavailableError) -> int:
    return max(1, round(error.retry_after or RETRY_SECONDS))
