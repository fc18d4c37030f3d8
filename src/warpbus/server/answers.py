"""Splits the pieces of an answer to a conversation into thinking, text and tool calls, for every endpoint of chats."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from warpbus.engine import TextPiece
from warpbus.models.templates.thinking import ThinkingStart, ThinkingStream, ThinkingTokens
from warpbus.models.templates.tools import AnswerStream, Tool, ToolCall, ToolDialect
from warpbus.models.tokenizers import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class AnswerDelta:
    """The addition of a piece to an answer; `calls` are complete, but for the last one if `max_tokens` cuts it off."""

    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class AnswerReader:
    """Splits one answer.

    For GLM-4, `<|assistant|>` in an answer begins another message and has no text: its position in the text is found by
    decoding the tokens once more.

    Args:
        tokenizer: of the model.
        dialect: of its tool calls; None: all text is text.
        tools: that may be called.
        most_calls: further calls are dropped; None: any number.
        thinking: the tokens around the model's thinking; None: it does not think.
        start: how the answer begins.
        show_reasoning: hand out the thinking; otherwise it is dropped.
        keep_first_space: as of `StreamDecoder`.

    Attributes:
        calls: the number of tool calls so far.
        finish_reason: of the last piece; "tool_calls" if the answer ended with calls.
        reasoning_tokens: the number of tokens of the thinking so far, the closing one included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        dialect: ToolDialect | None,
        tools: Sequence[Tool] = (),
        most_calls: int | None = None,
        thinking: ThinkingTokens | None = None,
        start: ThinkingStart = "over",
        show_reasoning: bool = True,
        keep_first_space: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stream: AnswerStream | None = None if dialect is None else dialect.stream(tools)
        self._most = most_calls
        self._thinking = thinking
        self._thoughts = None if thinking is None else ThinkingStream(start)
        self._phase = start
        self._show_reasoning = show_reasoning
        self._next = None if dialect is None else tokenizer.special_ids.get("<|assistant|>")
        self._decoder = StreamDecoder(tokenizer, keep_first_space=keep_first_space)
        self._decoded = 0  # characters of all tokens so far
        self._taken = 0  # characters received as text so far
        self._ends: deque[int] = deque()  # ends of messages whose text is not complete yet
        self.calls = 0
        self.finish_reason: str | None = None
        self.reasoning_tokens = 0

    def read(self, piece: TextPiece) -> AnswerDelta:
        """The addition of the piece; a call is added at its end, or at that of an answer that `max_tokens` cuts off."""
        self.finish_reason = piece.finish_reason
        if self._stream is None and self._thoughts is None:
            return AnswerDelta("", piece.text)
        self._count_reasoning(piece.token_ids)
        self._find_ends(piece.token_ids)
        found: list[AnswerDelta] = []
        rest = piece.text
        while self._ends and self._taken + len(rest) >= self._ends[0]:
            own = self._ends.popleft() - self._taken
            found.append(self._push(rest[:own]))
            self._taken, rest = self._taken + own, rest[own:]
            if self._stream is not None:
                found.append(AnswerDelta("", *self._stream.turn()))
        found.append(self._push(rest))
        self._taken += len(rest)
        last: list[ToolCall] = []
        if piece.finish_reason is not None:
            end = self._flush(cut=piece.finish_reason == "length")
            last = end.calls
            found.append(end)
        calls = [call for delta in found for call in delta.calls]
        calls = calls if self._most is None else calls[: max(0, self._most - self.calls)]
        self.calls += len(calls)
        if (last and last[-1].complete) or (self.calls and piece.finish_reason == "stop"):
            self.finish_reason = "tool_calls"
        reasoning = "".join(delta.reasoning for delta in found) if self._show_reasoning else ""
        return AnswerDelta(reasoning, "".join(delta.text for delta in found), calls)

    def _push(self, text: str) -> AnswerDelta:
        reasoning = ""
        if self._thoughts is not None:
            reasoning, text = self._thoughts.push(text)
        shown, calls = (text, []) if self._stream is None else self._stream.push(text)
        return AnswerDelta(reasoning, shown, calls)

    def _flush(self, *, cut: bool) -> AnswerDelta:
        reasoning, text = ("", "") if self._thoughts is None else self._thoughts.flush()
        if self._stream is None:
            return AnswerDelta(reasoning, text)
        shown, calls = self._stream.push(text)
        more, last = self._stream.cut_off() if cut else self._stream.flush()
        return AnswerDelta(reasoning, shown + more, calls + last)

    def _find_ends(self, tokens: Sequence[int]) -> None:
        if self._next is None:
            return
        for token in tokens:
            if token == self._next:
                self._ends.append(self._decoded)
            else:
                self._decoded += len(self._decoder.push(token))

    def _count_reasoning(self, tokens: Sequence[int]) -> None:
        for token in tokens if self._thinking is not None else ():
            if self._phase == "over":
                return
            assert self._thinking is not None
            if self._phase == "open" or token == self._thinking.opening:
                self.reasoning_tokens += 1
                self._phase = "over" if token == self._thinking.closing else "open"
            elif self._tokenizer.token_bytes(token).strip():
                self._phase = "over"
