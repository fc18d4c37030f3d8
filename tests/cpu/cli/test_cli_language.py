"""The command line in Chinese: a complete catalogue, help without English, and unchanged English and JSON."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.cells import cell_len
from rich.console import Console as PlainConsole
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

import warpbus
from warpbus import language
from warpbus.cli import app, main
from warpbus.cli import language as app_language
from warpbus.cli.chinese_help import translate_command, wrapped
from warpbus.cli.language import Console
from warpbus.cuda.findings import language_of_locale
from warpbus.language import CATALOGUE, Catalogue, read_catalogue, translated, use_language

PLACEHOLDER = re.compile(r"\{\d+\}")
SENTENCE = re.compile(r"[A-Za-z]*[a-z]{2,} [a-z]{2,} [a-z]{2,}\b")  # three English words beside each other
COMMAND_LINE = re.compile(r"(?:warpbus|hf)(?: [a-z0-9*/-]+)+")
PLAN = ["plan", "glm-4.7-flash", "--gpu", "rtx-4090", "--memory", "24GB", "--scheme", "w4a16-g128"]


def commands(command: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield names, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *names, name)


def help_of(command: Any) -> Iterator[str]:
    """The help of a command, and of its arguments and options."""
    for text in (command.help, *(getattr(parameter, "help", None) for parameter in command.params)):
        if text:
            yield "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


ALL = dict(commands(typer.main.get_command(app)))
HELP = {text for command in ALL.values() for text in help_of(command)}
ENTRIES = read_catalogue(CATALOGUE.read_text(encoding="utf-8"))


def entries_of(kind: str) -> set[str]:
    """The English of the entries below a comment `#: kind`."""
    blocks = CATALOGUE.read_text(encoding="utf-8").split("\n\n")
    return {text for block in blocks if block.startswith(f"#: {kind}\n") for text in read_catalogue(block + "\n")}


@pytest.fixture
def chinese() -> Iterator[None]:
    use_language("zh")
    yield
    use_language("en")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_MESSAGES": "C.UTF-8"}, "en"),
        ({"LC_MESSAGES": "C.UTF-8", "LC_ALL": "zh_TW"}, "zh"),
        ({"LC_ALL": "zh_CN.UTF-8", "WARPBUS_LANG": "en"}, "en"),
        ({"LC_ALL": "C", "WARPBUS_LANG": "zh"}, "zh"),
        ({"LC_ALL": "", "LANG": "de_DE.UTF-8"}, "en"),
    ],
)
def test_the_language_is_that_of_the_first_variable_that_is_set(
    environment: dict[str, str], expected: str, monkeypatch
) -> None:
    for name in ("WARPBUS_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert language_of_locale() == expected


def test_every_help_text_is_in_the_catalogue_and_nothing_else_is_there_as_help() -> None:
    assert len(HELP) > 300
    assert entries_of("help") == HELP


def test_entries_are_unique_and_the_placeholders_of_both_languages_agree() -> None:
    text = CATALOGUE.read_text(encoding="utf-8")
    assert text.count('\nmsgid "') == len(ENTRIES) + 1  # and the header
    for english, chinese in ENTRIES.items():
        found = PLACEHOLDER.findall(english)
        assert found == [f"{{{index}}}" for index in range(len(found))], english
        assert sorted(PLACEHOLDER.findall(chinese)) == found, english
        # Blanks around a text are set aside before a template is looked for.
        assert not found or english == english.strip(), english


@pytest.fixture(scope="module")
def literals() -> str:
    """All strings of the package."""
    found = []
    for file in Path(warpbus.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\0".join(found)


@pytest.mark.parametrize("kind", ["terminal", "progress", "error", "evaluation", "benchmarks"])
def test_entries_follow_the_texts_of_the_package(kind: str, literals: str) -> None:
    """Every piece between placeholders is a string of the package, or consists of a few of them."""
    stale = []
    for english in entries_of(kind):
        for piece in PLACEHOLDER.split(english):
            rest, parts = piece, 0
            while rest:
                length = next((end for end in range(len(rest), 0, -1) if rest[:end] in literals), 1)
                rest, parts = rest[length:], parts + 1
            if parts > max(3, len(piece) // 8):
                stale.append((english, piece))
    assert entries_of(kind)
    assert stale == []


@pytest.mark.parametrize("columns", [60, 80])
def test_chinese_help_fits_and_has_no_english_sentence(columns: int, chinese, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    command: Any = typer.main.get_command(app)
    translate_command(command)
    for names in ALL:
        command.main([*names, "--help"], prog_name="warpbus", standalone_mode=False, terminal_width=columns)
        shown = capsys.readouterr().out
        assert "用法：" in shown
        assert "选项：" in shown
        assert max(map(cell_len, shown.splitlines())) <= columns, names
        assert SENTENCE.findall(COMMAND_LINE.sub("", " ".join(shown.split()))) == [], names
        words = re.split(r"[\s/,]+", shown)
        flags = [flag for option in ALL[names].params for flag in option.opts if flag.startswith("--")]
        assert [flag for flag in flags if flag not in words] == [], names


def test_lines_break_between_chinese_characters_but_not_before_punctuation() -> None:
    assert list(wrapped("量化模型。", 8, "", "")) == ["量化模", "型。"]
    assert list(wrapped("量化 MODEL 的层", 9, "", "  ")) == ["量化", "  MODEL", "  的层"]
    assert list(wrapped("见 http://host", 8, "", "  ")) == ["见", "  http:/", "  /host"]
    assert list(wrapped("量化模 [默认 1]", 8, "", "")) == ["量化模", "[默认 1]"]


def test_templates_are_filled_and_names_stay(chinese) -> None:
    assert translated("head: cannot be read: Permission denied") == "head：无法读取：Permission denied"
    assert (
        translated("For several machines: pip install x (missing: ray)") == "要使用多台机器：pip install x（缺少 ray）"
    )
    assert translated(" memory \n") == " 内存 \n"
    assert translated("an unknown text") == "an unknown text"


def test_a_template_that_fits_every_text_is_refused() -> None:
    with pytest.raises(ValueError, match="fit nearly every text"):
        Catalogue({"{0}: {1}": "{0}：{1}"}).gettext("a: b")


def chinese_output(words: list[str], monkeypatch) -> int | str | None:
    """Run the program under a Chinese locale; returns its exit code."""
    monkeypatch.setenv("WARPBUS_LANG", "zh")
    monkeypatch.setattr(sys, "argv", ["warpbus", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["quantiz"], 2, "错误：没有命令 'quantiz'。是否想用 'quantize'？"),
        (["quantize"], 2, "错误：缺少参数 'MODEL'。"),
        (["chat", "demo", "x", "y"], 2, "错误：多余的参数（x y）"),
        (["chat", "demo", "--prompt", "x", "--top-p", "2"], 2, "错误：--top-p 为 2.0：请给出大于 0 且不超过 1 的数"),
        (["chat", "demo", "--prompt", "x", "--activation-dtype", "fp8"], 2, "错误：--activation-dtype fp8 需要 GPU 上"),
        (["doctor", "--arch", "sm_90a"], None, "错误：--arch 须与 --compile 同用：它指定为哪种架构编译"),
        (["plan", "demo", "--scheme", "int5"], 2, "错误：未知方案 'int5'：应为 w<比特数>a16[-g<组>][-asym]，"),
        (["serve", "demo", "--host", "0.0.0.0"], 2, "错误：--host 0.0.0.0 可以从其他机器访问："),
        (["cuda", "run", "no.cu"], 1, "错误：no.cu：没有这个文件：请给出一个 .cu 文件"),
        (["eval", "demo", "--data", "no.txt"], 1, "错误：no.txt：没有这个文件：应为由对话或文本组成的 .jsonl，或 .txt"),
    ],
)
def test_errors_are_chinese(words: list[str], code: int | None, message: str, chinese, capsys, monkeypatch) -> None:
    found = chinese_output(words, monkeypatch)
    assert found == code if code is not None else found
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)


def test_without_arguments_the_help_is_shown(chinese, capsys, monkeypatch) -> None:
    english = CliRunner().invoke(app, [], prog_name="warpbus")
    assert chinese_output([], monkeypatch) == english.exit_code
    shown = capsys.readouterr()
    assert "命令：" in shown.out + shown.err
    assert "错误" not in shown.err


def test_tables_are_chinese_and_json_is_the_same(chinese, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert chinese_output([*PLAN], monkeypatch) == 0
    table = capsys.readouterr().out
    assert SENTENCE.findall(table) == []
    assert "GPU 上合计" in table
    assert chinese_output([*PLAN, "--json"], monkeypatch) == 0
    found = capsys.readouterr().out
    use_language("en")
    assert found == CliRunner().invoke(app, [*PLAN, "--json"]).stdout


def test_english_is_unchanged_and_reads_no_catalogue(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(language, "CATALOGUE", tmp_path / "missing.po")
    use_language("en")
    table = Table("memory", "size", title="Where the time went")
    table.add_row("head", Text("1 GB", style="bold"))
    shown = []
    for kind in (Console, PlainConsole):
        console = kind(file=StringIO(), width=60, force_terminal=True)
        console.print(table, "memory", Text("none"))
        shown.append(console.file.getvalue())
    assert shown[0] == shown[1]
    assert all(translated(text) == text for text in ENTRIES)


def test_every_command_prints_through_the_console_that_translates() -> None:
    files = Path(app_language.__file__).parent.rglob("*.py")
    plain = re.compile(r"rich\.console import.*\bConsole\b")
    found = {file.name for file in files if plain.search(file.read_text(encoding="utf-8"))}
    assert found == {"language.py", "learn.py"}  # exercises have --lang


def test_what_convert_did_is_said_in_chinese(tmp_path: Path, chinese, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert chinese_output(["quantize", "demo", "w4", "--algorithm", "rtn", "--device", "cpu"], monkeypatch) == 0
    capsys.readouterr()
    for words in (["convert", "w4", "w4-gptq", "--to", "gptq"], ["convert", "w4", "w4.gguf", "--to", "gguf"]):
        assert chinese_output(words, monkeypatch) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[0].startswith(f"{words[2]}：")
        assert said[-1] == "已读回，逐比特相同"
        assert all("matrices" not in line for line in said)
