"""Structural tags with glm-poet's tokens: which texts belong to them, and what noise writes under them. No engine."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import warpbus.demo
from warpbus.engine.grammar import GrammarCompiler
from warpbus.engine.sampling_params import Grammar
from warpbus.errors import UsageError
from warpbus.models.tokenizers import load_tokenizer

POET = Path(warpbus.demo.__file__).parent / "glm-poet"
STOPS = (1, 5, 7)

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 99}}
ANY = {"type": "any_text"}


def const(value):
    return {"type": "const_string", "value": value}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags, triggers=("<f=",), **more):
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **more}


F, G = tag("<f=a>", INTEGER, "</f>"), tag("<f=b>", {"type": "regex", "pattern": "[xy/]{2}"}, "</f>")
SEPARATED = {"type": "tags_with_separator", "tags": [F, G], "separator": ", "}

CASES = {
    "const_string": (const('a "b"\n春'), ['a "b"\n春'], ["a", 'a "b"\n春.', ""]),
    "json_schema": (INTEGER, ["7", "42"], ["", "142", "x"]),
    "any schema": ({"type": "json_schema", "json_schema": True}, ['{"a": [1]}', "null"], ["{", "nul"]),
    "regex": ({"type": "regex", "pattern": "a/b\\/[0-9]\\\\/c"}, ["a/b/7\\/c"], ["a/b/7/c", "a"]),
    "regex with a line feed": ({"type": "regex", "pattern": "a\nb+"}, ["a\nbb"], ["ab", "a\n"]),
    "ebnf": (
        {"type": "grammar", "grammar": 'root ::= pair ("," pair)*\npair ::= [a-c] "=" [0-9]'},
        ["a=1", "a=1,b=2"],
        ["a=1,", "d=1"],
    ),
    "lark": ({"type": "grammar", "grammar": 'start: X+ "!"\nX: /[a-c]/'}, ["ab!"], ["ab", "!"]),
    "any_text": (ANY, ["", "anything\n at all"], []),
    "any_text without": ({"type": "any_text", "excludes": ["no", "<"]}, ["n o", ""], ["it is no", "a<b"]),
    "sequence": (
        {"type": "sequence", "elements": [const("n: "), INTEGER, const("; "), ANY]},
        ["n: 12; and so on", "n: 1; "],
        ["n: 1", "12; "],
    ),
    "or": ({"type": "or", "elements": [const("yes"), INTEGER]}, ["yes", "31"], ["no", "yes31"]),
    "tag": (tag("<t>", ANY, "</t>"), ["<t></t>", "<t>a < b</ t</t>"], ["<t>", "<t>a</t>b", "<t>a"]),
    "tag with several ends": (tag("<t>", ANY, ["</t>", "\n"]), ["<t>a</t>", "<t>a\n"], ["<t>a", "<t>a\nb</t>"]),
    "tag without an end": (tag("<t>", INTEGER, ""), ["<t>5"], ["<t>", "5"]),
    "tag in a tag": (
        tag("<a>", {"type": "or", "elements": [tag("<b>", ANY, "</b>"), ANY]}, "</a>"),
        ["<a><b>x</b></a>", "<a>free</a>"],
        ["<a>free", "<a></a></a>"],
    ),
    "triggered_tags": (
        triggered(F, G),
        ["", "text <f", "<f=a>1</f>", "so <f=a>12</f> and <f=b>x/</f> then", "<f=b>xy</f><f=a>1</f>"],
        ["<f=", "a <f=c>", "<f=a>1</f> <f=a>", "<f=a>x</f>"],
    ),
    "at least one": (
        triggered(F, G, at_least_one=True),
        ["<f=a>1</f>", "<f=a>1</f> text <f=b>xx</f>"],
        ["", "text", "text <f=a>1</f>"],
    ),
    "at most one": (
        triggered(F, G, stop_after_first=True),
        ["", "only text", "text <f=a>1</f>"],
        ["<f=a>1</f> text", "<f=a>1</f><f=a>1</f>"],
    ),
    "exactly one": (
        triggered(F, G, at_least_one=True, stop_after_first=True),
        ["<f=a>1</f>", "<f=b>yy</f>"],
        ["", "text <f=a>1</f>", "<f=a>1</f>."],
    ),
    "several triggers": (
        triggered(F, tag("[g]", const("ok"), "[/g]"), triggers=("<f=", "[g]"), excludes=["stop"]),
        ["a [g]ok[/g] b <f=a>1</f> c", "[ g"],
        ["[g]no[/g]", "stop", "a [g]ok[/g] stop"],
    ),
    "triggered_tags in a tag": (
        tag("<all>", triggered(F), "</all>"),
        ["<all></all>", "<all>a <f=a>1</f> b</all>"],
        ["<all>a", "<all><f=a>1</f>", "<all></all> "],
    ),
    "tags_with_separator": (SEPARATED, ["", "<f=a>1</f>", "<f=a>1</f>, <f=b>xy</f>"], ["<f=a>1</f>, ", "a<f=a>1</f>"]),
    "one of the tags": (
        {**SEPARATED, "at_least_one": True, "stop_after_first": True},
        ["<f=a>1</f>"],
        ["", "<f=a>1</f>, <f=a>1</f>"],
    ),
    "tags without a separator": (
        {**SEPARATED, "separator": "", "at_least_one": True},
        ["<f=a>1</f><f=b>xy</f>"],
        ["", "<f=a>1</f> <f=a>1</f>"],
    ),
    "repetitions": (
        {
            "type": "sequence",
            "elements": [
                {"type": "optional", "content": const("a")},
                {"type": "plus", "content": const("b")},
                {"type": "star", "content": const("c")},
                {"type": "repeat", "content": const("d"), "min": 1, "max": 2},
                {"type": "repeat", "content": const("e"), "min": 0, "max": -1},
            ],
        },
        ["bd", "abbccddeee"],
        ["a", "b", "aabd", "bddd"],
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(POET)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, vocab_size=8000, stop_ids=STOPS)


def compiled(compiler, form):
    return compiler.compile(Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form})))


def belongs(tokenizer, matcher, text):
    if not all(matcher.accept(token) for token in tokenizer.encode(text)):
        return False
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return not matcher.failed and bool(bits[list(STOPS)].all())


@pytest.mark.parametrize("name", CASES)
def test_texts_that_belong_and_others(tokenizer, compiler, name):
    form, right, wrong = CASES[name]
    assert [text for text in right if not belongs(tokenizer, compiled(compiler, form), text)] == []
    assert [text for text in wrong if belongs(tokenizer, compiled(compiler, form), text)] == []


@pytest.mark.parametrize("seed", range(4))
def test_noise_writes_tags_of_the_form(tokenizer, compiler, seed):
    matcher = compiled(compiler, triggered(F, G, at_least_one=True, stop_after_first=True))
    generator = np.random.default_rng(seed)
    tokens = []
    while not matcher.finished:
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[:8000]
        tokens.append(int(generator.choice(np.flatnonzero(bits))))
        assert matcher.accept(tokens[-1])
    assert re.fullmatch("<f=a>[0-9]{1,2}</f>|<f=b>[xy/]{2}</f>", tokenizer.decode(tokens))


def test_the_older_form(tokenizer, compiler):
    structure = {"begin": "<f=a>", "schema": INTEGER["json_schema"], "end": "</f>"}
    older = {"type": "structural_tag", "structures": [structure], "triggers": ["<f="]}
    grammar = Grammar("structural_tag", json.dumps(older))
    for text, right in {"so <f=a>1</f>.": True, "text": True, "<f=a>x</f>": False, "<f=b>": False}.items():
        assert belongs(tokenizer, compiler.compile(grammar), text) is right, text


REFUSED = {
    "give one of any_text, const_string": {"type": "xml"},
    "format is no JSON object": [],
    "format.value: give a text": const(3),
    "format.end: give a text": tag("<a>", ANY, None),
    "format.end: an empty text is no end beside others": tag("<a>", ANY, ["", "b"]),
    "format.content is of type any_text, which needs a tag whose end": tag("<a>", ANY, ""),
    "format.elements.0 is of type any_text": {"type": "sequence", "elements": [ANY, const("a")]},
    "format.elements.0.elements.1 is of type triggered_tags": {
        "type": "sequence",
        "elements": [{"type": "or", "elements": [const("a"), triggered(F)]}, const("a")],
    },
    "format.content is of type any_text, which cannot be repeated": {"type": "star", "content": ANY},
    "format.elements: give a list": {"type": "or", "elements": []},
    "format.tags.0.begin begins with none of the triggers": triggered(tag("<g>", ANY, "</g>")),
    "'<f=' contains '<f'": triggered(F, triggers=("<f", "<f=")),
    "'<f=' contains '<f='": triggered(F, triggers=("<f=", "<f=")),
    "format.tags.0.type is 'or'": triggered({"type": "or", "elements": []}),
    "format.excludes: give texts": {"type": "any_text", "excludes": [""]},
    "format.style is 'qwen_xml'": {**INTEGER, "style": "qwen_xml"},
    "format.strict is not supported": {**INTEGER, "strict": True},
    "give min and max from 0 to 1000": {"type": "repeat", "content": const("a"), "min": 1, "max": 10**6},
    "format.max is 1: give at least min": {"type": "repeat", "content": const("a"), "min": 2, "max": 1},
    "more than 500 formats": {"type": "sequence", "elements": [const("a")] * 500},
    "cannot be used": {"type": "regex", "pattern": "(a"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_say_where(compiler, message):
    with pytest.raises(UsageError, match="structural_tag") as error:
        compiled(compiler, REFUSED[message])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tag_needs_a_form(compiler):
    for text, message in {
        "[]": "structural_tag is no JSON object",
        "{}": "format is no JSON object",
        "{": "is not JSON",
        '{"structures": []}': "structures: give a list",
        '{"structures": [{"begin": "<f=a>", "end": ""}], "triggers": ["<"]}': "json_schema is no JSON object",
    }.items():
        with pytest.raises(UsageError, match="structural_tag") as error:
            compiler.compile(Grammar("structural_tag", text))
        assert message in str(error.value)
