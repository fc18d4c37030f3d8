"""Tool dialects: how the prompt of a model family lists the tools, and how the model calls them.

Calls are parsed as data and never executed. Text that is not exactly a call of an offered tool remains text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from warpbus.errors import UsageError
from warpbus.models.templates.base import Message, Variables
from warpbus.models.templates.json_schema import json_grammar

LONGEST_CALL = 1 << 16
"""Characters of a message that are read as a call; a longer one stays text."""

Tool = Mapping[str, Any]
"""A tool: its `name`, and optionally `description` and `parameters`, a JSON schema."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        arguments: the text of a JSON object.
        complete: False if `max_tokens` ended the answer within the call: `arguments` is then only its beginning.
    """

    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True)
class Turn:
    """A message that may hold tool calls. A turn of the role "tool" is what a tool gave back.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        content: the text.
        calls: of an assistant.
        reasoning: the thinking of an assistant before its text.
    """

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


class AnswerStream(Protocol):
    """Splits one answer into text and tool calls as it comes."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is certain now, and the calls that are complete."""

    def turn(self) -> tuple[str, list[ToolCall]]:
        """The text that was held back, or the calls, at the end of a message before another of the same answer."""

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The text that was held back, or the calls, at the end of the answer."""

    def cut_off(self) -> tuple[str, list[ToolCall]]:
        """The same at the end of an answer that has as many tokens as it may: its last call may be incomplete.

        A call whose tool is not known yet remains text.
        """


class ToolDialect(Protocol):
    """How one family of models reads and writes tools."""

    def render_tools(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Message]:
        """The messages of a conversation, for `Template.render`.

        Raises UsageError where a call of the past has arguments that are no JSON object, or that the model cannot
        write.
        """

    def variables(self, tools: Sequence[Tool]) -> Variables:
        """The variables of the template that declare the tools; none if `render_tools` declares them."""

    def stream(self, tools: Sequence[Tool]) -> AnswerStream:
        """Splits an answer that may call these tools; without tools, all of it is text."""

    def grammar(self, tools: Sequence[Tool], *, several: bool = False) -> str:
        """The grammar (Lark, as llguidance reads it) of an answer that is a call of one of the tools.

        Args:
            tools: at least one.
            several: the answer may have further calls.

        Raises UsageError where there is none for such a tool.
        """

    def free_grammar(self, tools: Sequence[Tool]) -> str | None:
        """The grammar of an answer of text and calls, in any order, whose calls match the tools' schemas.

        None if the dialect has none: its calls cannot be distinguished from text before they end.
        """


class TemplateTools:
    """Methods of a `ToolDialect` whose template declares the tools and writes the calls."""

    def render_tools(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Message]:
        """See `ToolDialect.render_tools`."""
        return openai_messages(turns)

    def variables(self, tools: Sequence[Tool]) -> Variables:
        """See `ToolDialect.variables`."""
        return {"tools": openai_tools(tools)} if tools else {}


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


def code_call(name: str, code: str, *, complete: bool = True) -> ToolCall:
    """A call of the code interpreter; of code that is cut off, if it is not complete."""
    arguments = json.dumps({"code": code}, ensure_ascii=False)
    return ToolCall(name, arguments if complete else arguments.removesuffix('"}'), complete)


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


def names_of(tools: Sequence[Tool]) -> frozenset[str]:
    """The names of tools."""
    return frozenset(str(tool["name"]) for tool in tools)


def openai_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools in the form of OpenAI's API, which Jinja templates expect."""
    return [{"type": "function", "function": dict(tool)} for tool in tools]


def openai_messages(turns: Sequence[Turn]) -> list[Message]:
    """Messages in the form of OpenAI's API, as Jinja templates expect them: arguments are objects.

    Raises UsageError if the arguments of a call are no JSON object.
    """
    messages: list[Message] = []
    for turn in turns:
        message: Message = {"role": turn.role, "content": turn.content}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": arguments_of(call)}}
                for call in turn.calls
            ]
        messages.append(message)
    return messages


def described(tool: Tool) -> dict[str, Any]:
    """A function as the models see it."""
    return {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("parameters") or {"type": "object", "properties": {}},
    }


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """A call's arguments, of which there may be none. UsageError if they are no JSON object."""
    try:
        found = json.loads(call.arguments or "{}", parse_constant=no_constant)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"tool_calls: {call.name}: expected arguments that are a JSON object, as text")
    return found


def arguments_grammar(tool: Tool) -> str:
    """The part of a grammar that matches a tool's arguments as a JSON object."""
    return json_grammar({**(tool.get("parameters") or {}), "type": "object"})


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
