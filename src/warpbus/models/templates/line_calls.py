"""Tool calls that begin with a line that names the tool: ChatGLM3's and GLM-4's.

The first line of an answer names a tool, or is empty in an answer to the user; the call follows it. The model may say
something first, or call several tools: then `<|assistant|>` begins another message, with its own first line. A call is
parsed as literals and never executed. Text that is not exactly a call of an offered tool remains text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from warpbus.models.templates.dialect import LONGEST_CALL, ToolCall

_LONGEST_LINE = 128


class LineCallStream:
    """Splits an answer whose first line may name a tool; see `AnswerStream`.

    Args:
        read: the calls that a message consists of, from its first line on; none if it is not exactly that.
        read_cut: the same of a message that is cut off behind its first line; the last call may be incomplete.
        names: of the tools that may be called; if empty, the answer is text.
    """

    def __init__(
        self,
        read: Callable[[str, Collection[str]], list[ToolCall]],
        read_cut: Callable[[str, Collection[str]], list[ToolCall]],
        names: Collection[str],
    ) -> None:
        self._read = read
        self._read_cut = read_cut
        self._names = frozenset(names)
        self._between = ""  # what stands before the text of a further message
        self._begin()

    def _begin(self) -> None:
        self._line = ""  # the first line, while it may be a tool's name
        self._call: list[str] | None = None  # what followed such a line, with it
        self._is_text = False
        self._shown = False  # something besides space
        self._length = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """See `AnswerStream.push`: a call is complete at the end of its message."""
        return self._push(text), []

    def _push(self, text: str) -> str:
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
        """See `AnswerStream.turn`."""
        found = self.flush()
        if self._shown:
            self._between = "\n"
        self._begin()
        return found

    def flush(self) -> tuple[str, list[ToolCall]]:
        """See `AnswerStream.flush`."""
        held = self._give_up()
        calls = self._read(held, self._names) if held else []
        return ("", calls) if calls else (self._text(held), [])

    def cut_off(self) -> tuple[str, list[ToolCall]]:
        """See `AnswerStream.cut_off`."""
        calls = [] if self._call is None else self._read_cut("".join(self._call), self._names)
        if not calls:
            return self.flush()
        self._give_up()
        return "", calls

    def _give_up(self) -> str:
        """The text kept back. From now on all is text."""
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
