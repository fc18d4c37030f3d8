"""The bodies of answers as `/openapi.json` declares them. The server builds its answers without these classes: tests
compare the two."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class TokenDetails(BaseModel):
    """Tokens of a prompt found in the prefix cache."""

    cached_tokens: int


class OutputDetails(BaseModel):
    """Tokens of an answer that are thinking."""

    reasoning_tokens: int


class TokenUsage(BaseModel):
    """The tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails
    completion_tokens_details: OutputDetails


class LikelyToken(BaseModel):
    """A token with its log probability (natural logarithm; -9999 for probability 0) and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(LikelyToken):
    """A sampled token, and the most likely ones at its position."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
    """The log probabilities of an answer's tokens."""

    content: list[ChosenToken]
    refusal: None = None


class RankedToken(BaseModel):
    """The log probability of a token of a prompt, and its rank among all, from 1."""

    logprob: float
    rank: int
    decoded_token: str


class CallAnswer(BaseModel):
    """The function of a call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCallAnswer(BaseModel):
    """A call of a tool. `index` counts the calls of a stream."""

    id: str
    type: Literal["function"]
    function: CallAnswer
    index: int | None = None


class MessageAnswer(BaseModel):
    """The message that a model wrote; of a chunk, what it adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    tool_calls: list[ToolCallAnswer] = []


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: MessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | None


class ChunkChoice(BaseModel):
    """A part of one answer."""

    index: int
    delta: MessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: TokenUsage
    service_tier: None
    prompt_logprobs: list[dict[str, RankedToken] | None] | None
    prompt_token_ids: list[int] | None


class ChatCompletionChunk(BaseModel):
    """The data of an event in a stream of answers to a conversation."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: TokenUsage | None = None
    prompt_token_ids: list[int] | None = None


class TextLogprobs(BaseModel):
    """The log probabilities of a text's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(BaseModel):
    """One text, or a part of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[str, RankedToken] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextCompletion(BaseModel):
    """The continuations of texts, or the data of an event in a stream of them."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: TokenUsage | None = None


class ServedModel(BaseModel):
    """A model that requests can name. What depends on its files is there when it is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    state: str
    max_model_len: int | None = None
    tools: bool | None = None
    reasoning: bool | None = None
    default_sampling_params: dict[str, float] | None = None


class ModelList(BaseModel):
    """All models that requests can name."""

    object: Literal["list"]
    data: list[ServedModel]


class TokenAndPiece(BaseModel):
    """A token, and what it adds to the text: a string, or bytes that are not UTF-8 by themselves."""

    id: int
    piece: str | list[int]


class Tokenized(BaseModel):
    """The token ids of a text or of several, and their texts if they were asked for."""

    tokens: list[int] | list[list[int]] | list[TokenAndPiece] | list[list[TokenAndPiece]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str] | list[list[str]] | None


class TokenizerAnswer(BaseModel):
    """The checkpoint's tokenizer_config.json, and more fields."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    model_max_length: int
    chat_template: str | None


class LoadAnswer(BaseModel):
    """How many requests for answers are under way."""

    server_load: int


class Detokenized(BaseModel):
    """The text of token ids, by its names in vLLM, SGLang and llama.cpp."""

    prompt: str
    text: str
    content: str


class ReplicaHealth(BaseModel):
    """The state of one of the engines of a model, and why it is not ready."""

    replica: int
    state: str
    reason: str | None = None


class HealthAnswer(BaseModel):
    """Whether all models are ready, or the states of the others and why; of models with replicas, those of each."""

    status: str
    reason: str | None = None
    replicas: dict[str, list[ReplicaHealth]] | None = None


class VersionAnswer(BaseModel):
    """The version of Warpbus."""

    version: str


class ResetAnswer(BaseModel):
    """The prefix caches are empty."""

    success: bool


class SleepAnswer(BaseModel):
    """Whether a model sleeps."""

    is_sleeping: bool


class MoveAnswer(BaseModel):
    """How a model moved: bytes of weights and of cache copied ahead and during the pause, and seconds."""

    weights: int
    ahead: int
    paused: int
    preparing: float
    pause: float


class ErrorDetail(BaseModel):
    """An error; `param` is the field of the request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """An error."""

    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class AnswerBlock(BaseModel):
    """A part of a message: `text`; `thinking`; or the `id`, `name` and `input` of a call."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class AnthropicUsage(BaseModel):
    """The tokens of a request; those found in the prefix cache are apart from the others."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(BaseModel):
    """The answer to a conversation in the form of Anthropic's API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class CountedTokens(BaseModel):
    """The number of tokens of a conversation."""

    input_tokens: int


class InputTokens(CountedTokens):
    """The number of tokens of the input of a response."""

    object: Literal["response.input_tokens"]


class ResponseError(BaseModel):
    """Why a response has failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponsePart(BaseModel):
    """A part of an item's content."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ResponseItem(BaseModel):
    """An item of a response: a message; thinking; or the call of a function."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    summary: list[Any] = []
    content: list[ResponsePart] = []
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseUsage(BaseModel):
    """The tokens of a response, also by their names in chat completions."""

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    prompt_tokens: int
    completion_tokens: int


class ResponseReasoning(BaseModel):
    """How the model was asked to think."""

    effort: str | None
    summary: None = None


class ResponseAnswer(BaseModel):
    """OpenAI's response object. Fields of the request are repeated."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[ResponseItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class DeletedAnswer(BaseModel):
    """A response is no longer kept."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


MOVES = dict[str, MoveAnswer]
"""By the name of the model."""

STREAMED: tuple[type[BaseModel], ...] = (ChatCompletionChunk,)
"""Data of events only."""


def documented(
    model: Any,
    *,
    events: str | None = None,
    also: dict[int | str, dict[str, Any]] | None = None,
    links: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Arguments of a route that declare its answer.

    Args:
        model: of the body, for status 200.
        events: if the answer may be a stream, what the data of its events is.
        also: further statuses that are declared.
        links: OpenAPI's links to operations that take a value of the answer.
    """
    event = {"type": "object", "properties": {name: {"type": "string"} for name in ("event", "data")}}
    content = {} if events is None else {"text/event-stream": {"schema": {**event, "description": f"events: {events}"}}}
    whole = {"model": model, "description": "the answer", "content": content}
    if links is not None:
        whole["links"] = links
    return {"response_model": None, "responses": {200: whole, **(also or {})}}
