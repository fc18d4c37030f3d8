"""The answers of POST /v1/chat/completions."""

from __future__ import annotations

from collections import abc
from typing import Any

from warpbus.engine import TextPiece
from warpbus.models.templates.tools import ToolCall
from warpbus.server.chunks import ChunkForm, UsageStyle
from warpbus.server.conversations import PreparedChat
from warpbus.server.responses import Json, Usage, new_id
from warpbus.server.schema import ChatRequest
from warpbus.server.token_scores import LOWEST, prompt_scores, token_id_text, token_text, with_sampled


class ChatForm(ChunkForm):
    """The format of chat answers.

    Args:
        chat: the request.
        body: the same as it came.
    """

    def __init__(self, chat: PreparedChat, body: ChatRequest) -> None:
        kinds = ("chat.completion", "chat.completion.chunk")
        super().__init__("chatcmpl", chat.model.name, kinds, UsageStyle.of(body.stream_options))
        self._tokenizer = chat.tokenizer
        self._prompt = chat.requests[0].prompt if body.return_token_ids else None
        self._logprobs = bool(body.logprobs)
        self._most = body.top_logprobs or 0
        self._prompt_logprobs = body.prompt_logprobs
        self._unsent: list[list[int]] = [[] for _ in chat.readers]  # token ids that no chunk has sent
        self._readers = chat.readers
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._stop_tokens = body.stop_token_ids
        self._offers_tools = bool(body.tools) and body.tool_choice != "none"
        self._echo = body.messages[-1].text if body.echo and body.continue_final_message else ""

    @property
    def reasoning_tokens(self) -> int:
        """See `ChunkForm.reasoning_tokens`."""
        return sum(reader.reasoning_tokens for reader in self._readers)

    def first_choices(self) -> list[Json]:
        """See `ChunkForm.first_choices`: the role of each answer."""
        # As in OpenAI's API: an answer that may be a call has no content yet.
        content = self._echo or (None if self._offers_tools else "")
        delta = {"role": "assistant", "content": content, "reasoning_content": None}
        return [self._choice(index, delta) for index in range(len(self._readers))]

    def text_choice(self, index: int, text: str) -> Json:
        """See `ChunkForm.text_choice`."""
        return self._choice(index, {"content": text, "reasoning_content": None})

    def choices(self, index: int, piece: TextPiece) -> list[Json | str]:
        """See `ChunkForm.choices`."""
        reader = self._readers[index]
        self._unsent[index] += piece.token_ids if self._prompt is not None else ()
        delta = reader.read(piece)
        calls = delta.calls
        logprobs = self._content([piece])
        found: list[Any] = []
        if delta.reasoning:
            thought = {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
            found.append(self._choice(index, thought, logprobs=None if delta.text else logprobs))
        # A last chunk without text would look like one more token to clients that count chunks.
        ends = reader.finish_reason is not None and not calls
        if delta.text and logprobs is None and self._prompt is None and not ends:
            found.append(delta.text)
        elif delta.text or (logprobs is not None and piece.logprobs and not delta.reasoning):
            shown = {"content": delta.text, "reasoning_content": None}
            found.append(self._choice(index, shown, logprobs=logprobs))
        if calls:
            numbered = [{"index": at, **_call(call)} for at, call in enumerate(calls, reader.calls - len(calls))]
            found.append(self._choice(index, {"tool_calls": numbered, "reasoning_content": None}))
        if reader.finish_reason is not None:
            last = found.pop() if found and ends else self._choice(index, {"reasoning_content": None})
            reason = self._stop_reason(piece, self._stop_tokens)
            found.append({**last, "finish_reason": reader.finish_reason, "stop_reason": reason})
        return found

    def opening(self, usage: Usage) -> list[Json]:
        """See `Form.opening`."""
        found = super().opening(usage)
        return found if self._prompt is None else [{**chunk, "prompt_token_ids": self._prompt} for chunk in found]

    def whole(self, answers: abc.Sequence[abc.Sequence[TextPiece]], usage: Usage) -> Json:
        """See `Form.whole`."""
        found = next((piece.prompt_logprobs for piece in answers[0] if piece.prompt_logprobs is not None), None)
        return {
            **super().whole(answers, usage),
            "service_tier": None,
            "prompt_logprobs": prompt_scores(self._tokenizer, found, self._prompt_logprobs),
            "prompt_token_ids": self._prompt,
        }

    def choice(self, index: int, pieces: abc.Sequence[TextPiece]) -> Json:
        """See `ChunkForm.choice`."""
        reader = self._readers[index]
        deltas = [reader.read(piece) for piece in pieces]
        text = self._echo + "".join(delta.text for delta in deltas)
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
            "stop_reason": self._stop_reason(pieces[-1], self._stop_tokens),
            "token_ids": None if self._prompt is None else [token for piece in pieces for token in piece.token_ids],
        }

    def _choice(self, index: int, delta: Json, *, logprobs: Json | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if self._prompt is not None:
            choice["token_ids"], self._unsent[index] = self._unsent[index], []
        return choice

    def _content(self, pieces: abc.Sequence[TextPiece]) -> Json | None:
        if not self._logprobs:
            return None
        return {
            "content": [
                {
                    **self._token(one.token, one.logprob),
                    "top_logprobs": [self._token(token, logprob) for token, logprob in with_sampled(one, self._most)],
                }
                for piece in pieces
                for one in piece.logprobs or ()
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> Json:
        text, data = token_text(self._tokenizer, token)
        text = token_id_text(token) if self._as_ids else text
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(data)}


def _call(call: ToolCall) -> Json:
    return {"id": new_id("call"), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
