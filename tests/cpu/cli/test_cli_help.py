"""The help of every command in narrow terminals, and what the shell completes."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from warpbus.cli import app
from warpbus.cli.completion import complete_model, one_of
from warpbus.cli.quantize import FORMATS, SCHEMES
from warpbus.formats import format_named
from warpbus.qtensor import Scheme


def commands(command: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield names, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *names, name)


ALL = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("names", ALL, ids=" ".join)
def test_help_fits_and_cuts_nothing(names: tuple[str, ...], columns: int, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    found = CliRunner().invoke(app, [*names, "--help"], prog_name="warpbus", terminal_width=columns)
    assert found.exit_code == 0
    assert max(map(len, found.stdout.splitlines())) <= columns
    assert "…" not in found.stdout
    words = found.stdout.replace("/", " ").replace(",", " ").split()
    flags = [flag for option in ALL[names].params for flag in option.opts if flag.startswith("--")]
    assert [flag for flag in flags if flag not in words] == []


@pytest.mark.parametrize("group", [(), ("pool",), ("bench",)])
def test_a_group_lists_whole_sentences(group: tuple[str, ...], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    found = CliRunner().invoke(app, [*group, "--help"], prog_name="warpbus", terminal_width=60)
    text = " ".join(found.stdout.split())
    for name, command in ALL[group].commands.items():
        assert f"{name} " in text
        first = " ".join(command.help.split("\n\n")[0].split())
        first = re.split(r"(?<!\.)\. ", first)[0].removesuffix(".")
        assert first in text


def completed(words: str, tmp_path: Path) -> list[str]:
    """What bash would be offered for the last word."""
    line = f"warpbus {words}"
    environment = os.environ | {
        "_WARPBUS_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        "HOME": str(tmp_path),
    }
    code = "import sys; sys.argv = ['warpbus']; from warpbus.cli import main; main()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    return found.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("qu", ["quantize"]),
        ("quantize demo out --alg", ["--algorithm"]),
        ("quantize demo out --algorithm s", ["smoothquant"]),
        ("quantize de", ["demo"]),
        ("quantize demo out --format gptq", ["gptq", "gptq-v2"]),
        ("pool mig", ["migrate"]),
    ],
)
def test_the_shell_completes(words: str, offered: list[str], tmp_path: Path) -> None:
    assert completed(words, tmp_path) == offered


def test_models_are_completed_by_their_directories(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "glm").mkdir(parents=True)
    (tmp_path / "models" / "glm" / "config.json").write_text("{}")
    (tmp_path / ".hidden").mkdir()
    assert complete_model("") == ["demo", "models/"]
    assert complete_model("models/") == ["models/glm"]
    assert complete_model("missing/a") == []


def test_values_that_are_completed_are_accepted() -> None:
    assert [str(Scheme.parse(name)) for name in SCHEMES][1:] == list(SCHEMES[1:])
    assert [format_named(name).name for name in FORMATS] == list(FORMATS)
    assert one_of("cpu", "cuda")("c") == ["cpu", "cuda"]
