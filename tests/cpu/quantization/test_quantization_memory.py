"""Quantizing holds one layer at a time: the benchmark of peak memory on a model of 150 M parameters (290 MB)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "memory.py"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory_stays_within_its_bound(tmp_path):
    command = [
        sys.executable,
        str(BENCHMARK),
        "--small",
        "--parameters",
        "1.5e8",
        "--directory",
        str(tmp_path),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (found,) = json.loads(done.stdout)
    assert found["checkpoint_bytes"] > 280e6
    assert found["largest_unit_bytes"] < 70e6
    assert found["peak_bytes"] - found["program_bytes"] < 2 * found["largest_unit_bytes"]
    assert found["peak_bytes"] <= found["bound_bytes"]
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []
