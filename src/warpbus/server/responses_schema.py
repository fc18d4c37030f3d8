"""The bodies of requests of OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, WithJsonSchema, model_validator

from warpbus.server.schema import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    Body,
    FewParts,
    ModelName,
    Name,
    NamesModel,
    ReasoningEffort,
)
from warpbus.server.schema_rules import REFUSED, absent, either, equals, given


class TextContent(Body):
    """A part of a content. Only text is understood."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Contents = str | Annotated[list[TextContent], Field(max_length=MOST_PARTS)]


class MessageItem(Body):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Contents
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Body):
    """A call of a tool in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str
    id: str | None = None
    status: str | None = None


class CallOutputItem(Body):
    """The result of a tool."""

    type: Literal["function_call_output"]
    call_id: str
    output: Contents
    id: str | None = None
    status: str | None = None


class ReasoningItem(Body):
    """The thinking of an earlier answer. Encrypted thinking is another server's, and not read."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[TextContent], Field(max_length=MOST_PARTS)] | None = None
    content: Annotated[list[TextContent], Field(max_length=MOST_PARTS)] | None = None
    encrypted_content: str | None = None
    status: str | None = None


def _kind(item: Any) -> str:
    """The type of an item; messages may be without."""
    found = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "")
    return found if isinstance(found, str) else ""


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class ResponsesTool(Body):
    """A tool: a function, which the client runs, or one of OpenAI's own, whose fields are not looked at."""

    type: Annotated[str, Field(min_length=1, max_length=64)]
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def hosted(self) -> bool:
        """It is one of OpenAI's own, which this server does not have."""
        return self.type != "function"

    rules = (either({"properties": {"type": {"not": {"const": "function"}}}}, given("name")),)

    @model_validator(mode="after")
    def _has_name(self) -> Self:
        if self.type == "function" and self.name is None:
            raise ValueError("a function needs a name")
        return self


class FunctionChoice(Body):
    """The function that has to be called."""

    type: Literal["function"]
    name: Name


class Reasoning(Body):
    """How the model thinks. There are no summaries: the thinking itself is in the answer."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(Body):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    rules = ({"if": equals("type", "json_schema"), "then": given("schema"), "else": absent("schema")},)

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema goes with the type json_schema, and only with it")
        return self


class TextConfig(Body):
    """How the text of the answer is; `verbosity` is not used."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(NamesModel):
    """POST /v1/responses."""

    model: ModelName
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MOST_MESSAGES), FewParts]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = Field(None, description="keep the response for previous_response_id; true by default")
    max_output_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="limited to what the prompt leaves of the context"
    )
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Annotated[list[ResponsesTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    truncation: Literal["auto", "disabled"] | None = Field(None, description="nothing is truncated")
    include: Annotated[list[str], Field(max_length=16)] | None = Field(None, description="not used")
    metadata: dict[str, Any] | None = Field(None, description="not used, but part of the response")
    user: str | None = Field(None, description="not used")
    stream_options: dict[str, Any] | None = Field(None, description="not used")
    service_tier: str | None = Field(None, description="not used")
    safety_identifier: str | None = Field(None, description="not used")
    prompt_cache_key: str | None = Field(None, description="not used")
    prompt_cache_retention: str | None = Field(None, description="not used")
    max_tool_calls: int | None = Field(None, description="not used: it limits OpenAI's own tools")
    background: Annotated[bool | None, WithJsonSchema(REFUSED)] = Field(None, description="refused if true")

    @model_validator(mode="after")
    def _can_be_done(self) -> Self:
        if self.background:
            raise ValueError("background is not supported: leave it out, and stream the answer")
        for name in ("conversation", "prompt"):
            if (self.model_extra or {}).get(name) is not None:
                raise ValueError(f"{name} is not supported: send the input itself")
        return self


def joined_contents(content: Contents | None) -> str:
    """A content as one text."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())
