"""`warpbus serve demo` asked over Anthropic's Messages API and OpenAI's Responses API, and ended amid streams."""

import importlib.util
import json
import re
import signal
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from served_process import serving

QUATRAIN = [{"role": "user", "content": "写一首题为《春夜》的五言绝句。"}]
VERSES = r"([\u4e00-\u9fff]{5}[，。]\n?){4}"
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def server():
    with serving("demo", "--max-num-seqs", "8") as process:
        yield process


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_all_apis_say_the_same(claude, gpt):
    chat = gpt.chat.completions.create(model="glm-poet", messages=QUATRAIN, max_tokens=60, **GREEDY)
    expected = chat.choices[0].message.content
    assert re.fullmatch(VERSES, expected)
    message = claude.messages.create(model="glm-poet", messages=QUATRAIN, max_tokens=60, extra_body=GREEDY)
    assert (message.content[0].text, message.stop_reason) == (expected, "end_turn")
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens
    response = gpt.responses.create(model="glm-poet", input=QUATRAIN[0]["content"], max_output_tokens=60, **GREEDY)
    assert (response.output_text, response.status) == (expected, "completed")
    assert (response.usage.input_tokens, response.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    with claude.messages.stream(model="glm-poet", messages=QUATRAIN, max_tokens=60, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == expected
    with gpt.responses.stream(model="glm-poet", input=QUATRAIN[0]["content"], **GREEDY) as stream:
        assert stream.get_final_response().output_text == expected
    counted = claude.messages.count_tokens(model="glm-poet", messages=QUATRAIN)
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_a_stop_sequence_is_named(claude):
    answer = claude.messages.create(
        model="glm-poet", messages=QUATRAIN, max_tokens=60, stop_sequences=["。", "，"], extra_body=GREEDY
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "，")
    assert len(answer.content[0].text) == 5


def test_the_context_limits_an_answer(claude, gpt):
    asked = [{"role": "user", "content": "春" * 440}]
    body = {"temperature": 0, "ignore_eos": True}
    answer = claude.messages.create(model="glm-poet", messages=asked, max_tokens=5000, extra_body=GREEDY)
    assert answer.stop_reason in ("end_turn", "model_context_window_exceeded")
    with pytest.raises(openai.BadRequestError, match="is too large: 5,000"):
        gpt.chat.completions.create(model="glm-poet", messages=asked, max_tokens=5000, extra_body=body)


def test_the_tokens_of_a_prompt_are_scored(gpt):
    def score(text):
        fields = {"model": "glm-poet", "prompt": text, "echo": True, "logprobs": 1, "max_tokens": 0}
        [choice] = gpt.completions.create(**fields).choices
        assert choice.text == text
        first, *found = choice.logprobs.token_logprobs
        assert first is None
        assert max(found) < 0
        for logprob, likely in zip(found, choice.logprobs.top_logprobs[1:], strict=True):
            assert logprob <= max(likely.values())
        return sum(found)

    poem = "床前明月光，疑是地上霜。"
    assert score(poem) > score(poem[::-1]) + 5
    # A second time the prefix cache has the prompt.
    assert score(poem) == pytest.approx(score(poem), abs=1e-3)
    whole = gpt.completions.create(
        model="glm-poet", prompt=poem, max_tokens=3, temperature=0, extra_body={"prompt_logprobs": 2}
    )
    assert sum(
        max(each.values(), key=lambda one: one["rank"])["rank"] > 0 for each in whole.choices[0].prompt_logprobs[1:]
    )


def test_the_example_keeps_its_conversation_on_the_server(server, capsys):
    path = Path(__file__).parents[2] / "examples" / "agent_responses.py"
    spec = importlib.util.spec_from_file_location("agent_responses", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main(["--url", server.url]) == 0
    first, second = re.findall(r"\((\d+) tokens in, (\d+) of them cached", capsys.readouterr().out)
    assert int(second[0]) > int(first[0]) + 20
    assert example.main(["--url", "http://127.0.0.1:9"]) == 1
    assert "warpbus serve demo" in capsys.readouterr().err


def test_a_server_that_has_to_end_tells_its_streams():
    body = {"model": "glm-poet", "messages": QUATRAIN, "stream": True, "max_tokens": 450, "ignore_eos": True}
    with serving("demo", "--shutdown-timeout", "0.3") as process:
        with httpx.stream("POST", f"{process.url}/v1/chat/completions", json=body, timeout=90) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert process.wait(90) == 0
        process.reading.join(60)
    assert json.loads(events[-1])["error"]["code"] == "server_ends"
    log = "".join(process.said)
    assert "Traceback" not in log
    assert re.search(r"POST /v1/chat/completions 200 .* error=server_ends ", log)
