"""Mistakes that people make at the command line, and the one line that answers each."""

import io
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from warpbus import cli
from warpbus.cli import app, pool_serving, serve
from warpbus.cli.models import model_directory
from warpbus.errors import CheckpointError, SchemeError, UsageError, WarpbusError
from warpbus.formats.files import check_target
from warpbus.language import in_language
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


def test_a_missing_model_is_said_before_a_missing_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert mistake("plan", "nowhere").startswith("nowhere: is not on this machine")


def test_an_output_that_exists_is_refused_before_anything_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    assert mistake("quantize", "demo", "out").startswith("out: exists and is not empty")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("output", [".", "..", "../here"])
def test_the_current_directory_is_no_output(tmp_path, monkeypatch, output):
    """It would be replaced under the shell."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    expected = f"{output}: is the current directory, or one above it: name a new directory"
    assert mistake("quantize", "demo", output) == expected
    assert list(tmp_path.rglob("*")) == [place]


def test_an_output_may_be_named_from_a_directory_that_was_removed(tmp_path, monkeypatch):
    place = tmp_path / "here"
    place.mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(place)
    place.rmdir()
    check_target(tmp_path / "there", overwrite=False)


def test_a_cuda_program_that_is_not_there():
    assert mistake("cuda", "run", "nowhere.cu") == "nowhere.cu: there is no such file: give a .cu file"


@pytest.mark.parametrize("module", ["warpbus.cli.pool", "warpbus.language"])
def test_ctrl_c_while_the_program_is_loaded(module, tmp_path):
    """The first time that something asks for a module, the user presses Ctrl-C."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.abc, sys\n"
        "class Interrupt(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "warpbus", "--version"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_before_a_command_has_begun(monkeypatch, capsys):
    def interrupted(prog_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "Interrupted.\n"


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


def test_triton_finds_its_objects_collected_at_the_end(monkeypatch):
    """It prints those that are left, pages of them, below what a command says."""
    frozen = []
    monkeypatch.setattr(cli.gc, "freeze", lambda: frozen.append(True))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    cli._leave_garbage()
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    cli._leave_garbage()
    assert frozen == [True]


def test_own_warnings_are_one_line_in_the_language_of_the_user(monkeypatch, capsys):
    others = []
    monkeypatch.setattr(warnings, "showwarning", lambda *given: others.append(given[2]))
    own = str(Path(cli.__file__).parents[1] / "cuda" / "jit.py")
    warning = UserWarning("no kernels for this CPU: quantized models decode slower (no compiler)")
    cli._show_warnings("zh")
    with in_language("en"):  # as while the English half of a page is drawn
        warnings.showwarning(warning, UserWarning, own, 1)
    assert capsys.readouterr().err == "警告：没有适合此 CPU 的核函数：量化模型的解码会较慢（no compiler）\n"
    cli._show_warnings("en")
    with in_language("zh"):
        warnings.showwarning(warning, UserWarning, own, 1)
    assert capsys.readouterr().err == f"warning: {warning}\n"
    warnings.showwarning(warning, UserWarning, "/other/program.py", 7)
    assert (others, capsys.readouterr().err) == (["/other/program.py"], "")


@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "demo", "out", "--evaluate", "demo", "--html", "there"),
        ("quantize", "demo", "out", "--plot", "there"),
        ("eval", "demo", "--html", "there"),
        ("eval", "demo", "--plot", "there"),
        ("bench", "vector-add", "--plot", "there"),
    ],
    ids=" ".join,
)
def test_a_report_that_could_not_be_written_is_refused_before_the_work(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert mistake(*words) == "there: is a directory: give the name of a file"
    assert capsys.readouterr().err == ""
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "demo", "file/out"),
        ("train", "demo", "file/out", "--data", "file"),
        ("quantize", "demo", "out", "--plot", "file/x.png"),
        ("eval", "demo", "--plot", "file/x.png"),
        ("bench", "vector-add", "--output", "file"),
        ("bench", "story", "--output", "file"),
        ("demo", "--output", "file"),
    ],
    ids=" ".join,
)
def test_an_output_below_a_file_is_refused_before_the_work(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert f"cannot be created below {tmp_path}/file, which is a file: choose another path" in mistake(*words)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_calibration_on_a_directory(tmp_path):
    said = mistake("quantize", "demo", str(tmp_path / "out"), "--calibration", str(tmp_path))
    assert said.startswith(f"{tmp_path}: is a directory: expected a .txt")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("chat", "demo", "--prompt", "x", "--kv-cache-dtype", "int3"), "--kv-cache-dtype is 'int3': give auto, int8"),
        (("chat", "demo", "--prompt", "x", "--max-model-len", "9999"), "--max-model-len is 9,999: give 2 to 512"),
        (
            ("chat", "demo", "--prompt", "x", "--generation-config", "no"),
            "--generation-config is 'no': give auto or none",
        ),
        (("plan", "glm-4-9b", "--gpu", "l4", "--kv-cache-dtype", "int2"), "--kv-cache-dtype is 'int2': give auto"),
        (("serve", "demo", "--data-parallel-size", "0"), "--data-parallel-size is 0: give a whole number, 1 or more"),
        (("serve", "demo", "--tensor-parallel-size", "0"), "--tensor-parallel-size is 0: give a whole number"),
        (("serve", "demo", "--kv-cache-tokens", "0"), "--kv-cache-tokens is 0: give a whole number, 64 or more"),
        (("demo", "--request", " "), "--request is empty"),
        (
            ("serve", "demo", "--replicas", "2"),
            "--replicas 2: replicas are for a cluster: give --cluster auto as well, or --data-parallel-size 2 for this",
        ),
        (
            ("serve", "demo", "--max-replicas", "3", "--data-parallel-size", "2"),
            "--data-parallel-size is for this machine, --max-replicas 3 for a cluster",
        ),
        (
            ("serve", "demo", "--cluster", "auto", "--data-parallel-size", "2"),
            "--data-parallel-size is for this machine: with --cluster auto give --replicas 2",
        ),
        (("pool", "serve", "--port", "0", "--cpu-memory", "x"), "--cpu-memory is 'x': give a size such as 6GB"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_message_names_the_option(words, said):
    assert mistake(*words).startswith(said)


def test_a_message_that_names_the_option_is_translated():
    with in_language("zh"):
        said = mistake("serve", "demo", "--data-parallel-size", "0")
        several = mistake("serve", "demo", "--replicas", "2", "--max-replicas", "4")
    assert said == "--data-parallel-size 为 0：请给出不小于 1 的整数"
    assert several.startswith("--replicas 2, --max-replicas 4：副本数用于集群：请同时给出 --cluster auto")


def test_a_model_that_cannot_be_sharded_is_refused_before_it_is_loaded(capsys, monkeypatch):
    # Seven processes that load torch would delay the refusal.
    monkeypatch.setattr(serve, "start_processes", lambda options: pytest.fail("processes were started"))
    assert mistake("serve", "demo", "--port", "0", "--tensor-parallel-size", "7").startswith(
        "7 GPUs: the model has 4 heads"
    )
    assert "loading" not in capsys.readouterr().err
