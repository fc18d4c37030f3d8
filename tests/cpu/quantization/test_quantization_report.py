"""The report as JSON, table, line and picture; what a run cost."""

import io
import json
import math
import struct
from dataclasses import replace

import pytest
from rich.console import Console

from warpbus.errors import DataError, StorageError, UsageError
from warpbus.quantization import LayerResult, Report, pictures

LINEARS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")


def make_report(algorithm="gptq", **changes):
    report = Report(
        model="models/poet",
        output="models/poet-w4",
        scheme="w4a16-g128",
        algorithm=algorithm,
        settings={"samples": 128},
        calibration_tokens=0 if algorithm == "rtn" else 4096,
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
    return replace(report, **changes)


def gpu_report(**changes):
    """Four GPUs for half an hour, 3 kWh."""
    facts = {
        "device": "cuda:0",
        "devices": ("NVIDIA H200",) * 4,
        "stages": {"reading": 1.0, "forward": 2.0, "hessians": 5.0},
        "estimate": {"seconds": 7.0},
        "gpu_seconds": 7200.0,
        "energy_joules": 3 * 3.6e6,
        "peak_gpu_memory": 7_000_000_000,
    }
    return make_report(**facts | changes)


def mixed():
    """Some matrices got another scheme or algorithm; one was left as it was."""
    layers = list(make_report().layers[:-1])
    layers[0] = replace(layers[0], scheme="w8a16", algorithm="rtn")
    layers[1] = replace(layers[1], algorithm="gptq")
    return make_report(layers=tuple(layers))


def shown(report):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.table())
    return console.export_text()


def test_json_holds_everything():
    found = json.loads(json.dumps(make_report().to_json()))
    assert found["layers"][5] == {
        "layer": 1,
        "linear": "attention.o",
        "scheme": "w4a16-g128",
        "error": 0.02,
        "seconds": 0.5,
        "algorithm": None,
    }
    assert found["bytes_after"] == 12_000_000
    assert found["settings"] == {"samples": 128}


def test_json_comes_back():
    for report in (make_report(), gpu_report().priced(gpu_hour=2.0), mixed()):
        assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_reports_of_other_versions_are_read():
    found = make_report().to_json()
    later = found | {"novelty": 1}
    earlier = {name: value for name, value in found.items() if name not in ("stages", "devices", "energy_joules")}
    assert Report.from_json(later) == Report.from_json(earlier) == make_report()


@pytest.mark.parametrize("broken", [{}, {"layers": 3}, {"layers": []}, {"layers": [{"layer": 1}]}, {"model": "m"}])
def test_what_is_no_report_is_said(broken):
    with pytest.raises(DataError, match="not a report of a quantization") as raised:
        Report.from_json(broken)
    assert "\n" not in str(raised.value)


def test_table_has_a_row_a_layer():
    text = shown(make_report())
    assert "relative error of the outputs" in text
    for linear in LINEARS:
        assert linear in text
    assert text.count("2.00%") == 4
    assert text.count("2.0 ") == 3  # seconds
    assert "Where the time went" not in text


def test_table_says_what_differs():
    text = shown(mixed())
    assert text.count("w8a16 rtn") == 1
    # The algorithm of the whole is not repeated, nor is its scheme, but in the title.
    assert (text.count("gptq"), text.count("w4a16-g128")) == (1, 1)
    assert text.count("3.00%") == 3


def test_table_of_the_stages():
    lines = [line.replace("│", " ").split() for line in shown(gpu_report()).splitlines()]
    assert ["hessians", "5.00", "62%"] in lines
    assert ["reading", "1.00", "12%"] in lines


def test_the_summary_is_one_line():
    text = make_report().summary()
    assert text == "models/poet-w4: 40.0 MB -> 12.0 MB in 6.5 s on cpu, peak memory 0.50 GB"
    assert gpu_report(resumed_layers=2).priced(gpu_hour=2.0, kwh=0.5).summary() == (
        "models/poet-w4: 40.0 MB -> 12.0 MB in 6.5 s on 4 x NVIDIA H200, going on after layer 1, peak memory 0.50 GB, "
        "7.00 GB on the GPU, 7200.0 GPU-seconds, energy 10,800.00 kJ (3,000.00 Wh), "
        "cost about 5.5 at 2 a GPU-hour and 0.5 a kWh"
    )
    assert "energy not measured" in gpu_report(energy_joules=None).summary()
    assert " on 2 x A and B, " in gpu_report(devices=("A", "B", "A")).summary()


def test_cost_is_computed_from_prices_that_are_given():
    assert make_report().cost is None
    assert gpu_report().priced().cost is None
    assert gpu_report().priced(gpu_hour=2.5).cost == pytest.approx(5.0)
    assert gpu_report().priced(kwh=0.25).cost == pytest.approx(0.75)
    both = gpu_report().priced(gpu_hour=2.5, kwh=0.25)
    assert both.cost == pytest.approx(5.75)
    assert both.prices == {"gpu_hour": 2.5, "kwh": 0.25}


def test_an_unknown_cost_is_no_guess():
    unmeasured = gpu_report(energy_joules=None).priced(gpu_hour=2.5, kwh=0.25)
    assert unmeasured.cost is None
    assert unmeasured.summary().endswith("cost not known: energy not measured at 2.5 a GPU-hour and 0.25 a kWh")
    without = make_report().priced(gpu_hour=2.5)
    assert without.cost is None
    assert without.cost_text == "not known: no GPU"


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf])
def test_prices_are_numbers(price):
    with pytest.raises(UsageError, match=r"price kwh is .* from 0 up"):
        gpu_report().priced(kwh=price)


def test_mean_and_greatest_error():
    report = make_report()
    assert report.mean_error == pytest.approx(0.02)
    assert report.worst.name == f"layers.2.{LINEARS[0]}"


def test_rtn_speaks_of_weights():
    assert "weights" in make_report("rtn").error_kind
    assert "outputs" in make_report("awq").error_kind


@pytest.mark.parametrize("report", [make_report(model="models/诗人 $\\frac$"), gpu_report(), mixed()])
def test_picture(report, tmp_path):
    path = tmp_path / "new" / "errors.png"
    pictures.draw(report, path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 800
    assert height > 400


def test_a_picture_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"file.errors\.png"):
        pictures.draw(make_report(), tmp_path / "file" / "errors.png")
