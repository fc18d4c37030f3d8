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
    del body["max_tokens"]
    assert http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"] == 2048 - 16
    messages = [{"role": "user", "content": "a" * 5000}]
    answer = chat(http, messages=messages, truncate_prompt_tokens=-1, max_completion_tokens=48)
    assert answer.json()["usage"]["prompt_tokens"] == 2000
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


def test_the_continued_message_is_echoed(http, served):
    served.service.script = "upon a time"
    messages = [*HELLO, {"role": "assistant", "content": "Once "}]
    fields = {"messages": messages, "continue_final_message": True, "echo": True}
    assert chat(http, **fields).json()["choices"][0]["message"]["content"] == "Once upon a time"
    with served.openai() as client:
        extra = {"continue_final_message": True, "echo": True}
        stream = client.chat.completions.create(model="parrot", messages=messages, stream=True, extra_body=extra)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Once upon a time"
    assert chat(http, echo=True).json()["choices"][0]["message"]["content"] == "upon a time"


def test_tokens_are_named_by_their_ids(http, served):
    served.service.script = "ab"
    asked = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    content = chat(http, **asked).json()["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content[:2]] == ["token_id:97", "token_id:98"]
    assert bytes(content[0]["bytes"]) == b"a"
    body = {"model": "parrot", "prompt": "x", "logprobs": 1, "return_tokens_as_token_ids": True}
    scores = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert scores["tokens"][:2] == ["token_id:97", "token_id:98"]
    assert "token_id:97" in scores["top_logprobs"][0]


def test_tokens_come_with_their_texts_and_without_special_ones(http):
    found = http.post(
        "/tokenize", json={"prompt": "a月", "return_token_strs": True, "add_special_tokens": False}
    ).json()
    assert found["tokens"] == list("a月".encode())
    assert found["token_strs"] == ["a", "\ufffd", "\ufffd", "\ufffd"]
    assert http.post("/tokenize", json={"prompt": "a", "add_special_tokens": True}).json()["token_strs"] is None


def test_sagemakers_route_takes_chats_and_completions(http, served):
    served.service.script = "said"
    answer = http.post("/invocations", json={"model": "parrot", "messages": HELLO}).json()
    assert answer["choices"][0]["message"]["content"] == "said"
    answer = http.post("/invocations", json={"model": "parrot", "prompt": "x"}).json()
    assert answer["choices"][0]["text"] == "said"
    assert http.post("/invocations", json={"model": "parrot"}).json()["error"]["param"] == "messages"
    wrong = http.post("/invocations", json={"model": "parrot", "messages": "hi"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages")
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200


def test_the_load_is_the_number_of_requests_that_generate(http, served):
    assert http.get("/load").json() == {"server_load": 0}
    served.service.pause = 3600.0
    with (
        served.http() as other,
        other.stream("POST", "/v1/completions", json={"model": "parrot", "prompt": "x", "stream": True}),
    ):
        assert http.get("/load").json() == {"server_load": 1}
    served.service.pause = 0.0
    until(lambda: http.get("/load").json() == {"server_load": 0})


def test_a_tokenizer_without_files_is_named(http):
    found = http.get("/tokenizer_info").json()
    assert found == {"tokenizer_class": "ByteTokenizer", "model_max_length": 2048, "chat_template": None}
    assert http.get("/tokenizer_info?model=other").status_code == 404
