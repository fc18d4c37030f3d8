"""Chat templates that checkpoints bring along, written in Jinja, rendered in a sandbox.

A template writes special tokens as text, and so might a user. To keep the two apart, every special token's text in a
message is broken by a private-use character before rendering; what is then found as a special token came from the
template. The character is taken out again from the ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from warpbus.errors import CheckpointError, UsageError, WarpbusError
from warpbus.models.templates.base import (
    ROLES,
    Message,
    SpecialToken,
    Text,
    Variables,
    check_continued,
    check_messages,
    prompt_ids,
    prompt_spans,
)
from warpbus.models.tokenizers import Tokenizer
from warpbus.models.tokenizers.facts import ChatTemplate

# Longest text that a template may make beyond eight times what it was given, in characters.
_LIMIT = 1_000_000
_PRIVATE_USE = (range(0xE000, 0xF900), range(0x100000, 0x10FFFE))
_MOST_DEPTH = 128  # of tools and variables, which are handled recursively

# Variables that a template gets from elsewhere than from `variables`.
_RESERVED = frozenset(("messages", "add_generation_prompt", "continue_final_message"))

_Views = list[dict[str, Any]]


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which in addition makes no huge values by operators."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (isinstance(right, (int, float)) and abs(right) <= 64):
            raise jinja2.exceptions.SecurityError("the exponent is too large")
        if operator == "*":
            for sized, factor in ((left, right), (right, left)):
                if hasattr(sized, "__len__") and isinstance(factor, int) and len(sized) * factor > _LIMIT:
                    raise jinja2.exceptions.SecurityError("a repeated text is too long")
        if (
            operator == "+"
            and isinstance(left, str)
            and isinstance(right, str)
            and len(left) + len(right) > 64 * _LIMIT
        ):
            raise jinja2.exceptions.SecurityError("a joined text is too long")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}`, with which templates mark answers for training: the text within is written as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class JinjaTemplate:
    """A Jinja chat template.

    Args:
        source: the template.
        tokenizer: its `special_ids` are the special tokens that the template may write.
        name: where the template comes from, for messages.
        variables: `bos_token` and the like, as text.
        stop_ids: the ids at which an answer ends.
        end_id: the stop token that `spans` appends to a last answer that has none.
        call_end_id: the same for a last answer that calls tools; None if it is `end_id` as well.
        tools: the template of conversations with tools, if it is another one.

    Attributes:
        source: as given.
        tools_source: that of `tools`, or `source`.

    Raises CheckpointError if the source is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        name: str,
        variables: Mapping[str, str],
        stop_ids: tuple[int, ...],
        end_id: int | None,
        call_end_id: int | None = None,
        tools: ChatTemplate | None = None,
    ) -> None:
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self._template = self._tools_template = _compiled(environment, source, name)
        if tools is not None:
            self._tools_template = _compiled(environment, tools.source, str(tools.path))
        self.stop_ids = stop_ids
        self._tokenizer = tokenizer
        self._name = name
        self.source = source
        self.tools_source = source if tools is None else tools.source
        self._tools_name = name if tools is None else str(tools.path)
        self._variables = dict(variables)
        self._end_id, self._call_end_id = end_id, call_end_id
        self._specials = _Specials(tokenizer.special_ids, tokenizer.strips)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Variables | None = None,
    ) -> list[int]:
        """See `Template.render`. CheckpointError if the template fails on messages that are well formed.

        UsageError for a variable that the template gets from the server, for messages of a role that the template
        leaves out, and for a last message that the template does not write, so that it cannot be continued.
        """
        variables = variables or {}
        reserved = sorted(_RESERVED & set(variables))
        if reserved:
            raise UsageError(f"chat_template_kwargs: {reserved[0]} is set by other fields; leave it out")
        check_messages(messages, any_role=True)
        if continue_final_message:
            check_continued(messages)
        views, variables, breaker = self._broken(messages, variables)
        if continue_final_message:
            text = self._text_to_continue(views, variables)
        else:
            text = self._text(views, add_generation_prompt, variables)
            self._check_roles(views, text, add_generation_prompt, variables)
        return prompt_ids(self._tokenizer, self._specials.items(text, breaker, []))

    def _check_roles(self, views: _Views, text: str, add_generation_prompt: bool, variables: Variables) -> None:
        """Raises UsageError if messages of a role other than the usual ones have no part in the text."""
        for role in dict.fromkeys(view["role"] for view in views if view["role"] not in ROLES and view["content"]):
            others = [{**view, "content": ""} if view["role"] == role else view for view in views]
            if self._text(others, add_generation_prompt, variables) == text:
                raise UsageError(
                    f"messages: the model's chat template leaves out messages of the role {role!r}; expected one of "
                    f"{', '.join(ROLES)}"
                )

    def spans(self, messages: Sequence[Message], *, variables: Variables | None = None) -> tuple[list[int], list[bool]]:
        """See `Template.spans`. CheckpointError if the template rewrites history so that answers cannot be located."""
        check_messages(messages)
        views, variables, breaker = self._broken(messages, variables or {})
        return prompt_spans(self._tokenizer, self._items_with_answers(views, variables, breaker))

    def _broken(self, messages: Sequence[Message], variables: Variables) -> tuple[_Views, Variables, str]:
        """Messages and variables with all special tokens' texts broken, and the character that breaks them."""
        if _depth([messages, variables]) > _MOST_DEPTH:
            raise UsageError(f"messages: a tool or a variable is nested deeper than {_MOST_DEPTH} levels; flatten it")
        breaker = self._free_character(messages, variables)
        views = [
            {key: value if key == "role" else self._specials.broken(value, breaker) for key, value in message.items()}
            for message in messages
        ]
        return views, {key: self._specials.broken(value, breaker) for key, value in variables.items()}, breaker

    def _free_character(self, *values: Any) -> str:
        return _unused_character([*_strings(values), self.source, self.tools_source])

    def _text_to_continue(self, views: _Views, variables: Variables) -> str:
        """The text of a conversation up to the end of the last message's content, which a mark shows."""
        content = views[-1]["content"]
        mark = self._free_character(views, variables)
        text = self._text([*views[:-1], {**views[-1], "content": content + mark}], False, variables)
        before, found, _ = text.rpartition(mark)
        if not found:
            before, found, _ = text.rpartition(_escaped(mark))
        if not found:
            raise UsageError(
                f"continue_final_message: {self._name}: the chat template does not write the last message; leave "
                "continue_final_message out"
            )
        return before

    def _items_with_answers(self, views: _Views, variables: Variables, breaker: str) -> list[SpecialToken | Text]:
        """A whole conversation, with the answers marked.

        An answer reaches from where the prompt for it ends to the first stop token; if a template has no stop token
        there, to where the conversation up to it ends. Then an answer that follows it directly begins there, since the
        model writes what is between the two.
        """
        text = self._text(views, False, variables)
        starts = {
            i: len(self._beginning(text, views, i, variables))
            for i, view in enumerate(views)
            if view["role"] == "assistant"
        }
        stops = [(at, after) for at, after, token in self._specials.found(text) if token in self.stop_ids]
        answers: list[tuple[int, int]] = []
        unfinished = False
        for i, start in starts.items():
            through = self._text(views[: i + 1], False, variables)
            limit = len(through) if text.startswith(through) else None
            following = [other for other in starts.values() if other > start]
            bound = limit if limit is not None else min(following, default=len(text))
            end = next((after for at, after in stops if start <= at <= bound), None)
            if end is None and limit is None and following:
                raise self._rewritten(i)
            goes_on = unfinished and i - 1 in starts
            unfinished = end is None
            answers.append((answers[-1][1] if goes_on else start, bound if end is None else end))
        items = self._specials.items(text, breaker, answers)
        if not (unfinished and views[-1]["role"] == "assistant"):
            return items
        calls = self._call_end_id is not None and (views[-1].get("tool_calls") or views[-1].get("metadata"))
        end_id = self._call_end_id if calls else self._end_id
        if end_id is None:
            raise CheckpointError(
                f"{self._name}: no stop token is known for the chat template; set eos_token in tokenizer_config.json"
            )
        return [*items, SpecialToken(end_id, answer=True)]

    def _beginning(self, text: str, views: _Views, index: int, variables: Variables) -> str:
        prompt = self._text(views[:index], True, variables)
        if not text.startswith(prompt):
            raise self._rewritten(index)
        return prompt

    def _rewritten(self, index: int) -> WarpbusError:
        return CheckpointError(
            f"{self._name}: the chat template writes messages[{index}] otherwise within a conversation than at its "
            "end, so its tokens cannot be separated from the rest; split the conversation there"
        )

    def _text(self, views: _Views, add_generation_prompt: bool, variables: Variables) -> str:
        limit = _LIMIT + 8 * sum(map(len, [*_strings(views), *_strings(variables)]))
        given = {"tools": None, "documents": None, **self._variables, **variables}
        template, name = (
            (self._template, self._name) if given["tools"] is None else (self._tools_template, self._tools_name)
        )
        chunks: list[str] = []
        try:
            for chunk in template.generate(messages=views, add_generation_prompt=add_generation_prompt, **given):
                chunks.append(chunk)
                limit -= len(chunk)
                if limit < 0:
                    raise CheckpointError(
                        f"{name}: the chat template makes more than {_LIMIT} characters out of a short "
                        "conversation; restore it from the model's source"
                    )
        except WarpbusError:
            raise
        # A template is a program: whatever it raises is a failure of the checkpoint's, reported as one.
        except Exception as error:
            raise CheckpointError(
                f"{name}: the chat template failed ({_first_line(error)}); check the messages' order, or restore "
                "it from the model's source"
            ) from None
        return "".join(chunks)


def _compiled(environment: jinja2.Environment, source: str, name: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{name}: the chat template is not valid Jinja ({_first_line(error)}); restore the file"
        ) from None


class _Specials:
    """The special tokens of a vocabulary: kept out of messages, found in what a template makes."""

    def __init__(self, special_ids: Mapping[str, int], strips: Mapping[str, tuple[bool, bool]]) -> None:
        self._ids = {text: token for text, token in special_ids.items() if text}
        self._strips = {special_ids[text]: sides for text, sides in strips.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._pattern = re.compile(alternatives)
        # The first character wherever a special token's text begins, also within another one.
        self._openings = re.compile(f"(?s)(?=(?:{alternatives}))(.)")
        self._heads = tuple({text[:i] for text in self._ids for i in range(1, len(text))})
        self._tails = tuple({text[i:] for text in self._ids for i in range(1, len(text))})
        self._length = max(map(len, self._ids), default=0)

    def broken(self, value: Any, breaker: str) -> Any:
        """A value of a message in which no special token's text is whole, nor can be made whole from outside.

        Breakers go inside of outer whitespace, so that a template which trims a content trims as much as ever.
        """
        if isinstance(value, Mapping):
            return {self._cut(str(key), breaker): self.broken(item, breaker) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.broken(item, breaker) for item in value]
        if not isinstance(value, str):
            return value
        text = self._cut(value, breaker)
        core = text.strip()
        inside = len(core) < self._length and bool(core) and any(core in special for special in self._ids)
        if inside or core.endswith(self._heads) or core.startswith(self._tails):
            before = text[: len(text) - len(text.lstrip())]
            after = text[len(before) + len(core) :]
            text = f"{before}{breaker}{core}{breaker}{after}"
        return text

    def _cut(self, text: str, breaker: str) -> str:
        return self._openings.sub(rf"\1{breaker}", text)

    def found(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Start, end and id of every special token in what a template made."""
        for match in self._pattern.finditer(text):
            yield match.start(), match.end(), self._ids[match[0]]

    def items(self, text: str, breaker: str, answers: Sequence[tuple[int, int]]) -> list[SpecialToken | Text]:
        """Special tokens and ordinary texts of what a template made, without the breakers.

        `answers` are ranges of its characters, none of which cuts a special token.
        """
        items: list[SpecialToken | Text] = []
        done = 0
        for start, end, token in self.found(text):
            left, right = self._strips.get(token, (False, False))
            before = _before_space(text, done, start) if left else start
            if before > done:
                items.append(_stretch(text, done, before, breaker, answers))
            items.append(SpecialToken(token, answer=any(first <= start and end <= last for first, last in answers)))
            done = _behind_space(text, end) if right else end
        if len(text) > done:
            items.append(_stretch(text, done, len(text), breaker, answers))
        return items


def _before_space(text: str, first: int, end: int) -> int:
    """Where the whitespace before `end` begins, not before `first`."""
    while end > first and _is_space(text[end - 1]):
        end -= 1
    return end


def _behind_space(text: str, start: int) -> int:
    """Where the whitespace from `start` on ends."""
    while start < len(text) and _is_space(text[start]):
        start += 1
    return start


def _is_space(char: str) -> bool:
    """Unicode's whitespace, to which Python adds four separators."""
    return char.isspace() and not "\x1c" <= char <= "\x1f"


def _stretch(text: str, start: int, end: int, breaker: str, answers: Sequence[tuple[int, int]]) -> Text:
    """The ordinary text from `start` to `end`, and which parts of it are answers."""
    inner = [(max(first, start), min(last, end)) for first, last in answers if first < end and last > start]
    cuts = sorted({start, end, *(border for answer in inner for border in answer)})
    mended = ""
    moved = {start: 0}
    for first, last in pairwise(cuts):
        mended += _mended(text[first:last], breaker)
        moved[last] = len(mended)
    return Text(mended, tuple((moved[first], moved[last]) for first, last in inner))


def _mended(text: str, breaker: str) -> str:
    # Templates that write JSON with escapes escape the breaker too.
    return text.replace(breaker, "").replace(_escaped(breaker), "")


def _escaped(char: str) -> str:
    return json.dumps(char)[1:-1]


def _unused_character(texts: Sequence[str]) -> str:
    joined = "\n".join(texts)
    for block in _PRIVATE_USE:
        for code in block:
            if chr(code) not in joined and _escaped(chr(code)) not in joined:
                return chr(code)
    raise UsageError("messages: they hold every private-use character of Unicode; take some out")


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in _strings(item)]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in _strings(item)]
    return []


def _depth(value: Any) -> int:
    """Levels of nested lists and objects, counted without recursion."""
    depth, level = 0, [value]
    while level := [
        inner
        for outer in level
        if isinstance(outer, (Mapping, list, tuple))
        for inner in (outer.values() if isinstance(outer, Mapping) else outer)
    ]:
        depth += 1
    return depth


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _raise(message: object) -> None:
    raise UsageError(f"messages: the model's chat template refuses them: {' '.join(str(message).split())[:200]}")


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as a prompt wants it: unlike Jinja's own filter, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
