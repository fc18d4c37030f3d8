"""Anthropic's Messages API, by Anthropic's own client."""

import asyncio
import json

import anthropic
import httpx
import pytest
from serving_fakes import FakeService, Running

from warpbus.engine import Thinking
from warpbus.errors import EngineDiedError
from warpbus.server.options import ServerOptions
from warpbus.server.registry import Models

ASKED = [{"role": "user", "content": "北京？"}]
WEATHER = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "北京"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(served):
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def ask(client, *, model="qwen3", messages=ASKED, max_tokens=1000, **fields):
    return client.messages.create(model=model, messages=messages, max_tokens=max_tokens, **fields)


def streamed(client, *, model="qwen3", messages=ASKED, max_tokens=1000, **fields):
    """The events of a stream, and the message that the client makes of them."""
    with client.messages.stream(model=model, messages=messages, max_tokens=max_tokens, **fields) as stream:
        events = list(stream)
        return events, stream.get_final_message()


def prompt_of(service):
    ids, params = service.asked[-1]
    specials = {number: text for text, number in service.tokenizer.special_ids.items()}
    return b"".join(specials.get(i, "").encode() or service.tokenizer.token_bytes(i) for i in ids).decode(), params


def plain(message):
    """A message without what differs from call to call."""
    found = message.model_dump(exclude_none=True)
    found.pop("id")
    for block in found["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return found


def test_a_text_is_answered(client, served):
    served.qwen.script = "晴。"
    answer = ask(client)
    assert answer.id.startswith("msg_")
    assert plain(answer) == {
        "type": "message",
        "role": "assistant",
        "model": "qwen3",
        "content": [{"type": "text", "text": "晴。"}],
        "stop_reason": "end_turn",
        "usage": {
            "input_tokens": len(served.qwen.asked[-1][0]) - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 7,
        },
    }
    assert answer._request_id


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        ("晴。", {}),
        ("<think>\n想\n</think>\n\n晴。", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        (f"<think>想</think>好。\n{CALL}\n{CALL}", {"thinking": {"type": "adaptive"}, "tools": [WEATHER]}),
        (CALL, {"tools": [WEATHER]}),
        ("", {}),
    ],
)
def test_a_stream_makes_the_same_message(client, served, script, fields):
    served.qwen.script = script
    whole = ask(client, **fields)
    events, message = streamed(client, **fields)
    assert plain(message) == plain(whole)
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)


def test_raw_events_are_named_and_in_order(served):
    served.qwen.script = "ab"
    body = {"model": "qwen3", "messages": ASKED, "max_tokens": 9, "stream": True}
    with served.http() as http:
        response = http.post("/v1/messages", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    for name, data in events:
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert [name.removeprefix("event: ") for name, _ in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_thinking_is_a_block_of_its_own(client, served):
    served.qwen.script = "<think>想</think>晴"
    answer = ask(client, thinking={"type": "enabled", "budget_tokens": 2000})
    assert [(block.type, getattr(block, "thinking", None) or block.text) for block in answer.content] == [
        ("thinking", "想"),
        ("text", "晴"),
    ]
    prompt, params = prompt_of(served.qwen)
    assert prompt.endswith("<|assistant|>")
    assert isinstance(params.thinking, Thinking)
    assert params.thinking.budget == 2000


@pytest.mark.parametrize("fields", [{}, {"thinking": {"type": "disabled"}}])
def test_without_thinking_the_model_is_reported_not_to_think(client, served, fields):
    served.qwen.script = "晴"
    assert [block.type for block in ask(client, **fields).content] == ["text"]
    assert prompt_of(served.qwen)[0].endswith("<|assistant|><think>\n\n</think>\n\n")


def test_thinking_that_is_not_to_be_shown_is_left_out(client, served):
    served.qwen.script = "<think>想</think>晴"
    answer = ask(client, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in answer.content] == ["text"]


def test_tools_are_offered_called_and_answered(client, served):
    served.qwen.script = f"<think>想</think>{CALL}"
    first = ask(client, tools=[WEATHER], thinking={"type": "adaptive"}, system="Be brief.")
    assert first.stop_reason == "tool_use"
    [_, call] = first.content
    assert (call.name, call.input) == ("weather", {"city": "北京"})
    assert call.id.startswith("toolu_")
    offered = {"name": "weather", "description": "of a city", "parameters": WEATHER["input_schema"]}
    assert json.dumps(offered, ensure_ascii=False) in prompt_of(served.qwen)[0]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    history = [
        *ASKED,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    served.qwen.script = "晴"
    assert ask(client, messages=history, tools=[WEATHER], system="Be brief.").content[0].text == "晴"
    prompt, _ = prompt_of(served.qwen)
    called = '<think>想</think><tool_call>{"name": "weather", "arguments": {"city": "北京"}}</tool_call>'
    expected = f"<|system|>Be brief.<|user|>北京？<|assistant|>{called}<|observation|>sunny<|user|>And?<|assistant|>"
    assert expected in prompt


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [
        ({"type": "any"}, "lark"),
        ({"type": "tool", "name": "weather"}, "lark"),
        ({"type": "auto"}, None),
        ({"type": "none"}, None),
    ],
)
def test_the_choice_of_a_tool(client, served, choice, grammar):
    served.qwen.script = CALL
    ask(client, tools=[WEATHER], tool_choice=choice)
    prompt, params = prompt_of(served.qwen)
    assert (params.grammar.kind if params.grammar else None) == grammar
    assert ("<tool_call>" in prompt) == (choice["type"] != "none")


def test_one_call_at_a_time(client, served):
    served.qwen.script = f"{CALL}\n{CALL}"
    answer = ask(client, tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert [block.type for block in answer.content] == ["tool_use"]
    assert prompt_of(served.qwen)[1].grammar.text.startswith("start: call\n")


def test_tools_of_the_vendor_are_left_out_with_a_warning(client, served):
    search = {"type": "web_search_20250305", "name": "web_search"}
    served.qwen.script = "晴"
    raw = client.messages.with_raw_response.create(model="qwen3", messages=ASKED, max_tokens=9, tools=[search, WEATHER])
    assert raw.headers["warning"].endswith('tools.0.web_search_20250305"')
    prompt, _ = prompt_of(served.qwen)
    assert "web_search" not in prompt
    assert "weather" in prompt


@pytest.mark.parametrize("content", ["One moment", [{"type": "text", "text": "One moment"}]])
def test_an_answer_that_has_begun_is_continued(client, served, content):
    served.qwen.script = ", please"
    ask(client, messages=[*ASKED, {"role": "assistant", "content": content}])
    assert prompt_of(served.qwen)[0].endswith("<|assistant|>One moment")


def test_sampling_and_stop_sequences(client, served):
    served.qwen.script = "abcdef"
    answer = ask(
        client,
        stop_sequences=["cd", "xx"],
        extra_body={"temperature": 0.5, "top_k": 7, "top_p": 0.25},
    )
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("ab", "stop_sequence", "cd")
    params = prompt_of(served.qwen)[1]
    assert (params.temperature, params.top_k, params.top_p, params.stop) == (0.5, 7, 0.25, ("cd", "xx"))


def test_answers_that_are_cut_off(client, served):
    served.qwen.script = "abcdef"
    assert ask(client, max_tokens=3).stop_reason == "max_tokens"
    # More than the context holds is taken as the limit that it is.
    served.qwen.script = "a" * 3000
    answer = ask(client, max_tokens=20_000)
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.output_tokens == 2048 - len(served.qwen.asked[-1][0])


@pytest.mark.parametrize(("tokens", "given"), [(CALL.index("京") + 2, {"city": "北"}), (45, {})])
def test_a_call_that_is_cut_off_has_the_input_so_far(client, served, tokens, given):
    served.qwen.script = CALL
    message = ask(client, tools=[WEATHER], max_tokens=tokens)
    assert message.stop_reason == "max_tokens"
    assert [(block.type, block.input) for block in message.content] == [("tool_use", given)]
    _, message = streamed(client, tools=[WEATHER], max_tokens=tokens)
    assert (message.stop_reason, message.content[0].type) == ("max_tokens", "tool_use")


def test_an_answer_follows_a_schema(client, served):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ask(client, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    params = prompt_of(served.qwen)[1]
    assert (params.grammar.kind, json.loads(params.grammar.text)) == ("json_schema", schema)


def test_tokens_are_counted(client, served):
    fields = {"model": "qwen3", "messages": ASKED, "system": [{"type": "text", "text": "Be brief."}]}
    found = client.messages.count_tokens(**fields, tools=[WEATHER])
    ask(client, messages=ASKED, system="Be brief.", tools=[WEATHER])
    assert found.input_tokens == len(served.qwen.asked[-1][0])
    assert client.messages.count_tokens(**fields).input_tokens < found.input_tokens


def test_what_claude_code_sends(client, served):
    """Blocks with cache_control, metadata, a beta's query and fields, and thinking that only another server reads."""
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}, **cached},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": "no", **cached}],
        },
    ]
    served.qwen.script = "晴"
    answer = client.beta.messages.create(
        model="qwen3",
        max_tokens=20_000,
        messages=history,
        system=[{"type": "text", "text": "You are an agent.", **cached}],
        tools=[{**WEATHER, **cached}],
        thinking={"type": "adaptive"},
        metadata={"user_id": "u"},
        betas=["interleaved-thinking-2025-05-14"],
        extra_body={"context_management": {"edits": []}, "output_config": {"effort": "high"}},
    )
    assert answer.content[0].text == "晴"
    prompt, _ = prompt_of(served.qwen)
    assert "<|system|>You are an agent.<|user|><system-reminder>\nhi<|assistant|><think>hm</think><tool_call>" in prompt
    assert prompt.endswith("<|observation|>no<|assistant|>")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0: "),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0.text: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"temperature": 2}, "temperature: "),
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a tool that tools does not have"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: name goes with the type tool"),
        ({"thinking": {"type": "much"}}, "thinking.type: "),
        ({"tools": [WEATHER, WEATHER]}, "two have the same name"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "the prompt has 5,0"),
    ],
)
def test_bad_requests_are_refused_with_their_error_object(served, fields, message):
    body = {"model": "qwen3", "messages": ASKED, "max_tokens": 9, **fields}
    with served.http() as http:
        response = http.post("/v1/messages", json=body)
    assert response.status_code == 400
    found = response.json()
    assert set(found) == {"type", "error"}
    assert found["type"] == "error"
    assert found["error"]["type"] == "invalid_request_error"
    assert message in found["error"]["message"]


@pytest.mark.parametrize("content", ["", [], [{"type": "redacted_thinking", "data": "x"}]])
def test_a_message_without_text_is_a_message(client, served, content):
    served.qwen.script = "晴"
    ask(client, messages=[{"role": "user", "content": content}])
    assert prompt_of(served.qwen)[0].startswith("<|user|><|assistant|>")


@pytest.mark.parametrize(
    ("error", "model", "raised", "kind"),
    [
        (None, "claude-opus-4-5", anthropic.NotFoundError, "not_found_error"),
        (EngineDiedError("it died", retry_after=5), "qwen3", anthropic.InternalServerError, "overloaded_error"),
        (RuntimeError("secret"), "qwen3", anthropic.InternalServerError, "api_error"),
    ],
)
def test_errors_are_those_of_the_client(client, served, error, model, raised, kind):
    served.qwen.fails = error
    with pytest.raises(raised) as caught:
        ask(client, model=model)
    assert caught.value.body["error"]["type"] == kind
    assert "secret" not in str(caught.value)


def test_a_stream_that_fails_ends_with_an_error(client, served):
    served.qwen.script = "abcdef"
    served.qwen.fails = (3, EngineDiedError("the engine died"))
    with pytest.raises(anthropic.APIStatusError, match="the engine died"):
        streamed(client)


def test_a_client_that_leaves_ends_its_request(client, served):
    served.qwen.script, served.qwen.pause = "abc", asyncio.Event()
    with client.messages.stream(model="qwen3", messages=ASKED, max_tokens=9) as stream:
        next(iter(stream))
    # `fresh` waits until nothing runs.


def test_keys_as_anthropic_sends_them():
    models = Models()
    models.add("parrot", FakeService())
    with Running(models, ServerOptions(api_keys=("a-key-of-some",))) as running:
        fields = {"model": "parrot", "messages": ASKED, "max_tokens": 9}
        for own in ({"api_key": "a-key-of-some"}, {"auth_token": "a-key-of-some"}):
            with anthropic.Anthropic(base_url=running.url, max_retries=0, **own) as client:
                assert client.messages.create(**fields).stop_reason == "max_tokens"
        with (
            anthropic.Anthropic(base_url=running.url, api_key="another-key", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            client.messages.create(**fields)
        assert caught.value.body["error"]["type"] == "authentication_error"


def test_strict_servers_refuse_what_is_not_known():
    models = Models()
    models.add("parrot", FakeService())
    with Running(models, ServerOptions(strict=True)) as running:
        body = {"model": "parrot", "messages": ASKED, "max_tokens": 9}
        for strange in ({"context_management": {}}, {"tools": [{"type": "bash_20250124", "name": "bash"}]}):
            response = httpx.post(f"{running.url}/v1/messages", json={**body, **strange})
            assert response.status_code == 400
            assert "leave it out" in response.json()["error"]["message"]
