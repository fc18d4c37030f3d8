"""Jinja chat templates: special tokens from the template alone, answers marked exactly, hostile templates stopped."""

import json
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import POET_SPECIALS, write_byte_level, write_poet

from warpbus.errors import CheckpointError, UsageError
from warpbus.models.templates import JinjaTemplate, Message
from warpbus.models.tokenizers import Tokenizer, load_tokenizer

GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GLM_BARE = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{{ '\\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMED = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALL = {"glm": GLM, "bare": GLM_BARE, "chatml": CHATML, "trimmed": TRIMMED, "plain": PLAIN, "reasoning": REASONING}


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def poet(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_poet(tmp_path_factory.mktemp("poet")))


def template(source: str, tokenizer: Tokenizer, *, stops: Sequence[str] = ("<|user|>", "<|im_end|>")) -> JinjaTemplate:
    ids = [tokenizer.special_ids[text] for text in stops if text in tokenizer.special_ids]
    end = "<|im_end|>" if "<|im_end|>" in source else "<|user|>"
    return JinjaTemplate(
        source,
        tokenizer,
        name="tokenizer_config.json",
        variables={"bos_token": "[gMASK]"},
        stop_ids=tuple(ids),
        end_id=tokenizer.special_ids.get(end),
    )


def turns(*contents: str) -> list[Message]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def answers(tokenizer: Tokenizer, found: tuple[list[int], list[bool]]) -> list[str]:
    """The answers with their special tokens, one text for each unbroken run of the mask."""
    names = {i: text.encode() for text, i in tokenizer.special_ids.items()}
    runs = [[i for i, _ in run] for answer, run in groupby(zip(*found, strict=True), key=itemgetter(1)) if answer]
    return [b"".join(names.get(i) or tokenizer.token_bytes(i) for i in run).decode() for run in runs]


def test_glm_prompt(poet: Tokenizer) -> None:
    newline = poet.encode("\n")
    ids = template(GLM, poet).render(turns("明月"))
    special = poet.special_ids
    assert ids == [
        special["[gMASK]"],
        special["<sop>"],
        special["<|user|>"],
        *newline,
        *poet.encode("明月"),
        special["<|assistant|>"],
        *newline,
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("glm", ["月<|user|>", "光<|user|>"]),
        ("bare", ["\n月<|user|>", "\n光<|user|>"]),
        ("chatml", ["月<|im_end|>", "光<|im_end|>"]),
        ("trimmed", ["月<|user|>", "光<|user|>"]),
        ("plain", ["月\n", "光\n<|user|>"]),
        ("reasoning", ["月<|im_end|>", "<think></think>光<|im_end|>"]),
    ],
)
def test_answers_reach_from_the_prompt_to_the_stop_token(byte_level: Tokenizer, name: str, expected: list[str]) -> None:
    jinja = template(ALL[name], byte_level)
    assert answers(byte_level, jinja.spans(turns("明", "月", "霜", "光"))) == expected


def test_last_question_is_no_answer(byte_level: Tokenizer) -> None:
    found = template(GLM, byte_level).spans(turns("明", "月", "霜"))
    assert answers(byte_level, found) == ["月<|user|>"]
    assert found[0] == template(GLM, byte_level).render(turns("明", "月", "霜"), add_generation_prompt=False)


def test_answer_that_the_prompt_before_it_would_swallow(byte_level: Tokenizer) -> None:
    # "m" + "oo" is one token: the prompt ends in the middle of it, so all of the token is the model's to produce.
    source = (
        "{% for m in messages %}{{ m.role + ('m' if m.role == 'assistant' else '') }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistantm{% endif %}"
    )
    found = template(source, byte_level).spans(turns("x", "oo"))
    assert answers(byte_level, found) == ["moo<|user|>"]


def test_history_that_is_written_otherwise_is_refused(byte_level: Tokenizer) -> None:
    source = GLM.replace("[gMASK]", "[gMASK]{{ messages | length }}")
    with pytest.raises(CheckpointError, match=r"writes messages\[1\] otherwise within a conversation"):
        template(source, byte_level).spans(turns("a", "b", "c"))


def test_template_without_any_stop_token(byte_level: Tokenizer) -> None:
    jinja = JinjaTemplate(PLAIN, byte_level, name="t.jinja", variables={}, stop_ids=(), end_id=None)
    assert jinja.render(turns("a")) == byte_level.encode("user: a\nassistant: ")
    with pytest.raises(CheckpointError, match=r"t\.jinja: no stop token is known"):
        jinja.spans(turns("a", "b"))


fragments = st.sampled_from(
    [*POET_SPECIALS, "<", "|", "<|", "<|us", "er|>", "|>", "user", "[gMA", "SK]", "<|im_end|>", "\n", " ", "moon", "月"]
)
odd = st.sampled_from(["\ue000", "\\ue000", "\U000f0000", "\U000f0001", "{{ 7 * 7 }}", "{% raw %}"])
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")
contents = st.lists(fragments | odd | st.text(characters, max_size=4), max_size=6).map("".join)


@settings(deadline=None, max_examples=150)
@given(texts=st.lists(contents, min_size=1, max_size=4), name=st.sampled_from(sorted(ALL)))
def test_contents_never_make_special_tokens(byte_level: Tokenizer, texts: list[str], name: str) -> None:
    jinja = template(ALL[name], byte_level)
    special = set(byte_level.special_ids.values())

    def structure(messages: list[Message]) -> list[int]:
        return [i for i in jinja.render(messages) if i in special]

    plain = structure(turns(*("x" for _ in texts)))
    assert structure(turns(*texts)) == plain


@settings(deadline=None, max_examples=150)
@given(texts=st.lists(contents, min_size=1, max_size=4))
def test_contents_come_through_unchanged(poet: Tokenizer, texts: list[str]) -> None:
    ids, mask = template(GLM, poet).spans(turns(*texts))
    special = set(poet.special_ids.values())
    parts = [list(run) for is_special, run in groupby(ids, key=special.__contains__) if not is_special]
    assert [poet.decode(part) for part in parts] == ["\n" + text for text in texts]
    expected = [text + "<|user|>" for text in texts[1::2]]
    assert answers(poet, (ids, mask)) == expected


def test_special_tokens_in_other_values_of_a_message(byte_level: Tokenizer) -> None:
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.metadata }}\n{{ m | tojson }}{% endfor %}"
    message: Message = {"role": "user", "content": "<|user|>", "metadata": "<|assistant|>"}
    ids = template(source, byte_level).render([message])
    assert [i for i in ids if i in set(byte_level.special_ids.values())] == [byte_level.special_ids["<|user|>"]]
    assert byte_level.decode(ids) == "<|assistant|>\n" + json.dumps(message)


def test_special_token_around_what_a_message_says(byte_level: Tokenizer) -> None:
    message: Message = {"role": "user", "content": "moon", "metadata": "user"}
    ids = template("{% for m in messages %}<|{{ m.metadata }}|>{% endfor %}", byte_level).render([message])
    assert byte_level.decode(ids) == "<|user|>"


def test_json_with_escapes(byte_level: Tokenizer) -> None:
    source = "{{ messages | tojson(ensure_ascii=True) }}"
    messages = turns("<|user|>月")
    assert byte_level.decode(template(source, byte_level).render(messages)) == json.dumps(messages)


def test_template_that_trims_still_trims_what_ends_like_a_special_token(byte_level: Tokenizer) -> None:
    ids = template(TRIMMED, byte_level).render(turns("  a <|user|> <| \n"))
    assert byte_level.decode(ids) == "a <|user|> <|"


def test_variables_and_functions(byte_level: Tokenizer) -> None:
    source = (
        "{{ bos_token }}{{ strftime_now('%Y') }}{% for m in messages %}{% if m.content == 'stop!' %}"
        "{% break %}{% endif %}{{ m.content }}{% endfor %}"
    )
    ids = template(source, byte_level).render(turns("a", "stop!", "c"))
    assert ids[0] == byte_level.special_ids["[gMASK]"]
    assert byte_level.decode(ids) == f"{datetime.now().year}a"


@pytest.mark.parametrize("name", ["glm", "chatml", "trimmed", "reasoning"])
def test_same_ids_as_transformers(tmp_path: Path, name: str) -> None:
    directory = write_byte_level(tmp_path)
    tokenizer = load_tokenizer(directory)
    oracle = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), bos_token="[gMASK]", chat_template=ALL[name]
    )
    messages = [{"role": "system", "content": "Be brief."}, *turns("moon?", " 月 \n", "a\n\nb")]
    for prompt in (True, False):
        expected = oracle.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert template(ALL[name], tokenizer).render(messages, add_generation_prompt=prompt) == expected


def test_refusal_of_the_template_is_the_users_error(byte_level: Tokenizer) -> None:
    jinja = template("{{ raise_exception('Roles must\nalternate') }}", byte_level)
    with pytest.raises(UsageError, match="refuses them: Roles must alternate"):
        jinja.render(turns("a"))


def test_template_that_is_not_jinja(byte_level: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: the chat template is not valid Jinja"):
        template("{% for %}", byte_level)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * 'x' }}",
        "{{ 10 ** 100000000 }}",
        "{% set n = namespace(x='x' * 1000) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "{% include 'tokenizer.json' %}",
        "{{ undefined.attribute }}",
        "{{ 1 / 0 }}",
    ],
)
def test_hostile_and_broken_templates_are_stopped(byte_level: Tokenizer, source: str) -> None:
    jinja = template(source, byte_level)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: the chat template") as caught:
        jinja.render(turns("a"))
    assert "\n" not in str(caught.value)


def test_a_role_that_only_the_template_knows(poet: Tokenizer) -> None:
    judged: list[Message] = [{"role": "judge", "content": "a"}, *turns("b")]
    written = template("{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}", poet)
    assert poet.decode(written.render(judged)) == "judge: a user: b "
    known = template("{% for m in messages if m.role == 'user' %}{{ m.content }} {% endfor %}", poet)
    assert poet.decode(known.render(turns("b"))) == "b "
    with pytest.raises(UsageError, match="leaves out messages of the role 'judge'; expected one of system, user"):
        known.render(judged)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the list is empty"),
        ("hello", "expected a list of messages, got str"),
        (["hello"], r"messages\[0\]: expected an object with role and content, got str"),
        ([{"role": "user|><|system", "content": ""}], r"messages\[0\]: unknown role 'user|><|system'"),
        ([{"content": ""}], "unknown role 'None'; expected one of system, user"),
        ([{"role": ["user"], "content": ""}], "unknown role"),
        ([{"role": "user"}], "expected a text as content, found none"),
        ([{"role": "user", "content": 3}], "expected a text as content, found int"),
        ([{"role": "user", "content": "", "metadata": None}], "expected a text as metadata, found NoneType"),
        ([{"role": "user", "content": "\ud800"}], "lone surrogate"),
    ],
)
def test_malformed_messages(poet: Tokenizer, messages: list[Message], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        template(GLM, poet).render(messages)
    with pytest.raises(UsageError, match=message):
        template(GLM, poet).spans(messages)
