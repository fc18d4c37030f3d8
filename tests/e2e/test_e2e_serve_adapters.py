"""`warpbus serve demo --adapter ...`: the packaged poet with two adapters, asked by OpenAI's own client."""

import os
import re
import subprocess
import sys
import threading

import openai
import pytest
import torch

from warpbus.demo import model_path
from warpbus.engine import LLM, SamplingParams
from warpbus.formats import Checkpoint
from warpbus.models import read_config
from warpbus.models.adapters import Lora, LowRank, Prefix, save_lora, save_prefix

ASKED = [{"role": "user", "content": "写一首题为《春夜》的五言绝句。"}]
NAMES = ("glm-poet", "changed", "begun")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """A LoRA and a prefix at random, by their names."""
    directory, config = tmp_path_factory.mktemp("adapters"), read_config(Checkpoint(model_path()))
    draw = torch.Generator().manual_seed(3)
    rows = sum(config.qkv_rows)
    parts = {
        f"layers.{layer}.attention.qkv": LowRank(
            torch.randn(8, config.hidden_size, generator=draw) / config.hidden_size**0.5,
            torch.randn(rows, 8, generator=draw) / 2,
        )
        for layer in range(config.num_layers)
    }
    save_lora(directory / "lora", Lora("changed", parts), config, base="glm-poet", rank=8, alpha=16)
    shape = config.num_layers, 5, config.num_kv_heads, config.head_dim
    keys, values = (torch.randn(shape, generator=draw) for _ in range(2))
    save_prefix(directory / "prefix", Prefix("begun", keys, values), config, base="glm-poet")
    return {"changed": directory / "lora", "begun": directory / "prefix"}


@pytest.fixture(scope="module")
def expected(adapters):
    """What each says in this process, greedily."""
    llm = LLM(model_path(), device="cpu", adapters=adapters)
    params = SamplingParams(temperature=0, max_tokens=24)
    return {name: llm.chat(ASKED, params, adapter=None if name == NAMES[0] else name).text for name in NAMES}


@pytest.fixture(scope="module")
def url(adapters):
    command = [sys.executable, "-m", "warpbus", "serve", "demo", "--port", "0", "--device", "cpu"]
    command += ["--max-num-seqs", "8", *(f"--adapter={name}={path}" for name, path in adapters.items())]
    environment = {**os.environ, "WARPBUS_API_KEY": "", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"ready at (http://\S+?):? ", line):
                break
        else:
            pytest.fail("".join(said))
        # Its log would fill the pipe.
        threading.Thread(target=lambda: said.extend(process.stderr), daemon=True).start()
        yield found[1]
        process.kill()


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, name, **fields):
    return client.chat.completions.create(model=name, messages=ASKED, temperature=0, max_tokens=24, **fields)


def test_the_model_and_its_adapters_are_listed(client):
    assert [(model.id, model.parent) for model in client.models.list()] == [
        ("glm-poet", None),
        ("changed", "glm-poet"),
        ("begun", "glm-poet"),
    ]
    with pytest.raises(openai.NotFoundError, match="give one of glm-poet, changed, begun"):
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
