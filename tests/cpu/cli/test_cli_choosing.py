"""`warpbus quantize` where it chooses: --recommend, auto and --bits."""

import json
import shlex

import pytest
import typer
from typer.testing import CliRunner

from warpbus.cli.quantize import quantize
from warpbus.errors import UsageError
from warpbus.formats import Checkpoint, read_schemes

app = typer.Typer()
app.command()(quantize)


@pytest.fixture(scope="module")
def model(make_model, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("choosing") / "tiny", hidden_size=128, intermediate_size=128, head_dim=64)


@pytest.fixture
def texts(tmp_path, write_lines):
    return write_lines(tmp_path / "texts.jsonl", *({"text": "床前明月光，疑是地上霜。"[index:]} for index in range(8)))


def invoke(*arguments):
    words = [*map(str, arguments), "--device", "cpu"]
    return CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": "100"})


def test_recommends_and_writes_nothing(model, texts, tmp_path):
    found = invoke(model, "--recommend", "--scheme", "w8a8-int8", "--calibration", texts, "--memory", "6GB")
    assert found.exit_code == 0
    assert "w8a8-int8 by smoothquant: the least error within 6.00 GB" in found.stdout
    command = found.stdout.splitlines()[-1]
    words = ["warpbus", "quantize", str(model), "OUTPUT", "--scheme", "w8a8-int8", "--algorithm", "smoothquant"]
    assert shlex.split(command) == [*words, "--calibration", str(texts)]
    assert "trying" in found.stderr
    assert [file.name for file in tmp_path.iterdir()] == [texts.name]


def test_recommends_without_calibration_data(model):
    found = invoke(model, "--recommend", "--scheme", "w4a16-g64", "--algorithm", "gptq", "--samples", "4")
    assert found.exit_code == 0
    assert "packaged texts" in found.stderr
    assert "--calibration" not in found.stdout.splitlines()[-1]


def test_recommends_in_json(model, texts):
    found = invoke(
        model,
        "--recommend",
        "--algorithm",
        "rtn",
        "--calibration",
        texts,
        "--goal",
        "size",
        "--format",
        "gptq",
        "--json",
    )
    plain = json.loads(found.stdout)
    assert plain["goal"] == "size"
    assert {trial["algorithm"] for trial in plain["trials"]} == {"rtn"}
    assert plain["chosen"] in plain["trials"]
    # The context of a GPU is part of what running takes.
    assert min(trial["memory"] for trial in plain["trials"]) > 5e8
    assert "--format gptq" in plain["command"]
    assert "--calibration" not in plain["command"]


def test_auto_does_what_is_recommended(model, texts, tmp_path):
    out = tmp_path / "out"
    found = invoke(model, out, "--scheme", "auto", "--algorithm", "rtn", "--calibration", texts)
    assert found.exit_code == 0
    assert "w8a16 by rtn: the least error" in found.stderr
    report = json.loads((out / "warpbus-report.json").read_text())
    assert (report["scheme"], report["algorithm"]) == ("w8a16", "rtn")
    assert report["settings"]["recommended"] == "w8a16 by rtn: the least error"
    assert report["settings"]["goal"] == "quality"


def test_bits_on_average(model, texts, tmp_path):
    out = tmp_path / "out"
    found = invoke(model, out, "--bits", "3.6", "--calibration", texts)
    assert found.exit_code == 0
    report = json.loads((out / "warpbus-report.json").read_text())
    assert report["settings"]["bits"] == 3.6
    assert len({row["scheme"] for row in report["layers"]}) > 1
    checkpoint = Checkpoint(out)
    stored = read_schemes(checkpoint.config)
    assert {str(each) for each in stored.distinct()} == {row["scheme"] for row in report["layers"]}
    assert "w4a16-g128" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out", "--goal", "size"], "--goal needs --recommend"),
        (["out", "--memory", "6GB"], "--memory needs --recommend"),
        (["--recommend", "--goal", "best"], "--goal is 'best': choose from quality, speed, size"),
        (["out", "--bits", "3.5", "--scheme", "w4a16"], "drop --scheme"),
        (["out", "--bits", "3.5", "--algorithm", "auto"], "drop --scheme"),
        ([], "OUTPUT is missing"),
    ],
)
def test_flags_that_do_not_go_together(model, arguments, message):
    with pytest.raises(UsageError, match=message):
        invoke(model, *arguments)


def test_the_demo_brings_its_data():
    found = invoke("demo", "--recommend", "--scheme", "w4a16", "--algorithm", "rtn", "--samples", "4")
    assert found.exit_code == 0
    assert found.stdout.splitlines()[-1] == "warpbus quantize demo OUTPUT --scheme w4a16 --algorithm rtn"
