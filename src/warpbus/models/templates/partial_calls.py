"""Tool calls at the end of an answer that `max_tokens` has cut off.

OpenAI returns such a call with its name and the beginning of its arguments' JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from warpbus.models.templates.dialect import ToolCall, as_json, no_constant

_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*',
    re.DOTALL,
)


def cut_json_call(text: str, names: Collection[str]) -> ToolCall | None:
    """The call that a JSON object with `name` and `arguments` or `parameters` begins, which is cut off.

    None if the name or the key of the arguments is not complete, or it is not the name of a tool.
    """
    head = _HEAD.match(text)
    if head is None:
        return None
    try:
        name = json.loads(head[1], strict=False)
    except ValueError:
        return None
    return cut_call(name, text[head.end() :]) if name in names else None


def cut_call(name: str, text: str) -> ToolCall | None:
    """A call with arguments that may be cut off. None if they are no JSON object, nor the beginning of one."""
    if text and not text.startswith("{"):
        return None
    try:
        found, _ = json.JSONDecoder(parse_constant=no_constant, strict=False).raw_decode(text)
        return ToolCall(name, as_json(found), complete=False)
    except (ValueError, RecursionError):
        return ToolCall(name, text, complete=False)
