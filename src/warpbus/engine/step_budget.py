"""How many prompt tokens a step prefills. Sequences that decode wait for these before they get their next token.

Knows no sequences and no device: numbers of tokens, and measured seconds.
"""

import math
import re
from collections.abc import Callable

from warpbus.errors import UsageError

BACKLOG = 4
"""Mixed steps that a backlog takes at least: with fewer, prompts are prefilled soon enough beside those that decode."""

_LEAST = 16  # prompt tokens of a step, so that prompts are prefilled whatever the target
_FIRST = 64  # tokens with which measuring begins
_WEIGHT = 0.25  # of a measured step in moving averages
_LARGEST_FACTOR = 2.0  # by which one measured step may change the number of tokens
_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3}


class StepBudget:
    """The token budget of each step.

    Args:
        most: tokens of a step, those of decoding sequences included. A step with decoding sequences prefills at least
            one token.
        mixed: maps the number of decoding tokens to the token budget of a mixed step, decoding tokens included; it
            limits how long decoding sequences wait for prompts. None: the budget is `most`.
        clears_backlogs: with much more waiting than a mixed step prefills, its budget is `most`: all sequences end
            earlier, though those that decode wait longer for a token.
        latency: the target of the seconds between two tokens of a sequence. If given, measured steps alone decide how
            much is prefilled beside decoding sequences: 16 tokens at least. Processes that share a model would
            measure different times, and schedule different steps.
    """

    def __init__(
        self,
        most: int,
        *,
        mixed: Callable[[int], int] | None = None,
        clears_backlogs: bool = False,
        latency: float | None = None,
    ) -> None:
        self._most = most
        self._mixed = mixed
        self._clears_backlogs = clears_backlogs
        self._target = None if latency is None else _LatencyTarget(latency, most)

    def prompt_tokens(self, decoding: int, waits: Callable[[int], bool]) -> int:
        """The most prompt tokens of a step.

        Args:
            decoding: tokens of its decoding sequences, drafts included.
            waits: whether more prompt tokens than a number wait to be prefilled.
        """
        if not decoding:
            return self._most
        room = max(1, self._most - decoding)
        if self._target is not None:
            return min(room, self._target.tokens)
        if self._mixed is None:
            return room
        mixed = max(1, min(room, self._mixed(decoding) - decoding))
        return room if self._clears_backlogs and waits(BACKLOG * mixed) else mixed

    def record(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Record how long a step with decoding sequences took."""
        if self._target is not None and decoding:
            self._target.record(decoding, prompt_tokens, seconds)


class _LatencyTarget:
    """Adapts the prompt tokens of a step so that measured steps take the seconds of a target.

    What a step takes beyond a step that only decodes is in proportion to its prompt tokens, roughly: their number is
    multiplied by the seconds that are free for prompts over those that they took.

    Attributes:
        tokens: prompt tokens of the next step.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._tokens = float(min(_FIRST, most))
        self._decoding: dict[int, float] = {}  # seconds of steps that only decode, by the bits of the tokens' number

    @property
    def tokens(self) -> int:
        return int(self._tokens)

    def record(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Record a step."""
        size = decoding.bit_length()
        base = self._decoding.get(size)
        if not prompt_tokens:
            self._decoding[size] = seconds if base is None else base + _WEIGHT * (seconds - base)
            return
        free, spent = self._seconds - (base or 0.0), seconds - (base or 0.0)
        factor = 0.0 if free <= 0 else math.inf if spent <= 0 else free / spent
        if factor > 1 and prompt_tokens < self.tokens:
            return  # a smaller chunk than allowed says nothing about a larger one
        wanted = prompt_tokens * min(max(factor, 1 / _LARGEST_FACTOR), _LARGEST_FACTOR)
        self._tokens = min(max(self._tokens + _WEIGHT * (wanted - self._tokens), _LEAST), self._most)


def parse_latency(value: str | float) -> float:
    """Seconds from "50ms", "0.05s" or a number of seconds.

    Raises:
        UsageError: anything else, or a value that is not positive and finite.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*(m?s|)\s*", str(value))
    seconds = float(found[1]) * _UNITS[found[2]] if found and not isinstance(value, bool) else 0.0
    if not 0 < seconds < math.inf:
        raise UsageError(f"inter_token_latency is {value!r}: give a time such as 50ms or 0.05s")
    return seconds
