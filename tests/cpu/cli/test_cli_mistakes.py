"""Mistakes that people make at the command line, and the one line that answers each."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from warpbus.cli import app, pool_serving
from warpbus.cli.models import model_directory
from warpbus.errors import CheckpointError, SchemeError, UsageError, WarpbusError
from warpbus.qtensor import Scheme


def mistake(*words: str) -> str:
    with pytest.raises(WarpbusError) as caught:
        CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_similar_name_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chatglm2-6b").mkdir()
    with pytest.raises(CheckpointError, match=r"dmo: there is no such model: did you mean demo\?"):
        model_directory("dmo")
    with pytest.raises(CheckpointError, match=r"did you mean chatglm2-6b\?"):
        model_directory("chatglm2-6")
    assert model_directory("zzz") == Path("zzz")


@pytest.mark.parametrize("words", [("out",), ("--recommend",), ("out", "--bits", "3.5")])
def test_a_missing_model_is_the_first_thing_to_say(words, capsys):
    assert "there is no such directory" in mistake("quantize", "/nonexistent/model", *words)
    assert "calibrating" not in capsys.readouterr().err


def test_words_of_other_programs():
    assert str(Scheme.parse("int4")) == "w4a16-g128"
    assert str(Scheme.parse("fp8")) == "w8a8-fp8"
    with pytest.raises(SchemeError, match="give w8a16 for weights of 8 bits, or w8a8-int8 for activations too"):
        Scheme.parse("int8")
    assert mistake("train", "demo", "out", "--data", "a.jsonl", "--method", "qlora") == (
        "method is 'qlora': QLoRA is method lora with --quantize w4a16-g64"
    )


def test_amounts_of_memory_on_a_cpu():
    assert "memory is '6XB': give a size such as 6GB" in mistake("chat", "demo", "--memory", "6XB", "--device", "cpu")
    said = mistake("chat", "demo", "--memory", "6GB", "--device", "cpu")
    assert said.startswith("--memory 6GB limits GPU memory, but this run is on the CPU: leave it out")
    with pytest.raises(UsageError, match=r"export LC_ALL=C\.UTF-8"):
        CliRunner().invoke(app, ["chat", "demo", "--prompt", "\udce5", "--device", "cpu"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("largest", "memory"), [(80 * 10**9, "8GB"), (2 * 10**9, "2GB"), (2_900_000_000, "2GB"), (600 * 10**6, "600MB")]
)
def test_a_daemon_suggests_a_lease_that_it_can_give(largest, memory, monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(pool_serving, "Console", lambda **given: Console(**given | {"file": written, "stderr": False}))
    pool_serving._greet("warpbus://localhost:7700", SimpleNamespace(name="mill"), largest)
    assert f'gpu = warpbus.pool.connect("warpbus://localhost:7700", memory="{memory}")' in written.getvalue()
