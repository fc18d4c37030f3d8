"""`warpbus serve demo --data-parallel-size 2`: two engines behind one address, of which one is killed."""

import json
import os
import re
import signal
import time

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served_process import serving

QUATRAIN = [{"role": "user", "content": "写一首题为《春夜》的五言绝句。"}]


@pytest.fixture(scope="module")
def server():
    with serving("demo", "--data-parallel-size", "2", "--max-num-seqs", "4") as process:
        yield process


def metrics(server, name):
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    return {
        sample.labels["replica"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"warpbus:{name}"
    }


def ask(server, **fields):
    body = {"model": "glm-poet", "messages": QUATRAIN, "temperature": 0, "max_tokens": 30, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def until(holds):
    end = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def states(server):
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 200
    return [each["state"] for each in health.json()["replicas"]["glm-poet"]]


def test_conversations_stay_with_their_replica(server):
    question = [{"role": "user", "content": "春眠不觉晓，处处闻啼鸟。" * 8}]
    answers = [ask(server, messages=question) for _ in range(3)]
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0
    assert cached[1] == cached[2] > 0
    assert set(metrics(server, "prefix_cache_queries_total")) == {"0", "1"}


def test_a_killed_replica_comes_back_while_the_other_answers(server):
    assert states(server) == ["ready", "ready"]
    expected = ask(server)["choices"][0]["message"]["content"]
    engines = [child for child in psutil.Process(server.pid).children() if "interpreters" in " ".join(child.cmdline())]
    assert len(engines) == 2
    body = {"model": "glm-poet", "messages": QUATRAIN, "max_tokens": 450, "ignore_eos": True, "stream": True}
    url = f"{server.url}/v1/chat/completions"
    with (
        httpx.stream("POST", url, json=body, timeout=300) as first,
        httpx.stream("POST", url, json=body, timeout=300) as second,
    ):
        lines = [stream.iter_lines() for stream in (first, second)]
        begun = [[next(own), next(own), next(own)] for own in lines]
        assert all(begun)
        assert sorted(metrics(server, "num_requests_running").values()) == [1, 1]
        os.kill(engines[0].pid, signal.SIGKILL)
        ends = [[line for line in own if line.startswith("data: ")][-1] for own in lines]
        assert ask(server)["choices"][0]["message"]["content"] == expected
    assert sorted(end == "data: [DONE]" for end in ends) == [False, True]
    (died,) = [json.loads(end.removeprefix("data: ")) for end in ends if end != "data: [DONE]"]
    assert "the engine died" in died["error"]["message"]
    until(lambda: states(server) == ["ready", "ready"])
    until(lambda: any(re.search(r"replica [01]: the engine died", line) for line in server.said))
    assert ask(server)["choices"][0]["message"]["content"] == expected


def test_sleep_and_wake_reach_all(server):
    assert httpx.post(f"{server.url}/sleep", timeout=300).json() == {"is_sleeping": True}
    asleep = httpx.get(f"{server.url}/health")
    assert (asleep.status_code, httpx.get(f"{server.url}/ready").status_code) == (200, 503)
    assert [each["state"] for each in asleep.json()["replicas"]["glm-poet"]] == ["asleep", "asleep"]
    assert httpx.post(f"{server.url}/wake_up", timeout=300).json() == {"is_sleeping": False}
    assert states(server) == ["ready", "ready"]
