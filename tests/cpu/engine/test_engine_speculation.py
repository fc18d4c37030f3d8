"""Tokens supposed by what followed before: against a search of the whole sequence, and with the rule of acceptance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpbus.engine.speculation import NgramIndex, accepted

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def search(tokens, longest, shortest, count):
    """The definition, by looking everywhere."""
    for length in range(longest, shortest - 1, -1):
        run = tokens[len(tokens) - length :]
        ends = [at for at in range(length, len(tokens)) if tokens[at - length : at] == run]
        if length <= len(tokens) and ends:
            grown = list(tokens)
            for i in range(count):
                grown.append(grown[ends[-1] + i])
            return grown[len(tokens) :]
    return []


@given(st.lists(TOKENS, max_size=6), st.integers(1, 4), st.integers(0, 3), st.integers(0, 6))
def test_proposes_what_followed_the_latest_longest_run(parts, shortest, more, count):
    index = NgramIndex(longest=shortest + more, shortest=shortest)
    tokens = []
    for part in parts:
        index.extend(part)
        tokens += part
        assert len(index) == len(tokens)
        assert index.propose(count) == search(tokens, shortest + more, shortest, count)


def test_the_longest_run_counts_before_the_latest():
    index = NgramIndex(longest=3, shortest=1)
    index.extend([1, 2, 3, 9, 8, 3, 7, 1, 2, 3])
    assert index.propose(2) == [9, 8]


def test_a_repetition_goes_on_with_itself():
    index = NgramIndex()
    index.extend([5, 1, 2, 1, 2])
    assert index.propose(5) == [1, 2, 1, 2, 1]


def test_nothing_is_proposed_where_nothing_repeats():
    index = NgramIndex()
    assert index.propose() == []
    index.extend([1])
    assert index.propose() == []
    index.extend([2, 3, 4])
    assert index.propose() == []


def test_what_it_refuses():
    with pytest.raises(ValueError, match="runs of 3 to 2 tokens"):
        NgramIndex(longest=2, shortest=3)
    with pytest.raises(ValueError, match="2 tokens chosen for 2 drafts"):
        accepted([1, 2], [1, 2])


@given(TOKENS, TOKENS)
def test_drafts_are_kept_to_the_first_that_was_not_chosen(drafts, chosen):
    chosen = (chosen + [0] * len(drafts))[: len(drafts) + 1] or [0]
    chosen += [0] * (len(drafts) + 1 - len(chosen))
    count = accepted(drafts, chosen)
    assert drafts[:count] == chosen[:count]
    assert count == len(drafts) or drafts[count] != chosen[count]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(0, 5))
def test_speculating_gives_the_same_tokens(prompt, seed):
    def model(tokens):
        """A token by what is before it."""
        return (sum(tokens[-3:]) * (seed + 1) + len(tokens) // 7) % 4

    expected = list(prompt)
    while len(expected) < 40:
        expected.append(model(expected))
    index, found = NgramIndex(), list(prompt)
    index.extend(found)
    while len(found) < 40:
        drafts = index.propose(4)
        chosen = [model(found + drafts[:i]) for i in range(len(drafts) + 1)]
        kept = chosen[: accepted(drafts, chosen) + 1]
        found += kept
        index.extend(kept)
    assert found[:40] == expected
