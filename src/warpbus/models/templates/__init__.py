"""Conversations to token ids, in the form that each family of models was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warpbus.errors import UsageError
from warpbus.formats.checkpoint import read_object
from warpbus.models.templates.base import Message, Template, Variables
from warpbus.models.templates.chatglm import QueryTemplate, RoleTokenTemplate, RoundTemplate
from warpbus.models.templates.jinja import JinjaTemplate
from warpbus.models.tokenizers import Tokenizer
from warpbus.models.tokenizers.facts import DEFAULT, TOOL_USE, chat_templates, special_texts

__all__ = [
    "JinjaTemplate",
    "Message",
    "NoTemplate",
    "QueryTemplate",
    "RoleTokenTemplate",
    "RoundTemplate",
    "Template",
    "find_stop_ids",
    "find_template",
    "find_text_end",
    "load_template",
]

# Where a GLM's answer ends besides its configured end: the next role takes over, or the text is over.
_GLM_STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")


class NoTemplate:
    """Stands in for the template of a model that was made to complete texts: it refuses every conversation."""

    def __init__(self, directory: Path, stop_ids: tuple[int, ...]) -> None:
        self.stop_ids = stop_ids
        self._directory = directory

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Variables | None = None,
    ) -> list[int]:
        """Raises UsageError."""
        raise self._error()

    def spans(self, messages: Sequence[Message], *, variables: Variables | None = None) -> tuple[list[int], list[bool]]:
        """Raises UsageError."""
        raise self._error()

    def _error(self) -> UsageError:
        return UsageError(
            f"{self._directory}: the model has no chat template, so it can only complete texts; give a text instead of "
            "messages, or add chat_template.jinja"
        )


def load_template(checkpoint_dir: Path, config: dict[str, Any], tokenizer: Tokenizer) -> Template:
    """`find_template`, or for a model without a template one that raises UsageError when it is asked to chat."""
    found = find_template(checkpoint_dir, config, tokenizer)
    return found or NoTemplate(Path(checkpoint_dir), find_stop_ids(checkpoint_dir, config, tokenizer))


def find_template(checkpoint_dir: Path, config: dict[str, Any], tokenizer: Tokenizer) -> Template | None:
    """The template of a model directory: the one it brings, else that of its family, else None.

    Looked for are the files of `chat_templates`, of which "default" is taken, and "tool_use" for conversations with
    tools; then, for `model_type` chatglm, the special tokens of the vocabulary.

    Raises CheckpointError if a file is damaged or the template is not valid.
    """
    directory = Path(checkpoint_dir)
    tokenizer_config = read_object(directory / "tokenizer_config.json")
    variables = special_texts(directory, tokenizer_config)
    stop_ids = find_stop_ids(directory, config, tokenizer)
    templates = chat_templates(directory, tokenizer_config)
    if DEFAULT in templates:
        return JinjaTemplate(
            templates[DEFAULT].source,
            tokenizer,
            name=str(templates[DEFAULT].path),
            variables=variables,
            stop_ids=stop_ids,
            end_id=_end_id(tokenizer, variables.get("eos_token"), stop_ids),
            call_end_id=tokenizer.special_ids.get("<|observation|>") if _is_glm(tokenizer) else None,
            tools=templates.get(TOOL_USE),
        )
    if config.get("model_type") != "chatglm":
        return None
    if tokenizer.prompt_suffix:
        return QueryTemplate(tokenizer, stop_ids=stop_ids)
    specials = tokenizer.special_ids
    if "<|user|>" in specials:
        return RoleTokenTemplate(tokenizer, sop="<sop>" if "<sop>" in specials else "sop", stop_ids=stop_ids)
    return RoundTemplate(tokenizer, stop_ids=stop_ids)


def find_stop_ids(checkpoint_dir: Path, config: dict[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids at which the model's texts end: `eos_token_id` of `generation_config.json` and of the config, the
    tokenizer's `eos_token`, and for a GLM with role tokens those that follow an answer."""
    directory = Path(checkpoint_dir)
    found: list[int] = []
    for values in (read_object(directory / "generation_config.json"), config):
        eos = values.get("eos_token_id")
        found += [i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)]
    specials = tokenizer.special_ids
    texts = [special_texts(directory, read_object(directory / "tokenizer_config.json")).get("eos_token", "")]
    if _is_glm(tokenizer):
        texts += _GLM_STOPS
    found += [specials[text] for text in texts if text in specials]
    return tuple(dict.fromkeys(found))


def find_text_end(checkpoint_dir: Path, config: dict[str, Any], tokenizer: Tokenizer) -> int | None:
    """The token that ends a text: the tokenizer's `eos_token`, else the first stop token; None if there is none.

    For ChatGLM-6B it is <eop>, which ends all that the model says.
    """
    directory, specials = Path(checkpoint_dir), tokenizer.special_ids
    if tokenizer.prompt_suffix and "<eop>" in specials:
        return specials["<eop>"]
    eos = special_texts(directory, read_object(directory / "tokenizer_config.json")).get("eos_token")
    if eos in specials:
        return specials[eos]
    return next(iter(find_stop_ids(directory, config, tokenizer)), None)


def _is_glm(tokenizer: Tokenizer) -> bool:
    return "[gMASK]" in tokenizer.special_ids and "<|user|>" in tokenizer.special_ids


def _end_id(tokenizer: Tokenizer, eos: str | None, stop_ids: tuple[int, ...]) -> int | None:
    """The end of a last answer if the template puts nothing there. GLM-4 learned to hand over to the user."""
    if _is_glm(tokenizer):
        return tokenizer.special_ids["<|user|>"]
    if eos in tokenizer.special_ids:
        return tokenizer.special_ids[eos]
    return stop_ids[0] if stop_ids else None
