"""From a model directory to an engine: what the options mean, and what is refused before anything is read."""

from dataclasses import replace

import pytest
import torch

from warpbus.dist import Group
from warpbus.engine.blocks import BLOCK
from warpbus.engine.loading import build_engine, load_engine, open_model
from warpbus.engine.options import ServiceOptions
from warpbus.errors import CheckpointError, UsageError

CPU = torch.device("cpu")
PLAIN = ServiceOptions(device="cpu", max_num_seqs=4)


def engine_of(model, **changes):
    options = replace(PLAIN, **changes)
    return build_engine(open_model(model, CPU, options), options)


def test_what_is_known_before_weights_are_read(tiny_glm):
    opened = open_model(tiny_glm, CPU, PLAIN)
    assert (opened.device, opened.dtype, opened.max_model_len, opened.plan) == (CPU, torch.float32, 512, None)
    assert opened.checkpoint.directory == tiny_glm
    assert opened.config.vocab_size == 400
    assert open_model(tiny_glm, CPU, replace(PLAIN, max_model_len=100)).max_model_len == 100
    assert open_model(tiny_glm, CPU, replace(PLAIN, dtype="bfloat16")).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 513}, "max_model_len is 513: give 2 to 512, the model's context"),
        ({"memory": "6GB"}, "--memory 6GB limits GPU memory, but this run is on the CPU: leave it out"),
        ({"memory": "6XB"}, "memory is '6XB': give a size such as 6GB"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_read(tiny_glm, changes, message):
    with pytest.raises(UsageError, match=message):
        open_model(tiny_glm, CPU, replace(PLAIN, **changes))


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        open_model(tmp_path / "nowhere", CPU, PLAIN)


def test_an_engine_is_made_as_the_options_say(tiny_glm):
    plain = engine_of(tiny_glm)
    assert (plain.max_model_len, plain.max_num_seqs, plain.dtype) == (512, 4, torch.float32)
    assert plain.stats().blocks == 4 * 512 // BLOCK
    prompts = [[7, 8, 9] * 30, [7, 8, 9] * 30, [11]]
    expected = plain.decode(prompts, 20)
    assert plain.stats().prefix_hits == 2 * BLOCK
    other = engine_of(tiny_glm, max_model_len=130, prefix_caching=False, speculation=3, max_num_batched_tokens=16)
    assert other.max_model_len == 130
    assert other.decode(prompts, 20) == expected
    stats = other.stats()
    assert (stats.prefix_hits, stats.blocks, other._pipeline.drafting.rows) == (0, 4 * 5, 4 + 3)
    assert (plain.kv_kind, engine_of(tiny_glm, kv_dtype="int8").kv_kind) == (None, "int8")


@pytest.mark.parametrize(("asked", "blocks"), [(1000, 32), (1024, 32), (1025, 33), (10**9, 4 * 16)])
def test_the_cache_has_whole_blocks_and_no_more_than_can_be_needed(tiny_glm, asked, blocks):
    assert engine_of(tiny_glm, cache_tokens=asked).stats().blocks == blocks


def test_a_small_cache_shortens_the_context_unless_that_is_asked_for(tiny_glm):
    assert engine_of(tiny_glm, cache_tokens=100).max_model_len == 4 * BLOCK
    with pytest.raises(UsageError, match="cache_tokens is 90: give at least max_model_len, which is 100"):
        engine_of(tiny_glm, cache_tokens=90, max_model_len=100)


def test_an_engine_sleeps_if_it_can(tiny_glm):
    engine = load_engine(tiny_glm, PLAIN, Group(0, 1, CPU), lambda *_: None)
    expected = engine.decode([[5, 6, 7]], 10)
    engine.sleep()
    assert engine.asleep
    engine.wake()
    assert engine.decode([[5, 6, 7]], 10) == expected
    with pytest.raises(UsageError, match="cannot sleep"):
        engine_of(tiny_glm).sleep()


def test_progress_is_reported_while_weights_are_read(tiny_glm):
    reported = []
    opened = open_model(tiny_glm, CPU, PLAIN)
    assert reported == []
    build_engine(opened, PLAIN, progress=lambda *arguments: reported.append(arguments))
    assert len(reported) > 2


def test_a_planned_memory_is_one_gpus(tiny_glm):
    with pytest.raises(UsageError, match="memory is '6GB', which plans one GPU's: leave it out with 2 GPUs"):
        load_engine(tiny_glm, replace(PLAIN, memory="6GB"), Group(0, 2, CPU), lambda *_: None)
