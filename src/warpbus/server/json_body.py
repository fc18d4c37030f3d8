"""Reads the JSON of request bodies: UTF-8 without lone surrogates, so that every text of a request can be sent back."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# An escape of JSON. The group is one half of a surrogate pair without the other half.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)


class JsonRoute(APIRoute):
    """A route that reads its body with `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """The handler of the route's requests."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class _JsonRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


def read_json(body: bytes) -> Any:
    """The value that a body holds.

    Raises:
        json.JSONDecodeError: it is not JSON in UTF-8, is nested too deeply, or holds a lone surrogate or a number with
            thousands of digits.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError("Not UTF-8", "", error.start) from None
    try:
        found = json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("Nested too deeply", "", 0) from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        raise json.JSONDecodeError("A number has too many digits", "", 0) from None
    # A client may escape everything beyond ASCII, so that a body has an escape per character.
    for escape in _ESCAPE.finditer(text) if _SURROGATE.search(text) else ():
        if escape[1]:
            raise json.JSONDecodeError(f"Lone surrogate \\{escape[1]}", "", escape.start())
    return found
