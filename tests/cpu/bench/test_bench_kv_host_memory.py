"""benchmarks/kv_host_memory.py measures and writes records, here of a model of next to no size."""

import subprocess
import sys
from pathlib import Path
from statistics import median

from warpbus.bench.records import read, results_path

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "kv_host_memory.py"


def test_it_writes_its_records(tmp_path):
    sizes = ["--tokens", "100", "--rounds", "2", "--hidden", "128", "--layers", "1", "--host-memory", "64MB"]
    command = [sys.executable, str(BENCHMARK), *sizes, "--output", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    for bench in ("kv-host-memory", "kv-disk"):
        (record,) = read(results_path(tmp_path, bench, "cpu"))
        assert (record.case["prompt"], record.case["layers"], record.peer.name) == (100, 1, "computed")
        assert [len(record.samples[of]) for of in ("ours", "peer")] == [2, 2]
        assert record.ours == median(record.samples["ours"])
        assert record.ratio == record.peer.value / record.ours
        assert record.command == "python benchmarks/kv_host_memory.py " + " ".join(sizes)
