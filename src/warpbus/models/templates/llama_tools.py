"""The tool dialect of Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from warpbus.models.templates.dialect import (
    LONGEST_CALL,
    TemplateTools,
    Tool,
    ToolCall,
    arguments_grammar,
    as_json,
    names_of,
    no_constant,
)
from warpbus.models.templates.partial_calls import cut_json_call

_HEAD = '{"name": %s, "parameters": '


class WholeCallStream:
    """Splits an answer that is either text or calls from its first character on; see `AnswerStream`.

    Args:
        names: of the tools that may be called; if empty, the answer is text.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._is_text = not names

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """See `AnswerStream.push`: calls are complete at the end of the answer."""
        self._held += text
        begun = self._held.lstrip()
        if not self._is_text and (not begun or begun.startswith("{")) and len(self._held) <= LONGEST_CALL:
            return "", []
        self._is_text = True
        shown, self._held = self._held, ""
        return shown, []

    def turn(self) -> tuple[str, list[ToolCall]]:
        """See `AnswerStream.turn`."""
        return self.flush()

    def flush(self) -> tuple[str, list[ToolCall]]:
        """See `AnswerStream.flush`."""
        held, self._held = self._held, ""
        calls = [] if self._is_text else _calls(held, self._names)
        return ("", calls) if calls else (held, [])

    def cut_off(self) -> tuple[str, list[ToolCall]]:
        """See `AnswerStream.cut_off`."""
        if self._is_text:
            return self.flush()
        held, self._held = self._held, ""
        calls, rest = _read_calls(held, self._names)
        if rest:
            last = cut_json_call(rest, self._names)
            calls = [] if last is None else [*calls, last]
        return ("", calls) if calls else (held, [])


class LlamaTools(TemplateTools):
    """Llama 3.x: the answer is a JSON object with `name` and `parameters`; several are separated by semicolons.

    The template writes tools and calls, and takes one call per message only. A call in Python, which follows
    `<|python_tag|>`, remains text.
    """

    def stream(self, tools: Sequence[Tool]) -> WholeCallStream:
        """See `ToolDialect.stream`."""
        return WholeCallStream(names_of(tools))

    def grammar(self, tools: Sequence[Tool], *, several: bool = False) -> str:
        """See `ToolDialect.grammar`. There is one call, whatever `several` says: the template takes no more."""
        rules = [
            f'tool{i}: {json.dumps(_HEAD % json.dumps(tool["name"]))} {arguments_grammar(tool)} "}}"'
            for i, tool in enumerate(tools)
        ]
        return "\n".join(["start: " + " | ".join(f"tool{i}" for i in range(len(tools))), *rules])

    def free_grammar(self, tools: Sequence[Tool]) -> str | None:
        """See `ToolDialect.free_grammar`: text that does not begin with a brace, or a call."""
        called = self.grammar(tools).removeprefix("start: ")
        return f"start: TEXT | call\nTEXT: /[^{{](.|\\n)*/\ncall: {called}"


def _calls(text: str, names: frozenset[str]) -> list[ToolCall]:
    """The calls that a text consists of; none if it is not exactly that."""
    calls, rest = _read_calls(text, names)
    return [] if rest else calls


def _read_calls(text: str, names: frozenset[str]) -> tuple[list[ToolCall], str]:
    """The calls that a text begins with, and the rest of it."""
    decoder = json.JSONDecoder(parse_constant=no_constant, strict=False)
    calls: list[ToolCall] = []
    rest = text.strip()
    while rest:
        try:
            found, end = decoder.raw_decode(rest)
            call = _call(found, names)
        except (ValueError, RecursionError):
            break
        if call is None:
            break
        calls.append(call)
        rest = rest[end:].lstrip(" \n;")
    return calls, rest


def _call(found: Any, names: frozenset[str]) -> ToolCall | None:
    if not isinstance(found, dict) or not set(found) <= {"type", "name", "parameters", "arguments"}:
        return None
    arguments = found.get("parameters", found.get("arguments"))
    if not isinstance(found.get("name"), str) or found["name"] not in names or not isinstance(arguments, dict):
        return None
    return ToolCall(found["name"], as_json(arguments))
