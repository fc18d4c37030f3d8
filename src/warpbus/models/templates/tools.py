"""How models are told which tools there are, and how they call them: the tool dialects of ChatGLM3 and GLM-4.

Both answer with a first line that names the tool, which is empty in an answer to the user; what follows is the call.
A call is read as a literal and never run. What is not exactly a call of a tool that there is stays text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from warpbus.errors import UsageError
from warpbus.models.templates.base import Message, Template
from warpbus.models.templates.chatglm import RoleTokenTemplate
from warpbus.models.templates.jinja import JinjaTemplate

LONGEST_CALL = 1 << 16
"""Characters of an answer that are read as a call; a longer one stays text."""

_LONGEST_LINE = 128
_GLM4_HEADING = "# 可用工具"


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
    """How one family of models reads and writes tools."""

    def render_tools(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        """The messages of a conversation, for `Template.render`.

        Args:
            tools: each with `name`, and optionally `description` and `parameters`, a JSON schema.

        Raises UsageError where a call of the past has arguments that are no JSON object.
        """

    def read(self, text: str, names: Collection[str]) -> list[ToolCall]:
        """The calls that an answer consists of, from its first line on; none if it is not exactly that."""

    def grammar(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The grammar (Lark, as llguidance reads it) of an answer that is a call of one of the tools.

        Raises UsageError where the dialect's calls have none.
        """


class ChatGLM3Tools:
    """ChatGLM3: a tool's name, then a Python call `tool_call(key=value, ...)` in a fence, its values literals."""

    def render_tools(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        """See `ToolDialect.render_tools`."""
        head = (
            "Answer the following questions as best as you can. You have access to the following tools:\n"
            + json.dumps([_described(tool) for tool in tools], ensure_ascii=False, indent=4)
        )
        return _messages(turns, head if tools else None, self._call)

    def read(self, text: str, names: Collection[str]) -> list[ToolCall]:
        """See `ToolDialect.read`."""
        name, _, rest = text.partition("\n")
        fenced = re.fullmatch(r"\s*```(?:python)?[ \t]*\n(.*?)\n?[ \t]*```\s*", rest, re.DOTALL)
        if name.strip() not in names or not fenced or len(text) > LONGEST_CALL:
            return []
        try:
            node = ast.parse(fenced[1].strip(), mode="eval").body
            if (
                not isinstance(node, ast.Call)
                or not isinstance(node.func, ast.Name)
                or node.func.id != "tool_call"
                or node.args
            ):
                return []
            found = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
            if None in found or len(found) < len(node.keywords):
                return []
            arguments = json.dumps(found, ensure_ascii=False, allow_nan=False)
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            return []
        return [ToolCall(name.strip(), arguments)]

    def grammar(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Raises UsageError."""
        raise UsageError("tool_choice: ChatGLM3 cannot be made to call a tool; give auto or none")

    def _call(self, call: ToolCall) -> Message:
        arguments = _arguments(call)
        strange = [key for key in arguments if not key.isidentifier()]
        if strange:
            raise UsageError(f"tool_calls: {call.name}: ChatGLM3 cannot write the argument's name {strange[0][:40]!r}")
        written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        return {"role": "assistant", "metadata": call.name, "content": f" ```python\ntool_call({written})\n```"}


# For llguidance: a small model otherwise goes on with blanks for ever.
_FEW_BLANKS = {"x-guidance": {"whitespace_pattern": "[ ]?"}}


class GLM4Tools:
    """GLM-4: a tool's name, then the arguments as a JSON object; several calls follow each other."""

    def render_tools(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        """See `ToolDialect.render_tools`."""
        head = _GLM4_HEADING
        for tool in tools:
            written = json.dumps(_described(tool), ensure_ascii=False, indent=4)
            head += f"\n\n## {tool['name']}\n\n{written}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"
        return _messages(turns, head if tools else None, self._call)

    def read(self, text: str, names: Collection[str]) -> list[ToolCall]:
        """See `ToolDialect.read`."""
        calls: list[ToolCall] = []
        rest = text.rstrip()
        decoder = json.JSONDecoder(parse_constant=_no_constant)
        while rest and len(text) <= LONGEST_CALL:
            name, _, rest = rest.partition("\n")
            rest = rest.lstrip()
            if name.strip() not in names or not rest.startswith("{"):
                return []
            try:
                _, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return []
            calls.append(ToolCall(name.strip(), rest[:end]))
            rest = rest[end:].lstrip()
        return [] if rest else calls

    def grammar(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """See `ToolDialect.grammar`."""
        rules = [
            f"tool{i}: {json.dumps(tool['name'] + chr(10))} %json "
            + json.dumps((tool.get("parameters") or {"type": "object"}) | _FEW_BLANKS, ensure_ascii=False)
            for i, tool in enumerate(tools)
        ]
        return "\n".join(["start: " + " | ".join(f"tool{i}" for i in range(len(tools))), *rules])

    def _call(self, call: ToolCall) -> Message:
        _arguments(call)
        return {"role": "assistant", "metadata": call.name, "content": call.arguments}


class AnswerStream:
    """Takes an answer apart as it comes: text is handed out at once, a call when it is whole.

    Args:
        dialect: of the model.
        names: of the tools that may be called; if empty, the answer is text.
    """

    def __init__(self, dialect: ToolDialect, names: Collection[str]) -> None:
        self._dialect = dialect
        self._names = frozenset(names)
        self._line = ""  # the first line, while it may be a tool's name
        self._call: list[str] | None = None  # what followed such a line, with it
        self._is_text = False
        self._shown = False  # something besides space
        self._length = 0

    def push(self, text: str) -> str:
        """The text that is certain now."""
        if self._is_text:
            return self._text(text)
        if self._call is not None:
            self._call.append(text)
            self._length += len(text)
            return "" if self._length <= LONGEST_CALL else self._text(self._give_up())
        self._line += text
        line, newline, _ = self._line.partition("\n")
        name = line.strip()
        if newline and name in self._names:
            self._call, self._length = [self._line], len(self._line)
            return ""
        may_become = not name or any(known.startswith(name) for known in self._names)
        if not newline and may_become and len(line) <= _LONGEST_LINE:
            return ""
        return self._text(self._give_up())

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The text that was kept back, or the calls, at the end of the answer."""
        held = self._give_up()
        calls = self._dialect.read(held, self._names) if held else []
        return ("", calls) if calls else (self._text(held), [])

    def _give_up(self) -> str:
        """What was kept back. From now on all is text."""
        held = self._line if self._call is None else "".join(self._call)
        self._line, self._call, self._is_text = "", None, True
        return held

    def _text(self, text: str) -> str:
        # The empty first line, and what ChatGLM3 puts before its text, is not the user's.
        if not self._shown:
            text = text.lstrip()
            self._shown = bool(text)
        return text


def find_dialect(template: Template) -> ToolDialect | None:
    """The dialect of a model by its template; None if it knows no tools."""
    if isinstance(template, RoleTokenTemplate):
        return GLM4Tools() if template.sop == "<sop>" else ChatGLM3Tools()
    if isinstance(template, JinjaTemplate) and _GLM4_HEADING in template.source and "metadata" in template.source:
        return GLM4Tools()
    return None


def _messages(turns: Sequence[Turn], head: str | None, write: Any) -> list[Message]:
    messages: list[Message] = [] if head is None else [{"role": "system", "content": head}]
    for turn in turns:
        if turn.role == "tool":
            messages.append({"role": "observation", "content": turn.content})
            continue
        if turn.content or not turn.calls:
            messages.append({"role": turn.role, "content": turn.content})
        messages += [write(call) for call in turn.calls]
    return messages


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("parameters") or {"type": "object", "properties": {}},
    }


def _arguments(call: ToolCall) -> dict[str, Any]:
    try:
        found = json.loads(call.arguments, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"tool_calls: {call.name}: expected arguments that are a JSON object, as text")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
