"""OpenAI's Responses API: POST /v1/responses, and GET and DELETE of a response that is kept.

A request becomes a `ChatRequest`: everything else is as for chat completions, but for the form of the answer.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from warpbus.engine import TextPiece
from warpbus.server.answer_schema import DeletedAnswer, InputTokens, ResponseAnswer, documented
from warpbus.server.blocks import Block, BlockForm
from warpbus.server.conversations import (
    PreparedChat,
    count_prompt,
    leave_out_tools,
    named_model,
    prepare_chat,
    valid_chat,
)
from warpbus.server.guard import cache_salt
from warpbus.server.registry import Model, Models
from warpbus.server.request_error import RequestError
from warpbus.server.responses import Json, Responder, Usage, new_id
from warpbus.server.responses_schema import (
    CallItem,
    CallOutputItem,
    InputItem,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    ResponsesTool,
    joined_contents,
)
from warpbus.server.schema import ChatRequest
from warpbus.server.stored_responses import StoredResponse, StoredResponses

_IDS = {"thinking": "rs", "text": "msg", "call": "fc"}


@dataclass(frozen=True)
class Exchange:
    """A request of the Responses API, translated.

    Attributes:
        body: as it came.
        tools: those that the model is offered.
        messages: the conversation before the answer, without `instructions`.
    """

    body: ResponsesRequest
    tools: list[ResponsesTool]
    messages: list[Json]

    def chat(self) -> ChatRequest:
        """The same request in the form of chat completions. RequestValidationError if it cannot be expressed."""
        body = self.body
        instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        choice = body.tool_choice
        if choice is not None and not isinstance(choice, str):
            named = {"type": "function", "function": {"name": choice.name}}
        found: Json = {
            "model": body.model,
            "messages": [*instructions, *self.messages],
            "max_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "stream": body.stream,
            "tools": [_chat_tool(tool) for tool in self.tools] or None,
            "tool_choice": choice if choice is None or isinstance(choice, str) else named,
            "parallel_tool_calls": body.parallel_tool_calls,
            "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        }
        form = body.text.format if body.text else None
        if form is not None:
            found["response_format"] = {"type": form.type}
            if form.schema_ is not None:
                schema = {"name": form.name or "answer", "schema": form.schema_, "strict": form.strict}
                found["response_format"]["json_schema"] = schema
        return valid_chat(found)


_LINKS = {
    operation: {"operationId": operation, "parameters": {"name": "$response.body#/id"}}
    for operation in ("retrieve_response", "delete_response")
}


def add_routes(app: FastAPI, models: Models, responder: Responder) -> None:
    """Add the routes to the application."""
    options = responder.options
    stored = StoredResponses(options.max_stored_responses)

    def begun(body: ResponsesRequest, request: Request) -> tuple[Model, Exchange]:
        """The model of a request, and its conversation with the kept one before it."""
        model = named_model(models, body, request, options)
        previous = body.previous_response_id
        before = [] if previous is None else _kept(stored, previous, cache_salt(request.scope), missing=400).messages
        tools = leave_out_tools(
            body.tools or (), lambda tool: tool.type if tool.hosted else None, request, strict=options.strict
        )
        return model, Exchange(body, tools, [*before, *_messages(body.input)])

    @app.post("/v1/responses", **documented(ResponseAnswer, events="OpenAI's response events", links=_LINKS))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, in the form of OpenAI's Responses API."""
        model, exchange = begun(body, request)
        owner = cache_salt(request.scope)
        chat = await prepare_chat(exchange.chat(), model, request, options, cut_to_context=True)

        def keep(answer: Json, messages: list[Json]) -> None:
            if body.store is not False:
                stored.add(StoredResponse(answer, messages, owner))

        form = ResponseForm(chat, exchange, keep)
        return await responder.respond(request, chat.model, form, chat.requests, per_prompt=1, stream=bool(body.stream))

    @app.post("/v1/responses/input_tokens", **documented(InputTokens))
    async def input_tokens(body: ResponsesRequest, request: Request) -> dict[str, Any]:
        """The number of tokens of a conversation."""
        model, exchange = begun(body, request)
        count = await count_prompt(exchange.chat(), model, request, options)
        return {"object": "response.input_tokens", "input_tokens": count}

    @app.get("/v1/responses/{name}", operation_id="retrieve_response", **documented(ResponseAnswer))
    async def one_response(name: str, request: Request) -> dict[str, Any]:
        """A response that is kept."""
        return _kept(stored, name, cache_salt(request.scope)).body

    @app.delete("/v1/responses/{name}", operation_id="delete_response", **documented(DeletedAnswer))
    async def delete_response(name: str, request: Request) -> dict[str, Any]:
        """Forget a response."""
        _kept(stored, name, cache_salt(request.scope))
        stored.remove(name)
        return {"id": name, "object": "response", "deleted": True}


def _kept(stored: StoredResponses, name: str, owner: bytes, *, missing: int = 404) -> StoredResponse:
    """A response that is kept; otherwise RequestError with the status `missing`."""
    found = stored.get(name, owner)
    if found is None:
        raise RequestError(
            missing,
            f"the response {name[:200]!r} is not kept, or no longer: send the whole conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found


def _chat_tool(tool: ResponsesTool) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _messages(given: str | abc.Sequence[InputItem]) -> list[Json]:
    """The messages of chat completions: items of one answer are one message. Calls that were cut off are left out."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[Json] = []
    answer: Json | None = None  # the assistant's message that further items belong to
    for item in given:
        if isinstance(item, CallItem) and item.status == "incomplete":
            continue
        if isinstance(item, CallOutputItem):
            answer = None
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": joined_contents(item.output)})
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            answer = None
            found.append({"role": item.role, "content": joined_contents(item.content)})
            continue
        if answer is None or (not isinstance(item, CallItem) and "tool_calls" in answer):
            answer = {"role": "assistant", "content": ""}
            found.append(answer)
        if isinstance(item, MessageItem):
            answer["content"] += joined_contents(item.content)
        elif isinstance(item, ReasoningItem):
            answer["reasoning_content"] = answer.get("reasoning_content", "") + joined_contents(item.content)
        else:
            function = {"name": item.name, "arguments": item.arguments}
            answer.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    return found


class ResponseForm(BlockForm):
    """The format of OpenAI's responses.

    Args:
        chat: the request.
        exchange: the same as it came.
        keep: called with the complete response, and the conversation with its answer.
    """

    def __init__(self, chat: PreparedChat, exchange: Exchange, keep: Callable[[Json, list[Json]], None]) -> None:
        super().__init__(chat, _IDS)
        body, params = exchange.body, chat.requests[0].params
        self._exchange = exchange
        self._keep = keep
        self._sequence = 0
        form = body.text.format if body.text else None
        self._head: Json = {
            "id": new_id("resp", "_"),
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": chat.model.name,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": _choice(body),
            "tools": [
                {name: getattr(tool, name) for name in ("type", "name", "description", "parameters", "strict")}
                for tool in exchange.tools
            ],
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def opening(self, usage: Usage) -> list[Json]:
        """See `Form.opening`."""
        begun = self._response("in_progress")
        return [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]

    def begin(self, block: Block) -> list[Json]:
        """See `BlockForm.begin`."""
        found = [self._of_item("response.output_item.added", block, begins=True)]
        if block.call is None:
            found.append(self._of_part("response.content_part.added", block, part=_part(block)))
        return found

    def grow(self, block: Block, text: str, piece: TextPiece | None) -> list[Json]:
        """See `BlockForm.grow`."""
        name = f"response.{_TEXTS[block.kind]}.delta"
        if block.call is not None:
            return [self._event(name, item_id=block.id, output_index=block.number, delta=text)]
        more: Json = {"logprobs": []} if block.kind == "text" else {}
        return [self._of_part(name, block, delta=text, **more)]

    def end(self, block: Block) -> list[Json]:
        """See `BlockForm.end`."""
        name = f"response.{_TEXTS[block.kind]}.done"
        if block.call is not None:
            done = [
                self._event(
                    name,
                    item_id=block.id,
                    output_index=block.number,
                    name=block.call.name,
                    arguments=block.call.arguments,
                )
            ]
        else:
            more: Json = {"logprobs": []} if block.kind == "text" else {}
            done = [
                self._of_part(name, block, text=block.text, **more),
                self._of_part("response.content_part.done", block, part=_part(block, whole=True)),
            ]
        return [*done, self._of_item("response.output_item.done", block)]

    def finish(self, usage: Usage) -> list[Json]:
        """See `BlockForm.finish`."""
        answer = self.body(usage)
        return [self._event(f"response.{answer['status']}", response=answer)]

    def failure(self, error: RequestError, usage: Usage) -> Json:
        """See `Form.failure`: a response that has failed."""
        self.cut_open()
        failed = self._response("failed", usage, error={"code": "server_error", "message": str(error)})
        return self._event("response.failed", response=failed)

    def body(self, usage: Usage) -> Json:
        """See `BlockForm.body`; the response is kept."""
        if self.finish_reason == "length":
            answer = self._response("incomplete", usage, incomplete_details={"reason": "max_output_tokens"})
        else:
            answer = self._response("completed", usage)
        self._keep(answer, [*self._exchange.messages, *_turn(self.blocks)])
        return answer

    def _event(self, kind: str, /, **fields: Any) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _of_item(self, name: str, block: Block, *, begins: bool = False) -> Json:
        return self._event(name, output_index=block.number, item=_item(block, begins=begins))

    def _of_part(self, name: str, block: Block, **fields: Any) -> Json:
        return self._event(name, item_id=block.id, output_index=block.number, content_index=0, **fields)

    def _response(self, status: str, usage: Usage | None = None, **fields: Any) -> Json:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [] if usage is None else [_item(block) for block in self.blocks],
            "usage": None if usage is None else self._counted(usage),
            **fields,
        }

    def _counted(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
            # The names of chat completions, which SGLang's clients read.
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.output_tokens,
        }


# The names of the events of the text of a block, by its kind.
_TEXTS = {"thinking": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    return choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump()


def _item(block: Block, *, begins: bool = False) -> Json:
    """An item of the output; one that has just begun is empty."""
    status = "in_progress" if begins else "incomplete" if block.cut else "completed"
    if block.call is not None:
        arguments = "" if begins else block.call.arguments
        call = {"call_id": f"call_{block.id.removeprefix('fc_')}", "name": block.call.name, "arguments": arguments}
        return {"id": block.id, "type": "function_call", "status": status, **call}
    content = [] if begins else [_part(block, whole=True)]
    if block.kind == "thinking":
        return {"id": block.id, "type": "reasoning", "status": status, "summary": [], "content": content}
    return {"id": block.id, "type": "message", "status": status, "role": "assistant", "content": content}


def _part(block: Block, *, whole: bool = False) -> Json:
    text = block.text if whole else ""
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _turn(blocks: abc.Sequence[Block]) -> list[Json]:
    """The answer as a message of chat completions, without a call that is cut off; none if it is empty."""
    if not any(block.call is None or block.call.complete for block in blocks):
        return []
    turn: Json = {"role": "assistant", "content": "".join(block.text for block in blocks if block.kind == "text")}
    thinking = "".join(block.text for block in blocks if block.kind == "thinking")
    if thinking:
        turn["reasoning_content"] = thinking
    calls = [_item(block) for block in blocks if block.call is not None and block.call.complete]
    if calls:
        turn["tool_calls"] = [
            {
                "id": call["call_id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    return [turn]
