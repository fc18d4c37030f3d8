"""Reading calibration data, and cutting it into batches."""

import json

import pytest
import torch
from tokenizer_files import write_byte_level

from warpbus.errors import DataError, UsageError
from warpbus.models.documents import encode_line
from warpbus.models.templates import load_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.models.tokenizers.base import check_text
from warpbus.quantization import Calibration, read_calibration


class Letters:
    """A tokenizer: one token a character."""

    vocab_size = 0x110000
    special_ids = {}  # noqa: RUF012
    prompt_prefix = prompt_suffix = ()

    def encode(self, text):
        check_text(text)
        return [ord(character) for character in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


class Turns:
    """A template: every message is a 1 and its content."""

    stop_ids = ()

    def spans(self, messages, *, variables=None):
        if messages[0]["role"] == "nobody":
            raise UsageError("messages[0]: unknown role 'nobody'")
        ids = [token for message in messages for token in [1, *Letters().encode(message["content"])]]
        return ids, [True] * len(ids)


def read(path, *, template=None, seqlen=100, seed=0, **numbers):
    found = read_calibration(path, Letters(), template or Turns(), seqlen=seqlen, seed=seed, **numbers)
    return [Letters().decode(ids) for ids in found.sequences]


def write(path, *lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_text_is_cut_into_sequences(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij", encoding="utf-8")
    assert sorted(read(tmp_path / "a.txt", seqlen=4)) == ["abcd", "efgh", "ij"]
    assert len(read(tmp_path / "a.txt", seqlen=4, samples=2)) == 2


class EndedPrompts(Letters):
    """One whose prompts end in two special tokens, as ChatGLM-6B's do."""

    prompt_suffix = (2, 3)


class BegunTexts(Letters):
    """One that puts a special token before a text, as Llama's do."""

    prompt_prefix = (4,)


def test_every_sequence_of_a_text_begins_as_the_models_texts_do(tmp_path):
    def read_begun(path):
        found = read_calibration(path, BegunTexts(), Turns(), samples=100, seqlen=4, seed=0)
        return sorted(Letters().decode(ids) for ids in found.sequences)

    (tmp_path / "a.txt").write_text("abcdefg", encoding="utf-8")
    assert read_begun(tmp_path / "a.txt") == ["\x04abc", "\x04def", "\x04g"]
    talk = [{"role": "user", "content": "hi"}]
    assert read_begun(write(tmp_path / "a.jsonl", {"text": "plain"}, {"messages": talk})) == ["\x01hi", "\x04pla"]


class OneAnswer:
    """A template: the first message, the two tokens, the second message."""

    stop_ids = ()

    def spans(self, messages, *, variables=None):
        prompt, answer = (Letters().encode(message["content"]) for message in messages)
        return [*prompt, 2, 3, *answer], [False] * (len(prompt) + 2) + [True] * len(answer)


def test_every_sequence_of_a_model_with_ended_prompts_has_such_an_end(tmp_path):
    def read_ended(path, seqlen):
        found = read_calibration(path, EndedPrompts(), OneAnswer(), samples=100, seqlen=seqlen, seed=0)
        return sorted(Letters().decode(ids) for ids in found.sequences)

    (tmp_path / "a.txt").write_text("abcdefg", encoding="utf-8")
    assert read_ended(tmp_path / "a.txt", 5) == ["\x02\x03abc", "\x02\x03def", "\x02\x03g"]
    talks = [[{"role": "user", "content": asked}, {"role": "assistant", "content": "xyz"}] for asked in ("a", "abcde")]
    path = write(tmp_path / "a.jsonl", {"text": "plain"}, *[{"messages": talk} for talk in talks])
    assert read_ended(path, 100) == ["\x02\x03plain", "a\x02\x03xyz", "abcde\x02\x03xyz"]
    # A prompt that is cut before its end is passed over.
    assert read_ended(path, 5) == ["\x02\x03pla", "a\x02\x03xy"]


def test_lines_of_texts_and_conversations(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    shared = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
    path = write(tmp_path / "a.jsonl", {"text": "plain"}, "", {"messages": messages}, {"conversations": shared})
    assert sorted(read(path)) == ["\x01hi\x01ho", "\x01x\x01y", "plain"]
    assert sorted(read(path, seqlen=3)) == ["\x01hi", "\x01x\x01", "pla"]


def test_tools_of_a_conversation_are_in_its_prompt(tmp_path):
    """The tokens are those that training and a server give the model."""
    tokenizer = load_tokenizer(write_byte_level(tmp_path))
    template = load_template(tmp_path, {"model_type": "chatglm"}, tokenizer)
    tools = [{"type": "function", "function": {"name": "moo", "description": "mo", "parameters": {"type": "object"}}}]
    call = {"type": "function", "function": {"name": "moo", "arguments": "{}"}}
    messages = [{"role": "user", "content": "mo"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    line = {"messages": messages, "tools": tools}
    path = write(tmp_path / "a.jsonl", line)
    (found,) = read_calibration(path, tokenizer, template, seqlen=10_000, seed=0).sequences
    assert list(found) == encode_line("", json.dumps(line), tokenizer, template).ids
    assert "moo" in tokenizer.decode(found[: found.index(tokenizer.special_ids["<|user|>"])])
    weighted = [messages[0], {"role": "assistant", "content": "moo", "weight": 0}]
    assert read_calibration(
        write(tmp_path / "b.jsonl", {"messages": weighted}), tokenizer, template, seqlen=100, seed=0
    ).sequences  # nothing is learned from them


def test_the_seed_draws(tmp_path):
    path = write(tmp_path / "a.jsonl", *({"text": f"{index:03}"} for index in range(200)))
    first = read(path, samples=20)
    assert len(set(first)) == 20
    assert first == read(path, samples=20)
    assert first != read(path, samples=20, seed=1)


def test_a_number_of_tokens_is_drawn(tmp_path):
    texts = [f"{index:03}" * (1 + index % 3) for index in range(100)]  # of 3, 6 and 9 tokens
    path = write(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    drawn = read(path, tokens=60)
    lengths = [len(text) for text in drawn]
    assert sum(lengths[:-1]) < 60 <= sum(lengths)
    assert drawn == read(path, samples=len(drawn))  # the report has this number, and it gives the same
    assert drawn == read(path, samples=100)[: len(drawn)]
    assert read(path, tokens=60, samples=3) == drawn[:3]
    assert len(read(path, tokens=10**6)) == 100
    (tmp_path / "a.txt").write_text("abcdefghij" * 10, encoding="utf-8")
    assert len(read(tmp_path / "a.txt", seqlen=4, tokens=9)) == 3


def test_without_a_number_long_texts_give_tokens_and_short_ones_sequences(tmp_path):
    long = write(tmp_path / "long.jsonl", *[{"text": "x" * 2048}] * 200)
    assert len(read(long, seqlen=2048)) == 128
    assert len(read(long, seqlen=2048, samples=150)) == 150
    short = write(tmp_path / "short.jsonl", *[{"text": "x" * 9}] * 4200)
    assert len(read(short)) == 4096
    assert len(read(short, tokens=10**6)) == 4200


def test_empty_texts_are_passed_over(tmp_path):
    path = write(tmp_path / "a.jsonl", *[{"text": ""}] * 50, {"text": "x"})
    assert read(path, samples=1) == ["x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "not JSON"),
        ("[1]", "object"),
        ('{"words": "x"}', "expected an object with 'messages' or 'conversations' (a conversation) or 'text'"),
        ('{"messages": []}', "the list is empty"),
        ('{"messages": ["x"]}', "messages[0]: expected an object with role and content"),
        ('{"messages": [{"role": "user"}]}', "messages[0]: expected a text as content"),
        ('{"conversations": [{"from": "nobody", "value": "x"}]}', "conversations[0]: from is 'nobody': expected human"),
        ('{"messages": [{"role": "nobody", "content": "x"}]}', "unknown role 'nobody'"),
        (r'{"text": "a\ud800"}', "lone surrogate U+D800 at character 1"),
        (r'{"messages": [{"role": "user", "content": "\ud800"}]}', "lone surrogate U+D800 at character 0"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", {"text": "x"}, "", line)
    with pytest.raises(DataError, match="jsonl:3: ") as caught:
        read(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_malformed_line_is_named_although_it_is_not_drawn(tmp_path):
    path = write(tmp_path / "a.jsonl", *[{"text": "x"}] * 30, "oops")
    with pytest.raises(DataError, match="jsonl:31: not JSON"):
        read(path, samples=1)


def test_a_conversation_needs_a_template(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(DataError, match=r"jsonl:1: a conversation, but the model has no chat template"):
        read_calibration(path, Letters(), None, samples=1, seqlen=1, seed=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "no usable line"),
        ("a.jsonl", b'\n{"text": ""}\n', "no usable line"),
        ("a.txt", b"", "no text"),
        ("a.csv", b"x", "a .txt or a .jsonl"),
        ("a.txt", b"\xff\xfe", "UTF-8"),
        ("a.jsonl", b'{"text": "\xff"}', "UTF-8"),
        ("a.jsonl", None, "no such"),
        ("a.txt", None, "no such"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert message in str(caught.value)
    assert name in str(caught.value)


def test_a_directory_is_no_file(tmp_path):
    with pytest.raises(DataError, match=r"is a directory: expected a \.txt"):
        read(tmp_path)


def test_batches_hold_every_token_once():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (50,), generator=generator).tolist()
    sequences = tuple(tuple(range(index * 100, index * 100 + length)) for index, length in enumerate(lengths))
    data = Calibration(sequences)
    assert data.tokens == sum(lengths)
    found = []
    for batch in data.batches(64):
        assert batch.ids.shape == batch.real.shape
        assert batch.ids.numel() <= 64
        assert (batch.real.int().diff(dim=1) <= 0).all()  # padding on the right
        found += [tuple(row[mask].tolist()) for row, mask in zip(batch.ids, batch.real, strict=True)]
    assert sorted(found) == sorted(sequences)


def test_a_sequence_longer_than_a_batch_is_a_batch():
    batches = list(Calibration(((1,) * 10, (2,) * 3, (3,) * 3)).batches(6))
    assert [tuple(batch.ids.shape) for batch in batches] == [(1, 10), (2, 3)]
