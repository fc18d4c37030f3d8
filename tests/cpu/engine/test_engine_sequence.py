import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpbus.engine.sequence import SamplingParams, Sequence, StopStrings
from warpbus.errors import UsageError


class Letters:
    """Token 97 is the text "a"; "é" comes as two tokens, the first of which has no text yet."""

    def __init__(self):
        self.half = False

    def push(self, token, /):
        if token == 0xC3:
            self.half = True
            return ""
        self.half = False
        return "é" if token == 0xA9 else chr(token)

    def flush(self):
        return "�" if self.half else ""


def sequence(limit=100, stop_ids=(0,), **params):
    return Sequence(0, [1], SamplingParams(**params), limit=limit, stop_ids=frozenset(stop_ids), stream=Letters())


def feed(state, text):
    """The pieces that come out, until the sequence has ended or the text has."""
    pieces = []
    for char in text:
        pieces.append(state.append(ord(char)))
        if state.finish_reason:
            break
    return pieces


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 1.5),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("seed", -1),
        ("stop", ("",)),
        ("stop", 5),
        ("stop", (5,)),
        ("ignore_eos", 1),
    ],
)
def test_params_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(UsageError, match=f"^{name} is ") as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


def test_params_at_the_edge_are_accepted():
    params = SamplingParams(temperature=0, top_p=1, top_k=0, repetition_penalty=0.5, max_tokens=1, seed=0, stop="END")
    assert params.stop == ("END",)
    assert params.greedy


@pytest.mark.parametrize(
    ("params", "greedy"), [({"temperature": 0}, True), ({"top_k": 1}, True), ({"top_k": 2}, False)]
)
def test_greedy(params, greedy):
    assert SamplingParams(**params).greedy is greedy


@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
def test_stop_strings_cut_the_text_where_the_first_begins(pieces, stops):
    matcher, shown, stopped = StopStrings(stops), "", False
    whole = ""
    for piece in pieces:
        whole += piece
        text, stopped = matcher.push(piece)
        shown += text
        if stopped:
            break
    shown += matcher.flush()
    begins = [whole.find(stop) for stop in stops if stop in whole]
    assert stopped is bool(begins)
    assert shown == (whole[: min(begins)] if begins else whole)


@given(st.text("ab", max_size=8), st.text("ab", min_size=1, max_size=4))
def test_what_is_kept_back_is_no_longer_than_needed(text, stop):
    matcher = StopStrings([stop])
    shown, stopped = matcher.push(text)
    if not stopped:
        kept = text[len(shown) :]
        longest = max(size for size in range(len(stop)) if text.endswith(stop[:size]))
        assert kept == stop[:longest]


def test_a_stop_token_ends_the_text_and_is_counted():
    state = sequence()
    assert feed(state, "ab\0") == ["a", "b", ""]
    assert (state.text, state.finish_reason, state.token_ids) == ("ab", "stop", [97, 98, 0])


def test_the_limit_ends_the_text():
    state = sequence(limit=3)
    feed(state, "abcdef")
    assert (state.text, state.finish_reason) == ("abc", "length")


def test_a_stop_token_at_the_limit_is_a_stop():
    state = sequence(limit=3)
    feed(state, "ab\0")
    assert state.finish_reason == "stop"


def test_a_stop_string_over_several_tokens_is_held_back_and_cut():
    state = sequence(stop=("END",))
    assert feed(state, "aENbEND!") == ["a", "", "", "ENb", "", "", ""]
    assert (state.text, state.finish_reason) == ("aENb", "stop")


def test_what_was_held_back_comes_out_at_the_end():
    state = sequence(limit=3, stop=("END",))
    assert feed(state, "aEN") == ["a", "", "EN"]
    assert (state.text, state.finish_reason) == ("aEN", "length")
    stopped = sequence(stop=("END",))
    assert feed(stopped, "aE\0") == ["a", "", "E"]


def test_a_stop_string_that_completes_with_the_last_token_is_a_stop():
    state = sequence(limit=4, stop=("END",))
    feed(state, "aEND")
    assert (state.text, state.finish_reason) == ("a", "stop")


def test_half_a_character_is_shown_only_when_it_is_whole_or_over():
    state = sequence(limit=4)
    assert [state.append(token) for token in (0xC3, 0xA9, 97, 0xC3)] == ["", "é", "a", "�"]
    assert state.text == "éa�"


def test_the_seed_decides_the_random_numbers():
    def draws(seed):
        state = sequence(seed=seed)
        return [state.random.random() for _ in range(3)]

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)
    assert draws(None) != draws(None)


def test_stop_tokens_are_passed_by_when_they_are_ignored():
    state = sequence(limit=4, stop_ids=(ord("x"),), ignore_eos=True)
    feed(state, "axbcd")
    assert (state.text, state.finish_reason) == ("axbc", "length")
    # Stop strings still count.
    state = sequence(stop_ids=(ord("x"),), ignore_eos=True, stop="b")
    feed(state, "axbcd")
    assert (state.text, state.finish_reason) == ("ax", "stop")
