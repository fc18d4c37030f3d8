"""`warpbus serve` with a model that thinks, which is small and random: its budget, and grammars and tools behind it."""

import json
import re

import openai
import pytest
from reasoning_model import write_reasoning_model
from served_process import serving

ASKED = [{"role": "user", "content": "9.11 or 9.9?"}]
THINK = {"chat_template_kwargs": {"always_think": True}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["北京", "上海"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    model = write_reasoning_model(tmp_path_factory.mktemp("reasoning"))
    with (
        serving(str(model)) as process,
        openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client, *, extra=THINK, **fields):
    return client.chat.completions.create(
        **{"model": "model", "messages": ASKED, "max_tokens": 160, "seed": 3, "extra_body": extra, **fields}
    )


def ask_streamed(client, **fields):
    """The reasoning and the text of a stream, its calls and its usage."""
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}, **fields))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    return reasoning, "".join(delta.content or "" for delta in deltas), calls, chunks[-1].usage


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_the_budget_ends_the_thinking(client, budget):
    answer = ask(client, extra={**THINK, "thinking_token_budget": budget, "guided_regex": "[a-z]{3}"})
    [choice] = answer.choices
    assert re.fullmatch("[a-z]{3}", choice.message.content)
    assert choice.finish_reason == "stop"
    # the closing token counts too
    assert answer.usage.completion_tokens_details.reasoning_tokens <= budget + 1
    assert bool(choice.message.reasoning_content) <= (budget > 0)


def test_without_a_budget_the_thinking_may_take_all(client):
    unlikely = {"chat_template_kwargs": {"always_think": True}, "ignore_eos": True}
    answer = ask(client, extra=unlikely, max_tokens=20)
    details = answer.usage.completion_tokens_details
    assert 1 <= details.reasoning_tokens <= answer.usage.completion_tokens == 20


@pytest.mark.parametrize("budget", [3, 12])
def test_a_stream_says_the_same(client, budget):
    fields = {"extra": {**THINK, "thinking_token_budget": budget, "guided_regex": "[a-z ]{9}"}}
    whole = ask(client, **fields)
    message = whole.choices[0].message
    reasoning, text, calls, usage = ask_streamed(client, **fields)
    assert (reasoning, text, calls) == (message.reasoning_content or "", message.content, [])
    assert usage == whole.usage


def test_a_schema_applies_behind_the_thinking(client):
    form = {
        "type": "json_schema",
        "json_schema": {
            "name": "winner",
            "schema": {
                "type": "object",
                "properties": {"larger": {"enum": ["9.11", "9.9"]}},
                "required": ["larger"],
                "additionalProperties": False,
            },
        },
    }
    [choice] = ask(client, extra={**THINK, "thinking_token_budget": 5}, response_format=form).choices
    assert json.loads(choice.message.content)["larger"] in ("9.11", "9.9")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_comes_behind_the_thinking(client, choice):
    fields = {
        "extra": {**THINK, "thinking_token_budget": 5},
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    [found] = ask(client, **fields).choices
    assert found.finish_reason == "tool_calls"
    [call] = found.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("北京", "上海")
    reasoning, _, [streamed], _ = ask_streamed(client, **fields)
    assert reasoning == (found.message.reasoning_content or "")
    assert streamed.function.model_dump() == call.function.model_dump()


def test_thinking_that_is_turned_off_leaves_no_reasoning(client):
    off = {"enable_thinking": False, "thinking_token_budget": 5, "guided_regex": "[a-z]{3}"}
    answer = ask(client, extra=off)
    assert re.fullmatch("[a-z]{3}", answer.choices[0].message.content)
    assert answer.choices[0].message.reasoning_content is None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_the_thinking_can_be_left_out_of_the_answer(client):
    fields = {**THINK, "thinking_token_budget": 8, "guided_regex": "[a-z]{3}"}
    shown = ask(client, extra=fields)
    hidden = ask(client, extra={**fields, "include_reasoning": False})
    assert hidden.choices[0].message.content == shown.choices[0].message.content
    assert hidden.choices[0].message.reasoning_content is None
    assert hidden.usage == shown.usage
