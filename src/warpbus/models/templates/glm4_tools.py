"""The tool dialect of GLM-4 and GLM-4-0414."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Literal

from warpbus.models.templates.base import Message, Variables
from warpbus.models.templates.dialect import (
    LONGEST_CALL,
    Tool,
    ToolCall,
    Turn,
    arguments_grammar,
    as_json,
    code_call,
    code_of,
    described,
    messages_of_turns,
    names_of,
    no_constant,
    openai_tools,
    split_tools,
)
from warpbus.models.templates.line_calls import LineCallStream
from warpbus.models.templates.partial_calls import cut_call

HEADING = "# 可用工具"

Place = Literal["system", "message", "variable"]
"""Where GLM-4 reads its tools: in a system message that is written here, for checkpoints without a template; or by
the template, from the key `tools` of a system message (glm-4-9b-chat) or from its variable `tools` (GLM-4-0414)."""


class GLM4Tools:
    """GLM-4: a tool's name, then the arguments as a JSON object; several calls follow each other.

    The code interpreter is `python`, and called with the code as it is.

    Args:
        place: where the tools are declared.
    """

    interpreter = "python"

    def __init__(self, place: Place = "system") -> None:
        self._place = place

    def render_tools(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Message]:
        """See `ToolDialect.render_tools`."""
        if self._place == "system":
            return messages_of_turns(turns, self._head(tools), self._call)
        messages = messages_of_turns(turns, "", self._call)
        if self._place == "message" and tools:
            functions, interpreter = split_tools(tools, self.interpreter)
            declared = openai_tools(functions) + ([{"type": "python"}] if interpreter is not None else [])
            messages.insert(0, {"role": "system", "content": "", "tools": declared})
        return messages

    def variables(self, tools: Sequence[Tool]) -> Variables:
        """See `ToolDialect.variables`."""
        return {"tools": openai_tools(tools)} if tools and self._place == "variable" else {}

    def stream(self, tools: Sequence[Tool]) -> LineCallStream:
        """See `ToolDialect.stream`."""
        return LineCallStream(self.read, self.read_cut, names_of(tools))

    def _head(self, tools: Sequence[Tool]) -> str:
        functions, interpreter = split_tools(tools, self.interpreter)
        head = HEADING if tools else ""
        for tool in functions:
            written = json.dumps(described(tool), ensure_ascii=False, indent=4)
            head += f"\n\n## {tool['name']}\n\n{written}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"
        if interpreter is not None:
            head += f"\n\n## {self.interpreter}\n\n{interpreter.get('description') or ''}".rstrip()
        return head

    def read(self, text: str, names: Collection[str]) -> list[ToolCall]:
        """The calls that a message consists of, from its first line on; none if it is not exactly that."""
        return self._read(text, names, cut=False)

    def read_cut(self, text: str, names: Collection[str]) -> list[ToolCall]:
        """The same of a message that is cut off: the last call may be incomplete."""
        return self._read(text, names, cut=True)

    def _read(self, text: str, names: Collection[str], *, cut: bool) -> list[ToolCall]:
        calls: list[ToolCall] = []
        rest = text.rstrip()
        # Models write line feeds into strings, where JSON has none.
        decoder = json.JSONDecoder(parse_constant=no_constant, strict=False)
        while rest and len(text) <= LONGEST_CALL:
            name, _, rest = rest.partition("\n")
            name, code, rest = name.strip(), rest, rest.lstrip()
            if name not in names:
                return []
            try:
                arguments, end = decoder.raw_decode(rest)
                written = _written(rest[:end], arguments)
            except (ValueError, RecursionError):
                arguments, end, written = None, 0, ""
            if name == self.interpreter and rest and end < len(rest) and not (cut and rest.startswith("{")):
                # Code goes on to the end of the message.
                return [*calls, code_call(name, code, complete=not cut)]
            if not isinstance(arguments, dict):
                last = cut_call(name, rest) if cut and end == 0 else None
                return [] if last is None else [*calls, last]
            calls.append(ToolCall(name, written))
            rest = rest[end:].lstrip()
        return [] if rest else calls

    def grammar(self, tools: Sequence[Tool], *, several: bool = False) -> str:
        """See `ToolDialect.grammar`. There is one call, whatever `several` says: GLM-4 begins each with a message."""
        rules = [
            f"tool{i}: {json.dumps(tool['name'] + chr(10))} {self._arguments(tool)}" for i, tool in enumerate(tools)
        ]
        return "\n".join(["start: " + " | ".join(f"tool{i}" for i in range(len(tools))), *rules])

    def _arguments(self, tool: Tool) -> str:
        if split_tools([tool], self.interpreter)[1] is not None:
            return r"/(.|\n)+/"
        return arguments_grammar(tool)

    def free_grammar(self, tools: Sequence[Tool]) -> str | None:
        """See `ToolDialect.free_grammar`: there is none."""

    def _call(self, call: ToolCall) -> Message:
        code = code_of(call, self.interpreter)
        return {
            "role": "assistant",
            "metadata": call.name,
            "content": (call.arguments or "{}") if code is None else code,
        }


def _written(source: str, arguments: Any) -> str:
    """The arguments as the model has written them, if that is JSON, else written anew."""
    try:
        json.loads(source)
    except ValueError:
        return as_json(arguments)
    return source
