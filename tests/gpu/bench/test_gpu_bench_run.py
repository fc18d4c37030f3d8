"""Every benchmark once on a GPU, with tiny sizes: records are complete and finite. Speed is not asserted."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from warpbus.bench import Run, ceilings, run, timing
from warpbus.bench.catalog import BENCHMARKS
from warpbus.bench.matmul import GEMV_RUNGS, MATMUL_RUNGS
from warpbus.bench.records import read
from warpbus.bench.timing import QUICK, measure
from warpbus.cli import app
from warpbus.cuda.jit import architecture
from warpbus.errors import DeviceError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = torch.device("cuda", 0)


def settings(**changes):
    return Run(**{"device": DEVICE, "command": "warpbus bench x", "quick": True, "sizes": (256,), **changes})


def check(records, device):
    for record in records:
        assert record.device == torch.cuda.get_device_name(device)
        values = [record.ours, record.peer.value, record.ratio, *record.samples["ours"], *record.samples["peer"]]
        assert all(math.isfinite(value) and value > 0 for value in values)
        assert record.versions["cuda"] == torch.version.cuda


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "decode"])
def test_a_tiny_run(name):
    asked = settings(sizes=(512,)) if name == "wna8" else settings()  # it multiplies no fewer rows
    records = run(BENCHMARKS[name], asked)
    check(records, DEVICE)
    peers = {record.peer.name for record in records}
    if name in ("vector-add", "matmul"):
        assert {record.case["transfers"] for record in records} == {True, False}
        assert any("CPU" in peer for peer in peers)
        for record in records:
            assert record.case["timed"] == ("clock" if record.case["transfers"] else "graph")
            assert (record.floor is None) == record.case["transfers"]
    else:
        assert all(record.case["timed"] == "graph" and record.floor is not None for record in records)
    if name == "linear":
        assert peers in ({"torch", "torch.compile"}, {"torch"})
        assert len(peers) == 2 or any("torch.compile was left out" in note for note in asked.notes)
    if name in ("ladder", "gemm", "gemv"):
        assert peers == {"cuBLAS"}
    if name == "wna16":
        assert peers in ({"cuBLAS"}, {"cuBLAS", "humming"})
        assert "humming" in peers or any("humming was left out" in note for note in asked.notes)
    if name == "w8a8":
        assert peers == {"cuBLAS", "torch._scaled_mm", "torch._int_mm"}
    if name == "attention":
        assert peers == {"SDPA"}
    if name == "ladder" and architecture(DEVICE) == "sm_90a":
        assert [record.case["rung"] for record in records] == [*MATMUL_RUNGS, *GEMV_RUNGS]


def test_the_layers_of_a_glm():
    names = [record.case["shape"] for record in run(BENCHMARKS["gemv"], settings(sizes=(), dtype=torch.bfloat16))]
    assert names == ["qkv", "o", "gate_up", "down", "lm_head"]


def test_the_command_writes_what_it_measured(tmp_path):
    words = ["bench", "gemm", "--size", "256", "--quick", "--json", "--output", str(tmp_path)]
    found = CliRunner().invoke(app, words, catch_exceptions=False)
    assert found.exit_code == 0
    (path,) = tmp_path.glob("gemm-*.json")
    (record,) = read(path)
    assert json.loads(found.stdout)[0]["ours"] == record.ours
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_ceilings():
    copy, read_only = ceilings.copy_bandwidth(DEVICE), ceilings.read_bandwidth(DEVICE)
    assert 1e10 < copy < 1e14
    assert 1e10 < read_only < 1e14
    assert 1e11 < ceilings.matrix_rate(DEVICE, torch.float16) < 1e16


def test_a_call_that_cannot_be_captured_is_timed_by_events():
    def waits(x):
        return float(x.sum())

    ours, theirs = measure([torch.neg, waits], lambda: (torch.randn(1000, device=DEVICE),), QUICK)
    assert ours.method == theirs.method == "events"
    assert ours.median > 0
    # The stream is usable again.
    assert torch.ones(3, device=DEVICE).sum().item() == 3


def test_buffers_are_rotated_beyond_the_cache():
    seen = set()
    cache = torch.cuda.get_device_properties(DEVICE).L2_cache_size

    def call(x):
        seen.add(x.data_ptr())
        return x.neg()

    measure([call], lambda: (torch.randn(2**20, device=DEVICE),), QUICK)
    assert 2 * len(seen) * 2**22 >= 2 * cache
    assert len(seen) == timing.number_of_sets(2 * 2**22, 2 * 2**22, cache, 10**12)


def test_what_does_not_fit_the_memory():
    with pytest.raises(DeviceError, match="the memory of the GPU does not hold this case"):
        run(BENCHMARKS["gemv"], settings(sizes=(2**20,)))
    check(run(BENCHMARKS["gemv"], settings()), DEVICE)
