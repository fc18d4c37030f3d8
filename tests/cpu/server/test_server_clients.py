"""Requests in the shapes in which client libraries send them: each is answered, and no field of it is unknown."""

import json

import pytest

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DRAFT = {"$schema": "http://json-schema.org/draft-07/schema#", **SCHEMA, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "description": "w", "parameters": SCHEMA}}
CLAUDE_TOOL = {"name": "weather", "description": "w", "input_schema": DRAFT}
ASK = {"role": "user", "content": "hi"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"

SHAPES = {
    "AI SDK, compatible, a schema": (
        CHAT,
        {
            "max_tokens": 200,
            "messages": [ASK],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": DRAFT, "strict": True, "name": "response"},
            },
        },
    ),
    "AI SDK, compatible, tools in a stream": (
        CHAT,
        {
            "max_tokens": 200,
            "messages": [ASK],
            "tools": [{"type": "function", "function": {"name": "weather", "description": "w", "parameters": DRAFT}}],
            "tool_choice": "required",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "AI SDK, responses": (
        RESPONSES,
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            "max_output_tokens": 200,
            "stream": True,
            "text": {"format": {"type": "json_schema", "strict": True, "name": "response", "schema": DRAFT}},
        },
    ),
    "AI SDK, Anthropic, a schema": (
        MESSAGES,
        {
            "max_tokens": 200,
            "messages": [PARTS],
            "tools": [{**CLAUDE_TOOL, "name": "json"}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    ),
    "AI SDK, Anthropic, tools in a stream": (
        MESSAGES,
        {
            "max_tokens": 200,
            "messages": [PARTS],
            "tools": [{**CLAUDE_TOOL, "eager_input_streaming": True}],
            "tool_choice": {"type": "any"},
            "stream": True,
        },
    ),
    "LangChain, a named tool": (
        CHAT,
        {
            "messages": [ASK],
            "max_completion_tokens": 200,
            "parallel_tool_calls": False,
            "stream": False,
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "tools": [TOOL],
        },
    ),
    "LangChain, the result of a tool": (
        CHAT,
        {
            "messages": [
                ASK,
                {"content": None, "role": "assistant", "tool_calls": [CALL]},
                {"content": "sunny", "role": "tool", "tool_call_id": "c1"},
            ],
            "max_completion_tokens": 200,
            "stream": False,
            "tools": [TOOL],
        },
    ),
    "LangChain, a text": (
        TEXT,
        {
            "prompt": ["hi"],
            "frequency_penalty": 0,
            "logprobs": None,
            "max_tokens": 8,
            "n": 1,
            "presence_penalty": 0,
            "seed": None,
            "temperature": 0.7,
            "top_p": 1,
        },
    ),
    "LangChain, responses": (RESPONSES, {"input": [{**ASK, "type": "message"}], "stream": False}),
    "LangChain, Anthropic, thinking": (
        MESSAGES,
        {"max_tokens": 1500, "messages": [ASK], "thinking": {"type": "enabled", "budget_tokens": 1024}},
    ),
    "LangChain, Anthropic, a named tool": (
        MESSAGES,
        {
            "max_tokens": 200,
            "messages": [ASK],
            "tools": [CLAUDE_TOOL],
            "tool_choice": {"type": "tool", "name": "weather"},
        },
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_no_field_is_unknown(served, name):
    path, body = SHAPES[name]
    with served.http() as http:
        answer = http.post(path, json={"model": "qwen3", **body})
    assert answer.status_code == 200, answer.text
    assert "warning" not in answer.headers
    if body.get("stream"):
        events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        assert len(events) > 2
        assert "error" not in json.loads(events[-2].removeprefix("data: "))
    (_, params) = served.qwen.asked[-1]
    assert params.max_tokens in (8, 200, 1500) or path == RESPONSES
