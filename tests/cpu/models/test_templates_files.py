"""Forms in which checkpoints have their tokenizer and template: prompts have the ids that transformers gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizer_files import write_byte_level, write_llama

from warpbus.errors import CheckpointError
from warpbus.models.templates import load_template
from warpbus.models.templates.tools import JsonTagTools, find_dialect
from warpbus.models.tokenizers import load_tokenizer

MESSAGES = [
    {"role": "user", "content": "moon  mo o\n 月"},
    {"role": "assistant", "content": "oo m"},
    {"role": "user", "content": " m "},
]
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
)


def assert_same_prompt(directory: Path, **tokenizer_config: Any) -> None:
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    expected = transformers.AutoTokenizer.from_pretrained(directory).apply_chat_template(MESSAGES, return_dict=False)
    template = load_template(directory, {}, load_tokenizer(directory))
    assert template.render(MESSAGES, add_generation_prompt=False) == expected
    assert template.spans(MESSAGES[:2])[0]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("nested", [False, True])
def test_metaspace_puts_a_space_where_its_scheme_says(tmp_path: Path, scheme: str, nested: bool) -> None:
    write_llama(tmp_path)
    file = tmp_path / "tokenizer.json"
    step: dict[str, Any] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    if nested:
        step = {"type": "Sequence", "pretokenizers": [step]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": None, "pre_tokenizer": step}))
    for source in (INST, INST.removeprefix("{{ bos_token }}")):
        assert_same_prompt(tmp_path, chat_template=source, bos_token="<s>", eos_token="</s>")


def test_marks_of_generation_have_no_text(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    assert_same_prompt(tmp_path, chat_template=MARKED, bos_token="<s>", eos_token="<|im_end|>")


@pytest.mark.parametrize("form", [["default", "tool_use"], ["default"], ["tool_use", "other", "default"]])
def test_conversations_with_tools_have_their_own_template(tmp_path: Path, form: list[str]) -> None:
    write_byte_level(tmp_path)
    tool = {"type": "function", "function": {"name": "moo", "description": "x", "parameters": {}}}
    calling = MARKED.replace("{{ bos_token }}", "<|system|>{% for t in tools %}{{ t.function.name }}{% endfor %}")
    sources = {"default": MARKED, "tool_use": calling, "other": "other"}
    named = [{"name": name, "template": sources[name]} for name in form]
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    oracle, template = (
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        load_template(tmp_path, {}, load_tokenizer(tmp_path)),
    )
    prompts = []
    for tools in (None, [tool]):
        expected = oracle.apply_chat_template(MESSAGES, tools=tools, return_dict=False)
        variables = {} if tools is None else {"tools": tools}
        prompts.append(template.render(MESSAGES, add_generation_prompt=False, variables=variables))
        assert prompts[-1] == expected
    assert prompts[0][0] == 259  # <s>
    assert (prompts[1][0] == 259) == ("tool_use" not in form)


@pytest.mark.parametrize("names", [("tool_use",), ("tool_use", "rag"), ("rag",), ("default", "tool_use")])
@pytest.mark.parametrize("listed", [False, True])
def test_templates_of_several_files(tmp_path: Path, names: tuple[str, ...], listed: bool) -> None:
    """What `save_pretrained` of transformers writes; files replace the templates of the configuration."""
    write_byte_level(tmp_path)
    tool = {"type": "function", "function": {"name": "moo", "description": "x", "parameters": {}}}
    sources = {"default": "d{{ messages[0].content }}", "tool_use": "t{{ tools[0].function.name }}", "rag": "r"}
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    for name in names:
        (folder / f"{name}.jinja").write_text(sources[name])
    if "default" not in names:
        (tmp_path / "chat_template.jinja").write_text(sources["default"])
    described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if listed:
        described["chat_template"] = [{"name": name, "template": "replaced"} for name in ("default", "tool_use")]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = load_template(tmp_path, {}, load_tokenizer(tmp_path))
    for tools in (None, [tool]):
        expected = oracle.apply_chat_template(MESSAGES, tools=tools, return_dict=False)
        variables = {} if tools is None else {"tools": tools}
        assert template.render(MESSAGES, add_generation_prompt=False, variables=variables) == expected


def test_a_template_of_tools_stands_beside_that_of_the_configuration(tmp_path: Path) -> None:
    """transformers refuses every conversation here, as no file has the default template."""
    tokenizer = load_tokenizer(write_byte_level(tmp_path))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0] }}")
    with pytest.raises(CheckpointError, match="has the chat templates tool_use, but none named default: expected chat"):
        load_template(tmp_path, {}, tokenizer)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "moon"}))
    template = load_template(tmp_path, {}, tokenizer)
    assert template.render(MESSAGES) == tokenizer.encode("moon")
    assert template.render(MESSAGES, variables={"tools": ["mo"]}) == tokenizer.encode("mo")


def test_a_damaged_template_of_tools_is_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_byte_level(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("plain")
    file = tmp_path / "additional_chat_templates" / "tool_use.jinja"
    file.parent.mkdir()
    for content, message in ((b"{% for", "not valid Jinja"), (b"\xff", "cannot be read")):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"additional_chat_templates/tool_use\.jinja.*{message}"):
            load_template(tmp_path, {}, tokenizer)
    file.write_text("{{ none_such.field }}")
    template = load_template(tmp_path, {}, tokenizer)
    template.render(MESSAGES)
    with pytest.raises(CheckpointError, match=r"tool_use\.jinja: the chat template failed"):
        template.render(MESSAGES, variables={"tools": [1]})


def test_the_syntax_of_calls_is_that_of_the_template_for_tools(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    calls = "{% for t in tools %}{{ t }}{% endfor %}<tool_call>name, arguments</tool_call>"
    for name, kind in (("tool_use", JsonTagTools), ("other", type(None))):
        named = [{"name": "default", "template": "plain"}, {"name": name, "template": calls}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        assert type(find_dialect(load_template(tmp_path, {}, load_tokenizer(tmp_path)))) is kind
    damaged = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{% for"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": damaged}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: the chat template is not valid Jinja"):
        load_template(tmp_path, {}, load_tokenizer(tmp_path))


def test_tokens_that_only_the_configuration_lists(tmp_path: Path) -> None:
    """One of the vocabulary, a new one, and one with text; those of tokenizer.json stay as they are."""
    write_byte_level(tmp_path)
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    listed = {
        "57": {"content": "Z", "special": True},
        "270": {"content": "<|new|>", "special": True},
        "271": {"content": "<words>", "special": False},
        "259": {"content": "<s>", "special": False},
    }
    listed = {index: flags | token for index, token in listed.items()}
    source = MARKED.replace("<|im_end|>", "<|new|>").replace("'<|im_start|>'", "'Z'")
    described = {"bos_token": "<s>", "eos_token": "<|new|>", "added_tokens_decoder": listed}
    assert_same_prompt(tmp_path, chat_template=source, **described)
    tokenizer, oracle = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Z", "<|new|>", "<s>"):
        assert tokenizer.special_ids[text] == oracle.convert_tokens_to_ids(text)
    assert tokenizer.vocab_size == len(oracle) == 272
    assert tokenizer.encode("a <words> b")[2] == oracle.convert_tokens_to_ids("<words>")
    assert tokenizer.decode(tokenizer.encode("a <words> <|new|> b")) == "a <words> <|new|> b"
    assert tokenizer.special_ids["<|new|>"] not in tokenizer.encode("<|new|>")


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_special_tokens_take_the_whitespace_beside_them(tmp_path: Path, left: bool, right: bool, listed: bool) -> None:
    write_byte_level(tmp_path)
    source = "{% for m in messages %}<|new|> \n{{ m.content }} \t<|new|>\u00a0<|new|>\x1c{{ '\n ' }}{% endfor %}"
    flags = {"lstrip": left, "rstrip": right, "single_word": False, "normalized": False, "special": True}
    token, described = {"content": "<|new|>"} | flags, {"chat_template": source, "eos_token": "<|new|>"}
    if listed:
        assert_same_prompt(tmp_path, added_tokens_decoder={"270": token}, **described)
    else:
        file = tmp_path / "tokenizer.json"
        description = json.loads(file.read_text())
        description["added_tokens"].append({"id": 270} | token)
        file.write_text(json.dumps(description))
        assert_same_prompt(tmp_path, **described)


def test_special_tokens_map_has_what_the_configuration_lacks(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    listed = {"bos_token": {"content": "<s>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(listed))
    assert_same_prompt(tmp_path, chat_template=MARKED, bos_token=None, eos_token="<|im_end|>")
