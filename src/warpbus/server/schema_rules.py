"""Rules between the fields of a body as JSON schema, for the document of the API; the body's validators check them."""

from __future__ import annotations

from typing import Any

Rule = dict[str, Any]

NULL: Rule = {"type": "null"}
REFUSED: Rule = {"anyOf": [{"const": False}, NULL]}
"""Of a field that is refused if it is true."""


def given(*names: str) -> Rule:
    """All these fields are in the body and not null."""
    return {"required": list(names), "properties": {name: {"not": NULL} for name in names}}


def equals(name: str, value: Any) -> Rule:
    """The field is in the body and has this value."""
    return {"required": [name], "properties": {name: {"const": value}}}


def filled(name: str) -> Rule:
    """The field is in the body and a list with items."""
    return {"required": [name], "properties": {name: {"type": "array", "minItems": 1}}}


def absent(*names: str) -> Rule:
    """None of these fields is in the body, or not null."""
    return {"properties": dict.fromkeys(names, NULL)}


def either(*rules: Rule) -> Rule:
    """At least one of these holds."""
    return {"anyOf": list(rules)}


def one_of(*names: str) -> Rule:
    """Exactly one of these fields is given."""
    return either(*({**given(name), "allOf": [absent(*(set(names) - {name}))]} for name in names))
