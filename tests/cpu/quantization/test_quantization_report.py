"""The report as JSON and a line; what a run cost."""

import json
import math

import pytest
from quantization_reports import LINEARS, gpu_report, make_report, mixed

from warpbus.errors import DataError, UsageError
from warpbus.quantization import Report


def test_json_holds_everything():
    found = json.loads(json.dumps(make_report().to_json()))
    assert found["layers"][5] == {
        "layer": 1,
        "linear": "attention.o",
        "scheme": "w4a16-g128",
        "error": 0.02,
        "seconds": 0.5,
        "algorithm": None,
        "routed_tokens": None,
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


def test_the_summary_is_one_line():
    text = make_report().summary()
    assert text == "models/poet-w4: 40.0 MB -> 12.0 MB in 6.5 s on cpu, peak memory 0.50 GB"
    assert gpu_report(resumed_layers=2).priced(gpu_hour=2.0, kwh=0.5).summary() == (
        "models/poet-w4: 40.0 MB -> 12.0 MB in 6.5 s on 4 x NVIDIA H200, going on after layer 1, peak memory 0.50 GB, "
        "7.00 GB on the GPU, 7200.0 GPU-seconds, energy 10,800.00 kJ (3,000.00 Wh), "
        "cost about 5.5 at 2 per GPU-hour and 0.5 per kWh"
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
    assert unmeasured.summary().endswith("cost not known: energy not measured at 2.5 per GPU-hour and 0.25 per kWh")
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
