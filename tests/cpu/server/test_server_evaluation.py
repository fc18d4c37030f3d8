"""What evaluators ask for: log probabilities of prompts, echoes with them, token ids, and the sampled token's place."""

import pytest
from openai import BadRequestError

from warpbus.engine import TokenLogprob
from warpbus.server.token_scores import with_sampled

HELLO = [{"role": "user", "content": "ab"}]
STOP = "<|user|>"


@pytest.fixture(scope="module")
def client(served):
    with served.openai() as client:
        yield client


def ask(client, prompt="abc", **fields):
    own = {name: fields.pop(name) for name in ("prompt_logprobs", "return_token_ids") if name in fields}
    return client.completions.create(model="parrot", prompt=prompt, extra_body=own, **fields)


def chat(client, **fields):
    own = {name: fields.pop(name) for name in ("prompt_logprobs", "return_token_ids") if name in fields}
    return client.chat.completions.create(model="parrot", messages=HELLO, extra_body=own, **fields)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_logprobs_of_its_prompt(client, served, stream):
    answer = ask(client, echo=True, logprobs=1, max_tokens=2, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == "abcab"
    found = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    for choice in choices:
        for name, values in found.items():
            values += getattr(choice.logprobs, name)
    assert found["tokens"] == ["a", "b", "c", "a", "b"]
    assert found["token_logprobs"] == [None, -2.5, -2.5, -0.5, -0.5]
    assert found["top_logprobs"] == [None, {"A": -1.0, "b": -2.5}, {"A": -1.0, "c": -2.5}, {"a": -0.5}, {"b": -0.5}]
    assert found["text_offset"] == [0, 1, 2, 3, 4]
    assert served.service.asked[-1][1].prompt_logprobs == 1


def test_what_lm_evaluation_harness_sends(client, served):
    """Token ids of several prompts, of which nothing is to be generated."""
    prompts = [list(b"abc"), list(b"de")]
    answer = ask(client, prompts, echo=True, logprobs=1, max_tokens=0, temperature=0, seed=1234)
    assert [choice.text for choice in answer.choices] == ["abc", "de"]
    assert [choice.logprobs.token_logprobs for choice in answer.choices] == [[None, -2.5, -2.5], [None, -2.5]]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 0)
    # Its own form has one more token, whose log probability it cuts off.
    [choice] = ask(client, [list(b"abc")], echo=True, logprobs=1, max_tokens=1).choices
    assert choice.logprobs.token_logprobs == [None, -2.5, -2.5, -0.5]


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_can_be_generated(client, stream):
    answer = ask(client, max_tokens=0, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert [(choice.text, choice.finish_reason) for choice in choices] == [("", "length")]


@pytest.mark.parametrize("count", [0, 1])
def test_logprobs_of_prompts_have_ids_and_ranks(client, count):
    more = {"65": {"logprob": -1.0, "rank": 1, "decoded_token": "A"}} if count else {}
    expected = [None, *({str(ord(c)): {"logprob": -2.5, "rank": 7, "decoded_token": c}, **more} for c in "bc")]
    choice = ask(client, prompt_logprobs=count).choices[0]
    assert choice.prompt_logprobs == expected
    assert choice.logprobs is None
    found = chat(client, prompt_logprobs=count).prompt_logprobs
    assert len(found) == len("user: ab\nassistant: ")
    assert found[:2] == [None, {str(ord("s")): {"logprob": -2.5, "rank": 7, "decoded_token": "s"}, **more}]


def test_each_count_is_kept(client, served):
    choice = ask(client, echo=True, logprobs=0, prompt_logprobs=2).choices[0]
    assert served.service.asked[-1][1].prompt_logprobs == 2
    assert choice.logprobs.top_logprobs[1] == {"b": -2.5}
    assert len(choice.prompt_logprobs[1]) == 3


def test_without_them_there_are_none(client, served):
    choice = ask(client, logprobs=1).choices[0]
    assert (choice.prompt_logprobs, choice.token_ids, choice.prompt_token_ids) == (None, None, None)
    answer = chat(client)
    assert (answer.prompt_logprobs, answer.prompt_token_ids, answer.choices[0].token_ids) == (None, None, None)
    assert served.service.asked[-1][1].prompt_logprobs is None


def test_token_ids_are_returned(client, served):
    stop = served.service.tokenizer.special_ids[STOP]
    choice = ask(client, return_token_ids=True).choices[0]
    assert (choice.prompt_token_ids, choice.token_ids) == (list(b"abc"), [*b"abc", stop])
    answer = chat(client, return_token_ids=True, n=2)
    assert bytes(answer.prompt_token_ids) == b"user: ab\nassistant: "
    assert [choice.token_ids for choice in answer.choices] == [[*b"ab", stop]] * 2


def test_token_ids_are_streamed(client, served):
    stop = served.service.tokenizer.special_ids[STOP]
    choices = [chunk.choices[0] for chunk in ask(client, return_token_ids=True, stream=True)]
    assert [token for choice in choices for token in choice.token_ids] == [*b"abc", stop]
    assert [choice.prompt_token_ids for choice in choices] == [list(b"abc"), *[None] * (len(choices) - 1)]
    chunks = list(chat(client, return_token_ids=True, stream=True))
    assert bytes(chunks[0].prompt_token_ids) == b"user: ab\nassistant: "
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == [*b"ab", stop]


def test_token_ids_of_text_that_is_held_back_are_not_lost(client, served):
    served.qwen.script = "<think>a</think>\n\nb"
    answer = client.chat.completions.create(
        model="qwen3", messages=HELLO, stream=True, extra_body={"return_token_ids": True}
    )
    found = [token for chunk in answer for token in chunk.choices[0].token_ids]
    expected = served.qwen.tokenizer.encode(served.qwen.script)
    assert found == [*expected, served.qwen.tokenizer.special_ids[STOP]]


@pytest.mark.parametrize(
    ("most", "top", "expected"),
    [
        (2, ((5, -0.1), (6, -0.2)), [(5, -0.1), (9, -3.0)]),
        (1, ((5, -0.1),), [(9, -3.0)]),
        (2, ((5, -0.1), (9, -3.0)), [(5, -0.1), (9, -3.0)]),
        (0, (), []),
    ],
)
def test_the_sampled_token_is_among_the_likeliest(most, top, expected):
    assert with_sampled(TokenLogprob(9, -3.0, top), most) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs is not available with stream"),
    ],
)
def test_what_cannot_be_had_is_refused(client, fields, message):
    for asking in (ask, chat):
        with pytest.raises(BadRequestError) as caught:
            asking(client, **fields)
        assert message in caught.value.body["message"]
