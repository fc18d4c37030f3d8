"""One request: what was asked, what has been generated, and the text that may already be shown.

Knows nothing of tensors, models, caches or the other requests of its batch.
"""

import math
import random
from collections import abc
from dataclasses import dataclass
from typing import Literal, Protocol

from warpbus.errors import UsageError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop. The steps are applied in the order of the attributes.

    Attributes:
        repetition_penalty: scores of tokens that the prompt or the answer holds are divided by it where positive and
            multiplied where negative (CTRL; Keskar et al., 2019). 1 changes nothing.
        temperature: scores are divided by it. 0 takes the most likely token (greedy).
        top_k: only the `top_k` most likely tokens may be drawn. 0 allows all.
        top_p: only the most likely tokens that together reach this probability may be drawn (nucleus sampling;
            Holtzman et al., 2020). 1 allows all.
        max_tokens: the most tokens to generate; cut to the room that the prompt leaves in the context.
        stop: generation ends where one of these strings begins; it is not part of the text.
        seed: the same seed draws the same tokens, whatever else is in the batch. None draws anew every time.
        ignore_eos: go on past the model's stop tokens, to `max_tokens` or a stop string: for measuring speed.

    Raises:
        UsageError: a value is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, abc.Sequence) or not all(isinstance(text, str) and text for text in stop):
            raise UsageError(f"stop is {self.stop!r}: give strings that are not empty")
        object.__setattr__(self, "stop", tuple(stop))
        _check("temperature", self.temperature, "0 or more (0 is greedy)", low=0.0)
        _check("top_p", self.top_p, "above 0 and at most 1", low=0.0, high=1.0, open_low=True)
        _check("top_k", self.top_k, "a whole number, 0 or more (0 allows every token)", low=0, whole=True)
        _check("repetition_penalty", self.repetition_penalty, "above 0 (1 changes nothing)", low=0.0, open_low=True)
        _check("max_tokens", self.max_tokens, "a whole number, 1 or more", low=1, whole=True)
        if self.seed is not None:
            _check("seed", self.seed, "a whole number, 0 or more", low=0, whole=True)
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos is {self.ignore_eos!r}: give True or False")

    @property
    def greedy(self) -> bool:
        """Nothing is left to chance."""
        return self.temperature == 0 or self.top_k == 1


def _check(
    name: str,
    value: float,
    expected: str,
    *,
    low: float,
    high: float = math.inf,
    open_low: bool = False,
    whole: bool = False,
) -> None:
    right_type = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right_type or not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        raise UsageError(f"{name} is {value!r}: give {expected}")


class TextStream(Protocol):
    """Tokens to text as it becomes certain (`warpbus.models.tokenizers.StreamDecoder`)."""

    def push(self, token: int, /) -> str:
        """The text that this token makes certain."""
        ...

    def flush(self) -> str:
        """The text still kept back, at the end."""
        ...


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces, and keeps back what could begin one."""

    def __init__(self, stops: abc.Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string was met, which ends the text before it."""
        if not self._stops:
            return text, False
        self._held += text
        begins = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if begins:
            shown, self._held = self._held[: min(begins)], ""
            return shown, True
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """What was kept back, now that no more text can complete a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class Sequence:
    """The state of one request, from its prompt to the reason why it ended.

    Attributes:
        index: which of the caller's prompts it is.
        prompt: token ids of the prompt.
        token_ids: token ids generated, the stop token included.
        text: their text up to the stop token or stop string, without what could still become a stop string.
        finish_reason: "stop" (a stop token or string), "length" (`limit` tokens), or None while it runs.
        random: draws for this request alone.
    """

    def __init__(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        limit: int,
        stop_ids: frozenset[int],
        stream: TextStream,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.params = params
        self.limit = limit
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.random = random.Random(params.seed)
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self._stop_ids = frozenset() if params.ignore_eos else stop_ids
        self._stream = stream
        self._stops = StopStrings(params.stop)

    def append(self, token: int) -> str:
        """Take the next token and return the text that is now certain, which may be empty."""
        self.token_ids.append(token)
        if token in self._stop_ids:
            self.finish_reason = "stop"
            text = self._stream.flush()
        else:
            text = self._stream.push(token)
            if len(self.token_ids) >= self.limit:
                self.finish_reason = "length"
                text += self._stream.flush()
        shown, stopped = self._stops.push(text)
        if stopped:
            self.finish_reason = "stop"
        elif self.finish_reason is not None:
            shown += self._stops.flush()
        self.text += shown
        return shown
