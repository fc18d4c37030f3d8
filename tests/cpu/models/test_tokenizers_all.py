"""What every kind of tokenizer promises: round trips, special tokens kept out, streaming that adds up."""

from pathlib import Path

import pytest
from chatglm_files import CHATGLM6B_SPECIALS, write_chatglm6b
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import (
    POET_SPECIALS,
    ROLES,
    write_byte_level,
    write_chatglm,
    write_glm4,
    write_llama,
    write_poet,
)

from warpbus.errors import UsageError
from warpbus.models.tokenizers import StreamDecoder, Tokenizer, load_tokenizer

KINDS = (
    "poet",
    "chatglm6b",
    "chatglm6b_early",
    "chatglm2",
    "chatglm3",
    "glm4",
    "byte_level",
    "byte_level_ignoring_merges",
    "llama",
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    def directory(kind: str) -> Path:
        return tmp_path_factory.mktemp(kind)

    directories = (
        write_poet(directory("poet")),
        write_chatglm6b(directory("chatglm6b"), early=False),
        write_chatglm6b(directory("chatglm6b_early"), early=True),
        write_chatglm(directory("chatglm2"), version=2),
        write_chatglm(directory("chatglm3"), version=3),
        write_glm4(directory("glm4")),
        write_byte_level(directory("byte_level")),
        write_byte_level(directory("ignore_merges"), ignore_merges=True),
        write_llama(directory("llama")),
    )
    return {kind: load_tokenizer(directory) for kind, directory in zip(KINDS, directories, strict=True)}


fragments = st.sampled_from(
    [
        *POET_SPECIALS,
        *ROLES,
        *CHATGLM6B_SPECIALS,
        "<n>",
        "<|tab|>",
        "<|blank_2|>",
        "<|blank_80|>",
        "<s>",
        "</s>",
        "sop",
        "<|",
        "|>",
        "user",
        "[",
        "gMASK]",
        " ",
        "  ",
        " " * 80,
        " " * 163,
        "\n",
        "\t",
        "月",
        "moon",
        "😀",
    ]
)
# U+2581 is how SentencePiece writes a space, and comes back as one.
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")
texts = st.lists(fragments | st.text(characters, max_size=8), max_size=8).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=texts)
def test_text_comes_back_and_holds_no_special_token(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special_ids.values())
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_streamed_text_adds_up_to_the_decoded_whole(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    # Any ids: bytes out of order, special tokens, and ids of padding rows that name no token.
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size + 3), max_size=20))
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_stream_holds_a_character_back_until_it_is_whole(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(i) for i in tokenizer.encode("😀")]
    assert "".join(pieces) == "😀"
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_unfinished_character_becomes_a_replacement_at_the_end(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("a😀")[:-1]
    stream = StreamDecoder(tokenizer)
    assert "".join(stream.push(i) for i in ids) == "a"
    assert stream.flush() == "\ufffd"
    assert tokenizer.decode(ids) == "a\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_left_out_of_the_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    special = next(iter(tokenizer.special_ids.values()))
    ids = tokenizer.encode("moon")
    assert tokenizer.decode([special, *ids, special]) == "moon"


@pytest.mark.parametrize("kind", KINDS)
def test_lone_surrogate_is_refused(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    with pytest.raises(UsageError, match=r"lone surrogate U\+D83D at character 2"):
        tokenizers[kind].encode("ab\ud83d")
