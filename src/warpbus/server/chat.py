"""The answers of POST /v1/chat/completions."""

from __future__ import annotations

from collections import abc

from warpbus.engine import TextPiece
from warpbus.models.templates.tools import ToolCall
from warpbus.models.tokenizers import Tokenizer
from warpbus.server.chunks import ChunkForm, UsageStyle
from warpbus.server.conversations import PreparedChat
from warpbus.server.responses import Json, new_id


class ChatForm(ChunkForm):
    """The format of chat answers.

    Args:
        chat: the request.
        logprobs: the answers have logprobs.
        style: which chunks have the usage.
    """

    def __init__(self, chat: PreparedChat, *, logprobs: bool, style: UsageStyle) -> None:
        super().__init__("chatcmpl", chat.model.name, ("chat.completion", "chat.completion.chunk"), style)
        self._tokenizer = chat.tokenizer
        self._logprobs = logprobs
        self._readers = chat.readers

    @property
    def reasoning_tokens(self) -> int:
        """See `ChunkForm.reasoning_tokens`."""
        return sum(reader.reasoning_tokens for reader in self._readers)

    def first_choices(self) -> list[Json]:
        """See `ChunkForm.first_choices`: the role of each answer."""
        delta = {"role": "assistant", "content": "", "reasoning_content": None}
        return [self._choice(index, delta) for index in range(len(self._readers))]

    def choices(self, index: int, piece: TextPiece) -> list[Json]:
        """See `ChunkForm.choices`."""
        reader = self._readers[index]
        delta = reader.read(piece)
        calls = delta.calls
        logprobs = self._content([piece])
        found = []
        if delta.reasoning:
            thought = {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
            found.append(self._choice(index, thought, logprobs=None if delta.text else logprobs))
        if delta.text or (logprobs is not None and piece.logprobs and not delta.reasoning):
            shown = {"content": delta.text, "reasoning_content": None}
            found.append(self._choice(index, shown, logprobs=logprobs))
        if calls:
            numbered = [{"index": at, **_call(call)} for at, call in enumerate(calls, reader.calls - len(calls))]
            found.append(self._choice(index, {"tool_calls": numbered}))
        if reader.finish_reason is not None:
            found.append(self._choice(index, {}, finish=reader.finish_reason))
        return found

    def choice(self, index: int, pieces: abc.Sequence[TextPiece]) -> Json:
        """See `ChunkForm.choice`."""
        reader = self._readers[index]
        deltas = [reader.read(piece) for piece in pieces]
        text = "".join(delta.text for delta in deltas)
        reasoning = "".join(delta.reasoning for delta in deltas) or None
        calls = [call for delta in deltas for call in delta.calls]
        message: Json = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
            "reasoning_content": reasoning,
            "reasoning": reasoning,
        }
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._content(pieces),
            "finish_reason": reader.finish_reason,
        }

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


def _call(call: ToolCall) -> Json:
    return {"id": new_id("call"), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
