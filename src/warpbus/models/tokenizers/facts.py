"""The tokenizer's settings in the files of a model."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from warpbus.errors import CheckpointError
from warpbus.formats.checkpoint import read_object
from warpbus.formats.companions import ADDITIONAL_TEMPLATES

DEFAULT = "default"
"""The name of the chat template that is used if no other is asked for."""
TOOL_USE = "tool_use"
"""The name of that for conversations with tools."""


class ChatTemplate(NamedTuple):
    """The source of a chat template, and the file that has it."""

    source: str
    path: Path


def tokenizer_facts(directory: Path, class_name: str, max_length: int) -> dict[str, Any]:
    """The fields of tokenizer_config.json, for clients of a server; with the chat template, wherever it is kept.

    Args:
        directory: of the model.
        class_name: the `tokenizer_class` if the file names none.
        max_length: the `model_max_length`: what the model is served with.

    Raises:
        CheckpointError: the file is damaged.
    """
    found = read_object(directory / "tokenizer_config.json")
    facts = {name: _plain(value) if name.endswith("_token") else value for name, value in found.items()}
    template = chat_templates(directory, found).get(DEFAULT)
    name = facts.get("tokenizer_class")
    return {
        **facts,
        "tokenizer_class": name if isinstance(name, str) else class_name,
        "model_max_length": max_length,
        "chat_template": None if template is None else template.source,
    }


def chat_templates(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, ChatTemplate]:
    """The chat templates of a model by name, as `transformers` reads them; one without a name is `DEFAULT`.

    They are in `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, or in tokenizer_config.json as a text
    or as a list of names and texts. Files replace what tokenizer_config.json has, unless none of them is `DEFAULT`.

    Args:
        directory: of the model.
        tokenizer_config: the content of its tokenizer_config.json.

    Raises:
        CheckpointError: a file is damaged, or there are templates, but none is `DEFAULT`.
    """
    files = {path.stem: path for path in sorted((directory / ADDITIONAL_TEMPLATES).glob("*.jinja"))}
    single = directory / "chat_template.jinja"
    if single.exists():
        files.setdefault(DEFAULT, single)
    found = {name: ChatTemplate(_read_text(path), path) for name, path in files.items()}
    if DEFAULT not in found:
        path = directory / "tokenizer_config.json"
        found = {name: ChatTemplate(text, path) for name, text in _listed(path, tokenizer_config).items()} | found
    if found and DEFAULT not in found:
        raise CheckpointError(
            f"{directory}: has the chat templates {', '.join(sorted(found))}, but none named {DEFAULT}: expected "
            "chat_template.jinja; restore the files from the model's source"
        )
    return found


def _listed(path: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """The templates in tokenizer_config.json."""
    found = tokenizer_config.get("chat_template")
    if found is None:
        return {}
    named = [{"name": DEFAULT, "template": found}] if isinstance(found, str) else found
    if isinstance(named, list):
        texts: dict[Any, Any] = {each.get("name"): each.get("template") for each in named if isinstance(each, dict)}
        if all(isinstance(each, dict) for each in named) and all(
            isinstance(text, str) for text in chain(*texts.items())
        ):
            return texts
    raise CheckpointError(
        f"{path}: chat_template is neither a text nor a list of objects with the texts name and template; restore the "
        "file from the model's source"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); restore it from the model's source") from None


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
