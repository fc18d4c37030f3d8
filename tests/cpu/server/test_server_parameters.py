"""Parameters beyond OpenAI's: defaults of the model, ends of prompts and answers, priority, unknown fields."""

import logging

import pytest
from serving_fakes import FakeService, Running, until

from warpbus.server.options import ServerOptions
from warpbus.server.registry import Models

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def http(served):
    with served.http() as http:
        yield http


def chat(http, **fields):
    return http.post("/v1/chat/completions", json={"model": "parrot", "messages": HELLO, **fields})


def test_the_models_own_defaults_are_used(http, served):
    defaults = {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.1}
    served.service.generation_defaults = defaults
    try:
        chat(http)
        chat(http, temperature=0.2, top_p=0.3)
        http.post("/v1/completions", json={"model": "parrot", "prompt": "a"})
        listed = http.get("/v1/models/parrot").json()
    finally:
        served.service.generation_defaults = {}
    own, given, text = [params for _, params in served.service.asked]
    assert (own.temperature, own.top_p, own.top_k, own.repetition_penalty) == (0.5, 1.0, 7, 1.1)
    assert (given.temperature, given.top_p, given.top_k) == (0.2, 0.3, 7)
    assert text.top_k == 7
    assert listed["default_sampling_params"] == defaults
    assert "default_sampling_params" not in http.get("/v1/models/glm-4").json()


def test_an_answer_continues_the_last_message(http, served):
    messages = [*HELLO, {"role": "assistant", "content": "Once "}]
    chat(http, messages=messages, continue_final_message=True)
    chat(http, messages=messages, continue_final_message=True, add_generation_prompt=False, model="glm-4")
    chat(http, add_generation_prompt=False)
    (continued, _), (plain, _) = served.service.asked
    assert served.service.tokenizer.decode(continued).endswith("assistant: Once ")
    assert served.service.tokenizer.decode(plain) == "user: hi\n"
    ids = served.glm4.asked[0][0]
    at = ids.index(served.glm4.tokenizer.special_ids["<|assistant|>"])
    assert served.glm4.tokenizer.decode(ids[at:]) == "\nOnce "


def test_a_continuation_keeps_its_first_line(http, served):
    served.glm4.script = "\nupon a time"
    messages = [*HELLO, {"role": "assistant", "content": "Once"}]
    answer = chat(http, messages=messages, continue_final_message=True, model="glm-4").json()
    assert answer["choices"][0]["message"]["content"] == "\nupon a time"


@pytest.mark.parametrize(("most", "kept"), [(5, "fghij"), (100, "abcdefghij"), (-1, "abcdefghij")])
def test_prompts_are_truncated_at_their_beginning(http, served, most, kept):
    body = {"model": "parrot", "prompt": "abcdefghij", "truncate_prompt_tokens": most}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert served.service.tokenizer.decode(served.service.asked[0][0]) == kept


def test_the_longest_prompt_that_fits_is_kept(http, served):
    body = {"model": "parrot", "prompt": "a" * 5000, "truncate_prompt_tokens": -1, "max_tokens": 48}
    assert http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"] == 2000
    assert chat(http, truncate_prompt_tokens=0).status_code == 400


def test_priority_and_stop_strings_reach_the_engine(http, served):
    chat(http, priority=-3, stop="b", include_stop_str_in_output=True)
    [(_, params)] = served.service.asked
    assert (params.priority, params.include_stop_str_in_output) == (-3, True)


def test_every_chunk_can_have_the_usage(served):
    served.service.script = "abc"
    with served.openai() as client:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(
            client.chat.completions.create(model="parrot", messages=HELLO, stream=True, stream_options=options)
        )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == [0, 1, 2, 3, 4, 4]
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {20}


def test_unknown_fields_are_ignored_with_a_warning(http, caplog):
    caplog.set_level(logging.INFO, logger="warpbus.access")
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}], "weight": 1}]
    response = chat(http, messages=messages, best=1, **{'odd"\r\nx: y 春': 2})
    assert response.status_code == 200
    expected = "best,odd???x??y??,messages.0.weight,messages.0.content.0.cache_control"
    assert response.headers["warning"] == f'299 - "unknown fields were ignored: {expected}"'
    until(lambda: any(f"ignored={expected}" in message for message in caplog.messages))
    assert "warning" not in chat(http).headers
    many = chat(http, **{f"x{i:02}": i for i in range(20)}).headers["warning"]
    assert many.endswith(',x09,..."')


def test_a_strict_server_refuses_unknown_fields():
    models = Models()
    models.add("parrot", FakeService())
    with Running(models, ServerOptions(strict=True)) as running, running.http() as http:
        for body, name in (
            ({"best": 1}, "best"),
            ({"messages": [{"role": "user", "content": "a", "weight": 1}]}, "messages.0.weight"),
        ):
            response = chat(http, **body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["message"] == f"{name}: not known or not supported; leave it out"
            assert (error["param"], error["code"]) == (name.partition(".")[0], "unknown")
        assert http.post("/tokenize", json={"prompt": "a", "x": 1}).status_code == 400
        assert chat(http).status_code == 200


def test_a_tokenized_conversation_may_have_tools_and_variables(http, served):
    body = {"model": "qwen3", "messages": HELLO}
    plain = http.post("/tokenize", json=body).json()["tokens"]
    tool = {"type": "function", "function": {"name": "weather"}}
    tools = http.post("/tokenize", json={**body, "tools": [tool]}).json()["tokens"]
    quiet = http.post("/tokenize", json={**body, "enable_thinking": False}).json()["tokens"]
    text = served.qwen.tokenizer.decode
    assert '"weather"' in text(tools)
    assert text(quiet) == text(plain) + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_grammar": 'root ::= "a"'},
        {"ebnf": 'root ::= "a"'},
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
    ],
)
def test_a_grammar_may_be_ebnf(served, fields):
    with served.http() as http:
        response = http.post("/v1/completions", json={"model": "parrot", "prompt": "a", **fields})
    assert response.status_code == 200
    grammar = served.service.asked[-1][1].grammar
    assert (grammar.kind, grammar.text) == ("ebnf", 'root ::= "a"')
