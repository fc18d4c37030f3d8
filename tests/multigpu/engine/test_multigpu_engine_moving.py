"""An engine moves to another GPU in the midst of its work, and answers what one does that stays."""

import gc
import random
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "gpu" / "engine"))
from gpu_engine_models import GPU, SMALL, W4, finish, model_of, random_lora

from warpbus.cuda.vmm import mapped_bytes
from warpbus.engine.engine import Engine, request
from warpbus.engine.moving import EngineMigration
from warpbus.engine.offload import OffloadableModel
from warpbus.engine.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

OTHER = torch.device("cuda", 1)
GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(seed=5, top_p=0.9, temperature=0.8)
PENALIZED = SamplingParams(seed=6, temperature=0.9, repetition_penalty=1.2, logprobs=3)


def requests(params, tokens=400):
    dice = random.Random(1)
    lengths = (900, 300, 2, 75, 33)
    return [request(dice.choices(range(1000), k=length), tokens=tokens, params=params) for length in lengths]


def move_while_it_answers(engine, device):
    """Prepared in a thread, as a server does it."""
    move = EngineMigration(engine, device)
    failed = []

    def prepare():
        try:
            move.prepare()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=prepare)
    thread.start()
    while thread.is_alive():
        if engine.has_work:
            engine.step()
    thread.join()
    assert not failed, failed
    while not move.copy_ahead():
        engine.step()
    _, done = move.finish()
    move.release()
    return done


@pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALIZED], ids=["greedy", "seeded", "penalized"])
@pytest.mark.parametrize(
    ("scheme", "dtype", "options"),
    [
        (W4, torch.float16, {}),
        (W4, torch.bfloat16, {"kv_dtype": "int8"}),
        (W4, torch.float16, {"kv_dtype": "fp8", "speculation": 3}),
        (W4, torch.float16, {"kv_dtype": "int4"}),
        (None, torch.float32, {}),
    ],
)
def test_answers_are_those_of_an_engine_that_stays(params, scheme, dtype, options):
    model = model_of(SMALL, scheme, dtype)
    expected = requests(params)
    finish(Engine(model, **options), expected)
    asked = requests(params)
    engine = Engine(model, **options)
    for each in asked:
        engine.add(each)
    for _ in range(20):
        engine.step()
    # Without a thread: so it falls in the midst of the answers however long it takes.
    move = EngineMigration(engine, OTHER)
    move.prepare()
    while not move.copy_ahead():
        engine.step()
    _, done = move.finish()
    move.release()
    assert engine.device == OTHER
    assert done.ahead > 0
    assert engine.stats().running == len(asked)
    finish(engine)
    assert [each.token_ids for each in asked] == [each.token_ids for each in expected]


def test_it_answers_while_the_other_gpu_is_made_ready_and_moves_back():
    model = model_of()
    expected = requests(GREEDY, tokens=900)
    finish(Engine(model), expected)
    engine = Engine(model)
    engine.warm(rows=8)
    asked = requests(GREEDY, tokens=900)
    for each in asked:
        engine.add(each)
    for device in (OTHER, GPU):
        done = move_while_it_answers(engine, device)
        print(f"to {device}: {done.pause * 1e3:.1f} ms for {done.paused:,} bytes, {done.ahead:,} ahead")
        assert engine.device == device
    finish(engine)
    assert [each.token_ids for each in asked] == [each.token_ids for each in expected]


def test_the_first_gpu_gets_its_memory_back_and_a_moved_engine_sleeps():
    model = model_of()
    engine = Engine(model, offloadable=OffloadableModel(model))
    del model
    expected = engine.decode([[1, 2, 3]], 20)
    move_while_it_answers(engine, OTHER)
    gc.collect()
    assert mapped_bytes(GPU) == 0
    assert engine.decode([[1, 2, 3]], 20) == expected
    engine.sleep()
    assert mapped_bytes(OTHER) == 0
    engine.wake()
    assert engine.decode([[1, 2, 3]], 20) == expected


def test_adapters_move_with_the_model():
    model = model_of()
    loras = [random_lora(model, "one", 4), random_lora(model, "two", 16)]

    def named():
        found = requests(GREEDY)
        for each, name in zip(found, ("one", None, "two", "one", "two"), strict=True):
            each.adapter = name
        return found

    expected, asked = named(), named()
    finish(Engine(model_of(), adapters=loras), expected)
    engine = Engine(model, adapters=loras)
    for each in asked:
        engine.add(each)
    for device in (OTHER, GPU):
        for _ in range(20):
            engine.step()
        move = EngineMigration(engine, device)
        move.prepare()
        move.finish()
        move.release()
        assert {each.device for each in engine.model.buffers()} == {device}
    finish(engine)
    assert [each.token_ids for each in asked] == [each.token_ids for each in expected]
