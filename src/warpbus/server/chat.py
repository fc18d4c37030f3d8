"""POST /v1/chat/completions: conversations, with tools for models that support them."""

from __future__ import annotations

import json
import time
from collections import abc, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from warpbus.engine import Grammar, TextPiece
from warpbus.models.templates import Message
from warpbus.models.templates.tools import AnswerStream, ToolCall, ToolDialect, Turn
from warpbus.models.tokenizers import StreamDecoder, Tokenizer
from warpbus.server.options import ServerOptions
from warpbus.server.params import check_size
from warpbus.server.registry import Model
from warpbus.server.request_error import RequestError
from warpbus.server.responses import Json, new_id
from warpbus.server.schema import ChatMessage, ChatRequest, NamedTool


def messages_of(
    messages: abc.Sequence[ChatMessage], model: Model, tools: abc.Sequence[dict[str, Any]] = ()
) -> list[Message]:
    """A conversation in the form of the model's template.

    Raises:
        RequestError: tools, or calls of them, for a model that knows none.
        UsageError: a call of the past is malformed.
    """
    turns = [
        Turn(
            "system" if message.role == "developer" else message.role,
            message.text,
            tuple(ToolCall(call.function.name, call.function.arguments) for call in message.tool_calls or ()),
        )
        for message in messages
    ]
    if model.dialect is not None:
        return model.dialect.render_tools(turns, tools)
    if tools or any(turn.calls or turn.role == "tool" for turn in turns):
        where = "tools" if tools else "messages"
        raise RequestError(400, f"{where}: the model {model.name} has not learned to call tools", param=where)
    return [{"role": turn.role, "content": turn.content} for turn in turns]


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        offered: the tools in the model's prompt.
        allowed: names of those that may be called.
        grammar: that forces a call, or None.
        most: calls in one answer, or None for any number.
    """

    offered: list[dict[str, Any]] = field(default_factory=list)
    allowed: Collection[str] = ()
    grammar: Grammar | None = None
    most: int | None = None


def tools_of(body: ChatRequest, model: Model, options: ServerOptions) -> ToolUse:
    """The tools of a request. RequestError or UsageError if the model does not support what the request asks for."""
    choice = body.tool_choice or "auto"
    if not body.tools or choice == "none":
        return ToolUse()
    offered = [tool.function.model_dump(exclude_none=True, exclude={"strict"}) for tool in body.tools]
    check_size("tools", json.dumps(offered, ensure_ascii=False), options)
    if model.dialect is None:
        raise RequestError(400, f"tools: the model {model.name} has not learned to call tools", param="tools")
    allowed = [tool["name"] for tool in offered]
    if len(set(allowed)) < len(allowed):
        raise RequestError(400, "tools: two have the same name: give each its own", param="tools")
    grammar = None
    if isinstance(choice, NamedTool):
        allowed = [choice.function.name]
    if choice != "auto":
        forced = [tool for tool in offered if tool["name"] in allowed]
        grammar = Grammar("lark", model.dialect.grammar(forced))
    most = 1 if body.parallel_tool_calls is False else None
    return ToolUse(offered, allowed, grammar, most)


class ChatForm:
    """The format of chat answers; see `Form`.

    Args:
        model: generates the answers.
        tokenizer: of the model, for the texts of tokens.
        count: of the answers.
        tools: that they may call.
        logprobs: the answers have logprobs.
        grammar: the answers match a grammar.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, count: int, tools: ToolUse, *, logprobs: bool, grammar: bool
    ) -> None:
        self._head = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": model.name}
        self._tokenizer = tokenizer
        self._count = count
        self._logprobs = logprobs
        self._readers = [_AnswerReader(model.dialect, tools, tokenizer, grammar=grammar) for _ in range(count)]

    def opening(self) -> list[Json]:
        """See `Form.opening`: the role of each answer."""
        return [self._choice(index, {"role": "assistant", "content": ""}) for index in range(self._count)]

    def chunks(self, index: int, piece: TextPiece) -> list[Json]:
        """See `Form.chunks`."""
        reader = self._readers[index]
        text, calls = reader.read(piece)
        logprobs = self._content([piece])
        found = []
        if text or (logprobs is not None and piece.logprobs):
            found.append(self._choice(index, {"content": text}, logprobs=logprobs))
        if calls:
            numbered = [{"index": at, **_call(call)} for at, call in enumerate(calls, reader.calls - len(calls))]
            found.append(self._choice(index, {"tool_calls": numbered}))
        if reader.finish_reason is not None:
            found.append(self._choice(index, {}, finish=reader.finish_reason))
        return found

    def whole(self, index: int, pieces: abc.Sequence[TextPiece]) -> Json:
        """See `Form.whole`."""
        text = ""
        calls: list[ToolCall] = []
        reader = self._readers[index]
        for piece in pieces:
            new, found = reader.read(piece)
            text += new
            calls += found
        message: Json = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._content(pieces),
            "finish_reason": reader.finish_reason,
        }

    def wrap(self, choices: list[Json], *, streamed: bool) -> Json:
        """See `Form.wrap`."""
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {**self._head, "object": kind, "choices": choices}

    def _choice(self, index: int, delta: Json, *, logprobs: Json | None = None, finish: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _content(self, pieces: abc.Sequence[TextPiece]) -> Json | None:
        if not self._logprobs:
            return None
        return {
            "content": [
                {
                    **self._token(one.token, one.logprob),
                    "top_logprobs": [self._token(token, logprob) for token, logprob in one.top],
                }
                for piece in pieces
                for one in piece.logprobs or ()
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> Json:
        text, data = token_text(self._tokenizer, token)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(data)}


LOWEST = -9999.0
"""The log probability of probability 0, as OpenAI writes it: JSON has no infinity."""


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    """A token's text, with U+FFFD for an incomplete character, and its bytes."""
    data = tokenizer.token_bytes(token)
    if not data:
        special = next((text for text, number in tokenizer.special_ids.items() if number == token), "")
        data = special.encode()
    return data.decode("utf-8", "replace"), data


class _AnswerReader:
    """Splits one answer into text and tool calls.

    For a model with tools, `<|assistant|>` in an answer begins another message and has no text: its position in the
    text is found by decoding the tokens once more.

    Attributes:
        calls: the number of tool calls so far.
        finish_reason: of the last piece; "tool_calls" if the answer ended with calls.
    """

    def __init__(self, dialect: ToolDialect | None, tools: ToolUse, tokenizer: Tokenizer, *, grammar: bool) -> None:
        self._stream = None if dialect is None else AnswerStream(dialect, tools.allowed)
        self._most = tools.most
        self._next = tokenizer.special_ids.get("<|assistant|>")
        self._decoder = StreamDecoder(tokenizer, keep_first_space=grammar)
        self._decoded = 0  # characters of all tokens so far
        self._taken = 0  # characters received as text so far
        self._ends: deque[int] = deque()  # ends of messages whose text is not complete yet
        self.calls = 0
        self.finish_reason: str | None = None

    def read(self, piece: TextPiece) -> tuple[str, list[ToolCall]]:
        """The new text and complete calls; a call is complete at the end of its message, never in a message cut off."""
        self.finish_reason = piece.finish_reason
        if self._stream is None:
            return piece.text, []
        for token in piece.token_ids:
            if token == self._next:
                self._ends.append(self._decoded)
            else:
                self._decoded += len(self._decoder.push(token))
        text = ""
        calls: list[ToolCall] = []
        rest = piece.text
        while self._ends and self._taken + len(rest) >= self._ends[0]:
            own = self._ends.popleft() - self._taken
            text += self._stream.push(rest[:own])
            self._taken, rest = self._taken + own, rest[own:]
            kept, found = self._stream.turn()
            text, calls = text + kept, calls + found
        text += self._stream.push(rest)
        self._taken += len(rest)
        found = []
        if piece.finish_reason is not None:
            kept, found = self._stream.flush()
            text, calls = text + kept, calls + found
        calls = calls if self._most is None else calls[: max(0, self._most - self.calls)]
        self.calls += len(calls)
        if found or (self.calls and piece.finish_reason == "stop"):
            self.finish_reason = "tool_calls"
        return text, calls


def _call(call: ToolCall) -> Json:
    return {"id": new_id("call"), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
