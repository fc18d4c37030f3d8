"""benchmarks/engine_move.py on the CPU: that the move comes about, and what it says of it."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from dense_configs import with_traits

from warpbus.models import SHAPES

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "engine_move.py"
SMALL = with_traits(SHAPES["chatglm2-6b"], vocab_size=300, hidden_size=64, num_layers=2, num_heads=4, head_dim=16)
SMALL = with_traits(SMALL, num_kv_heads=2, ffn_size=128, max_context=20_000, rope=replace(SMALL.rope, rotary_dim=8))


def test_an_engine_moves_and_its_pause_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    spec = importlib.util.spec_from_file_location("engine_move", BENCHMARK)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    monkeypatch.setitem(SHAPES, "chatglm2-6b", SMALL)
    options = ["--context", "100", "--sequences", "2", "--source", "cpu", "--target", "cpu"]
    assert benchmark.main(["chatglm2-6b", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["context"] > 100
    assert found["sequences"] == 2
    assert 0 < found["pause"] < found["gap"]
    # Which of the cache's bytes are left for the pause depends on when the steps are done: none may be.
    assert found["ahead"] + found["paused"] > 0
    for figure in ("weights", "step", "step_after"):
        assert found[figure] > 0
