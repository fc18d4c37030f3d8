"""`warpbus quantize --evaluate` as a person, and as CI, uses it."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from warpbus.cli.quantize import quantize
from warpbus.errors import DataError, QualityError, UsageError
from warpbus.evaluation import Speed
from warpbus.formats import Checkpoint

app = typer.Typer()
app.command()(quantize)
# The speed is measured in other tests, in processes of its own.
RUN = """
from warpbus.cli import main
from warpbus.evaluation import Speed, side_by_side
side_by_side.measure_speed = lambda *_, **__: Speed(100.0, 10**6, "cpu")
main()
"""
ROUGH = ("--algorithm", "rtn", "--scheme", "w2a16", "--device", "cpu")


@pytest.fixture(scope="module")
def model(make_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("verdict") / "tiny"
    return make_model(directory, hidden_size=128, intermediate_size=128, head_dim=64)


@pytest.fixture
def texts(tmp_path, write_lines):
    return write_lines(tmp_path / "texts.jsonl", *({"text": "床前明月光，疑是地上霜。"[index:]} for index in range(8)))


@pytest.fixture
def timed(monkeypatch):
    """No processes that measure the speed."""
    speed = Speed(100.0, 10**6, "cpu")
    monkeypatch.setattr("warpbus.evaluation.side_by_side.measure_speed", lambda *_, **__: speed)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_a_table_a_picture_and_a_page(timed, model, texts, write_lines, tmp_path):
    asked = [{"role": "user", "content": "下一句：床前明月光"}]
    line = {"messages": asked, "choices": ["疑是地上霜", "低头思故乡"], "answer": 0}
    questions = write_lines(tmp_path / "questions.jsonl", line)
    files = "--plot", tmp_path / "a.png", "--html", tmp_path / "new" / "a.html"
    data = "--evaluate", texts, "--questions", questions, "--max-perplexity-increase", "1000000%"
    found = invoke(model, tmp_path / "out", *ROUGH, *data, *files, "--price", "2")
    assert found.exit_code == 0
    for expected in (
        "attention.qkv",
        "perplexity",
        "KL divergence",
        "choices correct",
        "tokens/s",
        "not known: no GPU",
    ):
        assert expected in found.stdout
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    page = (tmp_path / "new" / "a.html").read_text(encoding="utf-8")
    assert "<h1>tiny: w2a16, rtn</h1>" in page
    assert ">met<" in page
    assert ">达到要求<" in page


def test_a_model_that_got_too_bad_fails_and_stays(model, texts, tmp_path):
    flags = [model, tmp_path / "out", *ROUGH, "--evaluate", texts, "--max-perplexity-increase", "0%", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, "quantize", *map(str, flags)], capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout)
    # Random weights may come out better than they were; either way the exit code follows.
    assert done.returncode == (0 if report["verdict"]["passed"] else 1)
    assert report["verdict"]["passed"] == (report["verdict"]["perplexity_increase"] <= 0)
    assert report["scheme"] == "w2a16"
    assert report["verdict"]["before"]["tokens_per_second"] == 100.0
    assert Checkpoint(tmp_path / "out").names()
    assert "Traceback" not in done.stderr


def test_the_gate_speaks_in_one_line(timed, model, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("warpbus.evaluation.Verdict.increase", 0.0731)
    with pytest.raises(QualityError, match=r"\(\+7\.31%\), more than the \+5\.00% allowed; the model was written"):
        invoke(model, tmp_path / "out", *ROUGH, "--evaluate", texts, "--max-perplexity-increase", "5%")
    assert Checkpoint(tmp_path / "out").names()


@pytest.mark.parametrize(
    "flag", [("--questions", "q.jsonl"), ("--html", "a.html"), ("--max-perplexity-increase", "5%")]
)
def test_flags_that_need_data(model, tmp_path, flag):
    with pytest.raises(UsageError, match=f"{flag[0]} needs --evaluate"):
        invoke(model, tmp_path / "out", *ROUGH, *flag)
    assert not (tmp_path / "out").exists()


def test_data_in_an_output_that_is_replaced(model, texts, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"replacing it would delete .*texts\.jsonl, which is read"):
        invoke(model, tmp_path, *ROUGH, "--evaluate", texts, "--overwrite")
    assert texts.exists()


@pytest.mark.parametrize("text", ["5", "-1%", "nan%", "inf%", "five%", "%"])
def test_percentages(model, texts, tmp_path, text):
    with pytest.raises(UsageError, match="give a percentage from 0% up, such as 5%"):
        invoke(model, tmp_path / "out", *ROUGH, "--evaluate", texts, f"--max-perplexity-increase={text}")
    assert not (tmp_path / "out").exists()


def test_data_are_looked_at_first(model, tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        invoke(model, tmp_path / "out", *ROUGH, "--evaluate", tmp_path / "none.jsonl")
    assert not (tmp_path / "out").exists()


def test_the_packaged_data(model, tmp_path, monkeypatch):
    given = {}

    def judge(report, **options):
        given.update(options)
        raise DataError("enough")

    monkeypatch.setattr("warpbus.evaluation.judge", judge)
    monkeypatch.setattr("warpbus.evaluation.check_data", lambda *_, **__: None)
    with pytest.raises(DataError, match="enough"):
        invoke(model, tmp_path / "out", *ROUGH, "--evaluate", "demo")
    assert (given["data"].name, given["questions"].name, given["limit"]) == (
        "validation.jsonl",
        "next-verse.jsonl",
        100,
    )
