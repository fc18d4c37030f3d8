"""Thinking of models that reason before they answer: text between `<think>` and `</think>`.

Qwen3 and GLM-4.5 begin their answers with `<think>`. For other models the template writes it at the end of the prompt,
or writes both tags if thinking is turned off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from warpbus.models.templates.base import Template
from warpbus.models.templates.jinja import JinjaTemplate
from warpbus.models.tokenizers import Tokenizer

OPENING, CLOSING = "<think>", "</think>"

ThinkingStart = Literal["open", "possible", "over"]
"""How an answer begins: within the thinking, perhaps with `<think>`, or after the thinking."""


@dataclass(frozen=True)
class ThinkingTokens:
    """The tokens around the thinking of a model.

    Attributes:
        opening, closing: the ids of `<think>` and `</think>`.
        roles: the special tokens, one of which begins the message that the model writes.
    """

    opening: int
    closing: int
    roles: frozenset[int]

    def start(self, prompt: Sequence[int]) -> ThinkingStart:
        """How the answer to a prompt begins, by the part of the prompt after its last special token."""
        for token in reversed(prompt):
            if token == self.closing:
                return "over"
            if token == self.opening:
                return "open"
            if token in self.roles:
                break
        return "possible"


def find_thinking(template: Template, tokenizer: Tokenizer) -> ThinkingTokens | None:
    """The tokens around the thinking of a model; None if its template has no thinking, or they are not in its
    vocabulary as one token each."""
    if not isinstance(template, JinjaTemplate) or CLOSING not in template.source:
        return None
    opening, closing = (tokenizer.encode(tag) for tag in (OPENING, CLOSING))
    if len(opening) != 1 or len(closing) != 1:
        return None
    return ThinkingTokens(opening[0], closing[0], frozenset(tokenizer.special_ids.values()))


class ThinkingStream:
    """Splits an answer into its thinking and the text after it, as it comes.

    The tags, and the whitespace around them, belong to neither.

    Args:
        start: how the answer begins.
    """

    def __init__(self, start: ThinkingStart) -> None:
        self._state: Literal["possible", "open", "after", "text"] = "after" if start == "over" else start
        self._held = ""
        self._begun = False  # the thinking has text other than whitespace

    def push(self, text: str) -> tuple[str, str]:
        """The thinking and the text that are certain now."""
        self._held += text
        thinking = ""
        if self._state == "possible":
            begun = self._held.lstrip()
            if begun.startswith(OPENING):
                self._state, self._held = "open", begun.removeprefix(OPENING)
            elif not OPENING.startswith(begun):
                self._state = "text"
        if self._state == "open":
            before, closed, after = self._held.partition(CLOSING)
            if closed:
                thinking = self._thought(before.rstrip())
                self._state, self._held = "after", after
            else:
                keep = len(before) - len(_certain(before))
                thinking = self._thought(before[: len(before) - keep])
                self._held = before[len(before) - keep :]
        if self._state == "after" and (begun := self._held.lstrip("\r\n")):
            self._state, self._held = "text", begun
        if self._state != "text":
            return thinking, ""
        shown, self._held = self._held, ""
        return thinking, shown

    def flush(self) -> tuple[str, str]:
        """The rest, at the end of the answer. An answer that ends within its thinking has no text."""
        held, self._held = self._held, ""
        if self._state == "open":
            return self._thought(held.rstrip()), ""
        return "", held if self._state == "possible" else ""

    def _thought(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return text


def _certain(text: str) -> str:
    """The beginning of a text that no later text can make `</think>`, or whitespace before it."""
    begun = next((size for size in range(len(CLOSING) - 1, 0, -1) if text.endswith(CLOSING[:size])), 0)
    return text[: len(text) - begun].rstrip()
