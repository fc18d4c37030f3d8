"""The special tokens around a text, of every kind of tokenizer: those that `transformers` puts there."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_files import (
    TEXT,
    train_llama_sentencepiece,
    write_byte_level,
    write_chatglm,
    write_glm4,
    write_llama,
    write_poet,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from warpbus.errors import CheckpointError
from warpbus.formats.hub import find_model
from warpbus.models.templates import load_template
from warpbus.models.tokenizers import Tokenizer, encode_prompt, encode_text, load_tokenizer

TEXTS = ("moon", " moo m", "月 is bright:\n\t1 2", "<s> typed", "")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


def around(ids: dict[str, int], before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> dict[str, Any]:
    """The post-processor that puts special tokens around a text."""
    begin, end = ([{"SpecialToken": {"id": text, "type_id": 0}} for text in texts] for texts in (before, after))
    single = [*begin, {"Sequence": {"id": "A", "type_id": 0}}, *end]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in (*before, *after)},
    }


def with_post_processor(directory: Path, post_processor: object) -> Tokenizer:
    file = directory / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"post_processor": post_processor}))
    return load_tokenizer(directory)


def oracle(directory: Path) -> PreTrainedTokenizerFast:
    # Special tokens that are typed are text here, too.
    return PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), split_special_tokens=True)


@pytest.mark.parametrize("write", [write_byte_level, write_llama])
@pytest.mark.parametrize(
    ("before", "after", "nested"),
    [
        ((), (), False),
        (("<s>",), (), False),
        (("<s>",), (), True),
        (("<s>", "</s>"), (), True),
        ((), ("</s>",), True),
        (("</s>", "<s>"), ("</s>",), False),
    ],
)
def test_a_text_gets_what_the_post_processor_says(
    tmp_path: Path, write: Any, before: tuple[str, ...], after: tuple[str, ...], nested: bool
) -> None:
    ids = load_tokenizer(write(tmp_path)).special_ids
    ids = {"<s>": ids["<s>"], "</s>": ids.get("</s>", ids["<|endoftext|>" if write is write_byte_level else "</s>"])}
    template = around(ids, before, after)
    tokenizer = with_post_processor(
        tmp_path, {"type": "Sequence", "processors": [BYTE_LEVEL, template]} if nested else template
    )
    theirs = oracle(tmp_path)
    for text in TEXTS:
        assert encode_text(tokenizer, text) == theirs(text).input_ids
        assert encode_prompt(tokenizer, text) == [ids[each] for each in before] + tokenizer.encode(text)
        bare = theirs(text, add_special_tokens=False).input_ids
        assert encode_prompt(tokenizer, text, add_special_tokens=False) == tokenizer.encode(text) == bare
        assert tokenizer.decode(encode_prompt(tokenizer, text)) == text


@pytest.mark.parametrize("kind", ["RobertaProcessing", "BertProcessing"])
def test_the_older_forms_of_a_template(tmp_path: Path, kind: str) -> None:
    ids = load_tokenizer(write_byte_level(tmp_path)).special_ids
    first, last = ids["<s>"], ids["<|endoftext|>"]
    fields = {"type": kind, "sep": ["<|endoftext|>", last], "cls": ["<s>", first]}
    if kind == "RobertaProcessing":
        fields |= {"trim_offsets": True, "add_prefix_space": False}
    tokenizer = with_post_processor(tmp_path, fields)
    assert encode_text(tokenizer, "moon") == oracle(tmp_path)("moon").input_ids
    assert (tokenizer.prompt_prefix, tokenizer.text_suffix) == ((first,), (last,))


@pytest.mark.parametrize("post_processor", [None, BYTE_LEVEL])
def test_byte_level_alone_adds_nothing(tmp_path: Path, post_processor: object) -> None:
    write_byte_level(tmp_path)
    tokenizer = with_post_processor(tmp_path, post_processor)
    assert (tokenizer.prompt_prefix, tokenizer.text_suffix) == ((), ())
    assert encode_prompt(tokenizer, "moon") == oracle(tmp_path)("moon").input_ids


@given(text=st.text(alphabet="mon 月\n<s>", max_size=20))
def test_any_text_stands_behind_one_token(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    directory = tmp_path_factory.mktemp("tokenizer")
    first = load_tokenizer(write_byte_level(directory)).special_ids["<s>"]
    tokenizer = with_post_processor(directory, around({"<s>": first}, ("<s>",)))
    ids = encode_prompt(tokenizer, text)
    assert ids == oracle(directory)(text).input_ids
    assert ids.count(first) == 1
    assert tokenizer.decode(ids) == text


def test_a_space_of_the_text_alone_stays_behind_the_token(tmp_path: Path) -> None:
    """Metaspace with the scheme "first" puts a space before the text; a token of the post-processor changes nothing."""
    ids = load_tokenizer(write_llama(tmp_path)).special_ids
    file = tmp_path / "tokenizer.json"
    description = json.loads(file.read_text(encoding="utf-8"))
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    file.write_text(json.dumps(description | {"normalizer": None, "pre_tokenizer": metaspace}))
    tokenizer = with_post_processor(tmp_path, around(ids, ("<s>",)))
    for text in TEXTS:
        assert encode_prompt(tokenizer, text) == oracle(tmp_path)(text).input_ids


def test_a_damaged_post_processor_is_refused(tmp_path: Path) -> None:
    template = around({"<s>": 1}, ("<s>",))
    write_byte_level(tmp_path)
    for damaged in (template | {"special_tokens": {}}, template | {"single": template["single"][:1]}):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: post_processor: expected a template"):
            with_post_processor(tmp_path, damaged)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer\.json, or damaged"):
        with_post_processor(tmp_path, template | {"single": 3})


NAMED = {"bos_token": {"content": "<s>", "__type": "AddedToken", "special": True}}


@pytest.mark.parametrize(
    "fields",
    [
        {"add_bos_token": None},
        {"add_bos_token": False, "bos_token": "<s>"},
        {"add_bos_token": True},
        {"add_bos_token": True} | NAMED,
    ],
)
def test_a_sentencepiece_model_of_llama_does_as_its_configuration_says(tmp_path: Path, fields: dict[str, Any]) -> None:
    train_llama_sentencepiece(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"} | fields))
    tokenizer, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.prompt_prefix == ((1,) if fields.get("add_bos_token") else ())
    for text in ("moon is bright", "明月光", TEXT):
        assert encode_prompt(tokenizer, text) == theirs(text).input_ids
        assert tokenizer.decode(encode_prompt(tokenizer, text)) == text


@pytest.mark.parametrize(
    ("model_type", "fields", "begins"),
    [
        ("llama", None, True),
        ("llama", {"tokenizer_class": "LlamaTokenizer"}, True),
        ("llama", {"tokenizer_class": "LLaMATokenizer", "bos_token": "", "eos_token": ""}, True),
        ("mistral", {"bos_token": "<s>"}, True),
        ("qwen2", {"tokenizer_class": "LlamaTokenizerFast"}, True),
        ("llama", {"tokenizer_class": "InternLM2Tokenizer"}, False),
        ("qwen2", {"bos_token": "<s>"}, False),
    ],
)
def test_a_sentencepiece_model_of_llama_has_a_beginning_by_default(
    tmp_path: Path, model_type: str, fields: dict[str, Any] | None, begins: bool
) -> None:
    """As LlamaTokenizer of transformers 4, and as that of transformers 5 is documented, but does not do."""
    train_llama_sentencepiece(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    if fields is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    assert encode_prompt(load_tokenizer(tmp_path), "moon") == [*([1] if begins else []), 311]


def test_a_vocabulary_without_a_beginning_gets_none_by_default(tmp_path: Path) -> None:
    write_poet(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert load_tokenizer(tmp_path).prompt_prefix == ()


def test_a_token_before_texts_that_the_vocabulary_lacks_is_refused(tmp_path: Path) -> None:
    write_poet(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "bos_token": "<start>"}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: a token before texts is missing: .* '<start>'"):
        load_tokenizer(tmp_path)


def test_special_tokens_map_names_the_token_that_the_configuration_lacks(tmp_path: Path) -> None:
    write_poet(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<sop>"}))
    assert load_tokenizer(tmp_path).prompt_prefix == (2,)


@pytest.mark.parametrize("version", [2, 3])
def test_texts_of_chatglm2_and_chatglm3_begin_with_gmask_and_sop(tmp_path: Path, version: int) -> None:
    """As `build_inputs_with_special_tokens` of their published tokenizers."""
    tokenizer = load_tokenizer(write_chatglm(tmp_path, version=version))
    specials = tokenizer.special_ids
    assert encode_prompt(tokenizer, "你好") == [specials["[gMASK]"], specials["sop"], *tokenizer.encode("你好")]
    # The template writes them, too: only once.
    template = load_template(tmp_path, json.loads((tmp_path / "config.json").read_text()), tokenizer)
    ids = template.render([{"role": "user", "content": "你好"}])
    assert ids.count(specials["[gMASK]"]) == ids.count(specials["sop"]) == 1


def test_texts_of_glm4_begin_with_gmask_and_sop(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_glm4(tmp_path))
    assert encode_prompt(tokenizer, "你好") == [151331, 151333, 260]
    listed = {"300": {"content": "<|user|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    assert encode_prompt(load_tokenizer(tmp_path), "你好") == [260]


def test_texts_of_glm_poet_get_nothing(tmp_path: Path) -> None:
    for directory in (write_poet(tmp_path), find_model("demo")):
        tokenizer = load_tokenizer(directory)
        assert encode_prompt(tokenizer, "明月") == tokenizer.encode("明月")


def test_a_conversation_begins_as_its_template_says(tmp_path: Path) -> None:
    """The template of Llama 3 writes `bos_token` itself; the tokenizer adds none."""
    first = load_tokenizer(write_byte_level(tmp_path)).special_ids["<s>"]
    tokenizer = with_post_processor(tmp_path, around({"<s>": first}, ("<s>",)))
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": template}))
    ids = load_template(tmp_path, {"model_type": "llama"}, tokenizer).render([{"role": "user", "content": "moon"}])
    assert ids == encode_prompt(tokenizer, "moon") == [first, *tokenizer.encode("moon")]
