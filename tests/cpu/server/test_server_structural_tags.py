"""Grammars by the names that other servers give them, and structural tags with streams, tools and thinking."""

import json

import pytest

from warpbus.engine import Grammar

HELLO = [{"role": "user", "content": "hi"}]
FORMAT = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
OLDER = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}
SCHEMA = {"type": "integer"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "北京"}}\n</tool_call>'


@pytest.fixture(scope="module")
def http(served):
    with served.http() as http:
        yield http


def tag(**parts):
    return Grammar("structural_tag", json.dumps(parts))


def test_every_field_of_a_grammar(http, served):
    of = {
        "structural_tag": tag(type="structural_tag", format=FORMAT),
        "regex": Grammar("regex", "[ab]"),
        "grammar": Grammar("ebnf", 'root ::= "a"'),
        "json_schema": Grammar("json_schema", json.dumps(SCHEMA)),
    }
    bodies = [
        ({"response_format": {"type": "structural_tag", "format": FORMAT}}, tag(format=FORMAT)),
        ({"response_format": {"type": "structural_tag", **OLDER}}, tag(**OLDER)),
        ({"structural_tag": {"type": "structural_tag", "format": FORMAT}}, of["structural_tag"]),
        ({"structural_tag": of["structural_tag"].text}, of["structural_tag"]),
        ({"structured_outputs": {"structural_tag": of["structural_tag"].text}}, of["structural_tag"]),
        ({"regex": "[ab]"}, of["regex"]),
        ({"grammar": 'root ::= "a"'}, of["grammar"]),
        ({"json_schema": SCHEMA}, of["json_schema"]),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, of["json_schema"]),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, of["json_schema"]),
    ]
    for fields, _ in bodies:
        answer = http.post("/v1/chat/completions", json={"model": "parrot", "messages": HELLO, **fields})
        assert answer.status_code == 200, answer.text
        assert "warning" not in answer.headers
        assert http.post("/v1/completions", json={"model": "parrot", "prompt": "a", **fields}).status_code == 200
    asked = [params.grammar for _, params in served.service.asked]
    assert asked == [grammar for _, grammar in bodies for _ in range(2)]


def test_a_structural_tag_with_a_stream_tools_and_thinking(served):
    served.qwen.script = f"<think>hm</think>So {CALL}"
    form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [{"begin": "<tool_call>", "end": "</t>"}]}
    with served.openai() as client:
        stream = client.chat.completions.create(
            model="qwen3",
            messages=HELLO,
            tools=[WEATHER],
            response_format={"type": "structural_tag", "format": form},
            stream=True,
        )
        chunks = [chunk for chunk in stream if chunk.choices]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.reasoning_content or "" for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "So"
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert json.loads(call.function.arguments) == {"city": "北京"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    (_, params) = served.qwen.asked[-1]
    assert params.grammar == tag(format=form)
    assert params.thinking is not None  # the grammar applies behind it


def test_what_ended_an_answer(http, served):
    stop = served.service.tokenizer.special_ids["<|user|>"]
    for fields, reason in (
        ({}, None),
        ({"stop": ["b"]}, "b"),
        ({"stop_token_ids": [stop]}, stop),
        ({"max_tokens": 1}, None),
    ):
        served.service.script = "abc"
        body = {"model": "parrot", **fields}
        chat = http.post("/v1/chat/completions", json={**body, "messages": HELLO}).json()
        text = http.post("/v1/completions", json={**body, "prompt": "x"}).json()
        lines = http.post("/v1/completions", json={**body, "prompt": "x", "stream": True}).text.split("\n\n")
        last = json.loads(lines[-3].removeprefix("data: "))
        assert [one["choices"][0]["stop_reason"] for one in (chat, text, last)] == [reason] * 3
        assert chat["system_fingerprint"].startswith("warpbus-")


def test_a_salt_separates_cached_prefixes(http, served):
    for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        http.post("/v1/chat/completions", json={"model": "parrot", "messages": HELLO, **fields})
        http.post("/v1/completions", json={"model": "parrot", "prompt": "a", **fields})
    salts = served.service.cache_salts[-8:]
    assert salts[:2] == [b"", b""]
    first, other = salts[2], salts[6]
    assert salts[2:] == [first] * 4 + [other] * 2
    assert first != other
    assert 0 < len(first) <= 56  # with the salt of an API key at most 64
