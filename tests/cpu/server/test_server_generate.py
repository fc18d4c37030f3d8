"""POST /generate, SGLang's own API."""

import json
from itertools import pairwise

import pytest
from serving_fakes import FIRST_TAG, STOP


@pytest.fixture(scope="module")
def http(served):
    with served.http() as client:
        yield client


def ask(http, **body):
    response = http.post("/generate", json={"model": "parrot", **body})
    assert response.status_code == 200, response.text
    return response.json()


def refusal(http, **body):
    response = http.post("/generate", json={"model": "parrot", **body})
    assert response.status_code == 400
    return response.json()["error"]["message"]


def streamed(http, **body):
    with http.stream("POST", "/generate", json={"model": "parrot", "stream": True, **body}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_a_text_goes_on(http, served):
    found = ask(http, text="abc", rid="mine")
    assert (found["text"], found["output_ids"]) == ("abc", [*b"abc", STOP])
    assert found["meta_info"] == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": STOP},
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 3,
    }
    prompt, params = served.service.asked[0]
    assert (prompt, params.max_tokens, params.logprobs, params.logprob_tokens) == (list(b"abc"), 128, None, ())


def test_no_model_is_the_first_and_adapters_are_named_by_lora_path(http):
    assert http.post("/generate", json={"text": "abc"}).json()["text"] == "abc"
    assert http.post("/generate", json={"text": "abc", "lora_path": "nobody"}).status_code == 404
    assert "give one of them" in refusal(http, text="abc", lora_path="parrot")
    info = http.get("/get_model_info").json()
    assert info == http.get("/model_info").json()
    assert (info["model_path"], info["is_generation"], info["max_model_len"]) == ("parrot", True, 2048)


def test_sampling_params_have_sglangs_names(http, served):
    sampling = {
        "max_new_tokens": 20,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_k": -1,
        "sampling_seed": 7,
        "stop": ["x"],
        "no_stop_trim": True,
        "logit_bias": {"5": 3.0},
        "regex": "a+",
    }
    ask(http, input_ids=[104, 105], sampling_params=sampling)
    prompt, params = served.service.asked[0]
    assert prompt == [104, 105]
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_k) == (20, 2, 0.5, 0)
    assert (params.seed, params.stop, params.include_stop_str_in_output) == (7, ("x",), True)
    assert (params.logit_bias, params.grammar.kind, params.grammar.text) == ({5: 3.0}, "regex", "a+")


def test_several_prompts_and_answers_come_in_a_list(http, served):
    found = ask(http, text=["ab", "c"], rid=["one", "two"], sampling_params=[{"max_new_tokens": 1}, {}])
    assert [(each["text"], each["meta_info"]["id"]) for each in found] == [("a", "one"), ("c", "two")]
    assert found[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    assert [params.max_tokens for _, params in served.service.asked] == [1, 128]
    assert [each["text"] for each in ask(http, input_ids=[[104], [105]])] == ["h", "i"]
    assert [each["text"] for each in ask(http, text="a", sampling_params={"n": 2, "sampling_seed": 1})] == [
        "a 1",
        "a 2",
    ]
    assert [each["text"] for each in ask(http, text=["a"])] == ["a"]


def test_each_event_has_the_whole_answer_so_far(http):
    events = streamed(http, text="abc", return_logprob=True)
    assert [event["text"] for event in events][-1] == "abc"
    assert all(late["text"].startswith(early["text"]) for early, late in pairwise(events))
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert ["output_token_logprobs" in event["meta_info"] for event in events] == [False] * (len(events) - 1) + [True]
    assert len(events[-1]["meta_info"]["output_token_logprobs"]) == 4
    assert "index" not in events[0]
    several = streamed(http, text=["ab", "c"])
    assert {event["index"]: event["text"] for event in several} == {0: "ab", 1: "c"}


def test_log_probabilities_are_of_prompt_and_answer(http, served):
    sampling = {"max_new_tokens": 2}
    found = ask(
        http,
        text="abc",
        sampling_params=sampling,
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=2,
        token_ids_logprob=[7, 9],
        return_text_in_logprobs=True,
    )["meta_info"]
    _, params = served.service.asked[0]
    assert (params.logprobs, params.prompt_logprobs, params.logprob_tokens) == (2, 2, (7, 9))
    assert [(token, text) for _, token, text in found["input_token_logprobs"]] == [(98, "b"), (99, "c")]
    assert [(token, text) for _, token, text in found["output_token_logprobs"]] == [(97, "a"), (98, "b")]
    assert [len(each) for each in found["input_top_logprobs"]] == [2, 2]
    assert [len(each) for each in found["output_top_logprobs"]] == [2, 2]
    for side in ("input", "output"):
        assert [[token for _, token, _ in each] for each in found[f"{side}_token_ids_logprobs"]] == [[7, 9]] * 2


def test_the_first_token_of_a_prompt_has_no_log_probability(http):
    found = ask(http, text="ab", return_logprob=True, logprob_start_len=0, top_logprobs_num=1, token_ids_logprob=[5])
    meta = found["meta_info"]
    assert meta["input_token_logprobs"][0] == [None, 97, None]
    assert meta["input_token_logprobs"][1][1:] == [98, None]
    assert meta["input_top_logprobs"][0] is None
    assert meta["input_token_ids_logprobs"][0] is None
    assert ask(http, text="ab", return_logprob=True)["meta_info"]["input_token_logprobs"] == []
    scored = ask(http, text="ab", sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    assert (scored["text"], scored["output_ids"], len(scored["meta_info"]["input_token_logprobs"])) == ("", [], 2)


def test_each_prompt_may_name_its_own_tokens(http, served):
    fields = {"return_logprob": [True, False, True], "token_ids_logprob": [[1], [2], None]}
    found = ask(http, text=["a", "b", "c"], **fields)
    assert [params.logprob_tokens for _, params in served.service.asked] == [(1,), (), ()]
    assert ["output_token_ids_logprobs" in each["meta_info"] for each in found] == [True, False, False]
    assert "output_token_logprobs" not in found[1]["meta_info"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "give text or input_ids, and only one of them"),
        ({"text": "a", "input_ids": [1]}, "give text or input_ids, and only one of them"),
        ({"text": ""}, "text: it is empty"),
        ({"text": "a", "token_ids_logprob": [-1]}, "token_ids_logprob: -1 is an out-of-vocabulary token id: give 0 to"),
        ({"text": "a", "token_ids_logprob": [FIRST_TAG + 2]}, "is an out-of-vocabulary token id"),
        ({"text": "a", "token_ids_logprob": [[0], [1, 2]]}, "token_ids_logprob: give a flat list of integers"),
        ({"text": ["a", "b"], "token_ids_logprob": [[0]]}, "token_ids_logprob has 1 items for 2 prompts"),
        ({"text": ["a", "b"], "token_ids_logprob": [[0], [True]]}, "token_ids_logprob: give a flat list of integers"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params has 1 items for 2 prompts"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params: n differs"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len is 2, but the prompt has 1"),
        ({"text": "a", "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 5000}}, "max_new_tokens is 5,000, but the prompt leaves"),
        ({"text": "a", "sampling_params": {"stop_regex": "a"}}, "stop_regex is not supported"),
        ({"text": "a", "custom_logit_processor": "code"}, "custom_logit_processor is not supported"),
        ({"text": "a", "image_data": "file"}, "image_data is not supported"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "regex"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(http, body, message):
    assert message in refusal(http, **body)


def test_unknown_fields_are_ignored_with_a_warning(http):
    response = http.post("/generate", json={"text": "a", "sampling_params": {"spaces_between_special_tokens": True}})
    assert response.status_code == 200
    assert "sampling_params.spaces_between_special_tokens" in response.headers["warning"]
