"""Sampling parameters: what is refused, and by which name."""

import pickle

import pytest

from warpbus.engine.sampling_params import Grammar, SamplingParams
from warpbus.errors import UsageError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 1.5),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("seed", -1),
        ("stop", ("",)),
        ("stop", 5),
        ("stop", (5,)),
        ("ignore_eos", 1),
    ],
)
def test_params_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(UsageError, match=f"^{name} is ") as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


def test_params_at_the_edge_are_accepted():
    params = SamplingParams(temperature=0, top_p=1, top_k=0, repetition_penalty=0.5, max_tokens=1, seed=0, stop="END")
    assert params.stop == ("END",)
    assert params.greedy


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 1e-40}, True),
        ({"temperature": 1e-5}, False),
        ({"top_k": 1}, True),
        ({"top_k": 2}, False),
    ],
)
def test_greedy(params, greedy):
    assert SamplingParams(**params).greedy is greedy


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("min_p", 1.1, "^min_p is 1.1"),
        ("min_p", -0.1, "^min_p is -0.1"),
        ("presence_penalty", 2.5, "^presence_penalty is 2.5: give a number from -2 to 2"),
        ("frequency_penalty", "1", "^frequency_penalty is '1'"),
        ("min_tokens", -1, "^min_tokens is -1"),
        ("min_tokens", 1.0, "^min_tokens is 1.0"),
        ("min_tokens", 257, "^min_tokens is 257: give at most max_tokens, which is 256"),
        ("stop_token_ids", 5, "^stop_token_ids is 5"),
        ("stop_token_ids", "56", "^stop_token_ids is 56"),
        ("stop_token_ids", [-1], "^a token id of stop_token_ids is -1"),
        ("stop_token_ids", [True], "^a token id of stop_token_ids is True"),
        ("stop_token_ids", range(65), "at most 64"),
        ("logprobs", 21, "^logprobs is 21: give a whole number from 0 to 20"),
        ("logprobs", -1, "^logprobs is -1"),
        ("logprobs", True, "^logprobs is True"),
        ("logit_bias", [1], r"^logit_bias is \[1\]: give a mapping"),
        ("logit_bias", {"5": 1.0}, "^a token id of logit_bias is '5'"),
        ("logit_bias", {-5: 1.0}, "^a token id of logit_bias is -5"),
        ("logit_bias", {5: 101}, "^logit_bias of token 5 is 101"),
        ("logit_bias", {5: float("nan")}, "^logit_bias of token 5 is nan"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "^logit_bias has 1025 entries"),
        ("grammar", "regex", "^grammar is of type str: give a Grammar"),
        ("temperature", 100.5, "^temperature is 100.5: give a number from 0 to 100"),
        pytest.param("temperature", 10**400, "^temperature is 1000", id="too large for a float"),
        ("repetition_penalty", 1e-30, "^repetition_penalty is 1e-30: give a number from 0.01 to 100"),
    ],
)
def test_more_params_out_of_range(name, value, says):
    with pytest.raises(UsageError, match=says) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


def test_a_grammar_and_going_on_exclude_each_other():
    with pytest.raises(UsageError, match="ignore_eos is True, but a grammar"):
        SamplingParams(grammar=Grammar("json_object"), ignore_eos=True)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("xml", "a", "kind is 'xml': give one of json_schema, json_object"),
        ("regex", "", "a text for regex"),
        ("json_object", "{}", "no text for json_object"),
        ("regex", 5, "text is of type int"),
    ],
)
def test_grammars_that_are_refused(kind, text, says):
    with pytest.raises(UsageError, match=f"^grammar: .*{says}"):
        Grammar(kind, text)


def test_ids_beyond_the_vocabulary():
    SamplingParams(logit_bias={99: 1}, stop_token_ids=[99]).check_ids(100)
    with pytest.raises(UsageError, match=r"^logit_bias has the token id 100: give ids below 100"):
        SamplingParams(logit_bias={100: 1}).check_ids(100)
    with pytest.raises(UsageError, match=r"^stop_token_ids has the token id 200"):
        SamplingParams(stop_token_ids=[5, 200]).check_ids(100)


def test_params_travel_between_processes():
    params = SamplingParams(logit_bias={1: 2.0}, grammar=Grammar("regex", "a"), stop_token_ids=[3], logprobs=5)
    again = pickle.loads(pickle.dumps(params))
    assert again == params
    assert hash(again) == hash(params)


def test_a_bias_is_not_shared_with_the_caller():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 500.0
    assert params.logit_bias == {1: 2.0}
