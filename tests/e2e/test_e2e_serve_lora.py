"""`warpbus serve demo --adapter-dir`: LoRAs that are loaded and dropped while the server runs."""

import time

import httpx
import psutil
import pytest
import torch
from served_process import serving

from warpbus.demo import model_path
from warpbus.engine import LLM, SamplingParams
from warpbus.models.adapters import Lora, LowRank, save_lora

ASKED = [{"role": "user", "content": "写一首题为《春夜》的诗。"}]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def write_random_lora(llm, directory, seed):
    """A LoRA that changes what the poet says."""
    draw = torch.Generator().manual_seed(seed)
    linear = llm.engine.model.get_submodule("layers.1.mlp.down")
    a = torch.randn(4, linear.in_features, generator=draw) / linear.in_features**0.5
    b = torch.randn(linear.out_features, 4, generator=draw)
    lora = Lora(directory.name, {"layers.1.mlp.down": LowRank(a, b)})
    save_lora(directory, lora, llm.engine.model.config, base="glm-poet", rank=4, alpha=4.0)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """The directory of two LoRAs, and what each says in this process."""
    root = tmp_path_factory.mktemp("loras")
    plain = LLM(model_path(), device="cpu")
    for seed, name in enumerate(("first", "second")):
        write_random_lora(plain, root / name, seed)
    whole = LLM(model_path(), device="cpu", adapters={name: root / name for name in ("first", "second")})
    found = {name: whole.chat(ASKED, GREEDY, adapter=name).text for name in ("first", "second")}
    found["glm-poet"] = plain.chat(ASKED, GREEDY).text
    assert len(set(found.values())) == 3
    return root, found


def say(http, name):
    body = {"model": name, "messages": ASKED, "temperature": 0, "max_tokens": 24}
    response = http.post("/v1/chat/completions", json=body)
    return response.json()["choices"][0]["message"]["content"] if response.status_code == 200 else response.status_code


def test_loras_come_and_go(said):
    root, expected = said
    with (
        serving("demo", "--adapter-dir", str(root)) as process,
        httpx.Client(base_url=process.url, timeout=90) as http,
    ):
        assert say(http, "first") == 404
        for name in ("first", "second"):
            answer = http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": name})
            assert answer.status_code == 200, answer.text
        assert {name: say(http, name) for name in expected} == expected
        # An engine that dies comes back with them.
        for engine in psutil.Process(process.pid).children():
            engine.kill()
        for status in (503, 200):
            end = time.monotonic() + 90
            while http.get("/health").status_code != status:
                assert time.monotonic() < end
                time.sleep(0.05)
        assert {name: say(http, name) for name in expected} == expected
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "first"}).status_code == 200
        assert say(http, "first") == 404
        assert say(http, "second") == expected["second"]
        # The name is free for another one.
        again = http.post("/v1/load_lora_adapter", json={"lora_name": "first", "lora_path": "second"})
        assert again.status_code == 200
        assert say(http, "first") == expected["second"]
        wrong = http.post("/v1/load_lora_adapter", json={"lora_name": "none", "lora_path": "none"})
        assert wrong.status_code == 404
        (root / "empty").mkdir(exist_ok=True)
        wrong = http.post("/v1/load_lora_adapter", json={"lora_name": "none", "lora_path": "empty"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "lora_path")
        assert str(root) not in wrong.text
        assert say(http, "glm-poet") == expected["glm-poet"]
