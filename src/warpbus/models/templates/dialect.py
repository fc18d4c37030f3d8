"""What a tool dialect is: how a family of models is told which tools there are, and how it calls them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from warpbus.errors import UsageError
from warpbus.models.templates.base import Message

LONGEST_CALL = 1 << 16
"""Characters of a message that are read as a call; a longer one stays text."""

Tool = Mapping[str, Any]
"""A tool: its `name`, and optionally `description` and `parameters`, a JSON schema."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """A message that may hold tool calls. A turn of the role "tool" is what a tool gave back."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()


class ToolDialect(Protocol):
    """How one family of models reads and writes tools.

    Attributes:
        interpreter: the name under which the model runs code. A tool of this name, with no parameter but perhaps
            `code`, is the code interpreter that the model knows: it is not described as a function, and called with the
            code as it is.
    """

    interpreter: str

    def render_tools(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Message]:
        """The messages of a conversation, for `Template.render`.

        Raises UsageError where a call of the past has arguments that are no JSON object, or that the model cannot
        write.
        """

    def read(self, text: str, names: Collection[str]) -> list[ToolCall]:
        """The calls that a message consists of, from its first line on; none if it is not exactly that."""

    def grammar(self, tools: Sequence[Tool]) -> str:
        """The grammar (Lark, as llguidance reads it) of an answer that is a call of one of the tools.

        Raises UsageError where there is none for such a tool.
        """


def split_tools(tools: Sequence[Tool], interpreter: str) -> tuple[list[Tool], Tool | None]:
    """The functions, and the code interpreter if it is among the tools."""
    found = next((tool for tool in tools if tool["name"] == interpreter and _takes_code(tool)), None)
    return [tool for tool in tools if tool is not found], found


def _takes_code(tool: Tool) -> bool:
    return set((tool.get("parameters") or {}).get("properties") or {}) <= {"code"}


def code_of(call: ToolCall, interpreter: str) -> str | None:
    """The code that a call hands to the code interpreter; None if it is another call."""
    arguments = arguments_of(call)
    code = arguments.get("code")
    return code if call.name == interpreter and len(arguments) == 1 and isinstance(code, str) else None


def code_call(name: str, code: str) -> ToolCall:
    """A call of the code interpreter."""
    return ToolCall(name, json.dumps({"code": code}, ensure_ascii=False))


def messages_of_turns(turns: Sequence[Turn], head: str, write: Callable[[ToolCall], Message]) -> list[Message]:
    """The messages of a conversation behind a system message `head` (if it has text), each call by `write`."""
    messages: list[Message] = [{"role": "system", "content": head}] if head else []
    for turn in turns:
        if turn.role == "tool":
            messages.append({"role": "observation", "content": turn.content})
            continue
        if turn.content or not turn.calls:
            messages.append({"role": turn.role, "content": turn.content})
        messages += [write(call) for call in turn.calls]
    return messages


def described(tool: Tool) -> dict[str, Any]:
    """A function as the models were told of it."""
    return {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("parameters") or {"type": "object", "properties": {}},
    }


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """A call's arguments. UsageError if they are no JSON object."""
    try:
        found = json.loads(call.arguments, parse_constant=no_constant)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"tool_calls: {call.name}: expected arguments that are a JSON object, as text")
    return found


def as_json(arguments: object) -> str:
    """A call's arguments as text. ValueError where JSON has no such values.

    Half a surrogate pair, which no encoding of text has, stays an escape.
    """
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        written.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments)
    return written


def no_constant(name: str) -> None:
    """For `json`'s parse_constant: refuses NaN and the infinities. ValueError."""
    raise ValueError(f"{name} is no JSON")
