"""POST /v1/chat/completions, by OpenAI's own client."""

import json

import pytest
from openai import BadRequestError, NotFoundError
from serving_fakes import STOP

from warpbus.engine import Grammar
from warpbus.server.registry import Models
from warpbus.server.request_error import RequestError

HELLO = [{"role": "user", "content": "你好, world"}]


@pytest.fixture(scope="module")
def client(served):
    with served.openai() as client:
        yield client


def ask(client, model="parrot", messages=HELLO, **fields):
    return client.chat.completions.create(model=model, messages=messages, **fields)


def texts(chunks, count=1):
    found = [""] * count
    for chunk in chunks:
        for choice in chunk.choices:
            found[choice.index] += choice.delta.content or ""
    return found


def test_an_answer_is_whole(client, served):
    answer = ask(client)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "你好, world")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.model == "parrot"
    assert answer.id.startswith("chatcmpl-")
    prompt, _ = served.service.asked[0]
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len("你好, world".encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_a_stream_has_a_role_then_pieces_then_the_reason_then_the_usage(client):
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[1:-2]] == list("你好, world")
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len("你好, world".encode()) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_text_of_the_last_token_comes_with_the_reason(client):
    chunks = list(
        ask(client, stream=True, max_tokens=7, stream_options={"include_usage": True, "continuous_usage_stats": True})
    )
    reported = [(each.choices[0].delta.content, each.choices[0].finish_reason) for each in chunks[1:-1]]
    assert [chunk.usage.completion_tokens for chunk in chunks[1:-1]] == [3, 6, 7]
    assert reported == [("你", None), ("好", None), (",", "length")]


def test_a_stream_is_server_sent_events(served):
    body = {"model": "parrot", "messages": HELLO, "stream": True}
    with served.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = list(response.iter_lines())
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line == "" or line.startswith("data: ") for line in lines)
    first = json.loads(lines[0].removeprefix("data: "))
    assert first["object"] == "chat.completion.chunk"
    assert "usage" not in first


def test_several_answers_have_seeds_of_their_own(client, served):
    answer = ask(client, n=3, seed=7)
    assert [choice.message.content for choice in answer.choices] == [f"你好, world {seed}" for seed in (7, 8, 9)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == len(served.service.asked[0][0])
    assert texts(ask(client, n=3, seed=7, stream=True), 3) == [f"你好, world {seed}" for seed in (7, 8, 9)]


def test_negative_seeds_are_seeds_too(client, served):
    ask(client, seed=-(2**63))
    ask(client, seed=-1)
    assert [params.seed for _, params in served.service.asked] == [0, 2**63 - 1]


def test_every_option_reaches_the_engine(client, served):
    ask(
        client,
        temperature=0.5,
        top_p=0.8,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"65": 3.0},
        max_completion_tokens=20,
        stop=["x", "yy"],
        seed=1,
        logprobs=True,
        top_logprobs=4,
        user="someone",
        extra_body={
            "top_k": 12,
            "min_p": 0.05,
            "repetition_penalty": 1.25,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [9, 10],
        },
    )
    [(_, params)] = served.service.asked
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.8, 12, 0.05)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.25, -0.5, 1.25)
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (20, 2, True)
    assert (params.stop, params.stop_token_ids, params.seed, params.logprobs) == (("x", "yy"), (9, 10), 1, 4)
    assert params.logit_bias == {65: 3.0}
    assert params.grammar is None


def test_without_a_limit_an_answer_may_fill_the_context(client, served):
    ask(client)
    [(prompt, params)] = served.service.asked
    assert params.max_tokens == served.service.max_model_len - len(prompt)


def test_an_answer_can_be_cut_off(client):
    answer = ask(client, max_tokens=3)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("你", "length")


def test_logprobs_have_texts_and_bytes(client):
    answer = ask(client, messages=[{"role": "user", "content": "hé"}], logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [one.bytes for one in content] == [[104], [0xC3], [0xA9], list(b"<|user|>")]
    assert [one.token for one in content] == ["h", "�", "�", "<|user|>"]
    assert [(one.token, one.logprob) for one in content[0].top_logprobs] == [("h", -0.5), ("A", -1.5)]
    chunks = ask(client, messages=[{"role": "user", "content": "hé"}], logprobs=True, stream=True)
    scored = [chunk.choices[0].logprobs for chunk in chunks]
    streamed = [one for logprobs in scored if logprobs for one in logprobs.content]
    assert [one.bytes for one in streamed] == [one.bytes for one in content]
    assert all(one.top_logprobs == [] for one in streamed)


SCHEMA = {"type": "object", "properties": {"名": {"type": "string"}}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Grammar("json_schema", json.dumps(SCHEMA, ensure_ascii=False)),
        ),
        ({"extra_body": {"guided_json": SCHEMA}}, Grammar("json_schema", json.dumps(SCHEMA, ensure_ascii=False))),
        ({"extra_body": {"guided_json": "{}"}}, Grammar("json_schema", "{}")),
        ({"extra_body": {"guided_regex": "[ab]+"}}, Grammar("regex", "[ab]+")),
        ({"extra_body": {"guided_choice": ["好", "b"]}}, Grammar("choice", '["好", "b"]')),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, Grammar("regex", "a")),
        ({"extra_body": {"structured_outputs": {"json": {}}}}, Grammar("json_schema", "{}")),
        ({"extra_body": {"structured_outputs": {"json_object": True}}}, Grammar("json_object")),
        ({"extra_body": {"structured_outputs": {"choice": ["a"]}}}, Grammar("choice", '["a"]')),
    ],
)
def test_grammars(client, served, fields, grammar):
    ask(client, **fields)
    assert served.service.asked[0][1].grammar == grammar


def test_only_one_grammar_at_a_time(client):
    with pytest.raises(BadRequestError, match="one grammar only"):
        ask(client, response_format={"type": "json_object"}, extra_body={"guided_regex": "a"})


def test_messages_of_every_kind_are_rendered(client, served):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "refusal": None},
        {"role": "user", "name": "me", "content": "four"},
    ]
    ask(client, messages=messages)
    prompt = served.service.tokenizer.decode(served.service.asked[0][0])
    assert prompt == "system: be brief\nuser: onetwo\nassistant: three\nuser: four\nassistant: "


def test_an_answer_can_be_sent_back_as_it_came(client):
    message = ask(client).choices[0].message
    again = ask(client, messages=[*HELLO, message.model_dump(), {"role": "user", "content": "more"}])
    assert again.choices[0].message.content == "more"


def test_a_model_is_found_by_its_alias():
    models = Models()
    model = models.add("parrot", adapters=["owner/bird"], alias="owner/parrot")
    models.add("crow", alias="owner/bird")
    assert models.find("owner/parrot") is model
    assert models.find("owner/bird").base is model  # a name goes before an alias
    assert [each.name for each in models.all()] == ["parrot", "owner/bird", "crow"]
    with pytest.raises(RequestError, match="'owner/crow' is not served here: give one of parrot, owner/bird, crow"):
        models.find("owner/crow")


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(NotFoundError) as caught:
        ask(client, model="other")
    assert caught.value.body["code"] == "model_not_found"
    assert "parrot" in caught.value.body["message"]


def test_a_prompt_that_is_too_long_is_reported_so(client):
    with pytest.raises(BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "x" * 3000}], stream=True)
    assert caught.value.body["code"] == "context_length_exceeded"
    assert caught.value.body["param"] == "messages"


def test_the_parsing_helper_of_the_client_works(client, served):
    from pydantic import BaseModel

    class Poem(BaseModel):
        title: str

    served.service.script = '{"title": "春夜"}'
    found = client.chat.completions.parse(model="parrot", messages=HELLO, response_format=Poem)
    assert found.choices[0].message.parsed == Poem(title="春夜")
    assert served.service.asked[0][1].grammar.kind == "json_schema"


def test_tokens_that_end_answers_are_not_shown(client, served):
    served.service.script = "好"
    assert texts(ask(client, stream=True)) == ["好"]
    assert STOP in served.service.template.stop_ids
