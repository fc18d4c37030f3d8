"""The time that training takes, against runs that were measured."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dense_configs import with_traits
from torch import nn

from warpbus.bench.train_variants import shape_named
from warpbus.models import SHAPES, Decoder
from warpbus.train.memory import num_trained
from warpbus.train.plan import flops_per_token, training_time
from warpbus.train.settings import TrainingSettings

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
SMALL = {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "ffn_size": 256}
CONFIG = with_traits(SHAPES["chatglm2-6b"], vocab_size=90, **SMALL)
ROWS = {"length": 64, "rows_per_step": 2, "rows_at_once": 2}
STEPS = 1000


def records() -> Iterator[Any]:
    """Measured speeds, each once."""
    for path in sorted(RESULTS.glob("train-*.json")):
        speeds = [each for each in json.loads(path.read_text(encoding="utf-8")) if each["metric"] == "speed"]
        for case, record in {json.dumps(each["case"]): each for each in speeds}.items():
            yield pytest.param(record, speeds, id=f"{path.stem}-{case}")


@pytest.mark.parametrize(("record", "speeds"), list(records()))
def test_recorded_runs_are_within_the_range(record: Any, speeds: list[Any]) -> None:
    case = record["case"]
    names = ("shape", "method", "gpus", "rows", "length")
    # The floor of the same run in bfloat16, which is what a plan measures, is the speed of its products.
    floor = next(
        each["floor"]
        for each in speeds
        if each["case"]["precision"] == "bf16" and all(each["case"][name] == case[name] for name in names)
    )
    settings = TrainingSettings(
        method="lora" if case["method"] == "qlora" else case["method"],
        dtype="bfloat16",
        fp8=case["precision"] == "fp8",
        steps=STEPS,
        length=case["length"],
        rows_per_step=case["rows"] * case["gpus"],
        rows_at_once=case["rows"],
    )
    tokens = STEPS * settings.rows_per_step * settings.length
    products = tokens / floor * case["gpus"]
    found = training_time(shape_named(case["shape"], None), settings, products, case["gpus"])
    assert found.least < tokens / record["ours"] < found.most


def test_more_gpus_share_the_products_and_more_pieces_launch_more() -> None:
    settings = TrainingSettings(method="lora", steps=10, length=64, rows_per_step=8, rows_at_once=4)
    one, two = (training_time(CONFIG, settings, 1000.0, gpus) for gpus in (1, 2))
    assert (one.least, two.least) == (1000.0, 500.0)
    assert one.most > 2 * 1000.0
    quick, pieces = (
        training_time(CONFIG, TrainingSettings(steps=10, length=64, rows_per_step=8, rows_at_once=rows), 0.0, 1)
        for rows in (8, 1)
    )
    # Eight forward and backward passes of four layers in place of one.
    assert pieces.most - quick.most == pytest.approx(0.012 * 4 * 10 * 7)


def test_operations_are_counted_by_the_weights_of_the_model() -> None:
    linears = [each.weight.numel() for each in Decoder(CONFIG).layers.modules() if isinstance(each, nn.Linear)]
    layers, head = sum(linears), 90 * 128
    full = TrainingSettings(method="full", **ROWS)
    assert flops_per_token(CONFIG, full, 1) == 6 * (layers + head)
    again = TrainingSettings(method="full", recompute=2, **ROWS)
    assert flops_per_token(CONFIG, again, 1) == 6 * (layers + head) + layers
    lora = TrainingSettings(method="lora", rank=2, **ROWS)
    trained = num_trained(CONFIG, lora)
    # A and B of each matrix.
    assert trained == sum(2 * sum(matrix.shape) for _, matrix in CONFIG.matrices)
    assert flops_per_token(CONFIG, lora, trained) == 4 * (layers + head) + 6 * trained
