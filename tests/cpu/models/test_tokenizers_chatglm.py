"""ChatGLM-6B's vocabularies and text rules: which ids, and which of the two revisions."""

import json
from pathlib import Path

import pytest
import sentencepiece
from chatglm_files import CHATGLM6B_SPECIALS, write_chatglm6b, write_full_chatglm6b

from warpbus.errors import CheckpointError
from warpbus.models.templates import load_template
from warpbus.models.tokenizers import ChatGLMTokenizer, StreamDecoder, encode_prompt, load_tokenizer

IMAGES = 50


def pieces_of(directory: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "ice_text.model"))


def configure(directory: Path, file: str, **changes: object) -> None:
    path = directory / file
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def test_the_later_vocabulary_has_the_ids_of_its_file(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chatglm6b(tmp_path, early=False))
    pieces = pieces_of(tmp_path)
    assert isinstance(tokenizer, ChatGLMTokenizer)
    assert {text: pieces.piece_to_id(text) for text in CHATGLM6B_SPECIALS}.items() <= tokenizer.special_ids.items()
    assert tokenizer.vocab_size == pieces.get_piece_size()
    assert tokenizer.encode("你好") == pieces.encode("你好")


def test_the_early_vocabulary_is_completed_behind_its_file_and_shifted_by_the_image_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chatglm6b(tmp_path, early=True))
    pieces = pieces_of(tmp_path)
    # With the real file's 130000 pieces and 20000 image tokens: [MASK] 150000 to <eop> 150005.
    first = IMAGES + pieces.get_piece_size()
    assert [tokenizer.special_ids[text] for text in CHATGLM6B_SPECIALS] == list(range(first, first + 6))
    assert tokenizer.encode("你好") == [IMAGES + i for i in pieces.encode("你好")]
    space = IMAGES + pieces.piece_to_id("\u2581")
    assert tokenizer.encode("\n") == [space, IMAGES + 4]
    assert tokenizer.encode("\t") == [space, first + 8]
    assert tokenizer.encode("  ") == [space, first + 9]
    assert tokenizer.encode(" " * 80) == [space, first + 87]
    # What is not in the vocabulary is spelled in bytes, which come last.
    assert tokenizer.encode("\x7f") == [space, first + 88 + 0x7F]
    assert tokenizer.vocab_size == first + 88 + 256
    assert tokenizer.decode([0, IMAGES - 1, *tokenizer.encode("月"), tokenizer.vocab_size]) == "月"


@pytest.mark.parametrize("early", [True, False])
def test_line_feeds_tabs_and_runs_of_spaces_are_tokens_of_their_own(tmp_path: Path, early: bool) -> None:
    tokenizer = load_tokenizer(write_chatglm6b(tmp_path, early=early))
    line = tokenizer.encode("\n")[1]
    one = {length: tokenizer.encode(" " * length)[1:] for length in (1, 2, 79, 80, 81, 82)}
    assert [len(ids) for ids in one.values()] == [1, 1, 1, 1, 2, 2]
    assert one[81] == [*one[80], *one[1]]
    assert one[82] == [*one[80], *one[2]]
    assert tokenizer.token_bytes(one[79][0]) == b" " * 79
    text = "月\n\n  光\t你好"
    ids = tokenizer.encode(text)
    assert ids.count(line) == 2
    stream = StreamDecoder(tokenizer)
    assert [stream.push(i) for i in ids if tokenizer.token_bytes(i) in (b"\n", b"  ", b"\t")] == [
        "\n",
        "\n",
        "  ",
        "\t",
    ]


def streamed(tokenizer: ChatGLMTokenizer, ids: list[int], *, keep_first_space: bool = False) -> str:
    stream = StreamDecoder(tokenizer, keep_first_space=keep_first_space)
    return "".join([stream.push(token) for token in ids]) + stream.flush()


@pytest.mark.parametrize("early", [True, False])
def test_a_text_keeps_the_spaces_that_it_begins_with(tmp_path: Path, early: bool) -> None:
    tokenizer = load_tokenizer(write_chatglm6b(tmp_path, early=early))
    assert isinstance(tokenizer, ChatGLMTokenizer)
    for text in ("", "月", "\n  月", "\t月"):
        for length in (0, 1, 2, 3, 79, 80, 81, 82, 161):
            spaced = " " * length + text
            ids = tokenizer.encode(spaced)
            assert tokenizer.decode(ids) == streamed(tokenizer, ids) == spaced


@pytest.mark.parametrize("early", [True, False])
def test_only_the_space_that_sentencepiece_puts_before_a_text_is_taken_away(tmp_path: Path, early: bool) -> None:
    tokenizer = load_tokenizer(write_chatglm6b(tmp_path, early=early))
    assert isinstance(tokenizer, ChatGLMTokenizer)
    space, blank = tokenizer.encode("    ")
    (moon,) = tokenizer.encode("月")[1:]
    stop = tokenizer.special_ids["<eop>"]
    # What a model says need not be what `encode` gives: it may begin with the run itself.
    for ids, text in (
        ([blank, moon], "    月"),
        ([stop, blank], "    "),
        ([blank, space, moon], "     月"),
        ([space, blank, moon], "    月"),
        ([space, space, moon], " 月"),
        ([moon, blank], "月    "),
    ):
        assert tokenizer.decode(ids) == streamed(tokenizer, ids) == text
    assert streamed(tokenizer, [space, blank], keep_first_space=True) == "     "
    if not early:  # by the library itself, which has the run as a piece like any other
        assert pieces_of(tmp_path).decode([blank, moon]).replace("<|blank_4|>", "    ") == "    月"


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("typed", [*CHATGLM6B_SPECIALS, "<n>", "<|tab|>", "<|blank_3|>", "<s>", "<pad>", "<ENC>"])
def test_what_somebody_typed_stays_text(tmp_path: Path, early: bool, typed: str) -> None:
    tokenizer = load_tokenizer(write_chatglm6b(tmp_path, early=early))
    meant = {tokenizer.encode(text)[1] for text in ("\n", "\t", "   ")} | set(tokenizer.special_ids.values())
    for text in (typed, f"a{typed}b", typed * 3, typed[1:] + typed):
        ids = tokenizer.encode(text)
        assert not meant & set(ids)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("early", [True, False])
def test_a_prompt_ends_in_gmask_and_sop(tmp_path: Path, early: bool) -> None:
    tokenizer = load_tokenizer(write_chatglm6b(tmp_path, early=early))
    end = [tokenizer.special_ids["[gMASK]"], tokenizer.special_ids["<sop>"]]
    assert encode_prompt(tokenizer, "你好") == [*tokenizer.encode("你好"), *end]
    assert tokenizer.decode(encode_prompt(tokenizer, "你好")) == "你好"
    assert end[0] + 3 == end[1]


@pytest.mark.parametrize(("early", "images"), [(False, 0), (True, 20000)])
def test_the_published_numbers(tmp_path: Path, early: bool, images: int) -> None:
    tokenizer = load_tokenizer(write_full_chatglm6b(tmp_path, early=early))
    ids = {text: images + 130000 + i for i, text in enumerate(CHATGLM6B_SPECIALS)}
    assert ids.items() <= tokenizer.special_ids.items()
    assert encode_prompt(tokenizer, "你好") == [images + i for i in (5, 74874, 130001, 130004)]
    assert tokenizer.encode("\n你好\t   ") == [images + i for i in (5, 4, 74874, 130008, 130010)]
    assert tokenizer.encode("月") == [images + i for i in (5, *(130088 + byte for byte in "月".encode()))]
    assert tokenizer.decode(encode_prompt(tokenizer, "\n你好\t   月 ")) == "\n你好\t   月 "
    assert tokenizer.vocab_size == images + 130344
    template = load_template(tmp_path, json.loads((tmp_path / "config.json").read_text()), tokenizer)
    assert template.render([{"role": "user", "content": "你好"}]) == encode_prompt(tokenizer, "你好")
    assert template.stop_ids == (images + 130005,)


def test_the_revision_is_reported_by_either_file_and_never_guessed(tmp_path: Path) -> None:
    write_chatglm6b(tmp_path, early=True)
    first = load_tokenizer(tmp_path).special_ids["[MASK]"]
    configure(tmp_path, "tokenizer_config.json", num_image_tokens=IMAGES)
    assert load_tokenizer(tmp_path).special_ids["[MASK]"] == first
    configure(tmp_path, "config.json", bos_token_id=None)
    assert load_tokenizer(tmp_path).special_ids["[MASK]"] == first
    configure(tmp_path, "tokenizer_config.json", num_image_tokens=None)
    with pytest.raises(CheckpointError, match=r"set num_image_tokens to 0 .* or 20000"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("tokenizer_config.json", {"num_image_tokens": 20000}, r"says 20000, bos_token_id in config\.json says 50;"),
        ("config.json", {"bos_token_id": 3}, r"bos_token_id in config\.json says -\d+;"),
        ("config.json", {"vocab_size": 130528}, r"says 50, vocab_size in config\.json says 0;"),
        ("config.json", {"vocab_size": 300}, r"ids up to \d+, but vocab_size in config.json is 300"),
    ],
)
def test_files_of_different_revisions_are_refused(
    tmp_path: Path, file: str, changes: dict[str, object], message: str
) -> None:
    configure(write_chatglm6b(tmp_path, early=True), file, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_another_models_file_is_refused(tmp_path: Path) -> None:
    write_chatglm6b(tmp_path, early=False)
    path = tmp_path / "ice_text.model"
    path.write_bytes(path.read_bytes().replace(b"<|blank_77|>", b"<|other_77|>"))
    with pytest.raises(CheckpointError, match=r"ice_text\.model: the piece <\|blank_77\|> is missing"):
        load_tokenizer(tmp_path)
    path.write_bytes(b"\n\x05 not a proto")
    with pytest.raises(CheckpointError, match="not a SentencePiece model"):
        load_tokenizer(tmp_path)
