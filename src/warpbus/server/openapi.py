"""The document of the API, `/openapi.json`: FastAPI's own, with the server's errors, streams and API keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI

from warpbus.server.answer_schema import STREAMED, AnthropicErrorAnswer, ErrorAnswer

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": "refused or failed"} for status in ("4XX", "5XX")
}
"""The `responses` of every route for its errors."""

ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicErrorAnswer, "description": "refused or failed"} for status in ("4XX", "5XX")
}
"""The same for the routes of Anthropic's API."""

_REFERENCE = "#/components/schemas/{model}"
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def install(app: FastAPI, *, has_keys: bool, is_open: Callable[[str], bool]) -> None:
    """Have the application make the document in this way.

    Args:
        has_keys: the server requires an API key.
        is_open: whether a path needs no key.
    """
    app.openapi = partial(_document, app, app.openapi, has_keys, is_open)  # type: ignore[method-assign]


def _document(
    app: FastAPI, generated: Callable[[], dict[str, Any]], has_keys: bool, is_open: Callable[[str], bool]
) -> dict[str, Any]:
    fresh = app.openapi_schema is None
    document = generated()
    if fresh:
        _add_schemas(document)
        _add_keys(document, has_keys, is_open)
    return document


def _add_schemas(document: dict[str, Any]) -> None:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for model in STREAMED:
        schema = model.model_json_schema(ref_template=_REFERENCE, mode="serialization")
        schemas |= schema.pop("$defs", {}) | {model.__name__: schema}
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            for status in ERRORS:
                # FastAPI gives errors the media type of the answer.
                content = operation["responses"][status]["content"]
                if "text/plain" in content:
                    content["application/json"] = content.pop("text/plain")


def _add_keys(document: dict[str, Any], has_keys: bool, is_open: Callable[[str], bool]) -> None:
    document["components"]["securitySchemes"] = _SCHEMES
    either: list[dict[str, list[str]]] = [{name: []} for name in _SCHEMES]
    document["security"] = either if has_keys else [{}, *either]
    for name, path in document["paths"].items():
        for operation in path.values():
            if is_open(name):
                operation["security"] = []
