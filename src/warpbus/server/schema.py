"""The bodies of requests, as OpenAI's API and the common extensions to it have them; strict about types.

Fields that change no answer (`user`, `metadata`, ...) are taken and not used. Fields of other servers that would change
the answer and are not supported are refused by name. All others are unknown: `unknown_fields` finds them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from warpbus.engine.sampling_params import MOST_BIASES
from warpbus.server.schema_rules import NULL, Rule, absent, either, equals, filled, given, one_of

MOST_MESSAGES = 2048
MOST_PARTS = 256
MOST_PARTS_IN_ALL = 8192
"""Parts, blocks and calls of all messages together: checking so many takes the event loop about 0.1 s."""

MOST_TOOLS = 128
MOST_STOPS = 16
MOST_PROMPTS = 128
MOST_CHOICES = 128
"""Answers that one request may ask for: prompts times `n`."""

_BIGGEST = 2**63 - 1
_MOST_FIELDS = 64

# Fields of other servers that change the answer.
_UNSUPPORTED = frozenset(
    (
        "allowed_token_ids",
        "bad_words",
        "chat_template",
        "function_call",
        "functions",
        "length_penalty",
        "logits_processors",
        "prompt_embeds",
        "use_beam_search",
    )
)

# Besides system, developer, user, assistant and tool, those that the model's Jinja template writes.
Role = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
# The routes refuse a text without tokens.
FilledText = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1})]
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=512)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Millions of wrong items would become millions of errors, and hold up everybody: the first one is enough.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=1 << 21)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_MOST_TEXTS = 1 << 16
Choices = Annotated[
    list[str],
    Field(fail_fast=True, max_length=_MOST_TEXTS),
    WithJsonSchema({"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": _MOST_TEXTS}),
]


_PARTS = ("content", "output", "summary", "tool_calls")
_PARTS_DEPTH = 3  # lists in one another: messages, blocks, the blocks of a tool's result


def _count_parts(items: list[Any], depth: int) -> int:
    found = [part for item in items if isinstance(item, dict) for name in _PARTS if (part := item.get(name))]
    inner = [part for part in found if isinstance(part, list)]
    return sum(map(len, inner)) + (sum(_count_parts(part, depth - 1) for part in inner) if depth else 0)


def _few_parts(messages: Any) -> Any:
    count = _count_parts(messages, _PARTS_DEPTH) if isinstance(messages, list) else 0
    if count > MOST_PARTS_IN_ALL:
        raise ValueError(f"they have {count:,} parts in all: give at most {MOST_PARTS_IN_ALL:,}")
    return messages


FewParts = BeforeValidator(_few_parts)
"""Of a list of messages: limits the parts of all of them."""


def _few_biases(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MOST_BIASES:
        raise ValueError(f"it has {len(biases):,} entries: give at most {MOST_BIASES:,}")
    return biases


Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_few_biases),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,11}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MOST_BIASES,
        }
    ),
]


def _takes_integers(annotation: Any) -> bool:
    return annotation is int or any(_takes_integers(each) for each in get_args(annotation))


def _with_integers(value: Any, depth: int = 2) -> Any:
    """A number, or lists of numbers of this depth, with 1.0 as 1: JSON schema counts it among the integers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and depth and not {float, list}.isdisjoint(map(type, value)):
        return [_with_integers(each, depth - 1) for each in value]
    return value


class Body(BaseModel):
    """The common fields of all bodies."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)

    rules: ClassVar[tuple[Rule, ...]] = ()
    """The schema's rules for several fields together."""

    _integers: ClassVar[frozenset[str]] = frozenset()
    """The fields that are integers or lists of them, by the names that requests have for them."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        cls._integers = frozenset(
            field.alias or name for name, field in cls.model_fields.items() if _takes_integers(field.annotation)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = handler(schema)
        described = handler.resolve_ref_schema(found)
        described["maxProperties"] = _MOST_FIELDS
        if rules := [rule for kind in cls.__mro__ for rule in vars(kind).get("rules", ())]:
            described["allOf"] = rules
        return found

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > _MOST_FIELDS:
            raise ValueError(f"it has {len(data):,} fields, and at most {_MOST_FIELDS} can be right")
        integers = cls._integers & data.keys()
        return data | {name: _with_integers(data[name]) for name in integers} if integers else data


def unknown_fields(value: Any, path: str = "") -> list[str]:
    """The names of the fields of a body that are not declared, such as `messages.0.cache`."""
    if isinstance(value, list):
        found = [(at, item) for at, item in enumerate(value) if isinstance(item, (Body, list))]
        return [name for at, item in found for name in unknown_fields(item, f"{path}{at}.")]
    if not isinstance(value, Body):
        return []
    names = [path + name for name in value.model_extra or ()]
    for name in type(value).model_fields:
        if isinstance(inner := getattr(value, name), (Body, list)):
            names += unknown_fields(inner, f"{path}{name}.")
    return names


class TextPart(Body):
    """A part of a message's content. Only text is understood."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """The function of a tool call: its name, and its arguments as JSON."""

    name: Name
    arguments: str


class ToolCallMessage(Body):
    """A tool call in a message of the past."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Body):
    """A message of a conversation. Fields with no use here may be null, as clients send answers back that have them."""

    role: Role
    content: str | Annotated[list[TextPart], Field(max_length=MOST_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallMessage], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = Field(None, description="what an assistant thought before its content")
    reasoning: str | None = Field(None, description="the same as reasoning_content")
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    rules: ClassVar[tuple[Rule, ...]] = (
        either(given("content"), filled("tool_calls")),
        either(equals("role", "assistant"), {"properties": {"tool_calls": either(NULL, {"maxItems": 0})}}),
    )

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError(f"a message of the role {self.role} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of the role assistant have tool_calls")
        return self


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The function of a named tool choice."""

    name: Name


class NamedTool(Body):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class StreamOptions(Body):
    """`include_usage`: a last chunk with the usage. `continuous_usage_stats`: every chunk has the usage so far.
    `include_obfuscation` changes nothing."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Body):
    """The schema of a `response_format`."""

    name: str | None = Field(None, description="not used")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of an answer. A structural tag has a `format`, or `structures` and `triggers`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="of a json_object, as llama.cpp has it")
    format: dict[str, Any] | None = Field(None, description="of a structural tag, as XGrammar has it")
    structures: list[dict[str, Any]] | None = Field(None, description="of a structural tag: begin, schema and end")
    triggers: list[str] | None = Field(None, description="of a structural tag: the texts that begin a structure")

    rules: ClassVar[tuple[Rule, ...]] = (
        {"if": equals("type", "json_schema"), "then": given("json_schema"), "else": absent("json_schema")},
        either(equals("type", "json_object"), absent("schema")),
        either(equals("type", "structural_tag"), absent("format", "structures", "triggers")),
    )

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and only with it")
        if self.type != "json_object" and self.schema_ is not None:
            raise ValueError("schema goes with the type json_object; a json_schema holds its own")
        parts = (self.format, self.structures, self.triggers)
        if self.type != "structural_tag" and parts != (None, None, None):
            raise ValueError("format, structures and triggers go with the type structural_tag, and only with it")
        return self


class StructuredOutputs(Body):
    """One of the ways to say what an answer has to be."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, description="EBNF, or Lark")
    structural_tag: dict[str, Any] | str | None = None


class NamesModel(Body):
    """A request that names a model."""

    model: ModelName | None = Field(None, description="by default the first model of the server")


class Generating(NamesModel):
    """The fields of every request that generates."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1 allows every token")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Biases | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, lt=2**31, description="keep so many tokens of the prompt's end; -1: as many as the context holds"
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=512, description="only requests with the same one share cached prefixes"
    )
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="lower values are answered first")
    ignore_eos: bool | None = None
    seed: int | None = Field(None, ge=-_BIGGEST - 1, le=_BIGGEST)
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = Field(None, description="EBNF, or Lark")
    ebnf: str | None = Field(None, description="the same, as SGLang has it")
    grammar: str | None = Field(None, description="the same, as llama.cpp has it")
    regex: str | None = Field(None, description="guided_regex, as SGLang has it")
    json_schema: dict[str, Any] | str | None = Field(None, description="guided_json, as SGLang and llama.cpp have it")
    structural_tag: dict[str, Any] | str | None = Field(None, description="free text, tags and grammars")
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20, description="of the prompt's tokens, as vLLM has them")
    return_token_ids: bool | None = Field(None, description="the token ids of prompt and answer, as vLLM has them")
    return_tokens_as_token_ids: bool | None = Field(None, description="logprobs name tokens as token_id:ID")
    user: str | None = Field(None, description="not used")

    rules: ClassVar[tuple[Rule, ...]] = (
        either(absent("stream_options"), equals("stream", True)),
        either(absent("prompt_logprobs"), {"properties": {"stream": {"not": {"const": True}}}}),
    )

    @model_validator(mode="after")
    def _asks_for_nothing_else(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED and value not in (None, False) and (name, value) != ("prompt_embeds", []):
                raise ValueError(f"{name} is not supported: leave it out")
        return self

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is not available with stream: true: leave one of them out")
        return self


class Templated(Body):
    """The fields of every request whose prompt a chat template writes."""

    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = Field(
        None, description="variables of the chat template, such as enable_thinking"
    )
    enable_thinking: bool | None = Field(None, description="the variable of the chat template of this name")
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="a variable of the chat template; none also sets enable_thinking to false"
    )
    add_generation_prompt: bool | None = Field(None, description="the prompt ends with what begins an answer")
    continue_final_message: bool | None = Field(None, description="the answer continues the last message")
    add_special_tokens: bool | None = Field(
        None, description="true: the tokenizer's special tokens come before those that the chat template writes"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        {"not": {"allOf": [equals("add_generation_prompt", True), equals("continue_final_message", True)]}},
    )

    @model_validator(mode="after")
    def _ends_in_one_way(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other: give one of them")
        return self


class ChatRequest(Generating, Templated):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES), FewParts]
    max_completion_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="the newer name of max_tokens; not both with different values"
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="required, or a name, only with a tool in tools that can be called"
    )
    parallel_tool_calls: bool | None = None
    echo: bool | None = Field(None, description="with continue_final_message: the answer begins with that message")
    include_reasoning: bool | None = Field(None, description="false leaves the thinking out of the answer")
    thinking_token_budget: int | None = Field(None, ge=0, lt=2**31, description="the most tokens of the thinking")
    modalities: list[Literal["text"]] | None = None
    store: bool | None = Field(None, description="not used")
    metadata: dict[str, Any] | None = Field(None, description="not used")
    service_tier: str | None = Field(None, description="not used")
    safety_identifier: str | None = Field(None, description="not used")
    prompt_cache_key: str | None = Field(None, description="not used")

    rules: ClassVar[tuple[Rule, ...]] = (either(absent("top_logprobs"), equals("logprobs", True)),)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        if isinstance(self.tool_choice, NamedTool) or self.tool_choice == "required":
            names = {tool.function.name for tool in self.tools or ()}
            wanted = names if self.tool_choice == "required" else names & {self.tool_choice.function.name}
            if not wanted:
                raise ValueError("tool_choice asks for a tool that tools does not have")
        return self


class CompletionRequest(Generating):
    """POST /v1/completions."""

    prompt: (
        FilledText
        | Annotated[list[FilledText], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[
            list[Annotated[TokenIds, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)
        ]
    )
    add_special_tokens: bool | None = Field(
        None, description="false: texts get no special tokens, such as one that begins a text"
    )
    max_tokens: int | None = Field(None, ge=0, lt=2**31, description="0: nothing is generated")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: Annotated[str | None, WithJsonSchema(either({"const": ""}, NULL))] = Field(
        None, description="refused: the models complete at the end only"
    )
    best_of: Annotated[int | None, WithJsonSchema(either({"const": 1}, NULL))] = Field(
        None, ge=1, description="refused where it is not n"
    )

    rules: ClassVar[tuple[Rule, ...]] = (either(absent("best_of"), {"properties": {"n": {"enum": [1, None]}}}),)

    @model_validator(mode="after")
    def _can_be_done(self) -> Self:
        if self.suffix:
            raise ValueError("suffix is not supported: the model completes a text at its end; leave it out")
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of is not supported: leave it out, and choose among n answers")
        return self


class TokenizeRequest(NamesModel, Templated):
    """POST /tokenize: a text, or several, which become what they are in a completion, or a conversation."""

    prompt: str | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)] | None = None
    content: str | None = Field(None, description="llama.cpp's name of prompt")
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES), FewParts] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="none: the prompt has no tools"
    )
    add_special_tokens: bool | None = Field(
        None, description="by default true for a text and false for a conversation, as in requests that generate"
    )
    add_special: bool | None = Field(None, description="llama.cpp's name of add_special_tokens")
    return_token_strs: bool | None = Field(None, description="the tokens' texts, too")
    with_pieces: bool | None = Field(None, description="as in llama.cpp: each token is an object with its text")

    rules: ClassVar[tuple[Rule, ...]] = (
        one_of("prompt", "content", "messages"),
        either(absent("add_special"), absent("add_special_tokens")),
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if sum(each is not None for each in (self.prompt, self.content, self.messages)) != 1:
            raise ValueError("give either prompt (or its other name, content) or messages")
        if self.add_special is not None and self.add_special_tokens is not None:
            raise ValueError("add_special is llama.cpp's name of add_special_tokens: give one of them")
        return self


class LoadAdapterRequest(NamesModel):
    """POST /v1/load_lora_adapter. `model` is the one below the adapter; by default the first."""

    lora_name: ModelName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadAdapterRequest(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: ModelName
    lora_int_id: int | None = Field(None, description="not used")


class DetokenizeRequest(NamesModel):
    """POST /detokenize."""

    tokens: TokenIds
    skip_special_tokens: bool | None = Field(None, description="false: special tokens are written, too")
