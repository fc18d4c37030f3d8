"""Speculative decoding: the model verifies several draft tokens of a sequence in one step.

N-gram lookup in the sequence itself proposes draft tokens, because answers that quote their prompt, such as summaries,
corrections and code, repeat long parts of it (prompt lookup decoding; Saxena, 2023). Or the model's layer of
multi-token prediction (MTP) proposes them (`warpbus.engine.mtp`).

Verification is rejection sampling (Leviathan et al., 2023) of drafts that were not sampled: after each draft a token is
sampled as without speculation, and the draft is accepted if it is this token. So answers, sampled ones included, have
the same tokens as without speculation, up to rounding.
"""

import itertools
from collections import abc
from dataclasses import dataclass
from typing import Self

from warpbus.errors import UsageError

MOST_NGRAM_DRAFTS = 1024
"""The most draft tokens of n-gram lookup per sequence and step: each needs a row of logits."""

MOST_MTP_DRAFTS = 4
"""The most draft tokens of multi-token prediction."""

MOST_MTP_SEQUENCES = 32
"""With more running sequences, multi-token prediction drafts no tokens: their rows fill the device by themselves."""

_DRAFT_COSTS = ((4, 0.35, 0.12), (16, 0.25, 0.25), (MOST_MTP_SEQUENCES, 0.25, 0.35))
# By the number of running sequences: the time of drafting at all and of each draft per sequence, both in steps without
# drafts. The first row was measured (docs/mtp.md), the others are estimates: with more sequences, drafts find experts
# of their own.
_WEIGHT = 1 / 32  # of a draft in the moving average of its position
_PERIOD, _TRIAL = 512, 32  # in the first _TRIAL of each _PERIOD of steps, all positions are drafted and measured


@dataclass(frozen=True)
class Speculation:
    """Where draft tokens come from, and how many there are.

    Attributes:
        tokens: the most draft tokens per sequence and step; 0: no speculation.
        mtp: multi-token prediction proposes them; else n-gram lookup.
    """

    tokens: int = 0
    mtp: bool = False

    @classmethod
    def parse(cls, value: int | str) -> Self:
        """From a number of tokens for n-gram lookup, "mtp" for one token of multi-token prediction, or "mtp:2" for two.

        Raises:
            UsageError: anything else, or a number out of range.
        """
        source, _, count = ("mtp", "", "1") if value == "mtp" else str(value).rpartition(":")
        mtp, most = source == "mtp", MOST_MTP_DRAFTS if source == "mtp" else MOST_NGRAM_DRAFTS
        is_count = not isinstance(value, bool) and count.isascii() and count.isdigit()
        if source not in ("", "mtp") or str(value).startswith(":") or not is_count or not mtp <= int(count) <= most:
            raise UsageError(
                f"speculation is {value!r}: give a whole number, 0 to {MOST_NGRAM_DRAFTS:,}, for n-gram lookup, or "
                f"mtp:1 to mtp:{MOST_MTP_DRAFTS} for multi-token prediction"
            )
        return cls(int(count), mtp)

    def rows(self, sequences: int) -> int:
        """The most rows of a step for so many sequences: the tokens that it samples, those after drafts included."""
        return sequences + self.tokens * (min(sequences, MOST_MTP_SEQUENCES) if self.mtp else 1)


class DraftPolicy:
    """How many tokens multi-token prediction drafts: as many as give most tokens per time, by their acceptance.

    A draft costs time of the device, more with more sequences, because its row is computed, in a mixture of experts by
    experts of its own. A moving average over the last drafts says for each position (first draft, second, ...) which
    share was accepted. A step with k drafts gives 1 + (sum of the first k shares) tokens, and takes as long as
    1 + a + k b steps without drafts: a = 0.35, b = 0.12 with up to 4 running sequences, a = 0.25, b = 0.25 with up to
    16, a = 0.25, b = 0.35 with up to 32. The k with most tokens per time is used, or none; with more than 32 sequences
    there are no drafts. In 32 of 512 steps all positions are used, so that the averages stay current. No clock is
    read, so that processes which share a model decide alike.

    Args:
        most: draft tokens per sequence and step.
    """

    def __init__(self, most: int) -> None:
        self._accepted = [1.0] * most
        self._step = 0

    def count(self, sequences: int) -> int:
        """The draft tokens per sequence of a step with so many running sequences."""
        costs = next(((base, each) for most, base, each in _DRAFT_COSTS if sequences <= most), None)
        if costs is None:
            return 0
        if self._step % _PERIOD < _TRIAL:
            return len(self._accepted)
        base, each = costs
        tokens = itertools.accumulate(self._accepted, initial=1.0)
        rates = [found / (1 + each * count + base * (count > 0)) for count, found in enumerate(tokens)]
        return rates.index(max(rates))

    def advance(self) -> None:
        """Count a step."""
        self._step += 1

    def record(self, drafted: int, accepted: int) -> None:
        """Record how many draft tokens of a sequence were verified and accepted in a step."""
        for at in range(drafted):
            self._accepted[at] += _WEIGHT * ((at < accepted) - self._accepted[at])


class NgramIndex:
    """The last occurrence of each n-gram of a growing sequence. Each token adds one entry per n-gram length.

    Args:
        longest, shortest: the lengths of the n-grams, in tokens. The longest one that is found counts.
    """

    def __init__(self, *, longest: int = 3, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"runs of {shortest} to {longest} tokens: expected 1 or more, the shortest first")
        self._lengths = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram: index of the token after its last occurrence

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: abc.Sequence[int]) -> None:
        """Append tokens to the sequence."""
        for token in tokens:
            # Index the n-grams that end before this token; those that end with the last token have no next one.
            end = len(self._tokens)
            for length in self._lengths:
                if length <= end:
                    self._follows[tuple(self._tokens[end - length :])] = end
            self._tokens.append(token)

    def propose(self, count: int = 4) -> list[int]:
        """At most `count` tokens: those after the latest earlier occurrence of the n-gram that ends the sequence.

        If fewer tokens than `count` follow that occurrence, they are repeated periodically.
        """
        end = len(self._tokens)
        for length in self._lengths:
            begin = self._follows.get(tuple(self._tokens[end - length :])) if length <= end else None
            if begin is not None:
                period = end - begin
                return [self._tokens[begin + i % period] for i in range(count)]
        return []


def accepted(drafts: abc.Sequence[int], chosen: abc.Sequence[int | None]) -> int:
    """How many drafts are accepted: those before the first that differs from the token sampled in its position.

    The token sampled after the accepted drafts is kept, too: a step yields `accepted + 1` tokens, the same ones that
    steps of one token would have sampled.

    Args:
        drafts: the draft tokens.
        chosen: the tokens sampled after none, the first, the first two, ... of them: one more than there are drafts.
            None for NaN or infinite logits.
    """
    if len(chosen) != len(drafts) + 1:
        raise ValueError(f"{len(chosen)} tokens chosen for {len(drafts)} drafts: expected one more")
    return next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))
