"""Engines with prefixes, and of ChatGLM-6B, move to another GPU in the midst of their work."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "gpu" / "engine"))
from gpu_engine_models import SMALL, finish, model_of
from test_gpu_engine_chatglm import PROMPTS as CHATGLM_PROMPTS
from test_gpu_engine_chatglm import SMALL as CHATGLM
from test_gpu_engine_chatglm import model_of as chatglm_of
from test_gpu_engine_chatglm import on_the_cpu
from test_gpu_engine_prefix import LENGTHS, PROMPTS, TOLERANCES, asked, check, drawn

from warpbus.engine.engine import Engine
from warpbus.engine.moving import EngineMigration
from warpbus.engine.offload import OffloadableModel

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

OTHER = torch.device("cuda", 1)


@pytest.mark.parametrize("kind", ["glm", "chatglm"])
def test_prefixes_are_there_too(kind):
    config, prompts = (SMALL, PROMPTS) if kind == "glm" else (CHATGLM, CHATGLM_PROMPTS)
    model = model_of() if kind == "glm" else chatglm_of()
    reference, prefixes = on_the_cpu(model), {name: drawn(config, name) for name in LENGTHS}
    engine = Engine(model, adapters=list(prefixes.values()), offloadable=OffloadableModel(model))
    requests = asked(prompts, [None, *prefixes], 60)
    for each in requests:
        engine.add(each)
    for _ in range(20):
        engine.step()
    move = EngineMigration(engine, OTHER)
    move.prepare()
    while not move.copy_ahead():
        engine.step()
    _, done = move.finish()
    move.release()
    assert engine.device == OTHER
    assert done.ahead > 0
    finish(engine)
    engine.sleep()
    engine.wake()
    late = asked(prompts, list(prefixes), 10)
    finish(engine, late)
    check(reference, prefixes, [*requests, *late], TOLERANCES[torch.float16])
