import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpbus.engine.sampling_params import Grammar, SamplingParams
from warpbus.engine.sequence import Sequence, StopStrings, TokenLogprob
from warpbus.errors import WarpbusError


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


@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_stop_string_can_be_part_of_the_text(size):
    matcher, shown, text = StopStrings(["bb", "bbc"], include=True), "", "abbcd"
    for at in range(0, len(text), size):
        piece, stopped = matcher.push(text[at : at + size])
        shown += piece
        if stopped:
            break
    assert (shown, stopped) == ("abb", True)


def test_a_stop_token_ends_the_text_and_is_counted():
    state = sequence()
    assert feed(state, "ab\0") == ["a", "b", ""]
    assert (state.text, state.finish_reason, state.token_ids) == ("ab", "stop", [97, 98, 0])
    assert state.take().stop_string is None


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
    assert state.take().stop_string == "END"


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


def test_stop_token_ids_end_the_text_and_are_not_shown():
    state = sequence(stop_token_ids=(ord("x"),))
    feed(state, "abx")
    assert (state.text, state.finish_reason, state.token_ids[-1]) == ("ab", "stop", ord("x"))
    # Also where the model's own are ignored.
    state = sequence(stop_token_ids=(ord("x"),), ignore_eos=True)
    feed(state, "a\0x")
    assert (state.text, state.finish_reason) == ("a\0", "stop")


def test_pieces_add_up():
    state = sequence(limit=8, stop=("END",))
    state.cached_tokens = 32
    pieces = []
    for step in ("aEN", "", "bc", "\0"):
        feed(state, step)
        pieces.append(state.take())
    assert [piece.text for piece in pieces] == ["a", "", "ENbc", ""]
    assert [len(piece.token_ids) for piece in pieces] == [3, 0, 2, 1]
    assert [piece.finish_reason for piece in pieces] == [None, None, None, "stop"]
    assert all(piece.logprobs is None and piece.cached_tokens == 32 for piece in pieces)
    assert [token for piece in pieces for token in piece.token_ids] == state.token_ids


def test_pieces_have_the_logprobs_of_their_tokens():
    state = sequence(logprobs=0)
    given = [TokenLogprob(token, -0.5, ()) for token in (97, 98, 0)]
    state.append(97, given[0])
    first = state.take()
    state.append(98, given[1])
    state.append(0, given[2])
    assert first.logprobs == (given[0],)
    assert state.take().logprobs == (given[1], given[2])
    assert state.logprobs == given
    assert state.take().logprobs == ()
    # Given but not asked for.
    state = sequence()
    state.append(97, given[0])
    assert state.take().logprobs is None


def test_a_grammar_is_never_passed_over():
    with pytest.raises(ValueError, match="a matcher where it has a grammar or thinking"):
        sequence(grammar=Grammar("json_object"))


def test_a_token_against_the_grammar_is_an_error():
    class Refusing:
        finished = failed = False

        def accept(self, token, /):
            return token != ord("b")

    state = sequence()
    state.matcher = Refusing()
    state.append(ord("a"))
    with pytest.raises(WarpbusError, match="token 98 does not follow the grammar"):
        state.append(ord("b"))


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=60))
def test_numbers_that_are_given_back_come_again(steps):
    state, plain = sequence(seed=3), sequence(seed=3)
    kept = []
    for count, back in steps:
        numbers = state.uniforms(count)
        back = min(back, count)
        state.give_back(back)
        kept += numbers[: count - back]
    assert kept == [plain.uniforms(1)[0] for _ in kept]


def test_no_more_numbers_are_given_back_than_were_taken():
    state = sequence(seed=3)
    state.uniforms(2)
    with pytest.raises(ValueError, match="cannot give back 3"):
        state.give_back(3)
    state.give_back(2)
    with pytest.raises(ValueError, match="cannot give back 1"):
        state.give_back(1)
