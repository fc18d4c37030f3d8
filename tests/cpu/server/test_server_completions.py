"""POST /v1/completions, by OpenAI's own client."""

import pytest
from openai import APIError, BadRequestError

from warpbus.errors import ContextLengthError


@pytest.fixture(scope="module")
def client(served):
    with served.openai() as client:
        yield client


def ask(client, prompt, **fields):
    return client.completions.create(model="parrot", prompt=prompt, **fields)


def test_a_text_goes_on(client, served):
    answer = ask(client, "abc")
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
        "text_completion",
        "abc",
        "stop",
    )
    prompt, params = served.service.asked[0]
    assert (prompt, params.max_tokens) == (list(b"abc"), 16)
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
    }


@pytest.mark.parametrize(
    ("path", "asked"),
    [("completions", {"prompt": "abc"}), ("chat/completions", {"messages": [{"role": "user", "content": "abc"}]})],
)
def test_a_request_without_a_model_is_for_the_first(served, path, asked):
    with served.http() as http:
        answer = http.post(f"/v1/{path}", json=asked)
    assert answer.status_code == 200
    assert answer.json()["model"] == "parrot"
    assert len(served.service.asked) == 1


def test_texts_end_as_the_models_prompts_do(client, served, monkeypatch):
    monkeypatch.setattr(served.service.tokenizer, "prompt_suffix", (256, 258), raising=False)
    assert ask(client, "abc", echo=True).choices[0].text == "abcabc"
    ask(client, ["d", "e"])
    ask(client, [104, 105])
    assert [prompt for prompt, _ in served.service.asked] == [
        [*b"abc", 256, 258],
        [*b"d", 256, 258],
        [*b"e", 256, 258],
        [104, 105],
    ]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        (["ab", "c"], [b"ab", b"c"]),
        ([104, 105], [b"hi"]),
        ([[104], [105, 106]], [b"h", b"ij"]),
    ],
)
def test_prompts_come_as_texts_or_tokens(client, served, prompt, prompts):
    answer = ask(client, prompt)
    assert [asked for asked, _ in served.service.asked] == [list(one) for one in prompts]
    assert [choice.text for choice in answer.choices] == [one.decode() for one in prompts]
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


def test_the_tokens_of_a_prompt_are_not_counted_as_prompts(client, served):
    assert len(ask(client, [104] * 200, n=2).choices) == 2
    assert served.service.asked[0][0] == [104] * 200


def test_several_prompts_with_several_answers(client):
    answer = ask(client, ["a", "b"], n=2, seed=1)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a 1"),
        (1, "a 2"),
        (2, "b 1"),
        (3, "b 2"),
    ]
    assert answer.usage.prompt_tokens == 2
    found = [""] * 4
    for chunk in ask(client, ["a", "b"], n=2, seed=1, stream=True):
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == ["a 1", "a 2", "b 1", "b 2"]


def test_the_prompt_can_be_echoed(client):
    assert ask(client, "好", echo=True).choices[0].text == "好好"
    assert "".join(chunk.choices[0].text for chunk in ask(client, "好", echo=True, stream=True)) == "好好"


def test_a_stream_can_have_the_usage(client):
    chunks = list(ask(client, "ab", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 5
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_logprobs_are_in_the_older_form(client):
    found = ask(client, "ab", logprobs=2).choices[0].logprobs
    assert found.tokens == ["a", "b", "<|user|>"]
    assert found.token_logprobs == [-0.5] * 3
    assert found.text_offset == [0, 1, 2]
    assert found.top_logprobs[0] == {"a": -0.5, "A": -1.5}
    assert ask(client, "ab", logprobs=0).choices[0].logprobs.top_logprobs == [
        {"a": -0.5},
        {"b": -0.5},
        {"<|user|>": -0.5},
    ]
    chunks = [chunk.choices[0].logprobs for chunk in ask(client, "ab", logprobs=0, stream=True)]
    assert [offset for found in chunks if found for offset in found.text_offset] == [0, 1, 2]


def test_stop_strings_end_it(client, served):
    assert ask(client, "abXcd", stop="X").choices[0].text == "ab"
    assert served.service.asked[0][1].stop == ("X",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "prompt: it is empty"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        ({"prompt": "a", "best_of": 3}, "best_of is not supported"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": ["a"] * 100, "n": 2}, "n is 2 for 100 prompts"),
        ({"prompt": "a", "n": 17}, "n is 17"),
    ],
)
def test_what_cannot_be_done_is_refused(client, fields, message):
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(model="parrot", **fields)
    assert message in caught.value.body["message"]


@pytest.mark.parametrize("prompt", ["x" * 3000, ["a", "x" * 3000], [65] * 3000])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_reported_so(client, prompt, stream):
    with pytest.raises(BadRequestError) as caught:
        ask(client, prompt, stream=stream)
    assert caught.value.body["code"] == "context_length_exceeded"
    assert caught.value.body["param"] == "prompt"


def test_a_prompt_that_a_stream_finds_too_long_is_named(client, served):
    served.service.pause = 0.5  # longer than a heartbeat: the stream has begun
    served.service.fails = (0, ContextLengthError("a request needs 9 tokens, the context holds 8"))
    with pytest.raises(APIError, match="context holds 8") as caught:
        list(ask(client, "abc", stream=True))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_best_of_that_changes_nothing_is_taken(client):
    assert ask(client, "a", best_of=1).choices[0].text == "a"
