"""The interface of prompt templates, the form of a message, and how a conversation becomes ids.

Special tokens come from the structure of a conversation, never from the text of a message. A template therefore does
not pass one string to the tokenizer. It makes a list of special token ids and ordinary texts. Each text goes through
`Tokenizer.encode`, which produces no special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from warpbus.errors import CheckpointError, UsageError
from warpbus.models.tokenizers import Tokenizer

Message = dict[str, Any]
"""`{"role": ..., "content": ...}`. Optional are for GLM `"metadata"` (the tool that a message calls), and for Jinja
templates `"reasoning_content"`, `"tool_calls"` and `"tools"` in the form of OpenAI's API, with arguments as objects."""

Variables = Mapping[str, Any]
"""Variables of a Jinja template beside the messages, such as `tools` and `enable_thinking`."""

ROLES = ("system", "user", "assistant", "observation", "tool")
_OTHER_ROLE = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Template(Protocol):
    """A conversation as the ids a model was trained on.

    Attributes:
        stop_ids: the ids at which an answer ends.
    """

    stop_ids: tuple[int, ...]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Variables | None = None,
    ) -> list[int]:
        """Ids of a conversation, followed by what makes the model answer if `add_generation_prompt`.

        Args:
            messages: the conversation.
            add_generation_prompt: not used with `continue_final_message`.
            continue_final_message: the ids end with the content of the last message, an assistant's, which the model
                continues.
            variables: of a Jinja template; other templates have none and ignore them.

        Raises UsageError if a message is malformed, or the conversation is one that the model cannot take.
        """

    def spans(self, messages: Sequence[Message], *, variables: Variables | None = None) -> tuple[list[int], list[bool]]:
        """Ids of a whole conversation, and for each whether the model is to produce it.

        True are the tokens of every assistant's answer and the stop token that ends it, from where the generation
        prompt leaves off. If nothing follows the last answer, its stop token is appended. `variables` and UsageError as
        in `render`.
        """


@dataclass(frozen=True, slots=True)
class Text:
    """A stretch of ordinary text between two special tokens.

    Attributes:
        text: the argument of `Tokenizer.encode`.
        answers: ranges of its characters, ascending and apart, that are answers.
    """

    text: str
    answers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A special token, and whether it belongs to an answer: as a part of it, or as its end."""

    token: int
    answer: bool = False


def prompt_ids(tokenizer: Tokenizer, items: Iterable[SpecialToken | Text]) -> list[int]:
    """The ids of a prompt."""
    ids: list[int] = []
    for item in items:
        ids += [item.token] if isinstance(item, SpecialToken) else _encoder(tokenizer, ids)(item.text)
    return ids


def prompt_spans(tokenizer: Tokenizer, items: Iterable[SpecialToken | Text]) -> tuple[list[int], list[bool]]:
    """The ids of a prompt, and for each whether it belongs to an answer.

    Where an answer begins within a stretch of text, its tokens are those that the text before it would not give by
    itself; where it ends within one, they go as far as the text up to its end would give them by itself.
    """
    ids: list[int] = []
    mask: list[bool] = []
    for item in items:
        if isinstance(item, SpecialToken):
            ids.append(item.token)
            mask.append(item.answer)
            continue
        encode = _encoder(tokenizer, ids)
        tokens = encode(item.text)
        done = 0
        for first, last in item.answers:
            begin = max(done, _given(encode, tokens, item.text[:first]))
            end = len(tokens)
            if last < len(item.text):
                end = max(begin, _given(encode, tokens, item.text[:last]))
            mask += [False] * (begin - done) + [True] * (end - begin)
            done = end
        mask += [False] * (len(tokens) - done)
        ids += tokens
    return ids, mask


def _encoder(tokenizer: Tokenizer, before: Sequence[int]) -> Callable[[str], list[int]]:
    """How the text behind these tokens is encoded, which end in a special token if there are any."""
    return tokenizer.encode_after_special if before else tokenizer.encode


def _given(encode: Callable[[str], list[int]], tokens: list[int], beginning: str) -> int:
    """How many of the first `tokens` the beginning of their text gives by itself."""
    if not beginning:
        return 0
    alone = encode(beginning)
    for index, (one, other) in enumerate(zip(tokens, alone, strict=False)):
        if one != other:
            return index
    return min(len(tokens), len(alone))


def check_messages(messages: Sequence[Message], *, any_role: bool = False) -> None:
    """Raises UsageError, naming the message, if one has an unknown role or no content.

    Args:
        messages: of a conversation.
        any_role: letters, digits, "_" and "-" are a role too.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise UsageError(f"messages: expected a list of messages, got {type(messages).__name__}")
    if not messages:
        raise UsageError("messages: the list is empty; give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            kind = type(message).__name__
            raise UsageError(f"messages[{index}]: expected an object with role and content, got {kind}")
        role = message.get("role")
        if role not in ROLES and not (any_role and isinstance(role, str) and _OTHER_ROLE.fullmatch(role)):
            raise UsageError(f"messages[{index}]: unknown role {str(role)[:40]!r}; expected one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            found = type(message["content"]).__name__ if "content" in message else "none"
            raise UsageError(f"messages[{index}]: expected a text as content, found {found}")
        for key in ("metadata", "reasoning_content"):
            if not isinstance(message.get(key, ""), str):
                raise UsageError(f"messages[{index}]: expected a text as {key}, found {type(message[key]).__name__}")


def check_continued(messages: Sequence[Message]) -> None:
    """Raises UsageError unless the last message is an assistant's text, which can be continued."""
    if not messages or messages[-1].get("role") != "assistant" or messages[-1].get("tool_calls"):
        raise UsageError(
            "continue_final_message: the last message is not an assistant's text; add the beginning of the answer as a "
            "message of the role assistant, or leave continue_final_message out"
        )


def special_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of a special token that a template needs. CheckpointError if the tokenizer has no such token."""
    if text not in tokenizer.special_ids:
        raise CheckpointError(
            f"the tokenizer has no special token {text}, which the model's chat template needs; restore "
            "tokenizer.model and tokenizer_config.json from the model's source"
        )
    return tokenizer.special_ids[text]
