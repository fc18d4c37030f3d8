"""A CUDA graph gives what its kernels give, launch by launch."""

import pytest
import torch
from gpu_engine_models import PROMPTS, finish, model_of

from warpbus.engine.engine import Engine, request
from warpbus.engine.sampling_params import SamplingParams
from warpbus.qtensor import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


class Eager:
    """Stands for the graphs: launches their kernels one by one, in the same buffers."""

    def run(self, key, work):
        del key
        work()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"seed": 1, "top_p": 0.9},
        {"seed": 2, "top_k": 7, "temperature": 0.7},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"seed": 3, "repetition_penalty": 1.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("speculation", [0, 3])
def test_a_graph_gives_what_its_kernels_give(params, batch, speculation):
    model = model_of(head=Scheme.parse("w8a16"))
    found = []
    for eager in (False, True, False):
        engine = Engine(model, max_model_len=200, prefix_caching=False, speculation=speculation)
        if eager:
            engine._instance.step._graphs = Eager()
        requests = [request(prompt, tokens=30, params=SamplingParams(**params)) for prompt in PROMPTS[:batch]]
        finish(engine, requests)
        found.append([each.token_ids for each in requests])
    assert found[0] == found[1] == found[2]


def test_a_graph_is_captured_once(monkeypatch):
    engine = Engine(model_of(), max_model_len=200, prefix_caching=False)
    engine.decode(PROMPTS, 5)
    graphs = engine._instance.step._graphs
    monkeypatch.setattr(graphs, "_capture", None)
    first = engine.decode(PROMPTS, 5)
    assert engine.decode(PROMPTS, 5) == first
