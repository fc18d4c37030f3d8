"""Converts request bodies to `SamplingParams`: sampling, stop conditions and grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from warpbus.engine import Grammar, SamplingParams, Thinking
from warpbus.errors import ContextLengthError, UsageError
from warpbus.server.options import ServerOptions
from warpbus.server.request_error import RequestError
from warpbus.server.schema import MOST_CHOICES, Generating

_SEEDS = 2**63


def answers_of(body: Generating, prompts: int, options: ServerOptions) -> int:
    """The number of answers per prompt. RequestError if it is more than the server allows."""
    wanted = body.n or 1
    if wanted > options.max_n:
        raise RequestError(400, f"n is {wanted}: this server gives at most {options.max_n} answers", param="n")
    if wanted * prompts > MOST_CHOICES:
        raise RequestError(
            400, f"n is {wanted} for {prompts} prompts: ask for at most {MOST_CHOICES} answers", param="n"
        )
    return wanted


def truncated(prompt: list[int], body: Generating, context: int, wanted: int | None, *, kept: int = 0) -> list[int]:
    """The end of a prompt, as long as `truncate_prompt_tokens` says; -1 leaves room for the answer, at least one token.

    Args:
        wanted: the most tokens of the answer; None is all that there is room for.
        kept: so many tokens at the beginning are kept and count, if there is room for others: those that the tokenizer
            puts before a text.

    Raises:
        RequestError: nothing would be left.
    """
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt
    if most < 0:
        most = context - (wanted or 1)
    if most < 1:
        raise RequestError(
            400,
            "truncate_prompt_tokens: no token of the prompt is left; give 1 or more",
            param="truncate_prompt_tokens",
        )
    if len(prompt) <= most or most <= kept:
        return prompt[-most:]
    return prompt[:kept] + prompt[kept - most :]


def room(prompt: list[int], context: int) -> int:
    """The most tokens of an answer. ContextLengthError if the prompt leaves no room."""
    if len(prompt) >= context:
        raise ContextLengthError(
            f"the prompt has {len(prompt):,} tokens and is longer than the model's context length, {context:,} "
            "with the answer: shorten it"
        )
    return context - len(prompt)


def sampling_params(
    body: Generating,
    *,
    wanted: int | None,
    space: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    options: ServerOptions,
    defaults: Mapping[str, float],
    grammar: Grammar | None,
    thinking: Thinking | None = None,
    continues_text: bool = False,
) -> SamplingParams:
    """The parameters of a request's first answer.

    Args:
        body: the request.
        wanted: the most tokens that it asks for; None is all that there is room for.
        space: the room that its prompt leaves.
        logprobs, prompt_logprobs: as in `SamplingParams`.
        options: of the server.
        defaults: the sampling parameters that the model recommends.
        grammar: that the answer has to follow.
        thinking, continues_text: as in `SamplingParams`.

    Raises:
        RequestError, UsageError: a value is out of range.
    """
    limit = options.max_tokens
    if wanted is not None and limit is not None and wanted > limit:
        raise RequestError(400, f"max_tokens is {wanted}: this server allows {limit}", param="max_tokens")
    if wanted is not None and wanted > space:
        raise RequestError(
            400,
            f"max_tokens or max_completion_tokens is too large: {wanted:,}, but the prompt leaves {space:,} tokens of "
            "the model's context; give at most those, or leave it out",
            param="max_tokens",
        )
    most = min(space, limit or space) if wanted is None else wanted
    given: dict[str, Any] = dict(defaults)
    given |= {
        name: value
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "min_tokens",
            "ignore_eos",
            "include_stop_str_in_output",
            "priority",
        )
        if (value := getattr(body, name)) is not None
    }
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)
    if body.seed is not None:
        given["seed"] = body.seed % _SEEDS
    if body.stop is not None:
        given["stop"] = tuple([body.stop] if isinstance(body.stop, str) else body.stop)
    if body.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias is not None:
        given["logit_bias"] = _biases(body.logit_bias)
    return SamplingParams(
        max_tokens=most,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        thinking=thinking,
        continues_text=continues_text,
        **given,
    )


def for_answer(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of a further answer to the same prompt: its seed is incremented, so that it differs."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + index) % _SEEDS)


def grammar_of(body: Generating, options: ServerOptions) -> Grammar | None:
    """The grammar of a body, from any of its fields. RequestError if there are several, or it is too long."""
    found: list[tuple[str, Grammar]] = []
    form = body.response_format
    if form is not None and form.type == "json_object":
        schema = form.schema_
        found.append(("response_format", Grammar("json_object") if schema is None else _schema(schema)))
    elif form is not None and form.json_schema is not None:
        schema = form.json_schema.schema_
        found.append(("response_format", Grammar("json_object") if schema is None else _schema(schema)))
    elif form is not None and form.type == "structural_tag":
        parts = form.model_dump(include={"format", "structures", "triggers"}, exclude_none=True)
        found.append(("response_format", _tag(parts)))
    for name in ("guided_json", "json_schema"):
        if (given := getattr(body, name)) is not None:
            found.append((name, _schema(given)))
    for name in ("guided_regex", "regex"):
        if (text := getattr(body, name)) is not None:
            found.append((name, Grammar("regex", text)))
    if body.guided_choice is not None:
        found.append(("guided_choice", _choice(body.guided_choice)))
    for name in ("guided_grammar", "ebnf", "grammar"):
        if (text := getattr(body, name)) is not None:
            found.append((name, Grammar("ebnf", text)))
    if body.structural_tag is not None:
        found.append(("structural_tag", _tag(body.structural_tag)))
    outputs = body.structured_outputs
    if outputs is not None:
        if outputs.json_ is not None:
            found.append(("structured_outputs", _schema(outputs.json_)))
        if outputs.json_object:
            found.append(("structured_outputs", Grammar("json_object")))
        if outputs.regex is not None:
            found.append(("structured_outputs", Grammar("regex", outputs.regex)))
        if outputs.choice is not None:
            found.append(("structured_outputs", _choice(outputs.choice)))
        if outputs.grammar is not None:
            found.append(("structured_outputs", Grammar("ebnf", outputs.grammar)))
        if outputs.structural_tag is not None:
            found.append(("structured_outputs", _tag(outputs.structural_tag)))
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(dict.fromkeys(name for name, _ in found))
        raise RequestError(400, f"{names}: an answer can follow one grammar only; give one", param=found[1][0])
    name, grammar = found[0]
    check_size(name, grammar.text, options)
    return grammar


def check_size(name: str, text: str, options: ServerOptions) -> None:
    """RequestError if a schema or grammar is longer than the server allows."""
    if len(text) > options.max_schema_bytes:
        raise RequestError(
            400, f"{name} has {len(text):,} characters: this server takes {options.max_schema_bytes:,}", param=name
        )


def _schema(schema: dict[str, Any] | str) -> Grammar:
    return Grammar("json_schema", _json(schema))


def _tag(tag: dict[str, Any] | str) -> Grammar:
    return Grammar("structural_tag", _json(tag))


def _json(value: dict[str, Any] | str) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _choice(texts: list[str]) -> Grammar:
    if not texts:
        raise UsageError("a list of choices is empty: give at least one text")
    return Grammar("choice", json.dumps(texts, ensure_ascii=False))


def _biases(given: dict[str, float]) -> dict[int, float]:
    # Unicode digits and long numbers are not token ids.
    strange = [key for key in given if not (key.isascii() and key.isdecimal() and len(key) < 12)]
    if strange:
        raise RequestError(400, f"logit_bias: {strange[0][:40]!r} is no token id", param="logit_bias")
    return {int(key): bias for key, bias in given.items()}
