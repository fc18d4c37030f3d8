"""`warpbus serve demo`: the packaged poet behind its API on the CPU, asked by OpenAI's own client."""

import importlib.util
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from served_process import serving

KEY = "a-key-for-the-poet"
QUATRAIN = [{"role": "user", "content": "写一首题为《春夜》的五言绝句。"}]


@pytest.fixture(scope="module")
def server():
    with serving("demo", "--max-num-seqs", "8", key=KEY) as process:
        yield process


@pytest.fixture(scope="module")
def poet(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def ask(poet, **fields):
    return poet.chat.completions.create(**{"model": "glm-poet", "messages": QUATRAIN, "max_tokens": 40, **fields})


def metric(server, name):
    text = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    return float(re.search(rf"^warpbus:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)[1])


def test_the_poet_writes_a_quatrain(poet):
    answer = ask(poet, temperature=0)
    text = answer.choices[0].message.content
    assert re.fullmatch(r"([\u4e00-\u9fff]{5}[，。]\n?){4}", text), text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 20


def test_a_stream_says_the_same_in_pieces(poet):
    chunks = list(ask(poet, temperature=0, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert streamed == ask(poet, temperature=0).choices[0].message.content
    assert "�" not in streamed
    assert chunks[-1].usage.prompt_tokens > 10


def test_seeds_make_answers_repeat(poet):
    first, again, other = (ask(poet, seed=seed, temperature=1.0).choices[0].message.content for seed in (5, 5, 6))
    assert first == again != other
    both = [choice.message.content for choice in ask(poet, seed=5, n=2, temperature=1.0).choices]
    assert both == [first, other]


def test_stop_strings_and_limits(poet):
    stopped = ask(poet, temperature=0, stop="，").choices[0]
    assert (len(stopped.message.content), stopped.finish_reason) == (5, "stop")
    cut = ask(poet, temperature=0, max_tokens=3)
    assert (cut.usage.completion_tokens, cut.choices[0].finish_reason) == (3, "length")


def test_logprobs_add_up(poet):
    content = ask(poet, temperature=0, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert all(one.logprob == max(other.logprob for other in one.top_logprobs) for one in content)
    assert all(len(one.top_logprobs) == 3 for one in content)


def test_answers_follow_a_schema(poet):
    schema = {
        "type": "object",
        "properties": {"题": {"type": "string", "maxLength": 4}, "行": {"enum": [4, 8]}},
        "required": ["题", "行"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "poem", "schema": schema}}
    found = json.loads(ask(poet, seed=1, max_tokens=120, response_format=form).choices[0].message.content)
    assert set(found) == {"题", "行"}
    assert found["行"] in (4, 8)
    assert len(found["题"]) <= 4
    chosen = ask(poet, extra_body={"guided_choice": ["春夜", "秋日"]}).choices[0].message.content
    assert chosen in ("春夜", "秋日")
    with pytest.raises(openai.BadRequestError):
        ask(poet, extra_body={"guided_regex": "("})


def test_what_one_request_asks_for_ends_no_other(server, poet):
    """A grammar that allows stop tokens alone, before there are min_tokens: it ended the engine, and all requests."""
    expected = ask(poet, temperature=0).choices[0].message.content
    stream = ask(poet, temperature=0, stream=True)
    chunks = [next(stream)]
    impossible = {"min_tokens": 5, "guided_regex": "a{10}", "stop_token_ids": [105, 329]}
    for temperature in (0, 1):
        answer = poet.completions.create(
            model="glm-poet", prompt="hello", max_tokens=20, temperature=temperature, extra_body=impossible
        )
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 1)
    chunks += stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert httpx.get(f"{server.url}/health").json() == {"status": "ready"}


def test_texts_are_completed(poet):
    answer = poet.completions.create(
        model="glm-poet", prompt=["床前明月光，", "春眠"], max_tokens=4, temperature=0, echo=True
    )
    assert [
        choice.text[: len(start)] for choice, start in zip(answer.choices, ("床前明月光，", "春眠"), strict=True)
    ] == [
        "床前明月光，",
        "春眠",
    ]


def test_many_at_once_get_the_answers_they_get_alone(poet):
    def draw(seed):
        return ask(poet, seed=seed, max_tokens=20, temperature=1.0).choices[0].message.content

    alone = [draw(seed) for seed in range(6)]
    together = [None] * 6

    def keep(seed):
        together[seed] = draw(seed)

    threads = [threading.Thread(target=keep, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == alone


def test_an_answer_that_nobody_waits_for_ends(server, poet):
    endless = {"ignore_eos": True, "min_tokens": 200}
    with ask(poet, stream=True, max_tokens=220, n=4, extra_body=endless) as stream:
        next(iter(stream))
    end = time.monotonic() + 90
    while metric(server, "num_requests_running"):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert metric(server, "kv_cache_usage_perc") == 0


def test_keys_and_errors(server, poet):
    with pytest.raises(openai.AuthenticationError):
        ask(openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong-key", max_retries=0))
    with pytest.raises(openai.BadRequestError, match="context"):
        ask(poet, messages=[{"role": "user", "content": "春" * 3000}])
    with pytest.raises(openai.BadRequestError, match="tools"):
        ask(poet, tools=[{"type": "function", "function": {"name": "f"}}])
    assert httpx.get(server.url).text.startswith("<!doctype html>")


def test_the_example_asks_it(server, capsys):
    path = Path(__file__).parents[2] / "examples" / "ask_a_server.py"
    spec = importlib.util.spec_from_file_location("ask_a_server", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main(["--url", server.url, "--key", KEY]) == 0
    printed = capsys.readouterr().out
    assert f"{len(example.TITLES)} answers" in printed
    assert printed.splitlines()[-1].removeprefix("the model says: ") in example.FORMS
    assert example.main(["--url", server.url, "--key", "wrong-key"]) == 1
    assert "401" in capsys.readouterr().err
    assert example.main(["--url", "http://127.0.0.1:9", "--key", KEY]) == 1
    assert "warpbus serve demo" in capsys.readouterr().err


def test_an_engine_that_is_killed_is_started_again(server, poet):
    engines = psutil.Process(server.pid).children(recursive=True)
    with ask(poet, stream=True, max_tokens=200, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
        for engine in engines:
            engine.kill()
        with pytest.raises(openai.APIError, match="the engine died"):
            list(stream)
    with pytest.raises(openai.InternalServerError) as refused:
        ask(poet)
    assert refused.value.response.headers["retry-after"] == "5"
    end = time.monotonic() + 90
    while httpx.get(f"{server.url}/health").status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.2)
    assert ask(poet, temperature=0).choices[0].finish_reason == "stop"


def test_it_ends_when_it_is_reported_to(server):
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait(90) == 0
    log = "".join(server.said)
    assert "model=glm-poet" in log
    assert "春夜" not in log
    assert KEY not in log
