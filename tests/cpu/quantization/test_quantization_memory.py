"""Quantizing holds one layer at a time: the benchmark of peak memory on a model of 150 M parameters (290 MB)."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quantization_models import write_model

from warpbus.formats import FinishedParts
from warpbus.formats import parts as part_files
from warpbus.quantization import Progress, quantize

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


def test_embedding_and_head_are_written_before_the_first_layer_is_read(tmp_path, monkeypatch):
    """However slow the disk is: while they are written, they are in memory."""
    write = part_files.write_file

    def slow(file, tensors, **options):
        time.sleep(0.2 * ("ends" in file.name))
        return write(file, tensors, **options)

    monkeypatch.setattr(part_files, "write_file", slow)
    model = write_model(tmp_path / "model", num_hidden_layers=1)
    there = []
    progress = Progress(matrix=lambda *arguments: there.append(FinishedParts(tmp_path / "out").parts()))
    quantize(model, tmp_path / "out", scheme="w4a16-g32", algorithm="rtn", device="cpu", progress=progress)
    assert there[0] == ["ends-0"]
