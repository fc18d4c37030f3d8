"""The facts of a tokenizer's files."""

import json

import pytest

from warpbus.errors import CheckpointError
from warpbus.models.tokenizers.facts import tokenizer_facts


def facts(directory, config):
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tokenizer_facts(directory, "Named", 512)


def test_the_fields_of_the_file_are_reported(tmp_path):
    found = facts(
        tmp_path,
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "bos_token": {"content": "<s>", "lstrip": False},
            "model_max_length": 1e30,
            "chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}],
            "errors": "replace",
        },
    )
    assert found == {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": "<s>",
        "model_max_length": 512,
        "chat_template": "d",
        "errors": "replace",
    }


def test_a_template_of_its_own_file_is_reported(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert tokenizer_facts(tmp_path, "Named", 512) == {
        "tokenizer_class": "Named",
        "model_max_length": 512,
        "chat_template": "{{ messages }}",
    }


def test_the_template_of_a_file_replaces_that_of_the_configuration(tmp_path):
    """The model is served with it: see test_templates_files.py."""
    (tmp_path / "chat_template.jinja").write_text("of the file", encoding="utf-8")
    assert facts(tmp_path, {"chat_template": "of the configuration"})["chat_template"] == "of the file"


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        tokenizer_facts(tmp_path, "Named", 512)
