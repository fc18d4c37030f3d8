"""The tool dialect of ChatGLM3."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from warpbus.errors import UsageError
from warpbus.models.templates.base import Message, Variables
from warpbus.models.templates.dialect import (
    LONGEST_CALL,
    Tool,
    ToolCall,
    Turn,
    arguments_of,
    as_json,
    code_call,
    code_of,
    described,
    messages_of_turns,
    names_of,
    split_tools,
)
from warpbus.models.templates.json_schema import resolved
from warpbus.models.templates.line_calls import LineCallStream

_FENCE = "```"

# Values as Python writes them.
_LITERALS = r"""
value: STRING | NUMBER | "True" | "False" | "None" | list | dict
list: "[" (value (", " value)*)? "]"
dict: "{" (STRING ": " value (", " STRING ": " value)*)? "}"
STRING: /'([^'\\\x00-\x1f]|\\['\\nt])*'/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/
INTEGER: /-?(0|[1-9][0-9]{0,17})/"""
_TYPES = {
    "string": "STRING",
    "number": "NUMBER",
    "integer": "INTEGER",
    "boolean": '("True" | "False")',
    "null": '"None"',
    "array": "list",
    "object": "dict",
}


class ChatGLM3Tools:
    """ChatGLM3: a tool's name, then a Python call `tool_call(key=value, ...)` in a fence, its values literals.

    The code interpreter is `interpreter`, and called with the code in a fence.
    """

    interpreter = "interpreter"

    def render_tools(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Message]:
        """See `ToolDialect.render_tools`. What the code interpreter is said to be comes first."""
        functions, interpreter = split_tools(tools, self.interpreter)
        head = [str(interpreter.get("description") or "")] if interpreter is not None else []
        if functions:
            head.append(
                "Answer the following questions as best as you can. You have access to the following tools:\n"
                + json.dumps([described(tool) for tool in functions], ensure_ascii=False, indent=4)
            )
        return messages_of_turns(turns, "\n".join(filter(None, head)), self._call)

    def variables(self, tools: Sequence[Tool]) -> Variables:
        """See `ToolDialect.variables`."""
        return {}

    def stream(self, tools: Sequence[Tool]) -> LineCallStream:
        """See `ToolDialect.stream`."""
        return LineCallStream(self.read, self.read_cut, names_of(tools))

    def free_grammar(self, tools: Sequence[Tool]) -> str | None:
        """See `ToolDialect.free_grammar`: there is none."""

    def read(self, text: str, names: Collection[str]) -> list[ToolCall]:
        """The calls that a message consists of, from its first line on; nothing is evaluated but literals."""
        name, _, rest = text.partition("\n")
        name = name.strip()
        source = _fenced(rest)
        if name not in names or source is None or len(text) > LONGEST_CALL:
            return []
        arguments = _literal_arguments(source.strip())
        if arguments is not None:
            return [ToolCall(name, arguments)]
        return [code_call(name, source)] if name == self.interpreter else []

    def read_cut(self, text: str, names: Collection[str]) -> list[ToolCall]:
        """The same of a message that is cut off. Arguments in Python's syntax are not converted before they end."""
        calls = self.read(text, names)
        if calls:
            return calls
        name, _, rest = text.partition("\n")
        name = name.strip()
        opening, line_feed, source = rest.strip(" ").partition("\n")
        fence = f"{_FENCE}python"
        opening = opening.rstrip(" \t")
        if name not in names or not (opening in (_FENCE, fence) if line_feed else fence.startswith(opening)):
            return []
        if name == self.interpreter and source:
            return [code_call(name, source.rstrip("`"), complete=False)]
        return [ToolCall(name, "", complete=False)]

    def grammar(self, tools: Sequence[Tool], *, several: bool = False) -> str:
        """See `ToolDialect.grammar`. There is one call, whatever `several` says.

        A call has the required parameters in their order, then some of the others in theirs; of a parameter's schema
        the type is held to, and `enum` of texts. UsageError for a parameter whose name Python does not allow.
        """
        rules = [f"start: {' | '.join(f'tool{i}' for i in range(len(tools)))}"]
        for i, tool in enumerate(tools):
            if split_tools([tool], self.interpreter)[1] is not None:
                raise UsageError(
                    f"tool_choice: ChatGLM3 cannot be made to run code: give auto, or tools other than {tool['name']}"
                )
            # The tokenizer puts a space before its texts, and the model before its fences.
            head, tail = json.dumps(f"{tool['name']}\n ```python\ntool_call("), json.dumps(")\n```")
            between, own = _parameters(tool, f"tool{i}")
            rules += [" ".join(filter(None, (f'tool{i}: " "?', head, between, tail))), *own]
        return "\n".join(rules) + _LITERALS

    def _call(self, call: ToolCall) -> Message:
        code = code_of(call, self.interpreter)
        if code is None:
            arguments = arguments_of(call)
            _check_names(f"tool_calls: {call.name}", arguments)
            code = f"tool_call({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        return {"role": "assistant", "metadata": call.name, "content": f" ```python\n{code}\n```"}


def _fenced(text: str) -> str | None:
    """The content of the fence, if a text is one; None if it is anything else."""
    opening, line_feed, rest = text.strip().partition("\n")
    if opening.rstrip(" \t") not in (_FENCE, f"{_FENCE}python") or not line_feed or not rest.endswith(_FENCE):
        return None
    return rest.removesuffix(_FENCE).rstrip(" \t").removesuffix("\n")


def _literal_arguments(source: str) -> str | None:
    """The arguments of `tool_call(key=literal, ...)` as a JSON object; None if the source is anything else."""
    try:
        node = ast.parse(source, mode="eval").body
        if (
            not isinstance(node, ast.Call)
            or not isinstance(node.func, ast.Name)
            or node.func.id != "tool_call"
            or node.args
        ):
            return None
        found = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
        if None in found or len(found) < len(node.keywords):
            return None
        return as_json(found)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _check_names(where: str, names: Collection[str]) -> None:
    strange = [name for name in names if not name.isidentifier()]
    if strange:
        raise UsageError(f"{where}: ChatGLM3 cannot write the argument's name {strange[0][:40]!r}")


def _parameters(tool: Tool, name: str) -> tuple[str, list[str]]:
    """The text that may stand between the parentheses of a call, and rules of it, whose names begin with `name`."""
    schema = tool.get("parameters") or {}
    properties: Mapping[str, Any] = schema.get("properties") or {}
    _check_names(f"tools: {tool['name']}", properties)
    required = [key for key in properties if key in (schema.get("required") or ())]
    optional = [key for key in properties if key not in required]
    written = {key: f"{json.dumps(key + '=')} {_value(resolved(properties[key], schema))}" for key in properties}
    if required:
        tails = [f'(", " {written[key]})?' for key in optional]
        return " ".join([' ", " '.join(written[key] for key in required), *tails]), []
    if not optional:
        return "", []
    return f"{name}_0_{len(optional)}?", list(_some([written[key] for key in optional], name))


def _some(written: Sequence[str], name: str, start: int = 0) -> Iterator[str]:
    """Rules for one or more of these in their order, of which the first is `{name}_{start}_{end}`.

    Halves of halves: without rules they would take the square of the room, and a chain of rules the parser's stack.
    """
    end = start + len(written)
    if len(written) == 1:
        yield f"{name}_{start}_{end}: {written[0]}"
        return
    half = len(written) // 2
    first, second = f"{name}_{start}_{start + half}", f"{name}_{start + half}_{end}"
    yield f'{name}_{start}_{end}: {first} (", " {second})? | {second}'
    yield from _some(written[:half], name, start)
    yield from _some(written[half:], name, start + half)


def _value(schema: object) -> str:
    """The rule for a parameter's values."""
    if not isinstance(schema, Mapping):
        return "value"
    among = schema.get("enum")
    if isinstance(among, list) and among and all(isinstance(one, str | int | None) for one in among):
        return f"({' | '.join(json.dumps(repr(one), ensure_ascii=False) for one in among)})"
    kind = schema.get("type")
    return _TYPES.get(kind, "value") if isinstance(kind, str) else "value"
