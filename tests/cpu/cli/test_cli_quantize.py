"""`warpbus quantize` as a person uses it."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import typer
from hub_standin import StandIn
from typer.testing import CliRunner

from warpbus.cli.quantize import quantize
from warpbus.errors import SchemeError, UsageError
from warpbus.formats import Checkpoint, FinishedParts, ResumableCheckpoint, format_of, read_schemes

app = typer.Typer()
app.command()(quantize)
RUN = "from warpbus.cli import main; main()"


@pytest.fixture(scope="module")
def model(make_model, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("quantize") / "tiny", hidden_size=128, intermediate_size=128, head_dim=64)


@pytest.fixture
def texts(tmp_path, write_lines):
    return write_lines(tmp_path / "texts.jsonl", *({"text": "床前明月光，疑是地上霜。"[index:]} for index in range(8)))


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_quantizes_and_shows_a_table(model, texts, tmp_path):
    found = invoke(model, tmp_path / "out", "--calibration", texts, "--scheme", "w4a16-g64", "--device", "cpu")
    assert found.exit_code == 0
    assert "attention.qkv" in found.stdout
    assert "MB" in found.stdout
    assert "quantizing" in found.stderr
    assert "quantizing" not in found.stdout
    assert str(read_schemes(Checkpoint(tmp_path / "out").config)) == "w4a16-g64"


def test_an_empty_name_is_no_model(tmp_path, monkeypatch, model):
    monkeypatch.chdir(model)
    with pytest.raises(UsageError, match=r"^the model's name is empty"):
        invoke("", tmp_path / "out", "--algorithm", "rtn", "--device", "cpu")


def test_without_calibration_data_it_says_what_it_takes(model, texts, tmp_path):
    flags = ("--samples", "2", "--seqlen", "32", "--scheme", "w4a16-g64", "--device", "cpu")
    found = invoke(model, tmp_path / "out", *flags)
    assert found.exit_code == 0
    assert "calibrating on the packaged texts (English, Chinese, code, chat)" in found.stderr
    assert "packaged texts" not in invoke(model, tmp_path / "own", *flags, "--calibration", texts).stderr
    assert "packaged texts" not in invoke(model, tmp_path / "rtn", *flags, "--algorithm", "rtn").stderr


def test_a_model_without_a_tokenizer_is_quantized_with_a_warning(model, tmp_path):
    bare = shutil.copytree(model, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    flags = ("--algorithm", "rtn", "--scheme", "w4a16-g64", "--device", "cpu")
    found = invoke(bare, tmp_path / "out", *flags)
    assert found.exit_code == 0
    assert f"warning: {bare}: no tokenizer: the quantized model cannot chat" in found.stderr
    assert (tmp_path / "out" / "config.json").exists()
    assert "no tokenizer" not in invoke(model, tmp_path / "whole", *flags).stderr


def test_json_and_picture(model, tmp_path):
    flags = ("--algorithm", "rtn", "--scheme", "w8a16", "--device", "cpu", "--json", "--plot", tmp_path / "errors.png")
    found = invoke(model, tmp_path / "out", *flags)
    report = json.loads(found.stdout)
    assert report["scheme"] == "w8a16"
    assert len(report["layers"]) == 8
    assert report == json.loads((tmp_path / "out" / "warpbus-report.json").read_text(encoding="utf-8"))
    assert (tmp_path / "errors.png").read_bytes()[:4] == b"\x89PNG"


def test_every_flag_arrives(model, texts, tmp_path):
    flags = ("--samples", "3", "--seqlen", "5", "--seed", "7", "--damping", "0.05", "--device", "cpu", "--json")
    found = invoke(model, tmp_path / "out", "--calibration", texts, "--scheme", "w3a16-g32-asym", *flags)
    report = json.loads(found.stdout)
    expected = {"calibration": str(texts), "samples": 3, "seqlen": 5, "seed": 7, "damping": 0.05}
    assert report["settings"] == expected
    assert report["calibration_tokens"] == 15
    assert report["scheme"] == "w3a16-g32-asym"


def test_an_output_is_replaced_only_when_asked(model, tmp_path):
    flags = (model, tmp_path / "out", "--algorithm", "rtn", "--device", "cpu", "--scheme")
    assert invoke(*flags, "w8a16").exit_code == 0
    done = subprocess.run(
        [sys.executable, "-c", RUN, "quantize", *map(str, flags), "w4a16"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "exists and is not empty" in done.stderr
    assert "Traceback" not in done.stderr
    assert invoke(*flags, "w4a16", "--overwrite").exit_code == 0
    assert str(read_schemes(Checkpoint(tmp_path / "out").config)) == "w4a16"


def test_numbers_out_of_range_are_refused(model, tmp_path):
    for flags in (("--samples", "0"), ("--tokens", "0"), ("--seqlen", "0"), ("--damping", "-1")):
        found = invoke(model, tmp_path / "out", *flags)
        assert found.exit_code == 2
        assert flags[0] in found.stderr


def test_where_and_in_which_format(tmp_path, monkeypatch):
    seen = {}

    def instead(*arguments, **options):
        seen.update(options)
        raise UsageError("seen")

    monkeypatch.setattr("warpbus.quantization.driver.check_arguments", lambda *checked: None)
    monkeypatch.setattr("warpbus.quantization.quantize", instead, raising=False)
    flags = ("--gpus", "0,2", "--processes", "3", "--cluster", "auto", "--format", "awq")
    for algorithm in ("awq", "rtn"):
        with pytest.raises(UsageError, match=r"^seen$"):
            invoke("demo", tmp_path / "out", "--algorithm", algorithm, *flags)
        assert {"gpus": "0,2", "processes": 3, "cluster": "auto", "format": "awq"}.items() <= seen.items()
        assert (seen["calibration"] is not None) == (algorithm == "awq")  # the packaged model brings its own


def test_zero_points_that_a_format_cannot_hold_are_refused_before_the_work(model, tmp_path):
    flags = ("--algorithm", "rtn", "--scheme", "w4a16-g64-asym", "--device", "cpu", "--format")
    with pytest.raises(SchemeError, match=r"q_proj\.weight in w4a16-g64-asym: has zero points 0, .* use gptq-v2$"):
        invoke(model, tmp_path / "out", *flags, "gptq")
    assert list(tmp_path.iterdir()) == []
    assert invoke(model, tmp_path / "out", *flags, "gptq-v2").exit_code == 0
    assert format_of(Checkpoint(tmp_path / "out").config).name == "gptq-v2"


def test_arguments_are_checked_before_a_model_is_fetched(hub: StandIn, texts, tmp_path):
    given = ("--calibration", texts, "--device", "cpu")
    for arguments, said in (
        ((*given, "--algorithm", "best"), "algorithm is 'best'"),
        ((*given, "--scheme", "w7a16"), "7 bits"),
        ((*given, "--gpus", "2"), "--gpus 2: --device cpu means the CPU: leave one of the two out"),
        ((*given, "--processes", "99"), "processes is 99"),
    ):
        with pytest.raises((UsageError, SchemeError), match=said):
            invoke("someone/tiny", tmp_path / "out", *arguments)
    assert hub.asked == []


def test_an_empty_scheme_is_no_default(model, texts, tmp_path):
    with pytest.raises(SchemeError, match="unknown scheme ''"):
        invoke(model, tmp_path / "out", "--calibration", texts, "--scheme", "")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("algorithm", ["quip", ""])
def test_an_unknown_algorithm_gets_the_list_with_auto(model, texts, tmp_path, algorithm):
    with pytest.raises(UsageError, match=f"algorithm is '{algorithm}': choose from gptq, awq, smoothquant, rtn, auto"):
        invoke(model, tmp_path / "out", "--calibration", texts, "--algorithm", algorithm)


def test_too_few_tokens_are_warned_of(model, tmp_path, write_lines):
    few = write_lines(tmp_path / "few.jsonl", {"text": "月"})
    flags = ("--calibration", few, "--scheme", "w4a16-g64", "--device", "cpu")
    found = invoke(model, tmp_path / "out", *flags)
    assert found.exit_code == 0
    assert "too few to tell which of them matter: give more or longer texts" in " ".join(found.stderr.split())
    many = write_lines(tmp_path / "many.jsonl", *({"text": "床前明月光，疑是地上霜。"} for _ in range(64)))
    found = invoke(model, tmp_path / "again", "--calibration", many, *flags[2:])
    assert "too few" not in found.stderr


def test_finished_layers_of_another_run_need_a_restart(model, texts, tmp_path):
    flags = ("--calibration", texts, "--scheme", "w4a16-g64", "--device", "cpu")
    with ResumableCheckpoint(tmp_path / "out", identity={"algorithm": "awq"}) as other:
        other.commit("layer-00000", {"x": torch.ones(3)}, {"results": []})
    with pytest.raises(UsageError, match='finished parts of a run that differs: algorithm was "awq" and is "gptq"'):
        invoke(model, tmp_path / "out", *flags)
    assert FinishedParts(tmp_path / "out").parts() == ["layer-00000"]
    found = invoke(model, tmp_path / "out", *flags, "--restart")
    assert found.exit_code == 0
    assert "the finished layers of an earlier run were removed" in " ".join(found.stderr.split())
