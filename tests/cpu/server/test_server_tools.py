"""Tools, by OpenAI's own client: shown to the model, called in its answers, and rendered back."""

import json

import pytest
from openai import BadRequestError
from serving_fakes import NEXT_MESSAGE

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "strict": True}}
CODE = {"type": "function", "function": {"name": "interpreter", "description": "runs Python"}}
ASKED = [{"role": "user", "content": "北京？"}]
TWO_CALLS = (("weather", "city='北京'"), ("time", ""))
CALL = 'get_weather\n{"city": "北京"}'


@pytest.fixture(scope="module")
def client(served):
    with served.openai() as client:
        yield client


def ask(client, model="glm-4", messages=ASKED, tools=(WEATHER, TIME), **fields):
    return client.chat.completions.create(model=model, messages=messages, tools=list(tools), **fields)


def test_a_call_comes_whole(client, served):
    served.glm4.script = CALL
    [choice] = ask(client).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "get_weather",
        {"city": "北京"},
    )
    prompt = served.glm4.tokenizer.decode(served.glm4.asked[0][0])
    assert prompt.startswith("\n# 可用工具\n\n## get_weather")
    assert served.glm4.asked[0][1].grammar is None


def test_chatglm3_calls_in_its_own_way(client, served):
    served.glm3.script = "get_weather\n ```python\ntool_call(city='北京')\n```"
    [choice] = ask(client, model="chatglm3").choices
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "北京"}


def test_calls_are_streamed(client, served):
    served.glm4.script = f"{CALL}\nget_time\n{{}}"
    deltas = [chunk.choices[0] for chunk in ask(client, stream=True)]
    assert deltas[-1].finish_reason == "tool_calls"
    calls = [call for choice in deltas for call in choice.delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in calls] == [(0, "get_weather"), (1, "get_time")]
    assert len({call.id for call in calls}) == 2
    assert deltas[0].delta.content is None
    assert "".join(choice.delta.content or "" for choice in deltas) == ""


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_several_calls_of_one_answer(client, served, stream):
    city, date = (f"get_{name}\n ```python\ntool_call({given})\n```" for name, given in TWO_CALLS)
    served.glm3.script = NEXT_MESSAGE.join(["\n 好的，我看看。", city, date])
    answer = ask(client, model="chatglm3", stream=stream)
    if stream:
        deltas = [chunk.choices[0] for chunk in answer]
        text = "".join(choice.delta.content or "" for choice in deltas)
        calls = [call for choice in deltas for call in choice.delta.tool_calls or ()]
        assert [call.index for call in calls] == [0, 1]
        # The first call is there before the second has begun.
        assert [len(choice.delta.tool_calls) for choice in deltas if choice.delta.tool_calls] == [1, 1]
        reason = deltas[-1].finish_reason
    else:
        [choice] = answer.choices
        text, calls, reason = choice.message.content, choice.message.tool_calls, choice.finish_reason
    assert (text, reason) == ("好的，我看看。", "tool_calls")
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", '{"city": "北京"}'),
        ("get_time", "{}"),
    ]


def test_further_messages_of_an_answer_are_text_where_they_call_nothing(client, served):
    served.glm4.script = f"\n一{NEXT_MESSAGE}\n二{NEXT_MESSAGE}unknown\n{{}}"
    [choice] = ask(client).choices
    assert (choice.message.content, choice.finish_reason) == ("一\n二\nunknown\n{}", "stop")


def test_a_stop_string_ends_an_answer_before_its_next_message(client, served):
    served.glm4.script = f"\n一二{NEXT_MESSAGE}{CALL}"
    [choice] = ask(client, stop="二").choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("一", None, "stop")


def test_an_answer_that_is_cut_off_in_its_second_call_keeps_the_first(client, served):
    served.glm4.script = f"{CALL}{NEXT_MESSAGE}get_time\n{{}}"
    [choice] = ask(client, max_tokens=len(CALL.encode()) + 6).choices
    assert choice.finish_reason == "length"
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    assert choice.message.content == "get_t"  # not known yet which tool this is


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_call_that_is_cut_off_has_the_beginning_of_its_arguments(client, served, stream):
    served.glm4.script = f'{CALL}{NEXT_MESSAGE}get_time\n{{"zone": "UTC"}}'
    answer = ask(client, max_tokens=len(CALL.encode()) + 20, stream=stream)
    if stream:
        calls = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()]
        assert [call.index for call in calls] == [0, 1]
    else:
        [choice] = answer.choices
        calls = choice.message.tool_calls
        assert (choice.message.content, choice.finish_reason) == (None, "length")
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", '{"city": "北京"}'),
        ("get_time", '{"zone": "'),
    ]


@pytest.mark.parametrize(("model", "name"), [("chatglm3", "interpreter"), ("glm-4", "python")])
def test_code_is_handed_out_and_rendered_back(client, served, model, name):
    tool = {"type": "function", "function": {"name": name, "description": "runs Python"}}
    service = served.glm3 if model == "chatglm3" else served.glm4
    service.script = f"{name}\n ```python\nprint(1)\n```" if model == "chatglm3" else f"{name}\nprint(1)"
    message = ask(client, model=model, tools=[tool]).choices[0].message
    [call] = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (name, {"code": "print(1)"})
    prompt = service.tokenizer.decode(service.asked[-1][0])
    assert "runs Python" in prompt
    assert '"parameters"' not in prompt
    said, service.script = service.script, "\n1"
    history = [*ASKED, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "1"}]
    assert ask(client, model=model, messages=history, tools=[tool]).choices[0].message.content == "1"
    assert service.tokenizer.decode(service.asked[-1][0]).endswith(f"{said}\n1")


def test_parallel_calls_can_be_switched_off(client, served):
    served.glm4.script = f"{CALL}\nget_time\n{{}}"
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_an_answer_without_a_call_is_text(client, served):
    served.glm4.script = "\n晴。get_weather"
    [choice] = ask(client).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
        "晴。get_weather",
        None,
        "stop",
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True)]
    assert "".join(texts) == "晴。get_weather"
    assert len(texts) > 5


def test_a_call_that_is_cut_off_has_the_beginning_of_its_arguments(client, served):
    served.glm4.script = CALL
    [choice] = ask(client, max_tokens=15).choices
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments, choice.finish_reason) == ("get_weather", '{"c', "length")
    assert choice.message.content is None


def test_a_call_that_ends_otherwise_before_its_end_is_text(client, served):
    served.glm4.script = CALL
    [choice] = ask(client, stop='ity"').choices
    assert (choice.message.content, choice.finish_reason) == ('get_weather\n{"c', "stop")


def test_the_choice_none_tells_of_no_tools(client, served):
    served.glm4.script = CALL
    [choice] = ask(client, tool_choice="none").choices
    assert choice.message.content == CALL
    assert "可用工具" not in served.glm4.tokenizer.decode(served.glm4.asked[0][0])


def test_a_call_can_be_forced(client, served):
    served.glm4.script = "get_time\n{}"
    ask(client, tool_choice="required")
    ask(client, tool_choice={"type": "function", "function": {"name": "get_time"}})
    required, named = [params.grammar for _, params in served.glm4.asked]
    assert required.kind == named.kind == "lark"
    assert "get_weather" in required.text
    assert "get_weather" not in named.text
    served.glm3.script = "get_time\n ```python\ntool_call()\n```"
    [choice] = ask(client, model="chatglm3", tool_choice="required").choices
    assert (choice.finish_reason, choice.message.tool_calls[0].function.name) == ("tool_calls", "get_time")
    assert "tool_call(" in served.glm3.asked[-1][1].grammar.text
    with pytest.raises(BadRequestError, match="cannot be made to run code"):
        ask(client, model="chatglm3", tools=[CODE], tool_choice="required")
    with pytest.raises(BadRequestError, match="grammar"):
        ask(client, tool_choice="required", response_format={"type": "json_object"})


def test_what_a_tool_gave_back_is_rendered(client, served):
    served.glm4.script = CALL
    message = ask(client).choices[0].message
    served.glm4.script = "\n晴"
    history = [
        *ASKED,
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"},
    ]
    assert ask(client, messages=history).choices[0].message.content == "晴"
    ids = served.glm4.asked[-1][0]
    specials = served.glm4.tokenizer.special_ids
    at = ids.index(specials["<|observation|>"])
    assert served.glm4.tokenizer.decode(ids[at:]) == "\nsunny"
    assert served.glm4.tokenizer.decode(ids[:at]).endswith('get_weather\n{"city": "北京"}')
    assert ids[-1] == specials["<|assistant|>"]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([TIME, TIME], "two have the same name"),
        ([{"type": "function", "function": {"name": "not a name"}}], "tools.0.function.name"),
        ([{"type": "retrieval"}], "tools.0.type"),
        ([{"type": "function", "function": {"name": "f", "description": "x" * 70_000}}], "70,0"),
        ([TIME] * 129, "tools"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(client, tools, message):
    with pytest.raises(BadRequestError) as caught:
        ask(client, tools=tools)
    assert message in caught.value.body["message"]


def test_calls_of_the_past_have_to_be_whole(client):
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": "{"}}
    with pytest.raises(BadRequestError, match="JSON object"):
        ask(client, messages=[*ASKED, {"role": "assistant", "tool_calls": [call]}])
