"""The report as JSON, table, line and picture."""

import io
import json
import struct

import pytest
from rich.console import Console

from warpbus.errors import StorageError
from warpbus.models import LINEARS
from warpbus.quantization import LayerResult, Report


def make_report(algorithm="gptq"):
    return Report(
        model="models/poet",
        output="models/poet-w4",
        scheme="w4a16-g128",
        algorithm=algorithm,
        settings={"samples": 128},
        calibration_tokens=4096,
        device="cpu",
        layers=tuple(
            LayerResult(layer, linear, "w4a16-g128", 0.01 * (layer + 1), 0.5)
            for layer in range(3)
            for linear in LINEARS
        ),
        bytes_before=40_000_000,
        bytes_after=12_000_000,
        resumed_layers=0,
        seconds=6.5,
        peak_memory=500_000_000,
        peak_gpu_memory=None,
        versions={"warpbus": "0.1.0"},
    )


def test_json_holds_everything():
    found = json.loads(json.dumps(make_report().to_json()))
    assert found["layers"][5] == {
        "layer": 1,
        "linear": "attention.o",
        "scheme": "w4a16-g128",
        "error": 0.02,
        "seconds": 0.5,
    }
    assert found["bytes_after"] == 12_000_000
    assert found["settings"] == {"samples": 128}


def test_table_has_a_row_a_layer():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(make_report().table())
    text = console.export_text()
    assert "relative error of the outputs" in text
    for linear in LINEARS:
        assert linear in text
    assert text.count("2.00%") == 4
    assert text.count("2.0 ") == 3  # seconds


def test_the_summary_is_one_line():
    text = make_report().summary()
    assert text == "models/poet-w4: 40.0 MB -> 12.0 MB in 6.5 s on cpu, peak memory 0.50 GB"


def test_rtn_speaks_of_weights():
    assert "weights" in make_report("rtn").error_kind


def test_picture(tmp_path):
    path = tmp_path / "new" / "errors.png"
    make_report().draw(path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 800
    assert height > 400


def test_a_picture_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"file.errors\.png"):
        make_report().draw(tmp_path / "file" / "errors.png")
