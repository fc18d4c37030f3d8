"""The adapters of the example: what they learn, and `warpbus serve demo --adapter ...` asked by OpenAI's own client."""

import importlib.util
from pathlib import Path

import openai
import pytest
from served_process import serving

from warpbus.demo import model_path
from warpbus.demo.themes import THEMES
from warpbus.engine import LLM, SamplingParams
from warpbus.models.adapters import merge_lora

EXAMPLE = Path(__file__).parents[2] / "examples" / "poet_adapters.py"
ASKED = [{"role": "user", "content": "写一首题为《春夜》的诗。"}]
NAMES = ("glm-poet", "li-bai", "spring")
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("poet_adapters", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def adapters(example, tmp_path_factory):
    """A QLoRA and a prefix, as the example trains them."""
    return example.make(tmp_path_factory.mktemp("adapters"), "cpu")


@pytest.fixture(scope="module")
def llm(adapters):
    return LLM(model_path(), device="cpu", adapters=adapters)


@pytest.fixture(scope="module")
def expected(llm):
    """What each says in this process, greedily."""
    return {name: llm.chat(ASKED, GREEDY, adapter=None if name == NAMES[0] else name).text for name in NAMES}


def test_each_adapter_shows_what_it_learnt(example, llm):
    for name, theme in THEMES.items():
        before, _ = example.ask(llm, theme, None)
        after, poem = example.ask(llm, theme, name)
        assert after >= 0.75, poem
        assert after >= before + 0.25


def test_a_merged_model_says_the_same(adapters, expected, tmp_path):
    merge_lora(model_path(), adapters["li-bai"], tmp_path / "merged")
    merged = LLM(tmp_path / "merged", device="cpu")
    assert merged.chat(ASKED, GREEDY).text == expected["li-bai"]


def test_adapters_that_are_there_are_used(example, adapters, capsys):
    assert example.make(adapters["li-bai"].parent, "cpu") == adapters
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def url(adapters):
    options = [f"--adapter={name}={path}" for name, path in adapters.items()]
    with serving("demo", "--max-num-seqs", "8", *options) as process:
        yield process.url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, name, **fields):
    return client.chat.completions.create(model=name, messages=ASKED, temperature=0, max_tokens=24, **fields)


def test_the_model_and_its_adapters_are_listed(client):
    assert [(model.id, model.parent) for model in client.models.list()] == [
        ("glm-poet", None),
        ("li-bai", "glm-poet"),
        ("spring", "glm-poet"),
    ]
    with pytest.raises(openai.NotFoundError, match="give one of glm-poet, li-bai, spring"):
        ask(client, "other")


def test_each_name_answers_as_in_this_process(client, expected):
    assert len(set(expected.values())) == 3, "the adapters change nothing"
    for name in NAMES:
        answer = ask(client, name, n=2)
        assert answer.model == name
        assert [choice.message.content for choice in answer.choices] == [expected[name]] * 2


def test_they_answer_at_once_in_streams(client, expected):
    streams = [(name, ask(client, name, stream=True)) for name in NAMES]
    for name, stream in streams:
        chunks = list(stream)
        assert {chunk.model for chunk in chunks} == {name}
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected[name]
