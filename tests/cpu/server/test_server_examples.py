"""The example of an agent, whose tool a model calls over Anthropic's API."""

import importlib.util
from pathlib import Path

import anthropic
import pytest

CALL = '<tool_call>\n{"name": "count_characters", "arguments": {"word": "warp"}}\n</tool_call>'


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parents[3] / "examples" / "agent_messages.py"
    spec = importlib.util.spec_from_file_location("agent_messages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_tool_is_called_until_there_is_an_answer(example, served, capsys):
    served.qwen.script = f"I ask.{CALL}"

    def run(word):
        served.qwen.script = "Four."
        return example.count_characters(word)

    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        assert example.converse(client, "qwen3", "How long is warp?", run) == "Four."
    assert capsys.readouterr().out == "I ask.\ncount_characters({'word': 'warp'}) = 4\nFour.\n"
    specials = {number: text for text, number in served.qwen.tokenizer.special_ids.items()}
    prompt = "".join(specials.get(i, "") or chr(i) for i in served.qwen.asked[-1][0] if i in specials or i < 128)
    assert "I ask." in prompt
    assert "<|observation|>4<|assistant|>" in prompt


def test_it_gives_up_at_some_time(example, served):
    served.qwen.script = CALL
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        assert example.converse(client, "qwen3", "How long is warp?") == "(no answer yet)"
    assert len(served.qwen.asked) == example.MOST_TURNS


def test_it_says_what_goes_wrong(example, served, capsys):
    served.qwen.script = "Four."
    assert example.main(["--url", served.url, "--model", "qwen3"]) == 0
    assert capsys.readouterr().out == "Four.\n"
    assert example.main(["--url", served.url]) == 1
    assert "has not learned to call tools" in capsys.readouterr().err
    assert example.main(["--url", "http://127.0.0.1:9"]) == 1
    assert "warpbus serve" in capsys.readouterr().err
