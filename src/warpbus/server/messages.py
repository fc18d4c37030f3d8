"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens.

A request becomes a `ChatRequest`: everything else is as for chat completions, but for the form of the answer.
"""

from __future__ import annotations

import json
from collections import abc
from typing import Any

from fastapi import FastAPI, Request
from pydantic_core import from_json
from starlette.responses import Response

from warpbus.engine import TextPiece
from warpbus.models.templates.tools import ToolCall
from warpbus.server.answer_schema import AnthropicMessage, CountedTokens, documented
from warpbus.server.blocks import Block, BlockForm
from warpbus.server.conversations import (
    PreparedChat,
    count_prompt,
    leave_out_tools,
    named_model,
    prepare_chat,
    valid_chat,
)
from warpbus.server.failures import anthropic_body_of
from warpbus.server.messages_schema import (
    InputBlock,
    MessagesPrompt,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    joined,
)
from warpbus.server.openapi import ANTHROPIC_ERRORS
from warpbus.server.registry import Models
from warpbus.server.request_error import RequestError
from warpbus.server.responses import Json, Responder, Usage, new_id
from warpbus.server.schema import ChatRequest

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_IDS = {"thinking": "thought", "text": "text", "call": "toolu"}


def add_routes(app: FastAPI, models: Models, responder: Responder) -> None:
    """Add the routes to the application."""
    options = responder.options

    @app.post(
        "/v1/messages", **documented(AnthropicMessage, events="Anthropic's message events", also=ANTHROPIC_ERRORS)
    )
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, in the form of Anthropic's API."""
        model = named_model(models, body, request, options)
        chat = await prepare_chat(
            _chat_request(body, request, strict=options.strict), model, request, options, cut_to_context=True
        )
        form = MessageForm(chat, body)
        return await responder.respond(request, chat.model, form, chat.requests, per_prompt=1, stream=bool(body.stream))

    @app.post("/v1/messages/count_tokens", **documented(CountedTokens, also=ANTHROPIC_ERRORS))
    async def count_tokens(body: MessagesPrompt, request: Request) -> dict[str, int]:
        """The number of tokens of a conversation."""
        model = named_model(models, body, request, options)
        chat = _chat_request(body, request, strict=options.strict)
        return {"input_tokens": await count_prompt(chat, model, request, options)}


def _chat_request(body: MessagesPrompt, request: Request, *, strict: bool) -> ChatRequest:
    """The same request in the form of OpenAI's API. RequestError if it cannot be expressed."""
    messages: list[Json] = []
    if body.system:
        messages.append({"role": "system", "content": joined(body.system)})
    for message in body.messages:
        messages += _turns(message.role, message.blocks)
    tools = leave_out_tools(body.tools or (), lambda tool: tool.type if tool.hosted else None, request, strict=strict)
    output_format = body.output_format or (body.output_config.format if body.output_config else None)
    thinking = body.thinking
    found: Json = {
        "model": body.model,
        "messages": messages,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in tools
        ]
        or None,
        "enable_thinking": thinking is not None and thinking.type != "disabled",
        "include_reasoning": thinking is not None and thinking.type != "disabled" and thinking.display != "omitted",
        "thinking_token_budget": None if thinking is None else thinking.budget_tokens,
        "reasoning_effort": body.output_config.effort if body.output_config else None,
        "continue_final_message": messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"),
    }
    if output_format is not None:
        found["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": output_format.schema_},
        }
    if body.tool_choice is not None:
        choice = body.tool_choice
        named = {"type": "function", "function": {"name": choice.name}}
        found["tool_choice"] = _CHOICES.get(choice.type, named)
        found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if isinstance(body, MessagesRequest):
        names = ("max_tokens", "temperature", "top_k", "top_p", "stream")
        found |= {name: getattr(body, name) for name in names} | {"stop": body.stop_sequences}
    return valid_chat(found)


def _turns(role: str, blocks: abc.Sequence[InputBlock]) -> list[Json]:
    """The messages of OpenAI's API that one of Anthropic's is: results of tools are messages of their own."""
    found: list[Json] = []
    texts: list[TextBlock] = []
    thoughts: list[str] = []
    calls: list[Json] = []

    def flush(*, last: bool = False) -> None:
        if texts or calls or thoughts or (last and not found):
            turn: Json = {"role": role, "content": joined(texts)}
            if calls:
                turn["tool_calls"] = calls[:]
            if thoughts:
                turn["reasoning_content"] = "\n".join(thoughts)
            found.append(turn)
        texts.clear()
        thoughts.clear()
        calls.clear()

    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            flush()
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text})
        else:
            assert isinstance(block, RedactedThinkingBlock)
    flush(last=True)
    return found


class MessageForm(BlockForm):
    """The format of Anthropic's messages.

    Args:
        chat: the request.
        body: as it came.
    """

    def __init__(self, chat: PreparedChat, body: MessagesRequest) -> None:
        super().__init__(chat, _IDS)
        self._head: Json = {
            "id": new_id("msg", "_"),
            "type": "message",
            "role": "assistant",
            "model": chat.model.name,
        }
        self._cut = chat.requests[0].params.max_tokens < body.max_tokens

    def opening(self, usage: Usage) -> list[Json]:
        """See `Form.opening`."""
        begun = {**self._head, "content": [], **_NOT_STOPPED, "usage": {**_counted(usage), "output_tokens": 0}}
        return [{"type": "message_start", "message": begun}]

    def begin(self, block: Block) -> list[Json]:
        """See `BlockForm.begin`."""
        return [{"type": "content_block_start", "index": block.number, "content_block": _content(block, begins=True)}]

    def grow(self, block: Block, text: str, piece: TextPiece | None) -> list[Json]:
        """See `BlockForm.grow`."""
        kind, name = _DELTAS[block.kind]
        return [_delta(block, {"type": kind, name: text})]

    def end(self, block: Block) -> list[Json]:
        """See `BlockForm.end`. Clients expect a signature of the thinking before its end."""
        signature = [_delta(block, {"type": "signature_delta", "signature": ""})] if block.kind == "thinking" else []
        return [*signature, {"type": "content_block_stop", "index": block.number}]

    def finish(self, usage: Usage) -> list[Json]:
        """See `BlockForm.finish`."""
        return [
            {"type": "message_delta", "delta": self._stopped(), "usage": _counted(usage)},
            {"type": "message_stop"},
        ]

    def failure(self, error: RequestError, usage: Usage) -> Json:
        """See `Form.failure`."""
        return anthropic_body_of(error)

    def body(self, usage: Usage) -> Json:
        """See `BlockForm.body`."""
        content = [_content(block) for block in self.blocks]
        return {**self._head, "content": content, **self._stopped(), "usage": _counted(usage)}

    def _stopped(self) -> Json:
        reason, sequence = self.finish_reason, None if self.piece is None else self.piece.stop_string
        if reason == "length":
            return {**_NOT_STOPPED, "stop_reason": "model_context_window_exceeded" if self._cut else "max_tokens"}
        if reason == "tool_calls":
            return {**_NOT_STOPPED, "stop_reason": "tool_use"}
        return {"stop_reason": "end_turn" if sequence is None else "stop_sequence", "stop_sequence": sequence}


_NOT_STOPPED: Json = {"stop_reason": None, "stop_sequence": None}
# By the kind of a block: the type of what it grows by, and the name of the text.
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _delta(block: Block, delta: Json) -> Json:
    return {"type": "content_block_delta", "index": block.number, "delta": delta}


def _content(block: Block, *, begins: bool = False) -> Json:
    if block.call is not None:
        return {
            "type": "tool_use",
            "id": block.id,
            "name": block.call.name,
            "input": {} if begins else _input(block.call),
        }
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": "" if begins else block.text, "signature": ""}
    return {"type": "text", "text": "" if begins else block.text}


def _input(call: ToolCall) -> Any:
    """The arguments of a call; of one that is cut off those that it has so far."""
    if call.complete:
        return json.loads(call.arguments)
    try:
        return from_json(call.arguments, allow_partial="trailing-strings") if call.arguments else {}
    except ValueError:
        return {}


def _counted(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }
