"""OpenAI's Responses API, by OpenAI's own client."""

import json

import openai
import pydantic
import pytest
from serving_fakes import FakeService, Running

from warpbus.errors import EngineDiedError
from warpbus.server.options import ServerOptions
from warpbus.server.registry import Models
from warpbus.server.stored_responses import StoredResponse, StoredResponses

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": None,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "北京"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(served):
    with served.openai() as client:
        yield client


def ask(client, given="北京？", model="qwen3", **fields):
    return client.responses.create(model=model, input=given, **fields)


def prompt_of(service):
    ids, params = service.asked[-1]
    specials = {number: text for text, number in service.tokenizer.special_ids.items()}
    return b"".join(specials.get(i, "").encode() or service.tokenizer.token_bytes(i) for i in ids).decode(), params


def plain(response):
    """A response without what differs from call to call."""
    found = response.model_dump(exclude_none=True)
    for name in ("id", "created_at"):
        found.pop(name)
    for item in found["output"]:
        item.pop("id")
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content", []):
            part.pop("parsed", None)
    return found


def test_a_text_is_answered(client, served):
    served.qwen.script = "晴。"
    answer = ask(client, temperature=0.5, top_p=0.25, max_output_tokens=100, metadata={"a": "b"})
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.output_text, answer.model) == ("completed", "晴。", "qwen3")
    [item] = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (answer.temperature, answer.top_p, answer.metadata, answer.tools) == (0.5, 0.25, {"a": "b"}, [])
    prompt = served.qwen.asked[-1][0]
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt), 7)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 7)  # as in SGLang
    assert answer.usage.input_tokens_details.cached_tokens == 3
    params = prompt_of(served.qwen)[1]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.25, 100)


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        ("晴。", {}),
        ("<think>\n想\n</think>\n\n晴。", {}),
        (f"<think>想</think>好。\n{CALL}\n{CALL}", {"tools": [WEATHER]}),
        ("abcdef", {"max_output_tokens": 3}),
        ("", {}),
    ],
)
def test_a_stream_makes_the_same_response(client, served, script, fields):
    served.qwen.script = script
    whole = ask(client, **fields)
    with client.responses.stream(model="qwen3", input="北京？", **fields) as stream:
        events = list(stream)
        response = events[-1].response
    assert plain(response) == plain(whole)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == len(whole.output)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_events_are_named_and_numbered(served):
    served.qwen.script = "<think>a</think>b"
    with served.http() as http:
        response = http.post("/v1/responses", json={"model": "qwen3", "input": "a", "stream": True})
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    data = [json.loads(line.removeprefix("data: ")) for _, line in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [each["type"] for each in data]
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
    assert [each["type"].removeprefix("response.") for each in data[2:-1]] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert [each["item"]["type"] for each in data if "item" in each] == ["reasoning"] * 2 + ["message"] * 2


def test_reasoning_is_an_item_of_its_own(client, served):
    served.qwen.script = "<think>想</think>晴"
    answer = ask(client, reasoning={"effort": "high"})
    thinking, message = answer.output
    assert (thinking.type, thinking.summary, thinking.content[0].text) == ("reasoning", [], "想")
    assert message.content[0].text == "晴"
    assert answer.usage.output_tokens_details.reasoning_tokens == 5
    assert answer.reasoning.effort == "high"
    served.qwen.script = "晴"
    ask(client, reasoning={"effort": "none"})
    assert prompt_of(served.qwen)[0].endswith("<think>\n\n</think>\n\n")


def test_tools_are_called_and_answered(client, served):
    served.qwen.script = f"<think>想</think>{CALL}"
    first = ask(client, [{"role": "user", "content": "北京？"}], tools=[WEATHER], instructions="Be brief.")
    thinking, call = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "北京"})
    served.qwen.script = "晴"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history = [{"role": "user", "content": "北京？"}, thinking, call, result]
    assert ask(client, history, tools=[WEATHER], instructions="Be brief.").output_text == "晴"
    whole = prompt_of(served.qwen)[0]
    called = '<think>想</think><tool_call>{"name": "weather", "arguments": {"city": "北京"}}</tool_call>'
    assert f"<|system|>Be brief.<|user|>北京？<|assistant|>{called}<|observation|>sunny<|assistant|>" in whole
    # The same by the id of the first response.
    ask(client, [result], previous_response_id=first.id, tools=[WEATHER], instructions="Be brief.")
    assert prompt_of(served.qwen)[0] == whole


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [("required", "lark"), ({"type": "function", "name": "weather"}, "lark"), ("auto", None), ("none", None)],
)
def test_the_choice_of_a_tool(client, served, choice, grammar):
    served.qwen.script = CALL
    answer = ask(client, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
    params = prompt_of(served.qwen)[1]
    assert (params.grammar.kind if params.grammar else None) == grammar
    assert answer.parallel_tool_calls is False
    assert answer.tools[0].name == "weather"


def test_a_conversation_goes_on_by_its_id(client, served):
    served.qwen.script = "Hi."
    first = ask(client, "My name is Li.", instructions="Forget this.")
    served.qwen.script = "Li."
    second = ask(client, "What is it?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    talk = "<|user|>My name is Li.<|assistant|>Hi.<|user|>What is it?<|assistant|>"
    assert prompt_of(served.qwen)[0] == talk
    with client.responses.stream(model="qwen3", input="Sure?", previous_response_id=second.id) as stream:
        third = stream.get_final_response()
    ask(client, "!", previous_response_id=third.id)
    assert prompt_of(served.qwen)[0].startswith(f"{talk}Li.<|user|>Sure?<|assistant|>Li.<|user|>!")


def test_responses_are_kept_and_forgotten(client, served):
    served.qwen.script = "Hi."
    kept = ask(client)
    assert client.responses.retrieve(kept.id) == kept
    client.responses.delete(kept.id)
    unkept = ask(client, store=False)
    for name in (kept.id, unkept.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)
        with pytest.raises(openai.BadRequestError) as caught:  # as OpenAI answers
            ask(client, previous_response_id=name)
        assert caught.value.code == "previous_response_not_found"


def test_only_the_last_responses_are_kept():
    stored = StoredResponses(2)
    for name in "abc":
        if name == "c":
            assert stored.get("a", b"") is not None
        stored.add(StoredResponse({"id": name}, [], b""))
    assert [name for name in "abc" if stored.get(name, b"")] == ["a", "c"]
    assert stored.get("a", b"other") is None
    nothing = StoredResponses(0)
    nothing.add(StoredResponse({"id": "a"}, [], b""))
    assert nothing.get("a", b"") is None


def test_long_responses_are_dropped_first(monkeypatch):
    monkeypatch.setattr("warpbus.server.stored_responses.MOST_BYTES", 100)
    stored = StoredResponses(9)
    stored.add(StoredResponse({"id": "a"}, [{"content": "x" * 40}], b""))
    stored.add(StoredResponse({"id": "b"}, [{"content": "x" * 40}], b""))
    stored.add(StoredResponse({"id": "c"}, [{"content": "x" * 200}], b""))
    assert [name for name in "abc" if stored.get(name, b"")] == ["b"]
    stored.remove("b")
    assert stored.get("b", b"") is None


def test_keys_do_not_see_the_responses_of_others():
    models, keys = Models(), ("a-key-of-some", "a-key-of-others")
    models.add("parrot", FakeService())
    with Running(models, ServerOptions(api_keys=keys)) as running:
        mine, others = (running.openai(key) for key in keys)
        answer = ask(mine, "a", model="parrot")
        assert mine.responses.retrieve(answer.id).id == answer.id
        with pytest.raises(openai.NotFoundError):
            others.responses.retrieve(answer.id)


def test_an_answer_follows_a_schema(client, served):
    class Weather(pydantic.BaseModel):
        city: str

    served.qwen.script = '{"city": "北京"}'
    answer = client.responses.parse(model="qwen3", input="北京？", text_format=Weather)
    assert answer.output_parsed == Weather(city="北京")
    params = prompt_of(served.qwen)[1]
    assert params.grammar.kind == "json_schema"
    ask(client, text={"format": {"type": "json_object"}})
    assert prompt_of(served.qwen)[1].grammar.kind == "json_object"


def test_what_codex_sends(client, served):
    """Parts, roles, tools of OpenAI's own, and thinking that only another server reads."""
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ls"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "call_1", "name": "shell", "arguments": '{"command": ["ls"]}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One file."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "thanks"}]},
    ]
    served.qwen.script = "晴"
    raw = client.responses.with_raw_response.create(
        model="qwen3",
        instructions="You are an agent.",
        input=items,
        tools=[{**WEATHER, "name": "shell", "strict": False}, {"type": "web_search", "external_web_access": False}],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="x",
        text={"verbosity": "low"},
    )
    assert raw.headers["warning"].endswith('tools.1.web_search"')
    prompt, _ = prompt_of(served.qwen)
    called = '<tool_call>{"name": "shell", "arguments": {"command": ["ls"]}}</tool_call>'
    assert prompt.endswith(
        f"<|system|>You are an agent.<|system|>Rules.<|user|>ls<|assistant|>{called}<|observation|>a.txt"
        "<|assistant|>One file.<|user|>thanks<|assistant|>"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "input: List should have at least 1 item"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type: "),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0: "),
        ({"background": True}, "background is not supported"),
        ({"conversation": "c"}, "conversation is not supported"),
        ({"text": {"format": {"type": "json_schema"}}}, "schema goes with the type json_schema"),
        ({"tools": [{"type": "function"}]}, "a function needs a name"),
        ({"tool_choice": "required"}, "tool_choice asks for a tool that tools does not have"),
        ({"max_output_tokens": 0}, "max_output_tokens: "),
        ({"input": "x" * 5000}, "the prompt has 5,0"),
    ],
)
def test_bad_requests_are_refused(served, fields, message):
    with served.http() as http:
        response = http.post("/v1/responses", json={"model": "qwen3", "input": "a", **fields})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_a_stream_that_fails_ends_with_a_failed_response(client, served):
    served.qwen.script = "abcdef"
    served.qwen.fails = (3, EngineDiedError("the engine died"))
    events = list(ask(client, stream=True))
    assert events[-1].type == "response.failed"
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert "the engine died" in failed.error.message
    assert (failed.output_text, failed.output[0].status) == ("abc", "incomplete")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(failed.id)


def test_an_answer_that_is_cut_off_is_incomplete(client, served):
    served.qwen.script = "abcdef"
    answer = ask(client, max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output_text, answer.output[0].status) == ("abc", "incomplete")


@pytest.mark.parametrize(
    ("script", "most"),
    [("<think>abcdefghi</think>xyz", 5), ("<think>abc</think>xyzuvw", 8), (CALL + "\n" * 60, len(CALL) + 20)],
)
def test_items_of_a_stream_are_those_of_its_response(client, served, script, most):
    served.qwen.script = script
    asked = {"model": "qwen3", "input": "北京？", "tools": [WEATHER], "max_output_tokens": most}
    events = list(client.responses.create(**asked, stream=True))
    assert events[-1].type == "response.incomplete"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    assert [item.status for item in done[:-1]] == ["completed"] * (len(done) - 1)
    assert done[-1].status == ("completed" if done[-1].type == "function_call" else "incomplete")
    assert plain(client.responses.create(**asked)) == plain(events[-1].response)


def test_a_call_that_is_cut_off_is_incomplete_and_not_reported_again(client, served):
    served.qwen.script = CALL
    with client.responses.stream(
        model="qwen3", input="北京？", tools=[WEATHER], max_output_tokens=CALL.index("北") - 1
    ) as stream:
        [done] = [event.item for event in stream if event.type == "response.output_item.done"]
    assert (done.type, done.status, done.arguments) == ("function_call", "incomplete", '{"city": ')
    first = ask(client, tools=[WEATHER], max_output_tokens=CALL.index("北") - 1)
    [call] = first.output
    assert (first.status, call.status, call.arguments) == ("incomplete", "incomplete", '{"city": ')
    served.qwen.script = "晴"
    history = [{"role": "user", "content": "北京？"}, call, {"role": "user", "content": "And?"}]
    assert ask(client, history, tools=[WEATHER]).output_text == "晴"
    whole = prompt_of(served.qwen)[0]
    assert whole.endswith("<|user|>北京？<|user|>And?<|assistant|>")
    ask(client, "And?", previous_response_id=first.id, tools=[WEATHER])
    assert prompt_of(served.qwen)[0] == whole


def test_tokens_of_the_input_are_counted(client, served):
    served.qwen.script = "Hi."
    first = ask(client, "My name is Li.")
    found = client.responses.input_tokens.count(model="qwen3", input="What is it?", previous_response_id=first.id)
    assert (found.object, found.input_tokens) == ("response.input_tokens", len(_tokens(served, client, first.id)))


def _tokens(served, client, before):
    ask(client, "What is it?", previous_response_id=before)
    return served.qwen.asked[-1][0]
