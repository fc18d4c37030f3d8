"""Speculative decoding without a second model: what followed the same words before is supposed to follow again.

Answers that quote their prompt, as summaries, corrections and code do, repeat long runs of it (prompt lookup decoding;
Saxena, 2023). The model reads the supposed tokens in one step and says which of them it would have chosen.
"""

from collections import abc


class NgramIndex:
    """Where each run of a few tokens last stood in a sequence that grows. A token costs an entry for each length.

    Args:
        longest, shortest: the lengths of the runs that are looked up, in tokens. The longest that is found counts.
    """

    def __init__(self, *, longest: int = 3, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"runs of {shortest} to {longest} tokens: expected 1 or more, the shortest first")
        self._lengths = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}  # run of tokens: where the token after its last occurrence is

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: abc.Sequence[int]) -> None:
        """Append tokens to the sequence."""
        for token in tokens:
            # The runs that end here now have a token after them; the last one of all has none yet.
            end = len(self._tokens)
            for length in self._lengths:
                if length <= end:
                    self._follows[tuple(self._tokens[end - length :])] = end
            self._tokens.append(token)

    def propose(self, count: int = 4) -> list[int]:
        """At most `count` tokens: those after the latest earlier occurrence of the run that the sequence ends with.

        Where that occurrence is so late that the sequence ends sooner, its repetition goes on with itself.
        """
        end = len(self._tokens)
        for length in self._lengths:
            begin = self._follows.get(tuple(self._tokens[end - length :])) if length <= end else None
            if begin is not None:
                period = end - begin
                return [self._tokens[begin + i % period] for i in range(count)]
        return []


def accepted(drafts: abc.Sequence[int], chosen: abc.Sequence[int | None]) -> int:
    """How many drafts are kept: those before the first that differs from the token chosen in its place.

    The token chosen after the drafts kept is kept as well: a step yields `accepted + 1` tokens, which are those that
    steps of one token would have chosen.

    Args:
        drafts: the tokens that were supposed to follow.
        chosen: the tokens chosen after none, the first, the first two, ... of them: one more than there are drafts.
            None where none could be chosen.
    """
    if len(chosen) != len(drafts) + 1:
        raise ValueError(f"{len(chosen)} tokens chosen for {len(drafts)} drafts: expected one more")
    return next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))
