"""The routes beside generation, and the schema of all."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving_fakes import FakeReplicas, FakeService, Running, until

from warpbus.errors import EngineDiedError
from warpbus.server.options import ServerOptions
from warpbus.server.registry import Models

HELLO = [{"role": "user", "content": "ab"}]


@pytest.fixture(scope="module")
def http(served):
    with served.http() as http:
        yield http


def test_models_are_listed_and_described(http):
    listed = http.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["parrot", "glm-4", "chatglm3", "qwen3"]
    one = http.get("/v1/models/glm-4").json()
    assert one == listed["data"][1]
    assert {
        "object": "model",
        "owned_by": "warpbus",
        "max_model_len": 2048,
        "state": "ready",
        "tools": True,
    }.items() <= (one.items())


def test_a_model_that_loads_is_listed_but_not_ready():
    models = Models()
    loading = models.add("org/slow")
    with Running(models, ServerOptions()) as running, running.http() as http:
        assert http.get("/v1/models/org/slow").json()["state"] == "starting"
        assert http.get("/health").json() == {"status": "starting"}
        for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "a"})):
            response = http.post(path, json={"model": "org/slow", **body})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "model_not_ready")
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 503
        assert http.get("/metrics").status_code == 200
        loading.loaded(FakeService())
        assert http.get("/health").status_code == 200
        assert http.post("/tokenize", json={"prompt": "a"}).json()["tokens"] == [97]


def test_text_becomes_tokens_and_back(http):
    found = http.post("/tokenize", json={"model": "parrot", "prompt": "好"}).json()
    assert found == {"tokens": list("好".encode()), "count": 3, "max_model_len": 2048, "token_strs": None}
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {
        "prompt": "好",
        "text": "好",
        "content": "好",
    }
    messages = http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    assert bytes(messages) == b"user: ab\nassistant: "
    bare = http.post("/tokenize", json={"messages": HELLO, "add_generation_prompt": False}).json()["tokens"]
    assert bytes(bare) == b"user: ab\n"
    for empty in ({}, {"prompt": "a", "content": "a"}, {"prompt": []}):
        assert http.post("/tokenize", json={"model": "parrot", **empty}).status_code == 400
    assert http.post("/tokenize", json={"model": "other", "prompt": "a"}).status_code == 404


def test_several_texts_become_tokens(http):
    found = http.post("/v1/tokenize", json={"prompt": ["a", "好"], "return_token_strs": True}).json()
    assert (found["tokens"], found["count"]) == ([[97], list("好".encode())], [1, 3])
    assert found["token_strs"][0] == ["a"]
    assert http.post("/tokenize", json={"content": "ab"}).json()["tokens"] == [97, 98]
    assert http.post("/v1/detokenize", json={"tokens": [97]}).json()["text"] == "a"
    refused = http.post("/detokenize", json={"tokens": [97, 100_000]})
    assert refused.status_code == 400
    assert re.fullmatch(
        r"tokens: 100000 is an out-of-vocabulary token id: give 0 to \d+", refused.json()["error"]["message"]
    )
    assert refused.json()["error"]["param"] == "tokens"


def test_tokens_with_their_pieces_as_llama_cpp_gives_them(http):
    found = http.post("/tokenize", json={"content": "a好", "with_pieces": True, "add_special": False}).json()
    assert found["tokens"] == [{"id": 97, "piece": "a"}, *({"id": one, "piece": [one]} for one in "好".encode())]
    assert (found["count"], found["token_strs"]) == (4, None)
    found = http.post("/tokenize", json={"prompt": ["a", "b"], "with_pieces": True, "return_token_strs": True}).json()
    assert found["tokens"] == [[{"id": 97, "piece": "a"}], [{"id": 98, "piece": "b"}]]
    assert found["token_strs"] == [["a"], ["b"]]
    special = http.post("/tokenize", json={"model": "glm-4", "messages": HELLO, "with_pieces": True}).json()["tokens"]
    assert special[0] == {"id": 256, "piece": "[gMASK]"}
    refused = http.post("/tokenize", json={"prompt": "a", "add_special": True, "add_special_tokens": True})
    assert refused.status_code == 400
    assert "give one of them" in refused.json()["error"]["message"]


def test_special_tokens_have_a_text_where_they_are_asked_for(http):
    tokens = http.post("/tokenize", json={"model": "glm-4", "messages": HELLO}).json()["tokens"]
    skipped = http.post("/detokenize", json={"model": "glm-4", "tokens": tokens}).json()["text"]
    written = http.post("/detokenize", json={"model": "glm-4", "tokens": tokens, "skip_special_tokens": False}).json()
    assert "ab" in skipped
    assert "<|user|>" not in skipped
    assert written["text"].startswith("[gMASK]<sop><|user|>")
    assert written["text"].endswith("ab<|assistant|>")
    assert written["text"] == written["content"]


def test_tools_that_may_not_be_called_are_not_in_the_prompt(http):
    tool = {"type": "function", "function": {"name": "get_time"}}
    body = {"model": "glm-4", "messages": HELLO}
    tokens = [
        http.post("/tokenize", json={**body, **more}).json()["tokens"]
        for more in ({}, {"tools": [tool], "tool_choice": "none"}, {"tools": [tool]})
    ]
    assert tokens[0] == tokens[1]
    assert len(tokens[2]) > len(tokens[0])
    for more, expected in (({}, tokens[0]), ({"tools": [tool]}, tokens[2])):
        counted = http.post("/v1/chat/completions/input_tokens", json={**body, **more}).json()
        assert counted == {"input_tokens": len(expected)}


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
def test_the_prefix_cache_is_emptied(http, served, path):
    before = served.service.resets, served.glm4.resets
    assert http.post(path, params={"model": "glm-4"}).json() == {"success": True}
    assert (served.service.resets, served.glm4.resets) == (before[0], before[1] + 1)
    assert http.post(path).json() == {"success": True}
    assert (served.service.resets, served.glm4.resets) == (before[0] + 1, before[1] + 2)
    assert http.post(path, params={"model": "other"}).status_code == 404


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache", "/sleep"])
def test_what_has_to_wait_for_requests_is_a_conflict(http, served, monkeypatch, path):
    monkeypatch.setattr(served.service, "running", [object()])
    response = http.post(path, params={"model": "parrot"})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "conflict")
    assert "requests run" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_probes_may_ask_for_the_head_only(http, path):
    response = http.head(path)
    assert (response.status_code, response.content) == (200, b"")


def test_health_by_generating(http, served, monkeypatch):
    assert http.get("/health_generate").json() == {"status": "ready"}
    assert served.service.asked[-1][1].max_tokens == 1
    monkeypatch.setattr(served.service, "fails", EngineDiedError("the engine died"))
    assert http.get("/health_generate").status_code == 503
    monkeypatch.setattr(served.service, "fails", None)
    monkeypatch.setattr("warpbus.server.generate._PROBE_SECONDS", 0.01)
    monkeypatch.setattr(served.service, "generate", lambda *_, **__: _Endless())
    response = http.get("/health_generate")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "model_not_ready")


class _Endless:
    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.Event().wait()

    async def aclose(self):
        pass


def test_the_server_tells_of_its_cache(http, served):
    found = http.get("/server_info").json()
    assert found == http.get("/get_server_info").json()
    assert found["max_total_num_tokens"] == 100 * found["page_size"]
    assert (found["context_length"], found["num_waiting_reqs"]) == (2048, 2)


def test_sleeping_models_do_not_answer(http, served):
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert http.post("/sleep", params={"model": "parrot"}).json() == {"is_sleeping": True}
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.get("/is_sleeping", params={"model": "glm-4"}).json() == {"is_sleeping": False}
    response = http.post("/v1/completions", json={"model": "parrot", "prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "asleep")
    assert response.headers["retry-after"] == "5"
    # The process works, and need not be restarted; but requests had better go elsewhere.
    working, ready = http.get("/health"), http.get("/ready")
    assert (working.status_code, ready.status_code, ready.headers["retry-after"]) == (200, 503, "5")
    assert working.json() == ready.json() == {"status": "asleep"}
    assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200
    assert http.post("/wake_up").json() == {"is_sleeping": False}
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.post("/v1/completions", json={"model": "parrot", "prompt": "a"}).status_code == 200


def test_a_model_that_stands_still_is_reported_and_takes_requests():
    models = Models()
    service = FakeService()
    models.add("parrot", service)
    models.add("other", FakeService())
    models.add("slow")
    with Running(models, ServerOptions()) as running, running.http() as http:
        service.state, service.reason = "unresponsive", "process 1 on cuda:1 has sent no heartbeat for 9 s"
        response = http.get("/health")
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert response.json() == {"status": "starting, unresponsive", "reason": f"parrot: {service.reason}"}
        states = {
            (sample.labels["model_name"], sample.labels["state"]): sample.value
            for family in text_string_to_metric_families(http.get("/metrics").text)
            for sample in family.samples
            if sample.name == "warpbus:model_state"
        }
        assert {names for names, value in states.items() if value} == {
            ("parrot", "unresponsive"),
            ("other", "ready"),
            ("slow", "starting"),
        }
        assert set(states.values()) == {0.0, 1.0}
        assert http.post("/v1/completions", json={"model": "parrot", "prompt": "a"}).status_code == 200


def test_a_model_moves_to_another_gpu(http):
    moved = http.post("/move", params={"device": "cuda:1", "model": "parrot"}).json()
    assert moved == {"parrot": {"weights": 1000, "ahead": 200, "paused": 10, "preparing": 3.5, "pause": 0.02}}
    assert set(http.post("/move", params={"device": "cuda:1"}).json()) >= {"parrot", "glm-4"}
    refused = http.post("/move", params={"device": "moon"})
    assert (refused.status_code, "device is 'moon'" in refused.json()["error"]["message"]) == (400, True)
    assert http.post("/move").status_code == 400
    absent = http.post("/move", params={"device": "cuda:9"})
    assert (absent.status_code, absent.json()["error"]["code"]) == (409, "no_device")


def test_the_version(http):
    import warpbus

    assert http.get("/version").json() == {"version": warpbus.__version__}


def test_metrics_count_and_time():
    models = Models()
    service = FakeService()
    models.add("parrot", service)
    with Running(models, ServerOptions()) as running, running.http() as http:
        for fields in ({"n": 2}, {"max_tokens": 1}, {"stream": True}):
            http.post("/v1/completions", json={"model": "parrot", "prompt": "abc", **fields})
        http.post("/v1/completions", json={"model": "none", "prompt": "abc"})
        until(lambda: service.running == 0)
        response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {
        (
            sample.name,
            *(value for key, value in sorted(sample.labels.items()) if key not in ("model_name", "replica")),
        ): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert found["warpbus:request_success_total", "stop"] == 3
    assert found["warpbus:request_success_total", "length"] == 1
    assert found["warpbus:request_errors_total", "404"] == 1
    assert found["warpbus:prompt_tokens_total",] == 12
    assert found["warpbus:generation_tokens_total",] == 13
    assert found["warpbus:time_to_first_token_seconds_count",] == 4
    assert found["warpbus:inter_token_latency_seconds_count",] == 9
    assert found["warpbus:e2e_request_latency_seconds_count",] == 4
    assert found["warpbus:kv_cache_usage_perc",] == 0.3
    assert found["warpbus:prefix_cache_hits_total",] == 40
    assert found["warpbus:prefix_cache_queries_total",] == 100
    assert found["warpbus:kv_host_cache_hits_total",] == 32
    assert found["warpbus:kv_host_cache_bytes",] == 4096
    assert found["warpbus:kv_host_cache_stored_bytes_total",] == 8192
    assert found["warpbus:kv_host_cache_loaded_bytes_total",] == 2048
    assert found["warpbus:kv_disk_cache_hits_total",] == 64
    assert found["warpbus:kv_disk_cache_bytes",] == 3000
    assert found["warpbus:kv_disk_cache_stored_bytes_total",] == 5000
    assert found["warpbus:kv_disk_cache_loaded_bytes_total",] == 1000
    assert found["warpbus:num_preemptions_total",] == 5
    assert found["warpbus:num_requests_waiting",] == 2
    assert found["warpbus:kv_cache_bytes_mapped",] == 1 << 20
    assert found["warpbus:spec_decode_num_draft_tokens_total",] == 40
    assert found["warpbus:spec_decode_num_accepted_tokens_total",] == 30
    assert found["warpbus:spec_decode_draft_acceptance_rate",] == 0.75
    assert found["warpbus:experts_exchanged_total",] == 6
    assert found["warpbus:host_expert_share",] == 0.25


def test_replicas_are_reported_one_by_one():
    models, replicas = Models(), [FakeService(), FakeService()]
    models.add("parrots", FakeReplicas(*replicas))
    models.add("parrot", FakeService())
    with Running(models, ServerOptions()) as running, running.http() as http:
        replicas[1].state, replicas[1].reason = "restarting", "the engine died: killed"
        response = http.get("/health")
        dead = {"replica": 1, "state": "restarting", "reason": "the engine died: killed"}
        assert response.status_code == 200
        assert response.json() == {
            "status": "ready",
            "replicas": {"parrots": [{"replica": 0, "state": "ready"}, dead]},
        }
        samples = [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(http.get("/metrics").text)
            for sample in family.samples
        ]
    series = [(name, *sorted(labels.items())) for name, labels, _ in samples]
    assert len(set(series)) == len(series)
    running = [labels for name, labels, _ in samples if name == "warpbus:num_requests_running"]
    assert running == [
        {"model_name": "parrots", "replica": "0"},  # the dead one has none
        {"model_name": "parrot", "replica": "0"},
    ]
    states = {
        (labels["model_name"], labels["replica"], labels["state"])
        for name, labels, value in samples
        if name == "warpbus:replica_state" and value
    }
    assert states == {("parrots", "0", "ready"), ("parrots", "1", "restarting"), ("parrot", "0", "ready")}


def test_the_dashboard_shows_metrics_that_there_are(served, http):
    http.post("/v1/completions", json={"model": "parrot", "prompt": "ab"})
    http.post("/v1/completions", json={"model": "parrot", "prompt": ""})
    families = text_string_to_metric_families(http.get("/metrics").text)
    there = {(sample.name, label) for family in families for sample in family.samples for label in sample.labels}
    board = json.loads((Path(__file__).parents[3] / "examples" / "grafana.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = {name for expression in expressions for name in re.findall(r"warpbus:\w+", expression)}
    assert used == used & {name for name, _ in there}
    assert all((name, "model_name") in there for name in used)
    for expression in expressions:
        for label in re.findall(r"by \((\w+)\)", expression):
            assert any((name, label) in there for name in re.findall(r"warpbus:\w+", expression)), expression
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) > 10
