"""Text from ids that arrive one by one."""

from __future__ import annotations

import codecs

from warpbus.models.tokenizers.base import Tokenizer, first_bytes


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
        """What is left at the end: U+FFFD for a character that was begun and not finished, else nothing."""
        return self._utf8.decode(b"", final=True)
