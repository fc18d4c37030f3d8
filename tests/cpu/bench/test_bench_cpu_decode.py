"""benchmarks/cpu_decode.py measures and writes records, here of a model of next to no size."""

import subprocess
import sys
from pathlib import Path

from warpbus.bench.records import read, results_path

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "cpu_decode.py"


def test_it_writes_a_record_for_each_scheme(tmp_path):
    arguments = ["--small", "--parameters", "2e6", "--threads", "1", "--scheme", "w4a16-g32-asym", "--scheme", "w8a16"]
    command = [sys.executable, str(BENCHMARK), *arguments, "--output", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    records = read(results_path(tmp_path, "cpu-decode", "cpu"))
    assert [record.case["scheme"] for record in records] == ["w4a16-g32-asym", "w8a16"]
    assert {record.peer.name for record in records} == {"float32"}
    assert all(len(record.samples["ours"]) == len(record.samples["peer"]) == 11 for record in records)
    assert 1e6 < records[0].case["parameters"] < 4e6
