"""Reasoning apart from the answer, by OpenAI's own client."""

import json

import pytest
from openai import BadRequestError
from serving_fakes import FIRST_TAG

ASKED = [{"role": "user", "content": "北京？"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "北京"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(served):
    with served.openai() as client:
        yield client


def ask(client, messages=ASKED, model="qwen3", **fields):
    own = {name: fields.pop(name) for name in OWN & set(fields)}
    return client.chat.completions.create(model=model, messages=messages, extra_body=own, **fields)


OWN = {"chat_template_kwargs", "enable_thinking", "thinking_token_budget", "include_reasoning", "guided_regex"}
OWN |= {"continue_final_message", "add_generation_prompt"}


def prompt_of(served):
    ids, params = served.qwen.asked[-1]
    specials = {number: text for text, number in served.qwen.tokenizer.special_ids.items()}
    tokenizer = served.qwen.tokenizer
    return b"".join(specials.get(i, "").encode() or tokenizer.token_bytes(i) for i in ids).decode(), params


def test_thinking_is_apart_from_the_answer(client, served):
    served.qwen.script = "<think>\n想\n</think>\n\n晴。"
    answer = ask(client)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("晴。", "想", "想")
    # <think>, two line feeds, three bytes and </think>
    assert answer.usage.completion_tokens_details.reasoning_tokens == 7
    assert prompt_of(served) == ("<|user|>北京？<|assistant|>", served.qwen.asked[-1][1])
    assert served.qwen.asked[-1][1].thinking is None


def test_thinking_is_streamed(client, served):
    served.qwen.script = "<think>ab</think>cd"
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)] == ["a", "b"]
    assert [delta.reasoning for delta in deltas if getattr(delta, "reasoning", None)] == ["a", "b"]
    assert [delta.content for delta in deltas if delta.content] == ["c", "d"]
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 4


def test_other_models_have_no_reasoning(client, served):
    served.service.script = "<think>a</think>b"
    answer = ask(client, model="parrot")
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("<think>a</think>b", None)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_reasoning_can_be_left_out(client, served):
    served.qwen.script = "<think>a</think>b"
    message = ask(client, include_reasoning=False).choices[0].message
    assert (message.content, message.reasoning_content) == ("b", None)


def test_an_answer_that_is_cut_off_in_its_thinking(client, served):
    served.qwen.script = "<think>abcdef</think>"
    [choice] = ask(client, max_tokens=4).choices
    assert (choice.message.content, choice.message.reasoning_content, choice.finish_reason) == ("", "abc", "length")


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ],
)
def test_thinking_can_be_turned_off(client, served, fields):
    served.qwen.script = "\n晴。"
    message = ask(client, thinking_token_budget=3, **fields).choices[0].message
    assert (message.content, message.reasoning_content) == ("晴。", None)
    prompt, params = prompt_of(served)
    assert prompt.endswith("<|assistant|><think>\n\n</think>\n\n")
    assert params.thinking is None


def test_a_prompt_may_open_the_thinking(client, served):
    served.qwen.script = "想</think>晴"
    message = ask(client, chat_template_kwargs={"always_think": True}, thinking_token_budget=9).choices[0].message
    assert (message.content, message.reasoning_content) == ("晴", "想")
    thinking = prompt_of(served)[1].thinking
    assert (thinking.opened, thinking.budget) == (True, 9)


def test_a_budget_and_a_grammar_reach_the_engine(client, served):
    served.qwen.script = "<think>a</think>b"
    ask(client, thinking_token_budget=0)
    ask(client, guided_regex="b")
    budget, grammar = [params for _, params in served.qwen.asked]
    assert (budget.thinking.budget, budget.thinking.opened, budget.grammar) == (0, False, None)
    assert (grammar.thinking.budget, grammar.grammar.kind) == (None, "regex")
    assert (grammar.thinking.opening, grammar.thinking.closing) == (FIRST_TAG, FIRST_TAG + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_behind_the_thinking(client, served, stream):
    served.qwen.script = f"<think>I call {CALL}</think>\n\n好。\n{CALL}\n{CALL}"
    answer = ask(client, tools=[WEATHER], stream=stream)
    if stream:
        deltas = [chunk.choices[0] for chunk in answer]
        text = "".join(choice.delta.content or "" for choice in deltas)
        thought = "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in deltas)
        calls = [call for choice in deltas for call in choice.delta.tool_calls or ()]
        assert [call.index for call in calls] == [0, 1]
        reason = deltas[-1].finish_reason
    else:
        [choice] = answer.choices
        message = choice.message
        text, thought, calls, reason = (
            message.content,
            message.reasoning_content,
            message.tool_calls,
            choice.finish_reason,
        )
    assert (text, thought, reason) == ("好。", f"I call {CALL}", "tool_calls")
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "北京"}] * 2
    assert "<tool_call>" in prompt_of(served)[0]


def test_forced_and_strict_calls_have_grammars(client, served):
    served.qwen.script = f"<think>a</think>{CALL}"
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    ask(client, tools=[WEATHER], tool_choice="required")
    ask(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    ask(client, tools=[strict])
    ask(client, tools=[WEATHER])
    ask(client, tools=[strict], response_format={"type": "json_object"})
    several, one, free, none, form = [params.grammar for _, params in served.qwen.asked]
    assert several.text.startswith('start: call ("\\n" call)*')
    assert one.text.startswith("start: call\n")
    assert free.text.startswith("start: (head body)* tail?")
    assert none is None
    assert form.kind == "json_object"
    assert all(params.thinking for _, params in served.qwen.asked if params.grammar)


def test_earlier_thinking_and_calls_are_rendered_back(client, served):
    served.qwen.script = f"<think>想</think>{CALL}"
    message = ask(client, tools=[WEATHER]).choices[0].message
    history = [
        *ASKED,
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "<|user|>"},
    ]
    served.qwen.script = "晴"
    assert ask(client, messages=history, tools=[WEATHER]).choices[0].message.content == "晴"
    prompt, _ = prompt_of(served)
    call = '<tool_call>{"name": "weather", "arguments": {"city": "北京"}}</tool_call>'
    assert prompt.endswith(f"<|user|>北京？<|assistant|><think>想</think>{call}<|observation|><|user|><|assistant|>")
    assert served.qwen.asked[-1][0].count(served.qwen.tokenizer.special_ids["<|user|>"]) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages: another field sets it"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools: another field sets it"),
        ({"chat_template_kwargs": {"x": "x" * 70_000}}, "chat_template_kwargs has 70,0"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: "),
        ({"reasoning_effort": "much"}, "reasoning_effort: "),
        ({"thinking_token_budget": -1}, "thinking_token_budget: "),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True}, "the last message is not an assistant's"),
    ],
)
def test_bad_values_are_refused(client, fields, message):
    with pytest.raises(BadRequestError) as caught:
        ask(client, **fields)
    assert message in caught.value.body["message"]


def test_nested_values_are_bounded(served):
    deep = []
    for _ in range(400):
        deep = [deep]
    body = {"model": "qwen3", "messages": ASKED, "chat_template_kwargs": {"x": deep}}
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "nested deeper than" in answer.json()["error"]["message"]


def test_the_models_say_whether_they_reason(client):
    assert {model.id: model.reasoning for model in client.models.list()}["qwen3"]
    assert not client.models.retrieve("parrot").reasoning
