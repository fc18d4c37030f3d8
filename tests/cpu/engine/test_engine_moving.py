"""An engine that moves in the midst of its work answers what one does that stays."""

import pytest
import torch
from engine_models import FAMILIES, PROMPTS, SMALL, finish

from warpbus.engine.blocks import BLOCK
from warpbus.engine.engine import Engine, request
from warpbus.engine.moving import EngineMigration
from warpbus.engine.offload import OffloadableModel
from warpbus.engine.sampling_params import SamplingParams
from warpbus.errors import DeviceError, UsageError
from warpbus.models import random_model
from warpbus.qtensor import Scheme

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(seed=5, top_p=0.9, temperature=0.8)
PENALIZED = SamplingParams(seed=6, temperature=0.9, repetition_penalty=1.2, logprobs=3)
LONG = [list(range(200)), *PROMPTS]


@pytest.fixture(scope="module")
def model():
    return random_model(SMALL, None, "cpu", torch.float32)


def requests(params, tokens=35):
    return [request(prompt, tokens=tokens, params=params) for prompt in LONG]


def stayed(model, params, **options):
    asked = requests(params)
    finish(Engine(model, **options), asked)
    return [each.token_ids for each in asked]


def moved(model, params, before, blocks=2, **options):
    """The same with a move after so many steps."""
    asked = requests(params)
    engine = Engine(model, **options)
    pieces = {}
    for each in asked:
        engine.add(each)

    def step():
        for sequence, piece in engine.step():
            pieces.setdefault(sequence, []).append(piece)

    for _ in range(before):
        step()
    move = EngineMigration(engine, CPU)
    move.prepare()
    step()
    while not move.copy_ahead(blocks):
        step()
    last, done = move.finish()
    for sequence, piece in last:
        pieces.setdefault(sequence, []).append(piece)
    move.release()
    for sequence, more in finish(engine).items():
        pieces.setdefault(sequence, []).extend(more)
    for each in asked:
        assert [token for piece in pieces[each] for token in piece.token_ids] == each.token_ids
    return [each.token_ids for each in asked], done, engine


@pytest.mark.parametrize("params", [SEEDED, PENALIZED], ids=["seeded", "penalized"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 40},
        {"prefix_caching": False},
        {"speculation": 3},
        {"cache_tokens": 12 * BLOCK, "max_model_len": 11 * BLOCK},
        {"cache_tokens": 11 * BLOCK, "max_model_len": 11 * BLOCK, "host_bytes": 1 << 24},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_answers_are_those_of_an_engine_that_stays(model, params, options):
    expected = stayed(model, params, **options)
    for before in (2, 20):
        answers, done, _ = moved(model, params, before, **options)
        assert answers == expected
        assert done.weights == sum(each.nbytes for each in model.parameters())


@pytest.mark.parametrize(("family", "kv_dtype"), [*((family, "auto") for family in FAMILIES), ("sparse", "fp8")])
def test_every_family_and_a_quantized_model(family, kv_dtype):
    model = random_model(FAMILIES[family], Scheme.parse("w4a16-g32"), "cpu", torch.float32)
    answers, _, engine = moved(model, GREEDY, 10, kv_dtype=kv_dtype)
    assert answers == stayed(model, GREEDY, kv_dtype=kv_dtype)
    assert engine.model is not model
    ours = {each.data_ptr() for each in (*model.parameters(), *model.buffers()) if each.nbytes}
    assert not ours & {each.data_ptr() for each in (*engine.model.parameters(), *engine.model.buffers())}


def test_full_blocks_go_ahead_and_the_rest_in_the_pause(model):
    _, done, _ = moved(model, GREEDY, 20, blocks=1)
    block = Engine(model)._instance.cache.block_bytes
    assert done.ahead >= 7 * block
    # Of each of the six sequences the block that is being filled, and what is little.
    assert done.paused <= (6 + 4) * block


def test_what_the_cache_knows_of_earlier_prompts_moves_too(model):
    engine = Engine(model)
    prompt = list(range(4 * BLOCK + 1))
    finish(engine, [request(prompt, tokens=2)])
    move = EngineMigration(engine, CPU)
    move.prepare()
    while not move.copy_ahead():
        pass
    move.finish()
    move.release()
    again = request(prompt, tokens=2)
    finish(engine, [again])
    assert again.cached_tokens == 4 * BLOCK
    fresh = request(prompt, tokens=2)
    finish(Engine(model), [fresh])
    assert again.token_ids == fresh.token_ids


def test_a_block_that_is_used_anew_is_copied_again(model):
    """Of a small cache: between two calls other sequences get the blocks that were copied."""
    engine = Engine(model, cache_tokens=4 * BLOCK, max_model_len=3 * BLOCK, max_num_seqs=1)
    finish(engine, [request(list(range(70)), tokens=5)])
    move = EngineMigration(engine, CPU)
    move.prepare()
    while not move.copy_ahead():
        pass
    finish(engine, [request(list(range(100, 170)), tokens=5)])
    last = request(list(range(200, 270)), tokens=20)
    engine.add(last)
    for _ in range(5):
        engine.step()
    while not move.copy_ahead():
        pass
    move.finish()
    finish(engine)
    expected = request(list(range(200, 270)), tokens=20)
    finish(Engine(model), [expected])
    assert last.token_ids == expected.token_ids


def test_an_engine_that_moved_moves_again_and_sleeps():
    model = random_model(SMALL, None, "cpu", torch.float32)
    expected = stayed(model, GREEDY)
    engine = Engine(model, offloadable=OffloadableModel(model))
    asked = requests(GREEDY)
    for each in asked:
        engine.add(each)
    for _ in range(3):
        engine.step()
        move = EngineMigration(engine, CPU)
        move.prepare()
        move.finish()
        move.release()
    finish(engine)
    assert [each.token_ids for each in asked] == expected
    engine.sleep()
    with pytest.raises(UsageError, match="wake it first"):
        EngineMigration(engine, CPU)
    engine.wake()
    asked = requests(GREEDY)
    finish(engine, asked)
    assert [each.token_ids for each in asked] == expected


def test_a_move_that_is_given_up_changes_nothing(model):
    engine = Engine(model)
    asked = requests(SEEDED)
    for each in asked:
        engine.add(each)
    engine.step()
    move = EngineMigration(engine, CPU)
    with pytest.raises(UsageError, match="not prepared"):
        move.finish()
    move.prepare()
    move.copy_ahead()
    move.release()
    finish(engine)
    assert [each.token_ids for each in asked] == stayed(model, SEEDED)


def test_another_kind_of_device_is_refused(model):
    with pytest.raises(UsageError, match="cannot move to cuda"):
        EngineMigration(Engine(model), torch.device("cuda:1"))


def test_without_room_for_the_cache_nothing_is_lost(model, monkeypatch):
    """Also not what the steps under way bring."""
    engine = Engine(model)
    asked = requests(GREEDY)
    for each in asked:
        engine.add(each)
    engine.step()
    move = EngineMigration(engine, CPU)
    move.prepare()
    monkeypatch.setattr(move._replica._instance.cache, "commit", lambda blocks: 1)
    monkeypatch.setattr(engine, "drain", lambda: pytest.fail("steps were read"))
    for attempt in (move.copy_ahead, move.finish):
        with pytest.raises(DeviceError, match="out of memory for the cache"):
            attempt()
    move.release()
    finish(engine)
    assert [each.token_ids for each in asked] == stayed(model, GREEDY)
