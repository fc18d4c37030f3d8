"""Files of text as token ids, and what is said of malformed ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from chatglm_files import write_chatglm6b

from warpbus.errors import DataError
from warpbus.models.documents import Document, read_documents
from warpbus.models.templates import Template, find_template
from warpbus.models.tokenizers import Tokenizer, load_tokenizer

WriteLines = Callable[..., Path]
TURNS = [{"role": "user", "content": "写诗"}, {"role": "assistant", "content": "明月光"}]


@pytest.fixture(scope="module")
def tokenizer(blank_model: Path) -> Tokenizer:
    return load_tokenizer(blank_model)


@pytest.fixture(scope="module")
def template(blank_model: Path, tokenizer: Tokenizer) -> Template:
    config = json.loads((blank_model / "config.json").read_text(encoding="utf-8"))
    found = find_template(blank_model, config, tokenizer)
    assert found is not None
    return found


def test_texts_and_conversations(
    tmp_path: Path, tokenizer: Tokenizer, template: Template, write_lines: WriteLines
) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "明月"}, "", "   ", {"messages": TURNS}, {"text": "霜"})
    text, conversation = read_documents(path, tokenizer, template, length=100)
    assert text == Document(tokenizer.encode("明月"), [True, True])
    assert (conversation.ids, conversation.answers) == template.spans(TURNS)
    # The answer and its stop token, nothing else.
    answer = [token for token, reported in zip(conversation.ids, conversation.answers, strict=True) if reported]
    assert answer == [*tokenizer.encode("明月光"), tokenizer.special_ids["<|user|>"]]


def test_long_documents_are_cut(tmp_path: Path, tokenizer: Tokenizer, write_lines: WriteLines) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "床前明月光"}, {"text": "举头"})
    assert [len(document.ids) for document in read_documents(path, tokenizer, None, length=3)] == [3, 2]
    assert len(read_documents(path, tokenizer, None, length=3, limit=1)) == 1


def test_a_text_file_is_cut_into_documents(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.txt"
    path.write_text("床前明月光疑是地上霜举", encoding="utf-8")
    documents = read_documents(path, tokenizer, None, length=5)
    # The eleventh token alone would predict nothing.
    assert [tokenizer.decode(document.ids) for document in documents] == ["床前明月光", "疑是地上霜"]
    assert all(all(document.answers) for document in documents)


@pytest.fixture(scope="module")
def chatglm6b(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Template | None]:
    directory = write_chatglm6b(tmp_path_factory.mktemp("chatglm6b"), early=True)
    tokenizer = load_tokenizer(directory)
    return tokenizer, find_template(directory, json.loads((directory / "config.json").read_text()), tokenizer)


def test_texts_of_chatglm6b_are_said_to_an_empty_prompt(
    tmp_path: Path, chatglm6b: tuple[Tokenizer, Template | None], write_lines: WriteLines
) -> None:
    tokenizer, template = chatglm6b
    begin = [tokenizer.special_ids["[gMASK]"], tokenizer.special_ids["<sop>"]]
    path = write_lines(tmp_path / "a.jsonl", {"text": "明月"}, {"messages": [*TURNS, *TURNS]})
    text, conversation = read_documents(path, tokenizer, template, length=100)
    ids = tokenizer.encode("明月")
    assert text == Document([*begin, *ids], [False, False, *[True] * len(ids)])
    # One answer, behind the only <sop>.
    assert conversation.ids.count(begin[1]) == 1
    reported = [token for token, answer in zip(conversation.ids, conversation.answers, strict=True) if answer]
    assert reported == conversation.ids[conversation.ids.index(begin[1]) + 1 :]
    assert reported == [*tokenizer.encode("明月光"), tokenizer.special_ids["<eop>"]]


def test_each_piece_of_a_text_of_chatglm6b_has_a_prompt(
    tmp_path: Path, chatglm6b: tuple[Tokenizer, Template | None]
) -> None:
    tokenizer, _ = chatglm6b
    path = tmp_path / "a.txt"
    path.write_text("床前明月光疑是地上霜举", encoding="utf-8")
    ids = tokenizer.encode("床前明月光疑是地上霜举")
    documents = read_documents(path, tokenizer, None, length=5)
    begin = list(tokenizer.prompt_suffix)
    assert [document.ids for document in documents] == [[*begin, *ids[at : at + 3]] for at in range(0, len(ids) - 1, 3)]
    assert all(document.answers == [False, False] + [True] * (len(document.ids) - 2) for document in documents)
    with pytest.raises(DataError, match="a document of 2 tokens has no room for text: give more than 2"):
        read_documents(path, tokenizer, None, length=2)


def test_texts_begin_as_the_models_prompts_do(
    tmp_path: Path, tokenizer: Tokenizer, write_lines: WriteLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "prompt_prefix", (2, 3))
    ids = tokenizer.encode("床前明月光")
    lines = write_lines(tmp_path / "a.jsonl", {"text": "床前明月光"})
    (tmp_path / "a.txt").write_text("床前明月光", encoding="utf-8")
    for path in (lines, tmp_path / "a.txt"):
        [document] = read_documents(path, tokenizer, None, length=9)
        assert (document.ids, document.answers) == ([2, 3, *ids], [False, False] + [True] * len(ids))
    pieces = read_documents(tmp_path / "a.txt", tokenizer, None, length=4)
    assert [document.ids for document in pieces] == [[2, 3, *ids[at : at + 2]] for at in range(0, len(ids) - 1, 2)]


def test_a_byte_order_mark_is_no_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines, text = tmp_path / "a.jsonl", tmp_path / "a.txt"
    lines.write_bytes(b"\xef\xbb\xbf" + '\r\n{"text": "明月"}\r\n'.encode())
    text.write_bytes(b"\xef\xbb\xbf" + "明月".encode())
    for path in (lines, text):
        assert read_documents(path, tokenizer, None, length=9)[0].ids == tokenizer.encode("明月")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("1" * 5000, "not JSON"),
        ("[1]", "expected one JSON object a line, found list"),
        ('{"prompt": "a"}', "expected an object with 'messages'"),
        ('{"text": 3}', "expected an object with 'messages'"),
        ('{"text": "\\ud800"}', "lone surrogate"),
        ('{"messages": "a"}', "expected an object with 'messages'"),
        ('{"messages": []}', "the list is empty"),
        ('{"messages": [{"role": "poet", "content": "a"}]}', "unknown role 'poet'"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\]: expected a text as content"),
    ],
)
def test_a_malformed_line_is_named(
    line: str, said: str, tmp_path: Path, tokenizer: Tokenizer, template: Template, write_lines: WriteLines
) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "明月"}, "", line)
    with pytest.raises(DataError, match=said) as raised:
        read_documents(path, tokenizer, template, length=9)
    assert str(raised.value).startswith(f"{path}:3: ")
    assert "\n" not in str(raised.value)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines, text = tmp_path / "a.jsonl", tmp_path / "a.txt"
    lines.write_bytes(b'{"text": "a b"}\n' * 2000 + b'{"text": "\xff"}\n')
    text.write_bytes("明月".encode("gbk"))
    with pytest.raises(DataError, match=r"a\.jsonl:2001: not UTF-8 \(byte 10\): save it as UTF-8"):
        read_documents(lines, tokenizer, None, length=9)
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8"):
        read_documents(text, tokenizer, None, length=9)


def test_a_conversation_needs_a_template(tmp_path: Path, tokenizer: Tokenizer, write_lines: WriteLines) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"messages": TURNS})
    with pytest.raises(DataError, match=r"a\.jsonl:1: a conversation, but the model has no chat template"):
        read_documents(path, tokenizer, None, length=9)


def test_nothing_to_read(tmp_path: Path, tokenizer: Tokenizer, write_lines: WriteLines) -> None:
    blank = write_lines(tmp_path / "blank.jsonl", "", {"text": ""}, {"text": "月"})
    short = tmp_path / "short.txt"
    short.write_text("月", encoding="utf-8")
    for path, said in (
        (blank, "no documents in it"),
        (short, "no text in it"),
        (tmp_path / "missing.jsonl", "no such file"),
        (tmp_path / "missing.txt", "no such file"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(DataError, match=said) as raised:
            read_documents(path, tokenizer, None, length=9)
        assert str(path) in str(raised.value)
