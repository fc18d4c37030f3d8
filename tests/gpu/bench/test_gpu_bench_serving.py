"""`bench serving` with a small model on a GPU: loads, growth, sleep, cycles, and limits."""

from dataclasses import replace

import pytest
import torch
from dense_configs import with_traits

from warpbus.bench import Run, run, serving
from warpbus.bench.options import ServingBenchOptions
from warpbus.bench.serving import serving_benchmark
from warpbus.models import SHAPES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SIZES = {"vocab_size": 1024, "hidden_size": 512, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 1024}


def test_a_small_model(monkeypatch):
    monkeypatch.setitem(SHAPES, "chatglm2-6b", with_traits(SHAPES["chatglm2-6b"], **SIZES))
    monkeypatch.setattr(serving, "QUICK", replace(serving.QUICK, seconds=0.3, grown=4_000_000))
    asked = Run(torch.device("cuda", 0), "warpbus bench serving", quick=True)
    work = ServingBenchOptions(concurrency=(1, 8), rates=(0.5,), prompt=64, tokens=16, peer=False)
    records = run(serving_benchmark(work), asked)
    output = [record for record in records if record.case.get("of") == "output"]
    assert [record.case["concurrency"] for record in output] == [1, 8]
    assert all(0 < record.ours < record.floor for record in output)
    tasks = {record.case["task"]: record for record in records if "task" in record.case}
    assert set(tasks) == {"growth", "sleep", "wake", "cycles"}
    assert tasks["wake"].peer.name == "a pinned copy"
    # 20 cycles of 64 MB: one piece that were left would be seen.
    assert tasks["cycles"].ours - tasks["cycles"].peer.value < 0.04
    assert all("left out" not in note for note in asked.notes)
