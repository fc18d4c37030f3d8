"""benchmarks/first_token.py measures and writes records, here of a model of next to no size."""

import subprocess
import sys
from pathlib import Path
from statistics import median

from warpbus.bench.records import read, results_path

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "first_token.py"


def test_it_writes_its_records(tmp_path):
    model = ["--device", "cpu", "--shape", "chatglm2-6b", "--layers", "1", "--hidden", "128"]
    command = [*model, "--tokens", "20", "--cached", "40", "--new", "7", "--rounds", "2"]
    finished = subprocess.run(
        [sys.executable, str(BENCHMARK), *command, "--output", str(tmp_path)], capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    records = read(results_path(tmp_path, "first-token", "cpu"))
    assert [(record.case["prompt"], record.case["cached"]) for record in records] == [(20, 0), (7, 40)]
    for record in records:
        assert (record.case["layers"], record.peer.name) == (1, "kernel by kernel")
        assert [len(record.samples[of]) for of in ("ours", "peer")] == [2, 2]
        assert record.ours == median(record.samples["ours"])
        assert record.command == "python benchmarks/first_token.py " + " ".join(command)
