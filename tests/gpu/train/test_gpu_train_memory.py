"""What a step is reckoned to take beside what the GPU's allocator saw."""

import gc
from dataclasses import replace

import pytest
import torch
from dense_configs import with_traits

from warpbus.bench.train_process import TrainBenchTask, job
from warpbus.dist import Group
from warpbus.models import SHAPES
from warpbus.train.memory import training_memory
from warpbus.train.settings import TrainingSettings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# The width of ChatGLM2-6B, and few layers.
CONFIG = with_traits(SHAPES["chatglm2-6b"], num_layers=4)
GPU = torch.device("cuda", 0)


def taken_by(config, settings):
    """The most that a step had allocated, in bytes."""
    gc.collect()  # the model of a test before is in cycles
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    said = []
    job(Group(0, 1, GPU), said.append, TrainBenchTask(config, settings, tf32=False, plain=False, warm=2, steps=2))
    return said[0].memory - before


@pytest.mark.parametrize(
    "chosen",
    [
        {"method": "lora", "dtype": "bfloat16"},
        {"method": "lora", "dtype": "bfloat16", "recompute": 1},
        {"method": "lora", "dtype": "bfloat16", "quantize": "w4a16-g128", "recompute": 1},
        {"method": "lora", "dtype": "float32"},
        {"method": "full", "dtype": "bfloat16"},
        {"method": "full", "dtype": "bfloat16", "recompute": 1},
    ],
    ids=lambda chosen: "-".join(str(each) for each in chosen.values()),
)
def test_the_estimate_is_within_15_percent(chosen):
    settings = TrainingSettings(steps=1, length=2048, rows_per_step=2, rows_at_once=2, **chosen)
    taken = taken_by(CONFIG, settings)
    reckoned = training_memory(CONFIG, settings).total
    assert reckoned == pytest.approx(taken, rel=0.15)


def test_qlora_of_six_billion_parameters_in_less_than_10_gb():
    config = SHAPES["chatglm2-6b"]
    settings = TrainingSettings(
        method="lora",
        dtype="bfloat16",
        steps=1,
        length=2048,
        rows_per_step=1,
        rows_at_once=1,
        quantize="w4a16-g128",
        recompute=1,
    )
    assert taken_by(config, settings) < 10e9


@pytest.mark.parametrize("method", ["lora", "full"])
def test_activations_are_within_15_percent(method):
    """What one row more takes: weights and all that belongs to them are there anyway."""
    less = TrainingSettings(method=method, dtype="bfloat16", steps=1, length=2048, rows_per_step=2, rows_at_once=2)
    more = replace(less, rows_per_step=4, rows_at_once=4)
    taken = taken_by(CONFIG, more) - taken_by(CONFIG, less)
    reckoned = training_memory(CONFIG, more).total - training_memory(CONFIG, less).total
    assert reckoned == pytest.approx(taken, rel=0.15)
