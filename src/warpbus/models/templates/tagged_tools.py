"""Tool calls between `<tool_call>` and `</tool_call>`: Qwen2.5 and Qwen3, and GLM-4.5 and later.

An answer may hold text and several calls. The checkpoint's Jinja template writes the tools and the calls of the past.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from warpbus.errors import UsageError
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
from warpbus.models.templates.json_schema import json_grammar, resolved, texts_of, types_of, value_types
from warpbus.models.templates.partial_calls import cut_json_call

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_CUT_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*)", re.DOTALL)
_QUOTE_OR_CLOSING = re.compile(rf'\\.|"|{_CLOSING}', re.DOTALL)  # or an escape, whose quote is none
_VALUE_OR_CLOSING = re.compile(f"</?arg_value>|{_CLOSING}")
_SPACE = " \t\r\n"
_LONGEST_GRAMMAR = 1 << 17  # no longer one is compiled


class TaggedCallStream:
    """Splits an answer whose calls are between tags; see `AnswerStream`.

    Whitespace before a call, and between calls, belongs to neither text nor call.

    Args:
        read: the call that a text between the tags is; None if it is none.
        read_cut: the call that a text behind an opening tag begins; None if it begins none.
        end: the position of the tag that closes the call behind an opening tag, not within a text of its arguments; -1
            if there is none yet.
        calls: tools may be called; otherwise all of the answer is text.
    """

    def __init__(
        self,
        read: Callable[[str], ToolCall | None],
        read_cut: Callable[[str], ToolCall | None],
        end: Callable[[str], int],
        *,
        calls: bool,
    ) -> None:
        self._read = read
        self._read_cut = read_cut
        self._end = end
        self._calls = calls
        self._held = ""  # whitespace, and text that may begin a tag; or a call so far, without its opening tag
        self._inside = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """See `AnswerStream.push`."""
        if not self._calls:
            return text, []
        self._held += text
        shown, calls = "", []
        while True:
            if not self._inside:
                before, found, after = self._held.partition(_OPENING)
                if not found:
                    break
                shown += before.rstrip(_SPACE)
                self._held, self._inside = after, True
            at = self._end(self._held) if _CLOSING in self._held else -1
            if at < 0:
                break
            call = self._read(self._held[:at])
            if call is None:
                shown += self._take_text()
            else:
                calls.append(call)
                self._held, self._inside = self._held[at + len(_CLOSING) :], False
        if not self._inside:
            keep = len(self._held) - len(_certain(self._held))
            at = len(self._held) - keep
            shown, self._held = shown + self._held[:at], self._held[at:]
        elif len(self._held) > LONGEST_CALL:
            shown, self._held, self._inside = shown + _OPENING + self._held, "", False
        return shown, calls

    def turn(self) -> tuple[str, list[ToolCall]]:
        """See `AnswerStream.turn`."""
        return self.flush()

    def flush(self) -> tuple[str, list[ToolCall]]:
        """See `AnswerStream.flush`: a call without its end remains text."""
        shown = ""
        calls: list[ToolCall] = []
        # The text that seemed to hold a closing tag has no end: the tag ended what is no call.
        while self._inside and _CLOSING in self._held:
            shown += self._take_text()
            more, found = self.push("")
            shown, calls = shown + more, calls + found
        shown += _OPENING + self._held if self._inside else self._held
        self._held, self._inside = "", False
        return shown, calls

    def cut_off(self) -> tuple[str, list[ToolCall]]:
        """See `AnswerStream.cut_off`."""
        call = self._read_cut(self._held) if self._inside else None
        if call is None:
            return self.flush()
        self._held, self._inside = "", False
        return "", [call]

    def _take_text(self) -> str:
        """What is no call, up to its first closing tag."""
        text, tag, self._held = self._held.partition(_CLOSING)
        self._inside = False
        return _OPENING + text + tag


def _certain(text: str) -> str:
    """The beginning of a text that no later text can make a tag, or whitespace before one."""
    return _without_tag(text, _OPENING).rstrip(_SPACE)


class _TaggedTools(TemplateTools):
    """The common part of two dialects: tools are declared by the template, and calls are between tags."""

    def stream(self, tools: Sequence[Tool]) -> TaggedCallStream:
        """See `ToolDialect.stream`."""
        return TaggedCallStream(
            lambda text: self.read(text, tools),
            lambda text: self.read_cut(text, tools),
            self.end,
            calls=bool(tools),
        )

    def read(self, text: str, tools: Sequence[Tool]) -> ToolCall | None:
        """The call that a text between the tags is; None if it is not exactly that."""
        raise NotImplementedError

    def read_cut(self, text: str, tools: Sequence[Tool]) -> ToolCall | None:
        """The call that a text behind an opening tag begins; None if its tool is not known yet."""
        raise NotImplementedError

    def end(self, text: str) -> int:
        """The position of the tag that closes the call behind an opening tag; -1 if there is none yet."""
        raise NotImplementedError

    def rules(self, tool: Tool, name: str) -> list[str]:
        """The rules of a grammar, the first of them called `name`, of a call of the tool, behind its opening tag."""
        raise NotImplementedError

    def grammar(self, tools: Sequence[Tool], *, several: bool = False) -> str:
        """See `ToolDialect.grammar`."""
        more = r' ("\n" call)*' if several else ""
        return "\n".join([f"start: call{more}", f'call: "{_OPENING}" body', *self._bodies(tools)])

    def free_grammar(self, tools: Sequence[Tool]) -> str | None:
        """See `ToolDialect.free_grammar`."""
        head = ["start: (head body)* tail?", f'head[suffix="{_OPENING}"]: /(?s:.*)/', "tail: TEXT"]
        text = f"TEXT: /(?s:.+)/ & ~/(?s:.*){_OPENING}(?s:.*)/"
        return "\n".join([*head, text, *self._bodies(tools)])

    def _bodies(self, tools: Sequence[Tool]) -> list[str]:
        names = [f"tool{i}" for i in range(len(tools))]
        rules: list[str] = []
        for tool, name in zip(tools, names, strict=True):
            rules += self.rules(tool, name)
            _check_size(tool, sum(map(len, rules)))
        return [f"body: {' | '.join(names)}", *rules]


class JsonTagTools(_TaggedTools):
    """Qwen2.5 and Qwen3: a JSON object with `name` and `arguments` between the tags, as in Hermes 2 Pro."""

    def read(self, text: str, tools: Sequence[Tool]) -> ToolCall | None:
        """See `_TaggedTools.read`."""
        try:
            # Models write line feeds into strings, where JSON has none.
            found = json.loads(text, parse_constant=no_constant, strict=False)
            name, arguments = str(found["name"]), found["arguments"]
            written = as_json(arguments)
        except (ValueError, RecursionError, KeyError, TypeError):
            return None
        return ToolCall(name, written) if isinstance(arguments, dict) and name in names_of(tools) else None

    def read_cut(self, text: str, tools: Sequence[Tool]) -> ToolCall | None:
        """See `_TaggedTools.read_cut`."""
        return cut_json_call(text, names_of(tools))

    def end(self, text: str) -> int:
        """See `_TaggedTools.end`."""
        within = False
        for part in _QUOTE_OR_CLOSING.finditer(text):
            if part[0] == _CLOSING and not within:
                return part.start()
            within ^= part[0] == '"'
        return -1

    def rules(self, tool: Tool, name: str) -> list[str]:
        """See `_TaggedTools.rules`."""
        head = json.dumps(f'\n{{"name": {json.dumps(tool["name"])}, "arguments": ')
        return [f'{name}: {head} {arguments_grammar(tool)} "}}\\n{_CLOSING}"']


class ArgumentTagTools(_TaggedTools):
    """GLM-4.5 and later: the tool's name, then `<arg_key>` and `<arg_value>` for each argument.

    Values of parameters of the type string are texts as they are, all others JSON. Line feeds between the tags are
    optional: GLM-4.7 writes none.
    """

    def read(self, text: str, tools: Sequence[Tool]) -> ToolCall | None:
        """See `_TaggedTools.read`."""
        begun = _begun(text, tools)
        if begun is None or begun[2].strip():
            return None
        try:
            return ToolCall(str(begun[0]["name"]), as_json(begun[1]))
        except (ValueError, RecursionError):
            return None

    def read_cut(self, text: str, tools: Sequence[Tool]) -> ToolCall | None:
        """See `_TaggedTools.read_cut`. The value that is cut off is the end of the arguments."""
        begun = _begun(text, tools)
        if begun is None:
            return None
        tool, arguments, rest = begun
        try:
            written = as_json(arguments)[:-1]  # without the closing brace
            pair = _CUT_PAIR.fullmatch(rest)
            if pair is not None and pair[1].strip() not in arguments:
                key, value = pair[1].strip(), _without_tag(pair[2], "</arg_value>")
                value = as_json(value)[:-1] if _is_text(_properties(tool).get(key)) else value
                written += f"{', ' if arguments else ''}{as_json(key)}: {value}"
        except (ValueError, RecursionError):
            return None
        return ToolCall(str(tool["name"]), written, complete=False)

    def end(self, text: str) -> int:
        """See `_TaggedTools.end`."""
        within = False
        for part in _VALUE_OR_CLOSING.finditer(text):
            if part[0] == _CLOSING and not within:
                return part.start()
            within = part[0] == "<arg_value>" or (within and part[0] == _CLOSING)
        return -1

    def rules(self, tool: Tool, name: str) -> list[str]:
        """See `_TaggedTools.rules`.

        A call has the required parameters in their order, then some of the others in theirs; a value matches its
        schema, except that texts have no limits of length or form but `enum`.
        """
        properties = _properties(tool)
        required = [key for key in _parameters(tool).get("required") or () if key in properties]
        keys = [*required, *(key for key in properties if key not in required)]
        parts = [json.dumps(tool["name"]) + ' "\\n"?']
        rules = []
        size = 0
        for i, key in enumerate(keys):
            begin = json.dumps(f"<arg_key>{key}</arg_key>")
            value, own = _value_rules(properties[key], tool, f"{name}v{i}")
            pair = f'{begin} "\\n"? "<arg_value>" {value} "\\n"?'
            parts.append(pair if key in required else f"({pair})?")
            rules += own
            size += len(pair)
            _check_size(tool, size)  # each value has the definitions that it may refer to
        return [f'{name}: {" ".join(parts)} "{_CLOSING}"', *rules]


def _begun(text: str, tools: Sequence[Tool]) -> tuple[Tool, dict[str, Any], str] | None:
    """The tool that a call names, its arguments that are complete, and the text behind them.

    None if the name is not complete, or not that of a tool, or an argument is given twice.
    """
    name, tag, rest = text.partition("<arg_key>")
    rest = tag + rest
    tool = next((tool for tool in tools if tool["name"] == name.strip()), None)
    if tool is None:
        return None
    properties = _properties(tool)
    arguments: dict[str, Any] = {}
    at = 0
    while (pair := _PAIR.match(rest, at)) is not None:
        key, value = pair[1].strip(), pair[2]
        if key in arguments:
            return None
        arguments[key] = _value(value, properties.get(key), tool)
        at = pair.end()
    return tool, arguments, rest[at:]


def _without_tag(text: str, tag: str) -> str:
    """A text without the beginning of a tag at its end."""
    return text[: len(text) - _begun_tag(text, tag)]


def _begun_tag(text: str, tag: str) -> int:
    """How many characters of a tag a text ends with; 0 if with none, or with all."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)


def _check_size(tool: Tool, size: int) -> None:
    if size > _LONGEST_GRAMMAR:
        raise UsageError(
            f"tools: {str(tool['name'])[:80]}: its grammar is longer than {_LONGEST_GRAMMAR:,} characters: give fewer "
            "tools, parameters or $defs, or leave out strict and tool_choice"
        )


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.get("parameters") or {}


def _properties(tool: Tool) -> dict[str, Any]:
    """The schemas of the arguments, without references at their top."""
    found = _parameters(tool).get("properties")
    return {key: resolved(each, _parameters(tool)) for key, each in found.items()} if isinstance(found, dict) else {}


def _is_text(schema: Any) -> bool:
    return isinstance(schema, dict) and (
        schema.get("type") == "string" or ("type" not in schema and bool(texts_of(schema)))
    )


def _value(text: str, schema: Any, tool: Tool) -> Any:
    """The value of an argument: a text as it is if its schema says so, otherwise JSON.

    What is no JSON, or has a type that the schema does not allow where it allows texts, is a text.
    """
    if _is_text(schema):
        return text
    try:
        found = json.loads(text, parse_constant=no_constant, strict=False)
    except (ValueError, RecursionError):
        return text
    types = types_of(schema, _parameters(tool))
    return text if "string" in types and types.isdisjoint(value_types(found)) else found


def _value_rules(schema: Any, tool: Tool, name: str) -> tuple[str, list[str]]:
    """The part of a grammar for a value and its closing tag, and the further rules that it needs."""
    closing = "</arg_value>"
    if not _is_text(schema):
        return f'{json_grammar(schema, _parameters(tool))} "{closing}"', []
    texts = texts_of(schema)
    if texts:
        return f'({" | ".join(json.dumps(text, ensure_ascii=False) for text in texts)}) "{closing}"', []
    return name, [f'{name}[suffix="{closing}"]: /(?s:.*)/']
