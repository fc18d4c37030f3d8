"""The bodies of requests of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from warpbus.server.schema import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_STOPS,
    MOST_TOOLS,
    Body,
    FewParts,
    ModelName,
    Name,
    NamesModel,
    ReasoningEffort,
)
from warpbus.server.schema_rules import absent, equals, given


class TextBlock(Body):
    """Text. `cache_control` and `citations` are not used: prefixes are cached by themselves."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None


class ThinkingBlock(Body):
    """The thinking of an earlier answer; the signature is not used."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Thinking of another server, which cannot be read; it is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Body):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: Name
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None


class ToolResultBlock(Body):
    """The result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(max_length=MOST_PARTS)] | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        return joined(self.content or "")


InputBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class InputMessage(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[InputBlock], Field(max_length=MOST_PARTS)]

    @property
    def blocks(self) -> list[InputBlock]:
        """The content as blocks."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class AnthropicTool(Body):
    """A tool that the model may call. A tool whose `type` is another than "custom" is one of Anthropic's own."""

    name: Name
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = Field(None, description="not used")

    @property
    def hosted(self) -> bool:
        """It is one of Anthropic's own, which this server does not have."""
        return self.type not in (None, "custom")


class AnthropicToolChoice(Body):
    """Which tools have to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    rules = ({"if": equals("type", "tool"), "then": given("name"), "else": absent("name")},)

    @model_validator(mode="after")
    def _has_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name goes with the type tool, and only with it")
        return self


class ThinkingConfig(Body):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1, lt=2**31, description="the most tokens of the thinking")
    display: str | None = Field(None, description="omitted leaves the thinking out of the answer")


class OutputFormat(Body):
    """A JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How the answer is."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class MessagesPrompt(NamesModel):
    """POST /v1/messages/count_tokens, and what it has in common with POST /v1/messages."""

    model: ModelName
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MOST_MESSAGES), FewParts]
    system: str | Annotated[list[TextBlock], Field(max_length=MOST_PARTS)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = Field(None, description="without it, the model is asked not to think")
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="the same as output_config.format")
    cache_control: dict[str, Any] | None = Field(None, description="not used: prefixes are cached by themselves")


class MessagesRequest(MessagesPrompt):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, lt=2**31, description="limited to what the prompt leaves of the context")
    stop_sequences: Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    top_p: float | None = Field(None, gt=0, le=1)
    metadata: dict[str, Any] | None = Field(None, description="not used")
    service_tier: str | None = Field(None, description="not used")


def joined(content: str | list[TextBlock]) -> str:
    """A content as one text."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
