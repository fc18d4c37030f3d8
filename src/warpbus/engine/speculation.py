"""Speculative decoding without a draft model: n-gram lookup in the sequence itself proposes the draft tokens.

Answers that quote their prompt, such as summaries, corrections and code, repeat long parts of it (prompt lookup
decoding; Saxena, 2023). The model verifies all draft tokens in one step.
"""

from collections import abc


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
