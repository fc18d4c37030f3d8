"""Tool calls in answers, as they come: text is handed out at once, calls when they are whole.

ChatGLM3 and GLM-4 answer with a first line that names the tool, which is empty in an answer to the user; what follows
is the call. They may say something first, or call several: then `<|assistant|>` begins another message, with its own
first line. A call is read as a literal and never run. What is not exactly a call of a tool that there is stays text.
"""

from __future__ import annotations

from collections.abc import Collection

from warpbus.models.templates.base import Template
from warpbus.models.templates.chatglm import RoleTokenTemplate
from warpbus.models.templates.chatglm3_tools import ChatGLM3Tools
from warpbus.models.templates.dialect import LONGEST_CALL, ToolCall, ToolDialect, Turn
from warpbus.models.templates.glm4_tools import HEADING, GLM4Tools
from warpbus.models.templates.jinja import JinjaTemplate

__all__ = ["AnswerStream", "ChatGLM3Tools", "GLM4Tools", "ToolCall", "ToolDialect", "Turn", "find_dialect"]

_LONGEST_LINE = 128


class AnswerStream:
    """Takes an answer apart as it comes: text is handed out at once, a call when it is whole.

    Args:
        dialect: of the model.
        names: of the tools that may be called; if empty, the answer is text.
    """

    def __init__(self, dialect: ToolDialect, names: Collection[str]) -> None:
        self._dialect = dialect
        self._names = frozenset(names)
        self._between = ""  # what stands before the text of a further message
        self._begin()

    def _begin(self) -> None:
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

    def turn(self) -> tuple[str, list[ToolCall]]:
        """`<|assistant|>` came: the text that was kept back, or the calls, at the end of a message before another."""
        found = self.flush()
        if self._shown:
            self._between = "\n"
        self._begin()
        return found

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
        if self._shown:
            return text
        text = text.lstrip()
        self._shown = bool(text)
        return self._between + text if text else ""


def find_dialect(template: Template) -> ToolDialect | None:
    """The dialect of a model by its template; None if it knows no tools."""
    if isinstance(template, RoleTokenTemplate):
        return GLM4Tools() if template.sop == "<sop>" else ChatGLM3Tools()
    if isinstance(template, JinjaTemplate) and HEADING in template.source and "metadata" in template.source:
        return GLM4Tools()
    return None
