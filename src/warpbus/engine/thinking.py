"""Answers that begin with thinking: a grammar applies behind it, and it has a budget of tokens.

Knows nothing of tensors: a mask is written to the caller's array.
"""

from collections.abc import Callable, Collection

import numpy as np

from warpbus.engine.sampling_params import Grammar, SamplingParams, Thinking
from warpbus.engine.sequence import Matcher


def matcher_of(
    params: SamplingParams, stop_ids: Collection[int], compile_grammar: Callable[[Grammar], Matcher]
) -> Matcher | None:
    """The constraints on the tokens of an answer: its grammar, its thinking, or both; None if there is neither.

    Args:
        params: of the answer.
        stop_ids: the tokens that end it.
        compile_grammar: starts a grammar; raises UsageError for one that cannot be used.
    """
    grammar = None if params.grammar is None else compile_grammar(params.grammar)
    return grammar if params.thinking is None else ThinkingMatcher(params.thinking, grammar, stop_ids)


class ThinkingMatcher:
    """The state of an answer that may begin with thinking; implements `Matcher`.

    Within the thinking all tokens are allowed, except for stop tokens if a grammar follows; after `thinking.budget`
    tokens only the closing token is. An answer that does not begin with the opening token has no thinking.

    Args:
        thinking: how the answer begins.
        grammar: applies behind the thinking; None: everything is allowed there.
        stop_ids: the tokens that end an answer.
    """

    def __init__(self, thinking: Thinking, grammar: Matcher | None, stop_ids: Collection[int]) -> None:
        self._thinking = thinking
        self._grammar = grammar
        self._stops = tuple(stop_ids) if grammar is not None else ()
        self._count = 0
        self._end: int | None = None  # the number of tokens before those of the grammar

    def accept(self, token: int) -> bool:
        """See `Matcher.accept`."""
        if self._end is None and self._count == 0 and not self._thinking.opened and token != self._thinking.opening:
            self._end = 0
            if self._accept_behind(token):
                return True
            self._end = None
            return False
        if self._end is not None:
            return self._accept_behind(token)
        if self._budget_used and token != self._thinking.closing:
            return False
        self._count += 1
        if token == self._thinking.closing:
            self._end = self._count
        return True

    def rollback(self, count: int) -> None:
        """See `Matcher.rollback`."""
        if self._end is not None:
            behind = min(count, self._count - self._end)
            if behind and self._grammar is not None:
                self._grammar.rollback(behind)
        self._count -= count
        if self._end is not None and (self._count < self._end or self._count == 0):
            self._end = None

    def fill(self, mask: np.ndarray) -> None:
        """See `Matcher.fill`."""
        if self._end is None and self._count == 0 and not self._thinking.opened:
            self._fill_behind(mask)
            _allow(mask, self._thinking.opening)
        elif self._end is not None:
            self._fill_behind(mask)
        elif self._budget_used:
            mask[:] = 0
            _allow(mask, self._thinking.closing)
        else:
            mask[:] = -1
            for token in self._stops:
                if token < 32 * len(mask):
                    mask.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)

    @property
    def finished(self) -> bool:
        """See `Matcher.finished`."""
        return self._end is not None and self._grammar is not None and self._grammar.finished

    @property
    def failed(self) -> bool:
        """See `Matcher.failed`."""
        return self._grammar is not None and self._grammar.failed

    @property
    def _budget_used(self) -> bool:
        budget = self._thinking.budget
        return budget is not None and self._count - (not self._thinking.opened) >= budget

    def _accept_behind(self, token: int) -> bool:
        accepted = self._grammar is None or self._grammar.accept(token)
        self._count += accepted
        return accepted

    def _fill_behind(self, mask: np.ndarray) -> None:
        if self._grammar is None:
            mask[:] = -1
        else:
            self._grammar.fill(mask)


def _allow(mask: np.ndarray, token: int) -> None:
    mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
