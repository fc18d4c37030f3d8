"""The document of the API: it is valid, complete, and says what the answers are."""

import json

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from openapi_spec_validator import validate
from pydantic import ValidationError
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving_fakes import FakeService, Running, qwen_template

from warpbus.server.app import create_app
from warpbus.server.embeddings_schema import EmbeddingRequest, ScoreRequest
from warpbus.server.generate_schema import GenerateRequest
from warpbus.server.messages_schema import MessagesRequest
from warpbus.server.options import ServerOptions
from warpbus.server.registry import Models
from warpbus.server.responses_schema import ResponsesRequest
from warpbus.server.schema import ChatRequest, CompletionRequest, TokenizeRequest

SCHEMA = create_app(Models()).openapi()
BODIES = (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerateRequest,
    MessagesRequest,
    ResponsesRequest,
    ScoreRequest,
    TokenizeRequest,
)
HELLO = [{"role": "user", "content": "ab"}]
CALL = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
CHECKS = (content_type_conformance, response_schema_conformance, status_code_conformance)
load_all_checks()


class Sleepless(FakeService):
    async def sleep(self):
        """A model that sleeps answers with 503, and it is the others that are looked for."""


@pytest.fixture(scope="module")
def sleepless():
    models = Models()
    models.add("parrot", Sleepless())
    models.add("glm-4", Sleepless("<sop>"))
    with Running(models, ServerOptions()) as running:
        yield running


@schemathesis.openapi.from_dict(SCHEMA).parametrize()
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_nothing_that_fits_the_schema_or_not_makes_the_server_fail(case, sleepless):
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "parrot" if len(case.body["model"]) % 2 else "glm-4"
    response = case.call(base_url=sleepless.url)
    assert response.status_code < 500
    case.validate_response(response, checks=CHECKS)


def test_the_document_is_valid():
    validate(SCHEMA)
    validate(create_app(Models(), ServerOptions(api_keys=("a-key-of-some",))).openapi())


def test_it_has_every_route_that_works_and_our_errors():
    assert "/pooling" not in SCHEMA["paths"]
    assert {"/v1/embeddings", "/v1/score", "/v1/rerank"} <= set(SCHEMA["paths"])
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/metrics", "/sleep"} <= set(SCHEMA["paths"])
    assert not [name for name in SCHEMA["components"]["schemas"] if "Validation" in name]
    assert "422" not in SCHEMA["paths"]["/v1/completions"]["post"]["responses"]


def test_every_answer_has_a_schema():
    for path, operations in SCHEMA["paths"].items():
        for operation in operations.values():
            assert {"200", "4XX", "5XX"} <= set(operation["responses"]), path
            for status, response in operation["responses"].items():
                assert response["content"], (path, status)
                assert all(content["schema"] for content in response["content"].values()), (path, status)
            assert set(operation["responses"]["4XX"]["content"]) == {"application/json"}
    chats = SCHEMA["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert set(chats) == {"application/json", "text/event-stream"}
    assert set(SCHEMA["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}


def test_it_says_where_a_key_is_needed():
    locked = create_app(Models(), ServerOptions(api_keys=("a-key-of-some",))).openapi()
    assert {} in SCHEMA["security"]
    assert {} not in locked["security"]
    assert {name for each in locked["security"] for name in each} == set(locked["components"]["securitySchemes"])
    open_paths = {path for path, item in locked["paths"].items() for each in item.values() if "security" in each}
    assert open_paths == {"/health", "/ready"}


def strict(name):
    """A schema of the document that also refuses fields that it does not name."""
    definitions = json.loads(json.dumps(SCHEMA["components"]["schemas"]).replace("#/components/schemas/", "#/$defs/"))
    for definition in definitions.values():
        if "properties" in definition and "allOf" not in definition:
            definition["additionalProperties"] = False
    return {"$ref": f"#/$defs/{name}", "$defs": definitions}


def check(name, body):
    jsonschema.validate(body, strict(name), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("path", "body", "whole", "event"),
    [
        (
            "/v1/chat/completions",
            {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "n": 2},
            "ChatCompletion",
            "ChatCompletionChunk",
        ),
        ("/v1/chat/completions", {"messages": HELLO, "tools": "WEATHER"}, "ChatCompletion", "ChatCompletionChunk"),
        ("/v1/completions", {"prompt": ["ab", "c"], "logprobs": 2}, "TextCompletion", "TextCompletion"),
        ("/v1/completions", {"prompt": "ab", "echo": True}, "TextCompletion", "TextCompletion"),
    ],
)
def test_answers_have_the_fields_that_are_declared_and_no_others(path, body, whole, event):
    models = Models()
    service = FakeService(make_template=qwen_template)
    models.add("qwen3", service)
    body = {"model": "qwen3", **body}
    if "tools" in body:
        body["tools"] = [{"type": "function", "function": {"name": "weather"}}]
        service.script = f"<think>a</think>b{CALL}"
    with Running(models, ServerOptions()) as running, running.http() as http:
        check(whole, http.post(path, json=body).json())
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        lines = http.post(path, json={**body, **options}).text.split("\n\n")
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        assert len(events) > 2
        for data in events:
            check(event, json.loads(data))


@pytest.mark.parametrize("script", ["ab", f"<think>a</think>b{CALL}"])
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/messages", {"messages": HELLO, "max_tokens": 99, "tools": [{"name": "weather"}]}, "AnthropicMessage"),
        ("/v1/messages/count_tokens", {"messages": HELLO}, "CountedTokens"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": "weather"}]}, "ResponseAnswer"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}, "ResponseAnswer"),
    ],
)
def test_answers_of_the_other_apis_have_the_fields_that_are_declared(script, path, body, name):
    models = Models()
    service = FakeService(make_template=qwen_template)
    service.script = script
    models.add("qwen3", service)
    with Running(models, ServerOptions()) as running, running.http() as http:
        response = http.post(path, json={"model": "qwen3", **body})
        assert response.status_code == 200
        check(name, response.json())
        if name == "ResponseAnswer":
            check(name, http.get(f"/v1/responses/{response.json()['id']}").json())
            check("DeletedAnswer", http.delete(f"/v1/responses/{response.json()['id']}").json())


@pytest.mark.parametrize(
    ("method", "path", "body", "name"),
    [
        ("GET", "/v1/models", None, "ModelList"),
        ("GET", "/v1/models/glm-4", None, "ServedModel"),
        ("POST", "/tokenize", {"prompt": "a"}, "Tokenized"),
        ("POST", "/detokenize", {"tokens": [97]}, "Detokenized"),
        ("GET", "/health", None, "HealthAnswer"),
        ("GET", "/server_info", None, "ServerInfo"),
        ("POST", "/reset_prefix_cache", None, "ResetAnswer"),
        ("GET", "/version", None, "VersionAnswer"),
        ("GET", "/is_sleeping", None, "SleepAnswer"),
        ("GET", "/nothing", None, "ErrorAnswer"),
        ("POST", "/tokenize", {}, "ErrorAnswer"),
        ("POST", "/v1/messages", {}, "AnthropicErrorAnswer"),
        ("GET", "/v1/responses/none", None, "ErrorAnswer"),
    ],
)
def test_other_answers_have_the_fields_that_are_declared(sleepless, method, path, body, name):
    with sleepless.http() as http:
        check(name, http.request(method, path, json=body).json())


def test_a_move_has_the_fields_that_are_declared(sleepless):
    with sleepless.http() as http:
        moved = http.post("/move", params={"device": "cuda:1"}).json()
    assert set(moved) == {"parrot", "glm-4"}
    for each in moved.values():
        check("MoveAnswer", each)


def test_a_wrong_method_names_all_that_the_path_takes(sleepless):
    with sleepless.http() as http:
        found = {
            "/v1/responses/none": "DELETE, GET",
            "/v1/responses/input_tokens": "POST",
            "/v1/chat/completions": "POST",
        }
        for path, allowed in found.items():
            refused = http.request("PUT", path)
            assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
            assert set(allowed.lower().split(", ")) == set(SCHEMA["paths"][path.replace("none", "{name}")])


MESSAGE = {"role": "user", "content": "a"}
TOOL_CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
ANTHROPIC = {"model": "m", "max_tokens": 1, "messages": [MESSAGE]}


@pytest.mark.parametrize(
    ("name", "body", "fits"),
    [
        ("ChatRequest", {"messages": [{"role": "user"}]}, False),
        ("ChatRequest", {"messages": [{"role": "user", "content": "a", "tool_calls": [TOOL_CALL]}]}, False),
        ("ChatRequest", {"messages": [{"role": "assistant", "tool_calls": [TOOL_CALL]}]}, True),
        ("ChatRequest", {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, False),
        ("ChatRequest", {"messages": [MESSAGE], "top_logprobs": 2}, False),
        ("ChatRequest", {"messages": [MESSAGE], "top_logprobs": 2, "logprobs": True}, True),
        ("ChatRequest", {"messages": [MESSAGE], "stream_options": {}}, False),
        ("ChatRequest", {"messages": [MESSAGE], "stream_options": {}, "stream": True}, True),
        ("ChatRequest", {"messages": [MESSAGE], "prompt_logprobs": 1, "stream": True}, False),
        ("ChatRequest", {"messages": [MESSAGE], "max_tokens": 3.0, "n": 1e0}, True),
        ("ChatRequest", {"messages": [MESSAGE], "max_tokens": 3.5}, False),
        ("ChatRequest", {"messages": [MESSAGE], "response_format": {"type": "json_schema"}}, False),
        ("ChatRequest", {"messages": [MESSAGE], "response_format": {"type": "text", "schema": {}}}, False),
        ("ChatRequest", {"messages": [MESSAGE], "response_format": {"type": "json_object", "schema": {}}}, True),
        ("ChatRequest", {"messages": [MESSAGE], "continue_final_message": True, "add_generation_prompt": True}, False),
        ("ChatRequest", {"messages": [MESSAGE], **{f"field{at}": 0 for at in range(64)}}, False),
        ("ChatRequest", {"messages": [MESSAGE], "temperature": 100, "repetition_penalty": 0.01}, True),
        ("ChatRequest", {"messages": [MESSAGE], "temperature": 100.5}, False),
        ("ChatRequest", {"messages": [MESSAGE], "repetition_penalty": 0.001}, False),
        ("CompletionRequest", {"prompt": [[1.0, 2], [3]]}, True),
        ("CompletionRequest", {"prompt": [1, 2.5]}, False),
        ("CompletionRequest", {"prompt": "a", "suffix": "b"}, False),
        ("CompletionRequest", {"prompt": "a", "best_of": 2}, False),
        ("CompletionRequest", {"prompt": "a", "best_of": 1, "n": None}, True),
        ("TokenizeRequest", {"prompt": "a", "content": "a"}, False),
        ("TokenizeRequest", {"content": "a"}, True),
        ("GenerateRequest", {"text": "a", "input_ids": [1]}, False),
        ("GenerateRequest", {"text": "a", "model": "a", "lora_path": "b"}, False),
        ("GenerateRequest", {"input_ids": [1.0], "logprob_start_len": 0.0}, True),
        ("MessagesRequest", {**ANTHROPIC, "tool_choice": {"type": "any", "name": "f"}}, False),
        ("MessagesRequest", {**ANTHROPIC, "tool_choice": {"type": "tool", "name": "f"}}, True),
        ("ResponsesRequest", {"model": "m", "input": "a", "background": True}, False),
        ("ResponsesRequest", {"model": "m", "input": "a", "temperature": 1e9}, False),
        ("ResponsesRequest", {"model": "m", "input": "a", "tools": [{"type": "function"}]}, False),
        ("ResponsesRequest", {"model": "m", "input": "a", "text": {"format": {"type": "text", "schema": {}}}}, False),
        ("TokenizeRequest", {"content": "a", "add_special": True, "add_special_tokens": True}, False),
        ("EmbeddingRequest", {"input": "a", "truncate_prompt_tokens": 0}, False),
        ("EmbeddingRequest", {"input": "a", "truncate_prompt_tokens": -1.0}, True),
        ("ScoreRequest", {"query": "", "items": "", "label_token_ids": [1]}, False),
        ("ScoreRequest", {"query": [], "items": ["a", ""], "label_token_ids": [1]}, False),
        ("ScoreRequest", {"query": "", "items": ["a"], "label_token_ids": [1]}, True),
        ("ScoreRequest", {"query": "a", "items": [""], "label_token_ids": [1]}, True),
        ("ScoreRequest", {"text_1": "a"}, False),
        ("ScoreRequest", {"text_1": ["a"], "text_2": "b"}, False),
        ("ScoreRequest", {"text_1": "a", "text_2": ["b"]}, True),
        ("ScoreRequest", {"query": "a", "items": ["b"], "label_token_ids": [1.0]}, True),
    ],
)
def test_the_schema_and_the_server_agree_on_what_is_refused(name, body, fits):
    definitions = json.loads(json.dumps(SCHEMA["components"]["schemas"]).replace("#/components/schemas/", "#/$defs/"))
    schema = {"$ref": f"#/$defs/{name}", "$defs": definitions}
    [kind] = [one for one in BODIES if one.__name__ == name]
    assert jsonschema.Draft202012Validator(schema).is_valid(body) == fits
    try:
        kind.model_validate(body)
    except ValidationError:
        assert not fits
    else:
        assert fits


def test_the_links_of_a_response_lead_to_it(sleepless):
    links = SCHEMA["paths"]["/v1/responses"]["post"]["responses"]["200"]["links"]
    paths = {
        operation["operationId"]: (method, path)
        for path, item in SCHEMA["paths"].items()
        for method, operation in item.items()
    }
    with sleepless.http() as http:
        made = http.post("/v1/responses", json={"model": "parrot", "input": "a"}).json()
        for name, link in links.items():
            method, path = paths[link["operationId"]]
            assert link["parameters"] == {"name": "$response.body#/id"}, name
            assert http.request(method, path.format(name=made["id"])).json()["id"] == made["id"]
