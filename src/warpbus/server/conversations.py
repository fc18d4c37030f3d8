"""A chat request, in the form of OpenAI's API, as a prompt, sampling parameters and readers of the answers."""

from __future__ import annotations

import json
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from warpbus.engine import Grammar, Thinking
from warpbus.engine.answer_decoder import keeps_first_space
from warpbus.models.templates import Message
from warpbus.models.templates.thinking import ThinkingStart
from warpbus.models.templates.tools import Tool, ToolCall, Turn
from warpbus.models.tokenizers import Tokenizer
from warpbus.server.admission import with_text
from warpbus.server.answers import AnswerReader
from warpbus.server.generation import GenerationRequest, RequestRecord, unless_gone
from warpbus.server.guard import cache_salt
from warpbus.server.options import ServerOptions
from warpbus.server.params import answers_of, check_size, for_answer, grammar_of, room, sampling_params, truncated
from warpbus.server.registry import Model, Models
from warpbus.server.request_error import RequestError
from warpbus.server.schema import (
    Body,
    ChatMessage,
    ChatRequest,
    FunctionTool,
    NamedTool,
    NamesModel,
    Templated,
    unknown_fields,
)

T = TypeVar("T")
B = TypeVar("B", bound=Body)

# Variables of a template that other fields set.
_TOLD = {"name", "description", "parameters"}  # of a tool
_MESSAGE_SIZE = 64  # characters that take as long as a message without any
_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        offered: the tools in the model's prompt.
        allowed: those of them that may be called.
        grammar: that forces a call, or None.
        free_grammar: that keeps calls to their schemas, in an answer that may be text; None: none is needed.
        most: calls in one answer, or None for any number.
    """

    offered: list[dict[str, Any]] = field(default_factory=list)
    allowed: abc.Sequence[Tool] = ()
    grammar: Grammar | None = None
    free_grammar: Grammar | None = None
    most: int | None = None


@dataclass(frozen=True)
class PreparedChat:
    """A request that is ready for the engine.

    Attributes:
        requests, readers: one per answer.
    """

    model: Model
    tokenizer: Tokenizer
    requests: list[GenerationRequest]
    readers: list[AnswerReader]


def named_model(models: Models, body: NamesModel, request: Request, options: ServerOptions) -> Model:
    """The model that a body names, which the access log records, with unknown fields.

    Raises:
        RequestError: there is no such model; or an unknown field, if the server is strict.
    """
    record = RequestRecord.of(request.scope)
    record.ignored = unknown_fields(body)
    if record.ignored and options.strict:
        name = record.ignored[0]
        raise RequestError(
            400, f"{name}: not known or not supported; leave it out", param=name.partition(".")[0], code="unknown"
        )
    model = models.find(body.model)
    record.model = model.name
    return model


def valid_chat(fields: dict[str, Any]) -> ChatRequest:
    """A chat request from the fields of another API's request. RequestValidationError as of a body."""
    return valid_body(ChatRequest, fields)


def valid_body(kind: type[B], fields: dict[str, Any]) -> B:
    """A body from its fields. RequestValidationError as of a body that was sent."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(found) from None


def leave_out_tools(
    tools: abc.Sequence[T], hosted: Callable[[T], str | None], request: Request, *, strict: bool
) -> list[T]:
    """The tools that a client runs. Those that only another vendor's server runs are left out, with a warning.

    Args:
        hosted: the type of a tool that a vendor's server runs; None for others.
        strict: refuse them instead, with RequestError.
    """
    record = RequestRecord.of(request.scope)
    left_out = [(at, kind) for at, tool in enumerate(tools) if (kind := hosted(tool)) is not None]
    if left_out and strict:
        at, kind = left_out[0]
        raise RequestError(400, f"tools.{at}: this server has no tool {kind!r}; leave it out", param="tools")
    record.ignored = record.ignored + [f"tools.{at}.{kind}" for at, kind in left_out]
    return [tool for tool in tools if hosted(tool) is None]


async def prepare_chat(
    body: ChatRequest, model: Model, request: Request, options: ServerOptions, *, cut_to_context: bool = False
) -> PreparedChat:
    """Check a request and render its prompt.

    Args:
        cut_to_context: the request's most tokens are cut to what there is room for, and what the server allows;
            otherwise more are refused.

    Raises:
        RequestError, UsageError: the request is wrong, or the model does not support what it asks for.
        ContextLengthError: the prompt leaves no room for an answer.
        ClientGoneError: the client disconnected.
    """
    service = model.awake()
    count = answers_of(body, 1, options)
    tools = tools_of(body, model, options)
    grammar = _one_grammar(grammar_of(body, options), tools)
    prompt = await with_text(
        request,
        model,
        _text_size(body, tools.offered),
        lambda: render_prompt(body.messages, body, model, tools.offered, options),
    )
    continues = bool(body.continue_final_message)
    wanted = body.max_completion_tokens or body.max_tokens
    prompt = truncated(prompt, body, service.max_model_len, wanted)
    start: ThinkingStart = "over" if model.thinking is None else model.thinking.start(prompt)
    thinking = None
    if model.thinking is not None and start != "over" and (grammar or body.thinking_token_budget is not None):
        tokens = model.thinking
        thinking = Thinking(tokens.opening, tokens.closing, start == "open", body.thinking_token_budget)
    space = room(prompt, service.max_model_len)
    if wanted is not None and cut_to_context:
        wanted = min(wanted, space, options.max_tokens or space)
    params = sampling_params(
        body,
        wanted=wanted,
        space=space,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        options=options,
        defaults=service.generation_defaults,
        grammar=grammar,
        thinking=thinking,
        continues_text=continues,
    )
    salt = cache_salt(request.scope, body.cache_salt)
    return PreparedChat(
        model,
        service.tokenizer,
        [GenerationRequest(prompt, for_answer(params, index), salt) for index in range(count)],
        [
            AnswerReader(
                service.tokenizer,
                dialect=None if continues and not tools.allowed else model.dialect,
                tools=tools.allowed,
                most_calls=tools.most,
                thinking=None if continues and start == "over" else model.thinking,
                start=start,
                show_reasoning=body.include_reasoning is not False,
                keep_first_space=keeps_first_space(service.tokenizer, prompt, params),
            )
            for _ in range(count)
        ],
    )


async def count_prompt(body: ChatRequest, model: Model, request: Request, options: ServerOptions) -> int:
    """The number of tokens of a conversation. Raises as `prepare_chat`, but a prompt may have any length."""
    tools = tools_of(body, model, options).offered
    prompt = await unless_gone(
        request.receive, model.in_thread(lambda: render_prompt(body.messages, body, model, tools, options))
    )
    return len(prompt)


def _text_size(body: ChatRequest, tools: abc.Sequence[dict[str, Any]]) -> int:
    """The characters that a template writes of a conversation, roughly."""
    others = len(str((tools, body.chat_template_kwargs)))
    return others + sum(
        _MESSAGE_SIZE
        + len(message.text)
        + len(message.reasoning_content or message.reasoning or "")
        + sum(len(call.function.arguments) for call in message.tool_calls or ())
        for message in body.messages
    )


def render_prompt(
    messages: abc.Sequence[ChatMessage],
    body: Templated,
    model: Model,
    tools: abc.Sequence[dict[str, Any]],
    options: ServerOptions,
) -> list[int]:
    """The token ids of a conversation, by the model's template.

    Raises:
        RequestError: tools, or calls of them, for a model that knows none; a variable that other fields set.
        UsageError: a call of the past is malformed, or the template refuses the conversation.
    """
    turns = [
        Turn(
            "system" if message.role == "developer" else message.role,
            message.text,
            tuple(ToolCall(call.function.name, call.function.arguments) for call in message.tool_calls or ()),
            message.reasoning_content or message.reasoning or "",
        )
        for message in messages
    ]
    variables = template_variables(body, options)
    if model.dialect is not None:
        rendered = model.dialect.render_tools(turns, tools)
        variables |= model.dialect.variables(tools)
    else:
        if tools or any(turn.calls or turn.role == "tool" for turn in turns):
            where = "tools" if tools else "messages"
            raise RequestError(400, f"{where}: the model {model.name} has not learned to call tools", param=where)
        rendered = [_plain(turn) for turn in turns]
    continues = bool(body.continue_final_message)
    prompt = model.service.template.render(
        rendered,
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        variables=variables,
    )
    return [*model.service.tokenizer.prompt_prefix, *prompt] if body.add_special_tokens else prompt


def template_variables(body: Templated, options: ServerOptions) -> dict[str, Any]:
    """The variables that a request gives to the template. RequestError if other fields set one of them."""
    given = dict(body.chat_template_kwargs or {})
    check_size("chat_template_kwargs", json.dumps(given, ensure_ascii=False), options)
    reserved = next((name for name in _RESERVED if name in given), None)
    if reserved is not None:
        raise RequestError(
            400,
            f"chat_template_kwargs.{reserved}: another field sets it; leave it out",
            param="chat_template_kwargs",
        )
    if body.reasoning_effort is not None:
        given.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            given.setdefault("enable_thinking", False)
    if body.enable_thinking is not None:
        given["enable_thinking"] = body.enable_thinking
    return given


def tools_of(body: ChatRequest, model: Model, options: ServerOptions) -> ToolUse:
    """The tools of a request. RequestError or UsageError if the model does not support what the request asks for."""
    choice = body.tool_choice or "auto"
    if not body.tools or choice == "none":
        return ToolUse()
    offered = offered_tools(body.tools)
    check_size("tools", json.dumps(offered, ensure_ascii=False), options)
    if model.dialect is None:
        raise RequestError(400, f"tools: the model {model.name} has not learned to call tools", param="tools")
    if len({tool["name"] for tool in offered}) < len(offered):
        raise RequestError(400, "tools: two have the same name: give each its own", param="tools")
    allowed = offered
    if isinstance(choice, NamedTool):
        allowed = [tool for tool in offered if tool["name"] == choice.function.name]
    several = body.parallel_tool_calls is not False
    grammar = free = None
    if choice != "auto":
        grammar = Grammar("lark", model.dialect.grammar(allowed, several=several))
    elif any(tool.function.strict for tool in body.tools):
        text = model.dialect.free_grammar(allowed)
        free = None if text is None else Grammar("lark", text)
    return ToolUse(offered, allowed, grammar, free, None if several else 1)


def offered_tools(tools: abc.Sequence[FunctionTool]) -> list[dict[str, Any]]:
    """Tools as the model sees them."""
    return [tool.function.model_dump(exclude_none=True, include=_TOLD) for tool in tools]


def _one_grammar(asked: Grammar | None, tools: ToolUse) -> Grammar | None:
    if asked is not None and tools.grammar is not None:
        raise RequestError(
            400, "tool_choice: a call that is required leaves no room for a grammar", param="tool_choice"
        )
    return tools.grammar or asked or tools.free_grammar


def _plain(turn: Turn) -> Message:
    message: Message = {"role": turn.role, "content": turn.content}
    return {**message, "reasoning_content": turn.reasoning} if turn.reasoning else message
