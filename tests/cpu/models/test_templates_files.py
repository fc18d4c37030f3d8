"""Forms in which checkpoints have their tokenizer and template: prompts have the ids that transformers gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizer_files import write_byte_level, write_llama

from warpbus.models.templates import load_template
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


def test_special_tokens_map_has_what_the_configuration_lacks(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    listed = {"bos_token": {"content": "<s>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(listed))
    assert_same_prompt(tmp_path, chat_template=MARKED, bos_token=None, eos_token="<|im_end|>")
