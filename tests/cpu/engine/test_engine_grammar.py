"""Grammars with glm-poet: whatever the model's scores, the answer belongs to the language. No grammar, no engine."""

import importlib
import json
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import sentencepiece
import torch

import warpbus.demo
from warpbus.engine.grammar import GrammarCompiler
from warpbus.engine.sampler import Sampler
from warpbus.engine.sampling_params import Grammar, SamplingParams
from warpbus.engine.sequence import Sequence
from warpbus.errors import UsageError
from warpbus.formats import Checkpoint
from warpbus.models import load_model
from warpbus.models.tokenizers import SentencePieceTokenizer, StreamDecoder, load_tokenizer

POET = Path(warpbus.demo.__file__).parent / "glm-poet"
CPU = torch.device("cpu")
VOCABULARY = 8000
STOPS = (1, 5, 7)

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["七言绝句", "五言绝句"]},
        "year": {"type": "integer", "minimum": 618, "maximum": 907},
        "lines": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
        "good": {"type": "boolean"},
    },
    "required": ["title", "kind", "year", "lines"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(POET)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, vocab_size=VOCABULARY, stop_ids=STOPS)


@pytest.fixture(scope="module")
def poet():
    checkpoint = Checkpoint(POET)
    return load_model(checkpoint, device="cpu", dtype=torch.float32).eval()


def request(tokenizer, compiler, grammar, limit=150, **params):
    return Sequence(
        0,
        tokenizer.encode("春"),
        SamplingParams(grammar=grammar, max_tokens=limit, **params),
        limit=limit,
        stop_ids=frozenset(STOPS),
        stream=StreamDecoder(tokenizer, keep_first_space=True),
        matcher=compiler.compile(grammar),
    )


def answer(one, scores):
    """Run a request by itself, on what `scores` gives for all its tokens."""
    sampler = Sampler(1, VOCABULARY, CPU)
    sampler.arrange([one])
    while one.finish_reason is None:
        sampler.draw()
        one.append(sampler.choose(scores(one.prompt + one.token_ids)[None])[0].item())
    return one


def noise(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda tokens: torch.randn(VOCABULARY, generator=generator) * 4


def of_poet(model):
    return lambda tokens: model(torch.tensor([tokens]))[0, -1]


def allowed(matcher):
    return np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("seed", range(6))
def test_noise_under_a_schema_is_json_of_it(tokenizer, compiler, seed):
    one = answer(request(tokenizer, compiler, Grammar("json_schema", json.dumps(SCHEMA)), seed=seed), noise(seed))
    assert one.finish_reason == "stop"
    jsonschema.validate(json.loads(one.text), SCHEMA)
    assert one.token_ids[-1] in STOPS


def test_the_model_under_a_schema_writes_json_of_it(tokenizer, compiler, poet):
    one = request(tokenizer, compiler, Grammar("json_schema", json.dumps(SCHEMA)), temperature=0.8, seed=1)
    with torch.inference_mode():
        answer(one, of_poet(poet))
    jsonschema.validate(json.loads(one.text), SCHEMA)


@pytest.mark.parametrize("seed", range(3))
def test_any_object(tokenizer, compiler, seed):
    # Noise never ends a string: what would make it longer becomes unlikely.
    short = noise(seed)
    penalty = torch.zeros(VOCABULARY)
    penalty[tokenizer.encode('"},]')] = 25.0
    one = answer(request(tokenizer, compiler, Grammar("json_object"), seed=seed), lambda ids: short(ids) + penalty)
    assert isinstance(json.loads(one.text), dict)


@pytest.mark.parametrize(
    "expression", [r"[0-9]{3}-[一-龥]{2,5}", r"(春|夏|秋|冬)眠不觉晓。", r"\$?\d{1,4}(\.\d\d)?", " x", r"[^a-z\n]{4}"]
)
@pytest.mark.parametrize("seed", range(3))
def test_regular_expressions_match_the_whole(tokenizer, compiler, expression, seed):
    one = answer(request(tokenizer, compiler, Grammar("regex", expression), seed=seed), noise(seed))
    assert one.finish_reason == "stop"
    assert re.fullmatch(expression, one.text)


CHOICES = ["床前明月光", "床前", 'a"b\\c', "tab\t", " leading", "line\nline", "\x7f\x01", "(.*)", "yes"]


@pytest.mark.parametrize("seed", range(8))
def test_choices(tokenizer, compiler, seed):
    grammar = Grammar("choice", json.dumps(CHOICES))
    assert answer(request(tokenizer, compiler, grammar, seed=seed), noise(seed)).text in CHOICES


@pytest.mark.parametrize("choice", CHOICES)
def test_each_choice_can_be_made(tokenizer, compiler, choice):
    matcher = compiler.compile(Grammar("choice", json.dumps(CHOICES)))
    assert all(matcher.accept(token) for token in tokenizer.encode(choice))
    assert set(STOPS) <= set(allowed(matcher))
    assert matcher.finished is (choice != "床前")


def test_where_nothing_is_left_to_choose_tokens_are_the_usual_ones(tokenizer, compiler):
    matcher = compiler.compile(Grammar("choice", '["春眠不觉晓"]'))
    for token in tokenizer.encode("春眠不觉晓"):
        assert allowed(matcher) == [token]
        assert matcher.accept(token)


def test_lark(tokenizer, compiler):
    grammar = Grammar("lark", 'start: "[" NAME ("," NAME)* "]"\nNAME: /[a-c]{1,2}/')
    one = answer(request(tokenizer, compiler, grammar, seed=0), noise(5))
    assert one.finish_reason == "length" or re.fullmatch(r"\[[a-c]{1,2}(,[a-c]{1,2})*\]", one.text)


def test_blanks_do_not_run_away(tokenizer, compiler):
    blanks = torch.zeros(VOCABULARY)
    blanks[tokenizer.encode(" \n\t")] = 50.0
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"]}
    schema["additionalProperties"] = False
    grammar = Grammar("json_schema", json.dumps(schema))
    assert answer(request(tokenizer, compiler, grammar, temperature=0), lambda ids: blanks).text == '{ "a" : 0 }'


def test_special_tokens_are_never_allowed(tokenizer, compiler):
    special = set(tokenizer.special_ids.values())
    matcher = compiler.compile(Grammar("regex", r"(.|\n)*"))
    assert special & set(allowed(matcher)) == set(STOPS)
    assert special & set(allowed(compiler.compile(Grammar("regex", r"(.|\n){3}")))) == set()
    # Not even where the grammar asks for one by its id: the answer is cut off.
    matcher = compiler.compile(Grammar("lark", 'start: "a" <[2]> "b"'))
    assert matcher.accept(tokenizer.encode("a")[0])
    assert allowed(matcher) == list(STOPS)
    assert matcher.failed


def test_an_answer_cut_short_of_its_grammar_says_so(tokenizer, compiler):
    one = request(tokenizer, compiler, Grammar("lark", 'start: "a" <[2]> "b"'), temperature=0)
    answer(one, noise(0))
    assert (one.text, one.finish_reason) == ("a", "length")


def test_ids_behind_the_tokenizers_are_never_allowed(tokenizer):
    padded = GrammarCompiler(tokenizer, vocab_size=8064, stop_ids=(*STOPS, 9000))
    found = allowed(padded.compile(Grammar("regex", r"(.|\n)*")))
    assert max(found) < VOCABULARY
    assert len(found) > 7000


def test_tokens_are_taken_back(tokenizer, compiler):
    chance = random.Random(0)
    matcher = compiler.compile(Grammar("json_schema", json.dumps(SCHEMA)))
    fresh = compiler.compile(Grammar("json_schema", json.dumps(SCHEMA)))
    kept = []
    for _ in range(60):
        if matcher.finished:
            break
        steps = []
        for _ in range(chance.randint(1, 4)):
            possible = [token for token in allowed(matcher) if token not in STOPS]
            if not possible:
                break
            steps.append(chance.choice(possible))
            assert matcher.accept(steps[-1])
        back = chance.randint(0, len(steps))
        matcher.rollback(back)
        kept += steps[: len(steps) - back]
    for token in kept:
        assert fresh.accept(token)
    assert allowed(fresh) == allowed(matcher)


def test_what_is_not_allowed_changes_nothing(tokenizer, compiler):
    matcher = compiler.compile(Grammar("choice", '["春眠"]'))
    before = allowed(matcher)
    assert not matcher.accept(tokenizer.encode("夏")[0])
    assert not matcher.accept(STOPS[0])
    assert allowed(matcher) == before
    assert not matcher.failed


def test_matchers_of_one_grammar_do_not_share_their_place(tokenizer, compiler):
    grammar = Grammar("choice", '["春眠", "春晓"]')
    first, second = compiler.compile(grammar), compiler.compile(grammar)
    first.accept(tokenizer.encode("春")[0])
    assert allowed(second) == allowed(compiler.compile(grammar)) != allowed(first)


def test_drafts_under_a_grammar_and_neighbours_without(tokenizer, compiler):
    grammar = Grammar("choice", json.dumps(["春眠不觉晓", "春风", "x"]))
    constrained = request(tokenizer, compiler, grammar, temperature=0, min_tokens=1)
    free = Sequence(
        1, [9], SamplingParams(temperature=0), limit=9, stop_ids=frozenset(STOPS), stream=StreamDecoder(tokenizer)
    )
    spring, sleep, wind, other = (tokenizer.encode(text)[0] for text in "春眠风龙")
    scores = torch.zeros(6, VOCABULARY)
    scores[:, other] = 9.0
    scores[:, STOPS[0]] = 8.0
    scores[0, spring], scores[1, sleep], scores[2, tokenizer.encode("不")[0]] = 3.0, 3.0, 3.0
    sampler = Sampler(8, VOCABULARY, CPU)
    # The third draft breaks the grammar: what its row says does not matter.
    sampler.arrange([constrained, free], [[spring, sleep, wind], [7]])
    chosen = sampler.choose(scores)[0].tolist()
    assert chosen[:3] == [spring, sleep, tokenizer.encode("不")[0]]
    assert chosen[4:] == [other, other]
    assert allowed(constrained.matcher) == allowed(compiler.compile(grammar))


def test_many_rows_follow_their_own_grammars(tokenizer, compiler):
    texts = ["春眠不觉晓", "处处闻啼鸟", "夜来风雨声", "花落知多少"]
    running = [request(tokenizer, compiler, Grammar("choice", json.dumps([texts[i % 4]])), seed=i) for i in range(12)]
    running.append(request(tokenizer, compiler, Grammar("regex", "[0-9]{5}"), temperature=0))
    sampler = Sampler(len(running), VOCABULARY, CPU)
    scores = noise(7)
    sampler.arrange(running)
    for _ in range(6):
        sampler.draw()
        tokens = sampler.choose(torch.stack([scores([]) for _ in running]))[0].tolist()
        for one, token in zip(running, tokens, strict=True):
            one.append(token)
    assert [one.text for one in running[:12]] == [texts[i % 4] for i in range(12)]
    assert running[12].text.isdigit()
    assert {one.finish_reason for one in running} == {"stop"}


def test_the_least_number_of_tokens_gives_way_to_the_end_of_a_grammar(tokenizer, compiler):
    one = request(tokenizer, compiler, Grammar("regex", "春*"), temperature=0, min_tokens=4)
    stop = torch.zeros(VOCABULARY)
    stop[STOPS[0]], stop[tokenizer.encode("春")] = 9.0, 5.0
    assert answer(one, lambda ids: stop).text == "春春春春"
    one = request(tokenizer, compiler, Grammar("choice", '["春"]'), temperature=0, min_tokens=4)
    assert answer(one, lambda ids: stop).text == "春"


def test_a_space_that_a_tokenizer_adds_is_none_of_the_grammars(tmp_path):
    # Like ChatGLM2's: encode puts a space before the text, and decode takes it away.
    prefix = tmp_path / "spaced"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["yes no maybe", "春 眠 不 觉 晓"] * 20),
        model_prefix=str(prefix),
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = SentencePieceTokenizer(prefix.with_suffix(".model"))
    assert tokenizer.drops_first_space
    stop = tokenizer.special_ids["</s>"]
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, stop_ids=[stop])
    for expression in ("yes|no", " yes| no", "春眠"):
        grammar = Grammar("regex", expression)
        matcher, stream, text = compiler.compile(grammar), StreamDecoder(tokenizer, keep_first_space=True), ""
        while not matcher.finished:
            token = next(token for token in allowed(matcher) if token != stop)
            assert matcher.accept(token)
            text += stream.push(token)
        assert re.fullmatch(expression, text + stream.flush())


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar("json_schema", "{"), "json_schema is not JSON"),
        (Grammar("json_schema", "[" * 100_000), "json_schema is not JSON"),
        (Grammar("json_schema", "[1]"), "json_schema is a JSON list: give an object"),
        (Grammar("json_schema", "false"), "allows no answer"),
        (Grammar("json_schema", '{"a":' * 100 + "1" + "}" * 100), "nested 100 deep: give at most 64"),
        (Grammar("json_schema", '{"type": "strin"}'), "Invalid type: strin"),
        (Grammar("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar("json_schema", json.dumps({"enum": ["x" * 200_000]})), "characters: give at most 131,072"),
        (
            Grammar("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(3000)}})),
            "too big",
        ),
        (Grammar("regex", "(ab"), "unclosed group"),
        (Grammar("regex", r"[^\x00-\x{10FFFF}]"), "regex cannot be used: no text matches it"),
        (Grammar("json_schema", '{"$ref": "#"}'), "json_schema cannot be used: no text matches it: a rule or a $ref"),
        (Grammar("lark", "start: nowhere"), "nowhere"),
        (Grammar("lark", "start: <|user|>"), "lark cannot be used"),
        (Grammar("ebnf", "root ::= x"), "ebnf cannot be used: Rule 'x' not found"),
        (Grammar("ebnf", "root ::= ("), "ebnf cannot be used: Expected ')'"),
        (Grammar("ebnf", "root ::= " + "(" * 60_000), "ebnf cannot be used"),
        (Grammar("ebnf", "\n".join(f'r{i} ::= "a"' for i in range(501))), "ebnf has 501 rules: give at most 500"),
        (Grammar("ebnf", "start: nowhere"), "nowhere"),
        (Grammar("choice", '"a"'), "choice is no list"),
        (Grammar("choice", '["a", ""]'), "choice is no list"),
        (Grammar("choice", "[]"), "choice is no list"),
        (Grammar("json_schema", '{"enum": ["\ud83d"]}'), "lone surrogate U+D83D at character 11"),
        (Grammar("ebnf", 'root ::= "\ud83d"'), "lone surrogate U+D83D at character 10"),
        (Grammar("choice", '["\\ud83d"]'), "lone surrogate U+D83D at character 2"),
        (Grammar("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'), "oneOf have to exclude each"),
        (Grammar("json_schema", '{"maximum": 1e999}'), "json_schema is not JSON (Out of range"),
    ],
)
def test_what_is_refused(compiler, grammar, says):
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        compiler.compile(grammar)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= verb " " noun\nverb ::= "see" | "hear"\nnoun ::= [a-z]+',
        'start: VERB " " /[a-z]+/\nVERB: "see" | "hear"',
    ],
)
def test_ebnf_and_lark(tokenizer, compiler, text):
    matcher = compiler.compile(Grammar("ebnf", text))
    assert all(matcher.accept(token) for token in tokenizer.encode("hear birds"))
    wrong = compiler.compile(Grammar("ebnf", text))
    assert not all(wrong.accept(token) for token in tokenizer.encode("hear 5"))


def test_true_is_a_schema(tokenizer, compiler):
    matcher = compiler.compile(Grammar("json_schema", "true"))
    assert all(matcher.accept(token) for token in tokenizer.encode('{"a": [1, "春"]}'))


def test_without_the_library(tokenizer, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UsageError, match=re.escape("pip install 'warpbus[serve]'")):
        GrammarCompiler(tokenizer, vocab_size=VOCABULARY, stop_ids=STOPS)


def test_without_a_stop_token(tokenizer):
    with pytest.raises(UsageError, match="no stop token"):
        GrammarCompiler(tokenizer, vocab_size=VOCABULARY, stop_ids=())


def test_the_text_of_all_compiled_grammars_is_limited(tokenizer, monkeypatch):
    monkeypatch.setattr("warpbus.engine.grammar._CACHED_TEXT", 50)
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCABULARY, stop_ids=STOPS)
    parsed = []
    parse = compiler._parse
    monkeypatch.setattr(compiler, "_parse", lambda grammar: parsed.append(grammar.text[0]) or parse(grammar))
    for letter in "abcabcdbab":
        compiler.compile(Grammar("regex", letter * (15 if letter != "d" else 40)))
    # d leaves no room for another; a and b then fit beside each other.
    assert "".join(parsed) == "abcdba"


def test_threads_compile_one_after_the_other(compiler, monkeypatch):
    """The library's objects and the cache of what is compiled are not made for several."""
    inside, most, parse = [], [], GrammarCompiler._parse
    second = threading.Event()

    def parsed(self, grammar):
        inside.append(grammar)
        most.append(len(inside))
        second.wait(0.2 if len(inside) == 1 else 0)
        if len(inside) > 1:
            second.set()
        found = parse(self, grammar)
        inside.remove(grammar)
        return found

    monkeypatch.setattr(GrammarCompiler, "_parse", parsed)
    grammars = [Grammar("regex", f"[a-z]{{{count}}}") for count in range(21, 25)]
    with ThreadPoolExecutor(4) as threads:
        matchers = list(threads.map(compiler.compile, grammars))
    assert most == [1] * 4
    assert not any(matcher.finished for matcher in matchers)
