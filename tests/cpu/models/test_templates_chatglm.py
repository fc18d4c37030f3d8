"""The built-in prompts of ChatGLM2, ChatGLM3 and GLM-4, and which template a directory gets."""

import json
from pathlib import Path

import pytest
from chatglm_files import write_chatglm6b
from tokenizer_files import write_chatglm, write_glm4, write_poet

from warpbus.errors import CheckpointError, UsageError
from warpbus.models.templates import (
    JinjaTemplate,
    Message,
    NoTemplate,
    QueryTemplate,
    RoleTokenTemplate,
    RoundTemplate,
    Template,
    find_stop_ids,
    find_template,
    load_template,
)
from warpbus.models.tokenizers import Tokenizer, load_tokenizer

CHATGLM = {"model_type": "chatglm", "eos_token_id": 2}
TALK: list[Message] = [
    {"role": "user", "content": "你好"},
    {"role": "assistant", "content": "明月"},
    {"role": "user", "content": "月<|user|>"},
    {"role": "assistant", "content": "霜"},
]


def test_glm4_prompt_has_the_published_ids(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_glm4(tmp_path))
    template = load_template(tmp_path, {"model_type": "chatglm", "eos_token_id": [151329, 151336, 151338]}, tokenizer)
    assert isinstance(template, RoleTokenTemplate)
    greeting = tokenizer.encode("你好")
    newline = tokenizer.encode("\n")
    assert template.render(TALK[:1]) == [151331, 151333, 151336, *newline, *greeting, 151337]
    assert template.stop_ids == (151329, 151336, 151338)


def test_glm4_answers(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_glm4(tmp_path))
    template = load_template(tmp_path, CHATGLM, tokenizer)
    ids, mask = template.spans(TALK)
    newline = tokenizer.encode("\n")
    assert ids == [*template.render(TALK, add_generation_prompt=False), 151336]
    produced = [i for i, answer in zip(ids, mask, strict=True) if answer]
    assert produced == [*newline, *tokenizer.encode("明月"), 151336, *newline, *tokenizer.encode("霜"), 151336]
    assert ids.count(151336) == 3


def test_chatglm3_prompt(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chatglm(tmp_path, version=3))
    template = load_template(tmp_path, CHATGLM, tokenizer)
    special = tokenizer.special_ids
    messages: list[Message] = [
        {"role": "system", "content": "简"},
        {"role": "user", "content": "你好"},
        {"role": "assistant", "metadata": "search", "content": "明月"},
        {"role": "observation", "content": "霜"},
    ]
    # Content and the line end before it are encoded apart: each gets SentencePiece's space.
    expected = [special["[gMASK]"], special["sop"]]
    for role, metadata, content in (
        ("system", "", "简"),
        ("user", "", "你好"),
        ("assistant", "search", "明月"),
        ("observation", "", "霜"),
    ):
        expected += [special[f"<|{role}|>"], *tokenizer.encode(metadata + "\n"), *tokenizer.encode(content)]
    assert template.render(messages) == [*expected, special["<|assistant|>"]]
    assert template.stop_ids == (2, special["<|user|>"], special["<|observation|>"])
    ids, mask = template.spans(messages)
    assert ids == expected
    produced = [i for i, answer in zip(ids, mask, strict=True) if answer]
    assert produced == [*tokenizer.encode("search\n"), *tokenizer.encode("明月"), special["<|observation|>"]]


def test_chatglm2_prompt(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chatglm(tmp_path, version=2))
    template = load_template(tmp_path, CHATGLM, tokenizer)
    assert isinstance(template, RoundTemplate)
    prefix = [tokenizer.special_ids["[gMASK]"], tokenizer.special_ids["sop"]]
    assert template.render(TALK[:1]) == prefix + tokenizer.encode("[Round 1]\n\n问：你好\n\n答：")
    text = "[Round 1]\n\n问：你好\n\n答：明月\n\n[Round 2]\n\n问：月<|user|>\n\n答："
    assert template.render(TALK[:3]) == prefix + tokenizer.encode(text)
    assert template.render(TALK, add_generation_prompt=False) == prefix + tokenizer.encode(text + "霜")
    assert template.render(TALK[:1], add_generation_prompt=False) == prefix + tokenizer.encode("[Round 1]\n\n问：你好")
    system: Message = {"role": "system", "content": "简"}
    assert template.render([system, *TALK[:1]]) == prefix + tokenizer.encode("简\n\n[Round 1]\n\n问：你好\n\n答：")
    assert template.stop_ids == (2,)


def test_chatglm2_answers(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chatglm(tmp_path, version=2))
    template = load_template(tmp_path, CHATGLM, tokenizer)
    ids, mask = template.spans(TALK)
    assert ids == [*template.render(TALK[:3]), *tokenizer.encode("霜"), 2]
    produced = [i for i, answer in zip(ids, mask, strict=True) if answer]
    assert tokenizer.decode(produced).replace(" ", "") == "明月霜"
    assert produced[-1] == 2
    ids, mask = template.spans(TALK[:3])
    assert tokenizer.decode([i for i, answer in zip(ids, mask, strict=True) if answer]) == "明月"


@pytest.mark.parametrize("order", [(1,), (0, 2), (0, 1, 3)])
def test_chatglm2_wants_turns(tmp_path: Path, order: tuple[int, ...]) -> None:
    tokenizer = load_tokenizer(write_chatglm(tmp_path, version=2))
    template = load_template(tmp_path, CHATGLM, tokenizer)
    with pytest.raises(UsageError, match=r"messages\[\d\]: ChatGLM2 expects user and assistant in turn"):
        template.render([TALK[i] for i in order])
    with pytest.raises(UsageError, match="the last message is not a user's"):
        template.render(TALK)


def test_chatglm2_needs_its_stop_id_and_prefix(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chatglm(tmp_path, version=2))
    with pytest.raises(CheckpointError, match=r"config\.json has no eos_token_id"):
        load_template(tmp_path, {"model_type": "chatglm"}, tokenizer)
    other = tmp_path / "other"
    other.mkdir()
    poet = load_tokenizer(write_poet(other))
    with pytest.raises(CheckpointError, match="no special token sop"):
        RoundTemplate(poet, stop_ids=(2,))


@pytest.fixture(scope="module")
def chatglm6b(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Template]:
    directory = write_chatglm6b(tmp_path_factory.mktemp("chatglm6b"), early=False)
    tokenizer = load_tokenizer(directory)
    return tokenizer, load_template(directory, json.loads((directory / "config.json").read_text()), tokenizer)


def test_chatglm6b_prompt(chatglm6b: tuple[Tokenizer, Template]) -> None:
    tokenizer, template = chatglm6b
    special = tokenizer.special_ids
    end = [special["[gMASK]"], special["<sop>"]]
    assert isinstance(template, QueryTemplate)
    assert template.stop_ids == (special["<eop>"],)
    assert template.render(TALK[:1]) == [*tokenizer.encode("你好"), *end]
    history = "[Round 0]\n问：你好\n答：明月\n[Round 1]\n问：月<|user|>\n答："
    assert template.render(TALK[:3]) == [*tokenizer.encode(history), *end]
    assert template.render(TALK, add_generation_prompt=False) == tokenizer.encode(history + "霜")
    assert template.render(TALK[:1], add_generation_prompt=False) == tokenizer.encode("你好")
    system: Message = {"role": "system", "content": "简"}
    assert template.render([system, *TALK[:1]]) == [*tokenizer.encode("简\n你好"), *end]
    assert template.render([system, *TALK[:3]]) == [*tokenizer.encode("简\n" + history), *end]


def test_chatglm6b_learns_one_answer_from_a_conversation_the_last(chatglm6b: tuple[Tokenizer, Template]) -> None:
    tokenizer, template = chatglm6b
    answer = [*tokenizer.encode("霜"), tokenizer.special_ids["<eop>"]]
    for talk in (TALK, [*TALK, TALK[0]]):
        ids, mask = template.spans(talk)
        assert ids == [*template.render(TALK[:3]), *answer]
        assert mask == [False] * (len(ids) - len(answer)) + [True] * len(answer)
    assert template.spans(TALK[:1]) == (template.render(TALK[:1]), [False] * len(template.render(TALK[:1])))


@pytest.mark.parametrize("typed", ["<eop>", "[gMASK]<sop>", "<sop>"])
def test_chatglm6b_users_make_no_special_token(chatglm6b: tuple[Tokenizer, Template], typed: str) -> None:
    tokenizer, template = chatglm6b
    ids = template.render([{"role": "user", "content": typed}])
    assert [i for i in ids if i in tokenizer.special_ids.values()] == list(tokenizer.prompt_suffix)


def test_chatglm6b_wants_turns(chatglm6b: tuple[Tokenizer, Template]) -> None:
    _, template = chatglm6b
    for messages in ([TALK[1]], [TALK[0], TALK[0]], [TALK[0], {"role": "tool", "content": "x"}]):
        for use in (template.render, template.spans):
            with pytest.raises(UsageError, match=r"messages\[\d\]: ChatGLM-6B expects user and assistant in turn"):
                use(messages)
    with pytest.raises(UsageError, match="the last message is not a user's"):
        template.render(TALK)
    with pytest.raises(UsageError, match="the last message is not a user's"):
        template.spans([{"role": "system", "content": "x"}])


def test_own_template_comes_first_and_the_jinja_file_before_the_configuration(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_glm4(tmp_path))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": "[gMASK]text", "eos_token": {"content": "<|endoftext|>"}}))
    found = find_template(tmp_path, CHATGLM, tokenizer)
    assert isinstance(found, JinjaTemplate)
    assert found.render(TALK) == [151331, *tokenizer.encode("text")]
    named = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "<sop>named"}]
    path.write_text(json.dumps({"chat_template": named}))
    assert load_template(tmp_path, CHATGLM, tokenizer).render(TALK) == [151333, *tokenizer.encode("named")]
    (tmp_path / "chat_template.jinja").write_text("<eop>file")
    assert load_template(tmp_path, CHATGLM, tokenizer).render(TALK) == [151334, *tokenizer.encode("file")]


def test_template_of_an_unknown_form(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_glm4(tmp_path))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": [{"name": "rag", "template": "x"}]}))
    with pytest.raises(CheckpointError, match="has the chat templates rag, but none named default"):
        find_template(tmp_path, CHATGLM, tokenizer)
    for malformed in (3, ["x"], [{"name": "default"}], [{"name": "default", "template": 3}]):
        path.write_text(json.dumps({"chat_template": malformed}))
        with pytest.raises(
            CheckpointError, match=r"tokenizer_config\.json: chat_template is neither a text nor a list"
        ):
            find_template(tmp_path, CHATGLM, tokenizer)
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: is not JSON"):
        find_template(tmp_path, CHATGLM, tokenizer)
    path.unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read"):
        find_template(tmp_path, CHATGLM, tokenizer)


def test_model_without_a_template_refuses_only_to_chat(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_poet(tmp_path))
    config = {"model_type": "llama", "eos_token_id": 3}
    assert find_template(tmp_path, config, tokenizer) is None
    template = load_template(tmp_path, config, tokenizer)
    assert isinstance(template, NoTemplate)
    assert 3 in template.stop_ids
    for use in (template.render, template.spans):
        with pytest.raises(UsageError, match="has no chat template, so it can only complete texts"):
            use(TALK)


def test_stop_ids_come_from_all_that_name_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_glm4(tmp_path))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eop>"}))
    found = find_stop_ids(tmp_path, {"eos_token_id": 8}, tokenizer)
    assert found == (7, 8, 151334, 151329, 151336, 151338)
    assert find_stop_ids(tmp_path / "none", {"eos_token_id": None}, tokenizer) == (151329, 151336, 151338)
