"""Structural tags: answers whose parts are free text, fixed text, JSON of a schema or other grammars, between tags.

The JSON of a structural tag has the form of XGrammar, which vLLM and SGLang take too, or the older form with
`structures` and `triggers`. It becomes one Lark grammar, as llguidance reads it. Knows neither tokens nor the library.
"""

from __future__ import annotations

import json
from collections import abc
from collections.abc import Callable, Mapping
from typing import Any

from warpbus.errors import UsageError
from warpbus.models.templates.json_schema import json_grammar

_MOST_PARTS = 500
_MOST_REPEATS = 1000

Json = Mapping[str, Any]
Ends = abc.Sequence[str]


def structural_grammar(tag: Any, lark_of: Callable[[str], str]) -> str:
    """The grammar, in Lark, of a structural tag.

    Args:
        tag: the parsed JSON.
        lark_of: converts a grammar of the format `grammar`, which may be EBNF, to Lark.

    Raises:
        UsageError: the tag is not of a known form, or free text is where nothing says at what it ends.
    """
    tag = _object(tag, "structural_tag")
    if "structures" in tag or "triggers" in tag:
        form: Json = _of_structures(tag)
    else:
        form = _object(tag.get("format"), "format")
        _only(tag, ("type", "format"), "structural_tag")
    rules = _Rules(lark_of)
    start = rules.of(form, (), "format")
    return "\n".join([f"start: {start}", *rules.lines])


def _of_structures(tag: Json) -> Json:
    """The older form, as `triggered_tags`: each structure has `begin`, `schema` and `end`."""
    _only(tag, ("type", "structures", "triggers"), "structural_tag")
    tags = []
    for at, each in enumerate(_list(tag, "structures", "structural_tag")):
        structure = _object(each, f"structures.{at}")
        _only(structure, ("begin", "schema", "end"), f"structures.{at}")
        content = {"type": "json_schema", "json_schema": structure.get("schema")}
        tags.append({**{name: structure.get(name) for name in ("begin", "end")}, "content": content})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Rules:
    """Writes the rules of a grammar.

    Attributes:
        lines: the rules and terminals so far, without `start`.
    """

    def __init__(self, lark_of: Callable[[str], str]) -> None:
        self.lines: list[str] = []
        self._lark_of = lark_of
        self._parts = 0
        self._forms = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "optional": self._optional,
            "plus": self._plus,
            "star": self._star,
            "repeat": self._repeat,
        }

    def of(self, form: Any, ends: Ends, path: str) -> str:
        """The expression of a format and, behind it, of one of the texts that end it.

        Args:
            form: the format.
            ends: the texts; without any it ends with the answer.
            path: where it is in the JSON, for errors.
        """
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise UsageError(f"structural_tag has more than {_MOST_PARTS} formats: give fewer")
        form = _object(form, path)
        kind = form.get("type")
        write = self._forms.get(kind) if isinstance(kind, str) else None
        if write is None:
            raise UsageError(
                f"structural_tag: {path}.type is {str(kind)[:40]!r}: give one of {', '.join(sorted(self._forms))}"
            )
        return write(form, ends, path)

    def _const_string(self, form: Json, ends: Ends, path: str) -> str:
        _only(form, ("type", "value"), path)
        return self._ended(_quoted(_text(form, "value", path)), ends)

    def _json_schema(self, form: Json, ends: Ends, path: str) -> str:
        if form.get("style", "json") != "json":
            raise UsageError(f"structural_tag: {path}.style is {str(form['style'])[:40]!r}: only json is supported")
        _only(form, ("type", "json_schema", "style"), path)
        schema = form.get("json_schema")
        if schema is True:
            schema = {}
        schema = dict(_object(schema, f"{path}.json_schema"))
        return self._ended(self._rule(json_grammar(schema)), ends)

    def _regex(self, form: Json, ends: Ends, path: str) -> str:
        _only(form, ("type", "pattern"), path)
        # A slash would end the expression; line feeds are not allowed within it.
        pattern = _text(form, "pattern", path, least=1).replace("\n", r"\x{A}")
        pattern = "".join(_slashes(pattern))
        return self._ended(self._rule(self._terminal(f"/{pattern}/")), ends)

    def _grammar(self, form: Json, ends: Ends, path: str) -> str:
        _only(form, ("type", "grammar"), path)
        lark = self._lark_of(_text(form, "grammar", path, least=1))
        return self._ended(self._rule(f"%lark {{\n{lark}\n}}"), ends)

    def _any_text(self, form: Json, ends: Ends, path: str) -> str:
        _only(form, ("type", "excludes"), path)
        return self._free_text(ends, self._excludes(form, path))

    def _sequence(self, form: Json, ends: Ends, path: str) -> str:
        _only(form, ("type", "elements"), path)
        elements = _list(form, "elements", path)
        found = []
        for at, element in enumerate(elements):
            where, last = f"{path}.elements.{at}", at == len(elements) - 1
            if not last:
                _refuse_free(element, where, "ends with the answer or its tag, but is not the last of a sequence")
            found.append(self.of(element, ends if last else (), where))
        return self._rule(" ".join(found))

    def _or(self, form: Json, ends: Ends, path: str) -> str:
        _only(form, ("type", "elements"), path)
        elements = _list(form, "elements", path)
        return self._rule(" | ".join(self.of(each, ends, f"{path}.elements.{at}") for at, each in enumerate(elements)))

    def _tag(self, form: Json, ends: Ends, path: str) -> str:
        return self._ended(self._rule(f"{_quoted(_text(form, 'begin', path))} {self._inside(form, path)}"), ends)

    def _inside(self, form: Json, path: str) -> str:
        """The content and the end of a tag."""
        _only(form, ("type", "begin", "content", "end"), path)
        end = form.get("end")
        found = [end] if isinstance(end, str) else end
        if not isinstance(found, list) or not found or not all(isinstance(each, str) for each in found):
            raise UsageError(f"structural_tag: {path}.end: give a text, or a list of texts")
        if "" in found:
            if len(found) > 1:
                raise UsageError(f"structural_tag: {path}.end: an empty text is no end beside others; leave it out")
            _refuse_free(form.get("content"), f"{path}.content", "needs a tag whose end is not empty")
            found = []
        return self.of(form.get("content"), found, f"{path}.content")

    def _triggered_tags(self, form: Json, ends: Ends, path: str) -> str:
        _only(form, ("type", "triggers", "tags", "at_least_one", "stop_after_first", "excludes"), path)
        triggers = _texts(form, "triggers", path)
        first = [(one, other) for one in triggers for other in triggers if one != other and one in other]
        if first or len(set(triggers)) < len(triggers):
            one, other = first[0] if first else (triggers[0], triggers[0])
            raise UsageError(f"structural_tag: {path}.triggers: {other!r} contains {one!r}; leave one of them out")
        excluded = self._excludes(form, path)
        bodies: dict[str, list[str]] = {}
        whole = []
        for at, each in enumerate(_list(form, "tags", path)):
            where = f"{path}.tags.{at}"
            tag = _tag_of(each, where)
            begin = _text(tag, "begin", where)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise UsageError(f"structural_tag: {where}.begin begins with none of the triggers; give one that does")
            inside = self._inside(tag, where)
            bodies.setdefault(trigger, []).append(f"{_quoted(begin.removeprefix(trigger))} {inside}")
            whole.append(f"{_quoted(begin)} {inside}")
        tags = self._rule(" | ".join(whole))
        once, needed = bool(form.get("stop_after_first")), bool(form.get("at_least_one"))
        if once and needed:
            return self._ended(tags, ends)
        calls = []
        for trigger, found in bodies.items():
            others = [each for each in (*triggers, *ends) if each != trigger]
            head = self._free_text((trigger,), [*excluded, *others])
            calls.append(f"{head} ({' | '.join(found)})")
        rest = self._rule(" | ".join(calls))
        # Where nothing follows, the text behind the last tag may be missing.
        tail = self._free_text(ends, [*excluded, *triggers])
        if once:
            return self._rule(f"{self._ended(rest, ends)} | {tail}")
        return self._rule(f"{tags if needed else ''} ({rest})* {tail}")

    def _tags_with_separator(self, form: Json, ends: Ends, path: str) -> str:
        _only(form, ("type", "tags", "separator", "at_least_one", "stop_after_first"), path)
        tags = [
            self._tag(_tag_of(each, f"{path}.tags.{at}"), (), f"{path}.tags.{at}")
            for at, each in enumerate(_list(form, "tags", path))
        ]
        one = self._rule(" | ".join(tags))
        more = "" if form.get("stop_after_first") else f"({_quoted(_text(form, 'separator', path))} {one})*"
        found = f"{one} {more}" if form.get("at_least_one") else f"({one} {more})?"
        return self._ended(self._rule(found), ends)

    def _optional(self, form: Json, ends: Ends, path: str) -> str:
        return self._repeated(form, ends, path, "?")

    def _plus(self, form: Json, ends: Ends, path: str) -> str:
        return self._repeated(form, ends, path, "+")

    def _star(self, form: Json, ends: Ends, path: str) -> str:
        return self._repeated(form, ends, path, "*")

    def _repeat(self, form: Json, ends: Ends, path: str) -> str:
        low, high = form.get("min"), form.get("max")
        if type(low) is not int or type(high) is not int or not (0 <= low <= max(low, high) <= _MOST_REPEATS):
            raise UsageError(f"structural_tag: {path}: give min and max from 0 to {_MOST_REPEATS}; max -1 is no limit")
        if high < low and high != -1:
            raise UsageError(f"structural_tag: {path}.max is {high}: give at least min, which is {low}, or -1")
        return self._repeated(form, ends, path, f"{{{low},{'' if high == -1 else high}}}")

    def _repeated(self, form: Json, ends: Ends, path: str, how: str) -> str:
        _only(form, ("type", "content", "min", "max"), path)
        where = f"{path}.content"
        _refuse_free(form.get("content"), where, "cannot be repeated")
        return self._ended(self._rule(f"({self.of(form.get('content'), (), where)}){how}"), ends)

    def _ended(self, expression: str, ends: Ends) -> str:
        if not ends:
            return expression
        return self._rule(f"{expression} ({' | '.join(map(_quoted, ends))})")

    def _free_text(self, ends: Ends, excluded: abc.Sequence[str]) -> str:
        """Text up to and with the first of the ends, or to the end of the answer."""
        without = "".join(f" & ~/(?s:.*){_spelled(text)}(?s:.*)/" for text in excluded)
        if not ends:
            return f"({self._rule(self._terminal(f'/(?s:.+)/{without}'))})?"
        text = self._terminal(f"/(?s:.*)({'|'.join(map(_spelled, ends))})/{without}")
        return self._rule(text, "[lazy]")

    def _excludes(self, form: Json, path: str) -> list[str]:
        return _texts(form, "excludes", path) if form.get("excludes") else []

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"rule{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"TEXT{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name


def _refuse_free(form: Any, path: str, why: str) -> None:
    """Refuse a format that ends only where its surroundings do."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind in ("any_text", "triggered_tags"):
        raise UsageError(f"structural_tag: {path} is of type {kind}, which {why}; put it into a tag with an end")
    if kind in ("or", "sequence"):
        elements = form.get("elements")
        for at, each in enumerate(elements if isinstance(elements, list) else ()):
            _refuse_free(each, f"{path}.elements.{at}", why)


def _object(value: Any, path: str) -> Json:
    if not isinstance(value, dict):
        raise UsageError(f"structural_tag: {path} is no JSON object: give one")
    return value


def _only(form: Json, known: abc.Sequence[str], path: str) -> None:
    unknown = next((name for name, value in form.items() if name not in known and value is not None), None)
    if unknown is not None:
        raise UsageError(f"structural_tag: {path}.{unknown[:40]} is not supported; leave it out")


def _tag_of(value: Any, path: str) -> Json:
    """A tag in a list of tags, where its type may be missing."""
    tag = _object(value, path)
    if tag.get("type", "tag") != "tag":
        raise UsageError(f"structural_tag: {path}.type is {str(tag['type'])[:40]!r}: give a tag")
    return tag


def _text(form: Json, name: str, path: str, *, least: int = 0) -> str:
    value = form.get(name)
    if not isinstance(value, str) or len(value) < least:
        raise UsageError(f"structural_tag: {path}.{name}: give a text{', not an empty one' if least else ''}")
    return value


def _list(form: Json, name: str, path: str) -> list[Any]:
    value = form.get(name)
    if not isinstance(value, list) or not value:
        raise UsageError(f"structural_tag: {path}.{name}: give a list with at least one entry")
    return value


def _texts(form: Json, name: str, path: str) -> list[str]:
    found = _list(form, name, path)
    if not all(isinstance(each, str) and each for each in found):
        raise UsageError(f"structural_tag: {path}.{name}: give texts that are not empty")
    return found


def _quoted(text: str) -> str:
    """A text as a string of Lark; nothing for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _spelled(text: str) -> str:
    """A regular expression that only the text matches."""
    return "".join(each if each.isalnum() else f"\\x{{{ord(each):X}}}" for each in text)


def _slashes(pattern: str) -> list[str]:
    """A regular expression in pieces, with every slash that is not escaped yet escaped."""
    found, escaped = [], False
    for each in pattern:
        found.append("\\/" if each == "/" and not escaped else each)
        escaped = each == "\\" and not escaped
    return found
