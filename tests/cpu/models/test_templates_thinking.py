"""Thinking: found by the template, recognized at the prompt's end, and split from the text that follows it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_files import write_byte_level

from warpbus.models.templates import JinjaTemplate, RoundTemplate
from warpbus.models.templates.thinking import ThinkingStream, ThinkingTokens, find_thinking
from warpbus.models.tokenizers import load_tokenizer

TOKENS = ThinkingTokens(opening=1, closing=2, roles=frozenset((8, 9)))


def split(start, text, size=1):
    stream = ThinkingStream(start)
    pairs = [stream.push(text[at : at + size]) for at in range(0, len(text), size)]
    pairs.append(stream.flush())
    return "".join(thinking for thinking, _ in pairs), "".join(shown for _, shown in pairs)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("start", "text", "thinking", "shown"),
    [
        ("possible", "<think>\nhm\n\n</think>\n\nYes. ", "hm", "Yes. "),
        ("possible", "\n<think>hm</think>\nYes", "hm", "Yes"),
        ("possible", "Yes <think>no</think>", "", "Yes <think>no</think>"),
        ("possible", " <b>", "", " <b>"),
        ("possible", "<thin", "", "<thin"),
        ("possible", "  ", "", "  "),
        ("open", "a < b </thin k \n </think> x", "a < b </thin k", " x"),
        ("open", "never done ", "never done", ""),
        ("open", "cut </thi", "cut </thi", ""),
        ("open", "</think>Yes", "", "Yes"),
        ("open", "a</think>b</think>c", "a", "b</think>c"),
        ("over", "\n\nYes\n", "", "Yes\n"),
        ("over", "  Yes", "", "  Yes"),
    ],
)
def test_thinking_is_split_from_the_text(start, text, thinking, shown, size):
    assert split(start, text, size) == (thinking, shown)


@given(st.text(alphabet="<think>/ \nab"), st.sampled_from(["possible", "open", "over"]), st.integers(1, 4))
def test_pieces_make_no_difference(text, start, size):
    assert split(start, text, size) == split(start, text, 1000)


def test_text_is_shown_as_soon_as_it_is_certain():
    stream = ThinkingStream("open")
    assert [stream.push(char) for char in "a b<c"] == [("a", ""), ("", ""), (" b", ""), ("", ""), ("<c", "")]


@pytest.mark.parametrize(
    ("prompt", "start"),
    [([8, 5, 9, 6], "possible"), ([8, 1, 9], "possible"), ([9, 1], "open"), ([9, 1, 6], "open"), ([9, 1, 2], "over")],
)
def test_the_end_of_the_prompt_tells_how_the_answer_begins(prompt, start):
    assert TOKENS.start(prompt) == start


def template_of(tmp_path, source, **more):
    tokenizer = load_tokenizer(write_byte_level(tmp_path, **more))
    return JinjaTemplate(source, tokenizer, name="x", variables={}, stop_ids=(), end_id=None), tokenizer


def test_a_model_thinks_if_its_template_and_vocabulary_have_the_tags(tmp_path):
    source = "{{ messages[0].content.split('</think>')[-1] }}"
    assert find_thinking(*template_of(tmp_path, source)) is None
    template, tokenizer = template_of(tmp_path, source, added=("<think>", "</think>"))
    found = find_thinking(template, tokenizer)
    assert [tokenizer.token_bytes(token) for token in (found.opening, found.closing)] == [b"<think>", b"</think>"]
    assert found.roles == frozenset(tokenizer.special_ids.values())
    assert find_thinking(*template_of(tmp_path, "{{ messages[0].content }}", added=("<think>", "</think>"))) is None
    assert find_thinking(RoundTemplate.__new__(RoundTemplate), tokenizer) is None
