"""Whatever a client sends, the answer is one of OpenAI's error objects that names what is wrong."""

import json

import pytest

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def http(served):
    with served.http() as http:
        yield http


def error_of(response, status):
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"structural_tag": ""}, None, "give a text for structural_tag"),
        ({"response_format": {"type": "text", "format": {}}}, "response_format", "structural_tag, and only with it"),
        (
            {"response_format": {"type": "text", "schema": {}}},
            "response_format",
            "schema goes with the type json_object",
        ),
        ({"json_schema": {}, "structural_tag": {}}, "structural_tag", "one grammar only"),
        ({"cache_salt": ""}, "cache_salt", "cache_salt"),
        ({"guided_grammar": ""}, None, "give a text for ebnf"),
        ({"guided_grammar": 'root ::= "a"', "ebnf": 'root ::= "a"'}, "ebnf", "one grammar only"),
        ({"modalities": ["text", "audio"]}, "modalities", "text"),
        ({"functions": []}, None, "functions is not supported"),
        ({"messages": []}, "messages", "messages"),
        ({"messages": HELLO * 2049}, "messages", "messages"),
        ({"messages": [{"role": "a poet", "content": "a"}]}, "messages", "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages", "needs content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages", "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            "messages.0.content.0",
        ),
        ({"temperature": "1"}, "temperature", "temperature"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"temperature": True}, "temperature", "temperature"),
        ({"top_p": 0}, "top_p", "top_p"),
        ({"n": 0}, "n", "n: "),
        ({"n": 17}, "n", "n is 17"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens", "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, None, "differ"),
        ({"min_tokens": 9, "max_tokens": 5}, None, "min_tokens"),
        ({"seed": 2**63}, "seed", "seed"),
        ({"stop": ["a"] * 17}, "stop", "stop"),
        ({"stop": ""}, None, "stop"),
        ({"stop": [1]}, "stop", "stop"),
        ({"stop": ["a"] * 10_000}, "stop", "stop: List should have at most 16 items"),
        ({"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice", "tool_choice.function.name: "),
        ({"max_tokens": 5000}, "max_tokens", "the prompt leaves 2,0"),
        ({"max_completion_tokens": 5000}, "max_tokens", "max_completion_tokens is too large: 5,000"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is no token id"),
        ({"logit_bias": {"³": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "logit_bias"),
        ({"top_logprobs": 2}, None, "top_logprobs goes with logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, None, "stream_options goes with stream"),
        ({"response_format": {"type": "xml"}}, "response_format", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "70,000"),
        ({"guided_choice": []}, None, "choices is empty"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not learned to call tools"),
        ({"tool_choice": "required"}, None, "tool_choice"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "1"}]}, "messages", "not learned"),
        ({"model": 5}, "model", "model"),
        ({"model": ""}, "model", "model"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "surrogate"),
    ],
)
def test_a_field_that_is_wrong_is_named(http, changes, param, message):
    body = json.dumps({"model": "parrot", "messages": HELLO, **changes})
    error = error_of(http.post(CHAT, content=body, headers={"content-type": "application/json"}), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: List should have at least 1 item"),
        (["a"] * 129, "prompt: List should have at most 128 items"),
        (["a", 5], "prompt.1: Input should be a valid string"),
        ([5, "a"], "prompt.1: Input should be a valid integer"),
    ],
)
def test_the_error_of_a_prompt_is_that_of_its_type(http, prompt, message):
    error = error_of(http.post("/v1/completions", json={"model": "parrot", "prompt": prompt}), 400)
    assert error["message"].startswith(message)
    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "parrot", "messages": [{"role": "user", "content": "\xff"}]}',
        b"[" * 100_000,
        b'{"model": "parrot", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "parrot", "temperature": NaN, "messages": [{"role": "user", "content": "a"}]}',
        b'{"model": "parrot", "temperature": 1e999, "messages": [{"role": "user", "content": "a"}]}',
        b'{"\\ud800": 1}',
        b'{"model": "\\ud800", "messages": [{"role": "user", "content": "a"}]}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_request_is_refused(http, path, content):
    if path == "/tokenize" and b'"temperature"' in content:
        pytest.skip("/tokenize knows no temperature")
    error_of(http.post(path, content=content, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (rb'"a\ud83d"', r"Lone surrogate \ud83d, at 12"),
        (rb'{"\uDE00\ud83d\ude00": 1}', r"Lone surrogate \uDE00, at 12"),
        (rb'"\ud83d\u0041"', r"Lone surrogate \ud83d, at 11"),
        (b'"\xed\xa0\xbd"', "Not UTF-8, at 11"),
        (b"[" * 100_000 + b"]" * 100_000, "Nested too deeply, at 0"),
        (b"9" * 5000, "A number has too many digits, at 0"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/generate", "/invocations", "/v1/load_lora_adapter"])
def test_a_value_that_no_answer_could_repeat_is_refused(http, path, value, says):
    content = b'{"unread":' + value + b"}"
    error = error_of(http.post(path, content=content, headers={"content-type": "application/json"}), 400)
    assert error["message"] == f"the body is not JSON ({says})"
    assert error["code"] == "invalid_json"


def test_escaped_pairs_of_surrogates_are_text(http, served):
    served.service.script = "ok"
    content = rb'{"model": "parrot", "max_tokens": 9, "stop": ["\ud83d\ude00", "\\ud83d"], "prompt": "\uD83D\uDE00"}'
    assert (
        http.post("/v1/completions", content=content, headers={"content-type": "application/json"}).status_code == 200
    )
    prompt, params = served.service.asked[0][:2]
    assert served.service.tokenizer.decode(prompt) == "\U0001f600"
    assert params.stop == ("\U0001f600", "\\ud83d")


@pytest.mark.parametrize(
    ("path", "field", "content"),
    [
        ("/v1/completions", "prompt", [1.5] * 400_000),
        ("/v1/completions", "prompt", [[]] * 500_000),
        ("/detokenize", "tokens", ["1"] * 400_000),
        (CHAT, "messages", [{}] * 400_000),
        (CHAT, "guided_choice", [1] * 600_000),
        (CHAT, "logit_bias", {str(token): "x" for token in range(100_000)}),
    ],
)
def test_many_mistakes_are_as_quick_to_tell_as_one(http, path, field, content):
    body = {"model": "parrot", "messages": HELLO, field: content}
    if path != CHAT:
        del body["messages"]
    response = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"] == field
    assert len(response.content) < 1000


def test_a_body_of_another_type_is_refused(http):
    content = b'{"model": "parrot", "messages": [{"role": "user", "content": "a"}]}'
    error = error_of(http.post(CHAT, content=content, headers={"content-type": "text/plain"}), 400)
    assert "application/json" in error["message"]


@pytest.mark.parametrize("path", ["/nothing", "/v1/models/none", "/v1", "/docs"])
def test_what_is_not_there_is_not_found(http, path):
    assert error_of(http.get(path), 404)["code"] in ("not_found", "model_not_found")


def test_methods_that_a_route_does_not_take(http):
    response = http.get(CHAT)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/pooling", "pooling"),
        ("/classify", "classification"),
    ],
)
def test_what_a_decoder_does_not_do_is_refused_in_so_many_words(http, path, what):
    error = error_of(http.post(path, json={"model": "parrot", "input": "a"}), 501)
    assert error["message"].endswith(f"not served for {what}")
    assert error["code"] == f"{what}_not_supported"


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        ("/v1/embeddings", {"input": "a"}, "embeddings"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "scoring"),
        ("/rerank", {"query": "a", "documents": [{"text": "b"}]}, "scoring"),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}, "scoring"),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, "scoring"),
        ("/score", {"text_1": "a", "text_2": ["b"]}, "scoring"),
    ],
)
def test_a_checkpoint_that_defines_no_vectors_is_reported_what_it_lacks(http, path, body, what):
    error = error_of(http.post(path, json={"model": "parrot", **body}), 404)
    assert "it needs modules.json and 1_Pooling/config.json" in error["message"]
    assert error["code"] == f"{what}_not_supported"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {}),
        ("/v1/embeddings", {"input": []}),
        ("/v1/embeddings", {"input": ["a"] * 1025}),
        ("/v1/embeddings", {"input": [[]]}),
        ("/v1/embeddings", {"input": [1, "a"]}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}),
        ("/v1/score", {"text_1": "a"}),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}),
        ("/v1/score", {"text_1": "a", "text_2": "b", "query": "c"}),
        ("/v1/score", {"query": "a", "items": ["b"]}),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": []}),
        ("/v1/rerank", {"query": "a", "documents": []}),
        ("/v1/rerank", {"query": "a", "documents": [1]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}),
    ],
)
def test_texts_are_checked(http, path, body):
    error_of(http.post(path, json={"model": "parrot", **body}), 400)


def test_a_long_body_is_refused_before_it_is_read(served):
    with served.http() as http:
        error_of(http.post(CHAT, content=b" " * (3 << 20)), 413)

        # Without a length in its head, a body is cut off where it passes the limit.
        error_of(http.post(CHAT, content=iter([b" " * (1 << 20)] * 3)), 413)


def test_nothing_was_generated_for_any_of_these(http, served):
    error_of(http.post(CHAT, json={"model": "parrot", "messages": []}), 400)
    assert served.service.asked == []


_TEXTS = [{"type": "text", "text": "a"}] * 256
_RESULT = {"type": "tool_result", "tool_use_id": "1", "content": _TEXTS}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": _TEXTS}] * 33}),
        ("/tokenize", {"messages": [{"role": "user", "content": _TEXTS}] * 33}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": _TEXTS}] * 33}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [_RESULT] * 33}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 256}] * 33}),
    ],
)
def test_parts_of_all_messages_are_counted(http, path, fields):
    response = http.post(path, json={"model": "parrot", **fields})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "parts in all: give at most 8,192" in message
    assert message.startswith(f"{next(iter(fields))}: ")


def test_as_many_parts_as_are_allowed(http):
    body = {"model": "parrot", "messages": [{"role": "user", "content": _TEXTS}] * 8}
    assert http.post("/tokenize", json=body).json()["count"] > 8 * 256
