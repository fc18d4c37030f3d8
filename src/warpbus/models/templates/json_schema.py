"""JSON schemas of answers and tools: as llguidance reads them, and which types of values they allow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

_FEW_BLANKS = {"x-guidance": {"whitespace_pattern": "[ ]?"}}
"""For llguidance: a small model otherwise goes on with blanks for ever."""

_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
"""The formats that llguidance enforces; it refuses others."""

_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_DEFINITIONS = ("$defs", "definitions")
_REFERENCE_CHARACTERS = "%#/?:@!$&'()*+,;=~"  # that RFC 3986 allows, besides letters and digits
_MOST_STEPS = 8  # of references to references, and of schemas within schemas whose types are looked for

# The keywords whose values are a schema, a list of schemas, or schemas by name.
_ONE = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = (*_DEFINITIONS, "dependentSchemas", "patternProperties", "properties")


def json_grammar(schema: Any, root: Mapping[str, Any] | None = None) -> str:
    """The part of a grammar (Lark) that matches JSON of a schema.

    Args:
        schema: the schema; what is no object allows everything.
        root: the schema to which its references lead, if it is a part of another one.
    """
    own = schema if isinstance(schema, dict) else {}
    if root is not None and '"$ref"' in json.dumps(own):
        own = {name: root[name] for name in _DEFINITIONS if name in root} | own
    return f"%json {json.dumps(for_llguidance(own) | _FEW_BLANKS, ensure_ascii=False)}"


def for_llguidance(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that allows the same as another one, with fewer keywords that llguidance refuses.

    - A `format` that it does not know is left out: such a format says nothing about validity (JSON Schema Validation
      2020-12, 7.2.1).
    - `$ref` is percent-encoded, as a URI has to be.
    - `oneOf` becomes `anyOf` if its schemas are objects that differ in the texts of one property. The property that an
      OpenAPI `discriminator` names is required then.
    """
    found = _rewritten(schema, schema)
    assert isinstance(found, dict)
    return found


def _rewritten(schema: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    choices = found.get("oneOf")
    if isinstance(choices, list) and "anyOf" not in found:
        exclusive = _exclusive(choices, found.get("discriminator"), root)
        if exclusive is not None:
            del found["oneOf"]
            found["anyOf"] = exclusive
    for name in found.keys() & set(_ONE):
        found[name] = _rewritten(found[name], root)
    for name in found.keys() & set(_LISTS):
        if isinstance(found[name], list):
            found[name] = [_rewritten(each, root) for each in found[name]]
    for name in found.keys() & set(_NAMED):
        if isinstance(found[name], dict):
            found[name] = {key: _rewritten(each, root) for key, each in found[name].items()}
    if isinstance(found.get("format"), str) and found["format"] not in _FORMATS:
        del found["format"]
    if isinstance(found.get("$ref"), str):
        found["$ref"] = quote(found["$ref"], safe=_REFERENCE_CHARACTERS, errors="surrogatepass")
    return found


def _exclusive(choices: Sequence[Any], discriminator: Any, root: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The schemas of a `oneOf`, with a required property in whose texts they differ; None if none is found."""
    targets = [resolved(choice, root) for choice in choices]
    if not targets or not all(isinstance(target, dict) and target.get("type") == "object" for target in targets):
        return None
    named = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    names = [named] if isinstance(named, str) else _common_required(targets)
    for name in names:
        texts = [_texts_of(target, name, root) for target in targets]
        if all(texts) and sum(map(len, texts)) == len(set().union(*texts)):
            required = [target.get("required") or [] for target in targets]
            return [
                {**choice, "required": [*before, *([] if name in before else [name])]}
                for choice, before in zip(choices, required, strict=True)
            ]
    return None


def _common_required(schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    """The properties that all of these schemas require."""
    lists: list[Any] = [schema.get("required") for schema in schemas]
    if not all(isinstance(each, list) for each in lists):
        return []
    return [name for name in lists[0] if isinstance(name, str) and all(name in each for each in lists)]


def _texts_of(schema: Mapping[str, Any], name: str, root: Mapping[str, Any]) -> set[str]:
    """The texts that a property may have; none if it may have other values."""
    properties = schema.get("properties")
    return set(texts_of(resolved(properties.get(name), root))) if isinstance(properties, dict) else set()


def texts_of(schema: Any) -> list[str]:
    """The values that `enum` or `const` allow; none if others than texts are allowed."""
    if not isinstance(schema, Mapping):
        return []
    found: list[Any] = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
    return found if all(isinstance(one, str) for one in found) else []


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema without a reference at its top: what a local `$ref` leads to, with the keywords beside it.

    A reference that leads nowhere stays.
    """
    for _ in range(_MOST_STEPS):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        target = _target(reference, root) if isinstance(reference, str) else None
        if not isinstance(target, Mapping):
            break
        schema = {**target, **{name: value for name, value in schema.items() if name != "$ref"}}
    return schema


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    found: Any = root
    for part in unquote(reference[2:], errors="replace").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def types_of(schema: Any, root: Mapping[str, Any], steps: int = _MOST_STEPS) -> frozenset[str]:
    """The types of values that a schema allows, by JSON Schema's names of them."""
    found = _TYPES
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or not steps:
        return found
    kind = schema.get("type")
    if isinstance(kind, (str, list)):
        found = found & frozenset([kind] if isinstance(kind, str) else [each for each in kind if isinstance(each, str)])
    if isinstance(schema.get("enum"), list):
        found &= frozenset().union(*map(value_types, schema["enum"]))
    elif "const" in schema:
        found &= value_types(schema["const"])
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            found &= frozenset().union(*[types_of(each, root, steps - 1) for each in schema[name]])
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= types_of(each, root, steps - 1)
    return found


def value_types(value: Any) -> frozenset[str]:
    """The types of JSON Schema that a value has: an integer is a number, too."""
    if value is None:
        return frozenset(("null",))
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, (int, float)):
        whole = isinstance(value, int) or value.is_integer()
        return frozenset(("integer", "number")) if whole else frozenset(("number",))
    return frozenset(("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object",))
