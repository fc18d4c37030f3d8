"""The tokenizer's settings in the files of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from warpbus.errors import CheckpointError
from warpbus.formats.checkpoint import read_object


def tokenizer_facts(directory: Path, class_name: str, max_length: int) -> dict[str, Any]:
    """The fields of tokenizer_config.json, for clients of a server; with the chat template, wherever it is kept.

    Args:
        directory: of the model.
        class_name: the `tokenizer_class` if the file names none.
        max_length: the `model_max_length`: what the model is served with.

    Raises:
        CheckpointError: the file is damaged.
    """
    found, jinja = read_object(directory / "tokenizer_config.json"), directory / "chat_template.jinja"
    try:
        template = jinja.read_text(encoding="utf-8") if jinja.is_file() else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{jinja}: cannot be read ({type(error).__name__}); download it again") from None
    facts = {name: _plain(value) if name.endswith("_token") else value for name, value in found.items()}
    named = facts.get("chat_template")
    if isinstance(named, list):  # several templates by name
        chosen = [each.get("template") for each in named if isinstance(each, dict) and each.get("name") == "default"]
        named = next(iter(chosen), None)
    name = facts.get("tokenizer_class")
    return {
        **facts,
        "tokenizer_class": name if isinstance(name, str) else class_name,
        "model_max_length": max_length,
        "chat_template": named if isinstance(named, str) else template,
    }


def special_texts(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, as texts or as objects with a `content`: those of tokenizer_config.json, and of
    special_tokens_map.json those that are missing there."""
    found = {key: value for key, value in tokenizer_config.items() if value is not None}
    values = read_object(directory / "special_tokens_map.json") | found
    texts = {key: _plain(value) for key, value in values.items() if key.endswith("_token")}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _plain(value: Any) -> Any:
    """The text of a special token, which may be an object with options."""
    return value.get("content") if isinstance(value, dict) else value
