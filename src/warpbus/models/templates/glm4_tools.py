"""The tool dialect of GLM-4 and GLM-4-0414."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from warpbus.models.templates.base import Message
from warpbus.models.templates.dialect import (
    LONGEST_CALL,
    Tool,
    ToolCall,
    Turn,
    as_json,
    code_call,
    code_of,
    described,
    messages_of_turns,
    no_constant,
    split_tools,
)

HEADING = "# 可用工具"

# For llguidance: a small model otherwise goes on with blanks for ever.
_FEW_BLANKS = {"x-guidance": {"whitespace_pattern": "[ ]?"}}


class GLM4Tools:
    """GLM-4: a tool's name, then the arguments as a JSON object; several calls follow each other.

    The code interpreter is `python`, and called with the code as it is.
    """

    interpreter = "python"

    def render_tools(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Message]:
        """See `ToolDialect.render_tools`."""
        functions, interpreter = split_tools(tools, self.interpreter)
        head = HEADING if tools else ""
        for tool in functions:
            written = json.dumps(described(tool), ensure_ascii=False, indent=4)
            head += f"\n\n## {tool['name']}\n\n{written}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"
        if interpreter is not None:
            head += f"\n\n## {self.interpreter}\n\n{interpreter.get('description') or ''}".rstrip()
        return messages_of_turns(turns, head, self._call)

    def read(self, text: str, names: Collection[str]) -> list[ToolCall]:
        """See `ToolDialect.read`."""
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
            if name == self.interpreter and rest and end < len(rest):
                # Code goes on to the end of the message.
                return [*calls, code_call(name, code)]
            if not isinstance(arguments, dict):
                return []
            calls.append(ToolCall(name, written))
            rest = rest[end:].lstrip()
        return [] if rest else calls

    def grammar(self, tools: Sequence[Tool]) -> str:
        """See `ToolDialect.grammar`."""
        rules = [
            f"tool{i}: {json.dumps(tool['name'] + chr(10))} {self._arguments(tool)}" for i, tool in enumerate(tools)
        ]
        return "\n".join(["start: " + " | ".join(f"tool{i}" for i in range(len(tools))), *rules])

    def _arguments(self, tool: Tool) -> str:
        if split_tools([tool], self.interpreter)[1] is not None:
            return r"/(.|\n)+/"
        schema = (tool.get("parameters") or {"type": "object"}) | _FEW_BLANKS
        return f"%json {json.dumps(schema, ensure_ascii=False)}"

    def _call(self, call: ToolCall) -> Message:
        code = code_of(call, self.interpreter)
        return {"role": "assistant", "metadata": call.name, "content": call.arguments if code is None else code}


def _written(source: str, arguments: Any) -> str:
    """The arguments as the model has written them, if that is JSON, else written anew."""
    try:
        json.loads(source)
    except ValueError:
        return as_json(arguments)
    return source
