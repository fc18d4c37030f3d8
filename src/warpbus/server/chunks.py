"""Common parts of chat completions and completions: choices, in chunks if they are streamed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import abc
from enum import Enum, auto

import warpbus
from warpbus.engine import TextPiece
from warpbus.server.failures import body_of
from warpbus.server.request_error import RequestError
from warpbus.server.responses import Json, Usage, new_id
from warpbus.server.schema import StreamOptions
from warpbus.server.sse import Event, TextEvents


class UsageStyle(Enum):
    """Which chunks of a stream have the usage: none, one at the end, or every chunk."""

    NONE = auto()
    LAST = auto()
    EVERY = auto()

    @classmethod
    def of(cls, options: StreamOptions | None) -> UsageStyle:
        """By OpenAI's `stream_options`, of which vLLM's `continuous_usage_stats` needs `include_usage`."""
        if options is None or not options.include_usage:
            return cls.NONE
        return cls.EVERY if options.continuous_usage_stats else cls.LAST


class ChunkForm(ABC):
    """A format whose answers are choices; see `Form`.

    Args:
        kind: of the id, such as "chatcmpl".
        model: the name of the model.
        objects: the names of a whole answer and of a chunk.
        style: which chunks have the usage.
    """

    last = b"data: [DONE]\n\n"

    def __init__(self, kind: str, model: str, objects: tuple[str, str], style: UsageStyle) -> None:
        self._head = {"id": new_id(kind), "created": int(time.time()), "model": model}
        self._head["system_fingerprint"] = f"warpbus-{warpbus.__version__}"
        self._object, self._chunk = objects
        self._style = style
        self._text_events: dict[int, TextEvents] = {}  # by the numbers of the answers

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of thinking so far, in all answers."""
        return 0

    @abstractmethod
    def first_choices(self) -> list[Json]:
        """The choices of the first chunks of a stream."""

    @abstractmethod
    def choices(self, index: int, piece: TextPiece) -> list[Json | str]:
        """The choices of the chunks of a piece; a string stands for `text_choice`."""

    @abstractmethod
    def text_choice(self, index: int, text: str) -> Json:
        """The choice of a chunk that adds a text to an answer, and nothing else."""

    @abstractmethod
    def choice(self, index: int, pieces: abc.Sequence[TextPiece]) -> Json:
        """The choice of an answer that is not streamed."""

    def opening(self, usage: Usage) -> list[Json]:
        """See `Form.opening`."""
        before = Usage(usage.prompt_tokens)
        return [self._of_chunk([choice], self._every(before)) for choice in self.first_choices()]

    def events(self, index: int, piece: TextPiece, usage: Usage) -> list[Event]:
        """See `Form.events`."""
        choices = self.choices(index, piece)
        so_far = self._every(usage)
        return [
            self._text_event(index, choice, so_far) if isinstance(choice, str) else self._of_chunk([choice], so_far)
            for choice in choices
        ]

    def closing(self, usage: Usage) -> list[Json]:
        """See `Form.closing`."""
        return [] if self._style is UsageStyle.NONE else [self._of_chunk([], self._counted(usage))]

    def failure(self, error: RequestError, usage: Usage) -> Json:
        """See `Form.failure`."""
        return body_of(error)

    def whole(self, answers: abc.Sequence[abc.Sequence[TextPiece]], usage: Usage) -> Json:
        """See `Form.whole`."""
        choices = [self.choice(index, pieces) for index, pieces in enumerate(answers)]
        return {**self._head, "object": self._object, "choices": choices, "usage": self._counted(usage)}

    def _stop_reason(self, piece: TextPiece, tokens: abc.Sequence[int] | None) -> str | int | None:
        """The reason that ended an answer, as in vLLM: a stop string, or one of these tokens; None for the model's own.

        Args:
            piece: the last one.
            tokens: the `stop_token_ids` of the request.
        """
        if piece.finish_reason != "stop" or piece.stop_string is not None:
            return piece.stop_string
        last = piece.token_ids[-1] if piece.token_ids else None
        return last if last in (tokens or ()) else None

    def _every(self, usage: Usage) -> Json | None:
        return self._counted(usage) if self._style is UsageStyle.EVERY else None

    def _text_event(self, index: int, text: str, usage: Json | None) -> Event:
        if usage is not None:
            return self._of_chunk([self.text_choice(index, text)], usage)
        if index not in self._text_events:
            self._text_events[index] = TextEvents(lambda mark: self._of_chunk([self.text_choice(index, mark)], None))
        return self._text_events[index].encode(text)

    def _of_chunk(self, choices: list[Json], usage: Json | None) -> Json:
        chunk = {**self._head, "object": self._chunk, "choices": choices}
        return chunk if self._style is UsageStyle.NONE else {**chunk, "usage": usage}

    def _counted(self, usage: Usage) -> Json:
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }
