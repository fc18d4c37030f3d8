"""benchmarks/cpu_decode.py measures and writes records, here of a model of next to no size."""

import os
import subprocess
import sys
from pathlib import Path

from warpbus.bench.records import read, results_path

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "cpu_decode.py"


def test_it_writes_a_record_for_each_scheme(tmp_path):
    command = [sys.executable, str(BENCHMARK), "--small", "--parameters", "2e6", "--threads", "1"]
    unset = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    finished = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, env=unset)
    assert finished.returncode == 0, finished.stderr
    records = read(results_path(tmp_path, "cpu-decode", "cpu"))
    assert [record.case["scheme"] for record in records] == ["w4a16-g128", "w8a16"]
    assert {record.peer.name for record in records} == {"float32"}
    assert all(len(record.samples["ours"]) == len(record.samples["peer"]) == 11 for record in records)
    assert 1e6 < records[0].case["parameters"] < 4e6
    assert records[0].command.startswith(f"OMP_WAIT_POLICY=PASSIVE python {BENCHMARK} --small --parameters 2e6")


def test_how_threads_wait_can_be_chosen(tmp_path):
    arguments = ["--small", "--parameters", "2e6", "--threads", "1", "--scheme", "w8a16-g32", "--output", str(tmp_path)]
    chosen = {**os.environ, "OMP_WAIT_POLICY": "ACTIVE"}
    subprocess.run([sys.executable, str(BENCHMARK), *arguments], check=True, capture_output=True, env=chosen)
    (record,) = read(results_path(tmp_path, "cpu-decode", "cpu"))
    assert record.case["scheme"] == "w8a16-g32"
    assert record.command.startswith("OMP_WAIT_POLICY=ACTIVE python ")
