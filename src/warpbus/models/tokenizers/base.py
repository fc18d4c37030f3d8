"""The interface of tokenizers, and the one way in which ids become text.

A tokenizer turns ordinary text into ids and ids into bytes. It never makes a special token (`<|user|>`, `[gMASK]`, ...)
out of text: those come from the structure of a conversation, which `warpbus.models.templates` knows, and stand around
whole texts (`Tokenizer.prompt_prefix`).

Decoding goes through bytes, token by token, for all kinds of tokenizer. That is what lets `StreamDecoder` promise
that the pieces it hands out add up to `decode` of the whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

from warpbus.errors import UsageError


class Tokenizer(Protocol):
    """Text to ids and back; implementations inherit `decode`.

    Attributes:
        vocab_size: number of ids, special tokens included: every id is in `range(vocab_size)`.
        special_ids: each special token's text and id, such as `{"<|user|>": 64795}`.
        strips: the special tokens that take the whitespace beside them away from what a template writes: whether on
            their left, and whether on their right.
        drops_first_space: whether `encode` puts a space before the text that `decode` has to take away again.
        own_spaces: tokens that begin with spaces of the text's own, none of which `encode` has put there: the runs of
            spaces of ChatGLM-6B, and nothing for all others.
        prompt_prefix: the special tokens that the checkpoint's tokenizer puts before a text, such as
            `<|begin_of_text|>` of Llama 3 and `[gMASK] <sop>` of GLM-4; none for many.
        prompt_suffix: the special tokens between a prompt and what the model says to it, where no template puts any:
            `[gMASK] <sop>` of ChatGLM-6B, and nothing for all others.
        text_suffix: the special tokens that the checkpoint's tokenizer puts behind a text, such as the end of a text
            that is embedded. A text that the model is to go on with gets none of them.
    """

    vocab_size: int
    special_ids: dict[str, int]
    strips: Mapping[str, tuple[bool, bool]] = {}
    drops_first_space: bool
    own_spaces: frozenset[int]
    prompt_prefix: tuple[int, ...] = ()
    prompt_suffix: tuple[int, ...] = ()
    text_suffix: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with no special token in it and none added. UsageError if `text` is not valid Unicode."""

    def encode_after_special(self, text: str) -> list[int]:
        """`encode` for text behind a special token, where some vocabularies put no space before it."""
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`. Special tokens, and ids that name no token (padding rows of the head), are left out.

        Bytes that are not UTF-8 become U+FFFD.
        """
        return join_bytes(self, ids)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token adds to the text: none for special tokens and for ids that name no token."""


def encode_prompt(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The ids of a text that the model is to go on with.

    Args:
        add_special_tokens: they are between the tokenizer's `prompt_prefix` and `prompt_suffix`.
    """
    tokens = tokenizer.encode(text)
    return [*tokenizer.prompt_prefix, *tokens, *tokenizer.prompt_suffix] if add_special_tokens else tokens


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that is complete, with the special tokens that the checkpoint's tokenizer puts around it."""
    return [*encode_prompt(tokenizer, text), *tokenizer.text_suffix]


def first_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a token that a text begins with: without the space that `encode` put before the text."""
    data = tokenizer.token_bytes(token)
    return data.removeprefix(b" ") if tokenizer.drops_first_space and token not in tokenizer.own_spaces else data


def join_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of the bytes of successive tokens; what is not UTF-8 becomes U+FFFD."""
    parts = [tokenizer.token_bytes(token) for token in ids]
    first = next((index for index, part in enumerate(parts) if part), None)
    if first is not None:
        parts[first] = first_bytes(tokenizer, ids[first])
    return b"".join(parts).decode("utf-8", errors="replace")


def check_text(text: str) -> None:
    """Raises UsageError if `text` holds a lone surrogate, which no UTF-8 tokenizer can take."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise UsageError(
            f"text is not valid Unicode: it holds the lone surrogate U+{code:04X} at character {error.start}; in a "
            "terminal, set a UTF-8 locale (export LC_ALL=C.UTF-8); in a program, decode the input as UTF-8"
        ) from None


class StreamDecoder:
    """Hands out text as soon as it is certain.

    All that `push` and `flush` return, joined, equals `tokenizer.decode` of all ids. A character whose bytes are spread
    over several tokens comes out with its last one; bytes that can no longer become a character come out as U+FFFD.

    Args:
        keep_first_space: hand out all bytes, for text that follows a grammar: no space belongs to the tokenizer then.
    """

    def __init__(self, tokenizer: Tokenizer, *, keep_first_space: bool = False) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._begins = not keep_first_space

    def push(self, token: int) -> str:
        """The text that became certain with this token, which may be empty."""
        data = self._tokenizer.token_bytes(token)
        if self._begins and data:
            self._begins = False
            data = first_bytes(self._tokenizer, token)
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The rest at the end: U+FFFD for a character that was begun and not finished, else nothing."""
        return self._utf8.decode(b"", final=True)
