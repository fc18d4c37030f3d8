"""Answers as a sequence of blocks, each of which ends before the next begins: thinking, text, or a call of a tool.

Anthropic's messages and OpenAI's responses have this form; what their events are called is theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import abc
from dataclasses import dataclass
from typing import Literal

from warpbus.engine import TextPiece
from warpbus.models.templates.tools import ToolCall
from warpbus.server.conversations import PreparedChat
from warpbus.server.request_error import RequestError
from warpbus.server.responses import Json, Usage, new_id


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        kind: its kind.
        number: its index in the answer.
        id: of its own.
        text: the thinking or the text so far; the arguments of a call.
        call: of a call; else None.
        cut: the answer has ended within it, by `max_tokens` or an error.
    """

    kind: Literal["thinking", "text", "call"]
    number: int
    id: str
    text: str = ""
    call: ToolCall | None = None
    cut: bool = False


class BlockForm(ABC):
    """A format whose answer, of which there is one, is a sequence of blocks; see `Form`.

    Args:
        chat: the request.
        ids: the prefix of the ids of each kind of block.

    Attributes:
        blocks: of the answer so far.
        piece: the last one of the answer; None before the first.
    """

    last = b""

    def __init__(self, chat: PreparedChat, ids: abc.Mapping[str, str]) -> None:
        self.blocks: list[Block] = []
        self.piece: TextPiece | None = None
        self._reader = chat.readers[0]
        self._ids = ids
        self._open: Block | None = None

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of the thinking so far."""
        return self._reader.reasoning_tokens

    @property
    def finish_reason(self) -> str | None:
        """See `AnswerReader.finish_reason`."""
        return self._reader.finish_reason

    @abstractmethod
    def opening(self, usage: Usage) -> list[Json]:
        """See `Form.opening`."""

    @abstractmethod
    def begin(self, block: Block) -> list[Json]:
        """The events of a block that begins."""

    @abstractmethod
    def grow(self, block: Block, text: str, piece: TextPiece | None) -> list[Json]:
        """The events of further text, which the block has already; `piece` brought it."""

    @abstractmethod
    def end(self, block: Block) -> list[Json]:
        """The events of a block that ends."""

    @abstractmethod
    def finish(self, usage: Usage) -> list[Json]:
        """The events of the end of the answer."""

    @abstractmethod
    def failure(self, error: RequestError, usage: Usage) -> Json:
        """See `Form.failure`."""

    @abstractmethod
    def body(self, usage: Usage) -> Json:
        """The whole answer, which has ended."""

    def events(self, index: int, piece: TextPiece, usage: Usage) -> list[Json]:
        """See `Form.events`."""
        self.piece = piece
        delta = self._reader.read(piece)
        found: list[Json] = []
        if delta.reasoning:
            found += self._add("thinking", delta.reasoning, piece)
        if delta.text:
            found += self._add("text", delta.text, piece)
        for call in delta.calls:
            block = Block("call", len(self.blocks), self._new_id("call"), call=call, cut=not call.complete)
            found += self._end_open() + self._begin(block)
            block.text = call.arguments
            found += self.grow(block, call.arguments, None) + self._end_open()
        if self.finish_reason == "length":
            self.cut_open()
        return found

    def closing(self, usage: Usage) -> list[Json]:
        """See `Form.closing`."""
        return self._end_open() + self.finish(usage)

    def whole(self, answers: abc.Sequence[abc.Sequence[TextPiece]], usage: Usage) -> Json:
        """See `Form.whole`."""
        for piece in answers[0]:
            self.events(0, piece, usage)
        return self.body(usage)

    def cut_open(self) -> None:
        """The answer ends within the block that is open, if there is one."""
        if self._open is not None:
            self._open.cut = True

    def _add(self, kind: Literal["thinking", "text"], text: str, piece: TextPiece) -> list[Json]:
        found: list[Json] = []
        block = self._open
        if block is None or block.kind != kind:
            block = Block(kind, len(self.blocks), self._new_id(kind))
            found = self._end_open() + self._begin(block)
        block.text += text
        return found + self.grow(block, text, piece)

    def _begin(self, block: Block) -> list[Json]:
        self.blocks.append(block)
        self._open = block
        return self.begin(block)

    def _end_open(self) -> list[Json]:
        block, self._open = self._open, None
        return [] if block is None else self.end(block)

    def _new_id(self, kind: str) -> str:
        return new_id(self._ids[kind], "_")
