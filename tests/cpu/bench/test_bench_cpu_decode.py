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
    cases = [(record.case["scheme"], record.case["task"]) for record in records]
    assert cases == [(scheme, task) for scheme in ("w4a16-g128", "w8a16") for task in ("decode", "prompt")]
    assert {record.peer.name for record in records} == {"float32"}
    for record in records:
        counts = {len(record.samples[of]) for of in ("ours", "peer")}
        assert counts == {40 if record.case["task"] == "decode" else 6}
        assert record.ours == max(record.samples["ours"])
        assert record.peer.value == max(record.samples["peer"])
    assert 1e6 < records[0].case["parameters"] < 4e6
    assert records[0].command.startswith(
        "OMP_WAIT_POLICY=PASSIVE python benchmarks/cpu_decode.py --small --parameters 2e6"
    )


def test_how_threads_wait_can_be_chosen(tmp_path):
    arguments = ["--small", "--parameters", "2e6", "--threads", "1", "--scheme", "w8a16-g32", "--output", str(tmp_path)]
    chosen = {**os.environ, "OMP_WAIT_POLICY": "ACTIVE"}
    subprocess.run([sys.executable, str(BENCHMARK), *arguments], check=True, capture_output=True, env=chosen)
    record = read(results_path(tmp_path, "cpu-decode", "cpu"))[0]
    assert record.case["scheme"] == "w8a16-g32"
    assert record.command.startswith("OMP_WAIT_POLICY=ACTIVE python ")


def test_llama_cpp_takes_part_in_a_process_of_its_own(tmp_path):
    arguments = ["--small", "--parameters", "2e6", "--threads", "1", "--scheme", "w4a16-g32", "--output", str(tmp_path)]
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 9.9\nwhile read what tokens; do echo $tokens; done\n", encoding="utf-8")
    python.chmod(0o755)
    command = [sys.executable, str(BENCHMARK), *arguments, "--llama", str(python)]
    subprocess.run(command, check=True, capture_output=True)
    theirs = [record for record in read(results_path(tmp_path, "cpu-decode", "cpu")) if "llama" in record.peer.name]
    assert [record.case["task"] for record in theirs] == ["decode", "prompt"]
    assert all(record.peer.value == 1.0 and record.peer.version == "llama-cpp-python 9.9" for record in theirs)


def test_a_python_without_llama_cpp_is_an_error(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    python.chmod(0o755)
    command = [sys.executable, str(BENCHMARK), "--small", "--parameters", "2e6", "--llama", str(python)]
    finished = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True)
    assert finished.returncode == 1
    assert "its Python needs llama-cpp-python and gguf" in finished.stderr
