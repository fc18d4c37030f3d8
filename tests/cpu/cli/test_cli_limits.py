"""`warpbus doctor --limits`: the device query, on this CPU and on a GPU that is not here."""

import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from warpbus.bench import ceilings
from warpbus.cli import app
from warpbus.cuda import driver, query, rates
from warpbus.errors import UsageError

# An H100's, by the numbers of CUdevice_attribute.
H100 = {
    1: 1024,
    2: 1024,
    3: 1024,
    4: 64,
    5: 2147483647,
    6: 65535,
    7: 65535,
    8: 49152,
    10: 32,
    12: 65536,
    16: 132,
    38: 52428800,
    39: 2048,
    75: 9,
    76: 0,
    81: 233472,
    82: 65536,
    97: 232448,
}


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """The rates of a device, without the seconds that measuring takes."""
    monkeypatch.setattr(ceilings, "copy_bandwidth", lambda device: 3.01e12)
    monkeypatch.setattr(rates, "matmul_rates", lambda device, dtypes: dict.fromkeys(dtypes, 6.5e14))


def limits(*words: str) -> str:
    found = CliRunner().invoke(app, ["doctor", "--limits", *words], catch_exceptions=False, env={"COLUMNS": "80"})
    assert found.exit_code == 0
    return found.stdout


def test_this_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for index, words in enumerate((("1", "Data", "48K"), ("2", "Unified", "2048K"))):
        place = tmp_path / f"index{index}"
        place.mkdir()
        for name, text in zip(("level", "type", "size"), words, strict=True):
            (place / name).write_text(text + "\n")
    monkeypatch.setattr(query, "_CACHES", tmp_path)
    monkeypatch.setattr(query, "cpu_instructions", lambda: frozenset(("sse2", "avx2")))
    (found,) = json.loads(limits("--json"))
    assert found["caches"] == {"L1 data": 48 * 1024, "L2": 2048 * 1024}
    assert found["instructions"] == ["avx2"]
    assert found["float32"] == 6.5e14
    shown = limits()
    assert "cache L1 data            48 KiB" in shown
    assert "cache L2                 2 MiB" in shown
    assert "multiprocessors" not in shown


def test_a_gpu_by_its_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 [test]")
    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuInit=lambda flags: 0))
    monkeypatch.setattr(driver, "attribute", lambda which, device: H100[which])
    lines = {" ".join(line.split()) for line in limits().splitlines()}
    assert "NVIDIA H100 [test]" in lines
    assert "compute capability 9.0" in lines
    assert "threads per block, at most 1,024" in lines
    assert "block, at most 1,024 x 1,024 x 64" in lines
    assert "grid, at most 2,147,483,647 x 65,535 x 65,535" in lines
    assert "shared memory per block 48 KiB, or 227 KiB of dynamic shared memory" in lines
    assert "L2 cache 50 MiB" in lines
    assert "copy within the memory 3,010.0 GB/s, bytes read and written" in lines
    assert "matrix product, bfloat16 650 TFLOP/s" in lines


def test_one_report_at_a_time():
    with pytest.raises(UsageError, match="ask for one at a time"):
        CliRunner().invoke(app, ["doctor", "--limits", "--compile"], catch_exceptions=False)
