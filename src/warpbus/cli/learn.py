"""`warpbus learn`: exercises of the tutorial, which are checked on the CPU, and timed on a GPU."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from warpbus.cli.completion import one_of
from warpbus.cuda.exercises import EXERCISES, Exercise, ExerciseCheck, Traffic, exercises_of
from warpbus.cuda.findings import LANGUAGES, language_of_locale
from warpbus.errors import StorageError, UsageError

_STATES = Path(".warpbus-learn.json")
"""In the directory of the exercises: the digest of each file when it was checked, and whether it passed."""

_NAMES = tuple(dict.fromkeys(name for each in EXERCISES for name in (each.chapter, each.name)))

_TEXTS = {
    "not begun": ("not begun", "未开始"),
    "not checked": ("not checked", "未检查"),
    "failing": ("failing", "未通过"),
    "passed": ("passed", "通过"),
    "wrote": ("wrote {file}: {task}", "已写入 {file}：{task}"),
    "next": (
        "Fill in the kernel, then: warpbus learn {name} --check",
        "填好核函数之后运行：warpbus learn {name} --check",
    ),
    "there": ("{file} is there already", "{file} 已存在"),
    "first": (
        "{file}: is not in this directory: run `warpbus learn {name}` first",
        "{file}：不在当前目录：请先运行 `warpbus learn {name}`",
    ),
    "correct": (
        "right at all sizes, with both orders of threads",
        "所有规模、线程的两种执行顺序下结果都正确",
    ),
    "device": (
        "{verb} {array}: {moved} sectors of 32 bytes, {least} needed",
        "{verb} {array}：{moved} 个 32 字节扇区，至少需要 {least} 个",
    ),
    "shared": (
        "{verb} {array}: {moved} passes of shared memory, {least} needed",
        "{verb} {array}：共享内存 {moved} 趟，至少需要 {least} 趟",
    ),
    "read": ("read", "读"),
    "write": ("write", "写"),
    "speed": ("{device}: {rate:,.0f} GB/s", "{device}：{rate:,.0f} GB/s"),
    "limit": (", {share:.0%} of what a copy reaches", "，是复制带宽的 {share:.0%}"),
    "count": ("{passed} of {count} passed", "已通过 {passed} / {count}"),
}


def learn(
    exercise: Annotated[
        str | None,
        typer.Argument(
            metavar="EXERCISE",
            help="a chapter (04) or one of its exercises (04.1)",
            autocompletion=one_of(*_NAMES),
            show_default=False,
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="test the files in this directory")] = False,
    lang: Annotated[
        str | None, typer.Option(help="en or zh; by default, that of the locale", autocompletion=one_of(*LANGUAGES))
    ] = None,
) -> None:
    """Practise CUDA: write the exercises of a chapter into this directory, or check them.

    Checks run on the CPU and need a C++ compiler. Without EXERCISE, all exercises and their state are listed.
    """
    language = lang or language_of_locale()
    if language not in LANGUAGES:
        raise UsageError(f"--lang is {lang!r}: choose from {', '.join(LANGUAGES)}")
    console = Console(soft_wrap=True, highlight=False)
    if exercise is None and not check:
        _list(console, language)
        return
    chosen = EXERCISES if exercise is None else exercises_of(exercise)
    if not check:
        _write(console, chosen, language)
        return
    present = [each for each in chosen if Path(each.file).exists()]
    if not present:
        name = exercise or chosen[0].chapter
        raise StorageError(_text("first", language, file=chosen[0].file, name=name))
    failed = [each for each in present if not _check(console, each, language)]
    if failed:
        raise typer.Exit(1)


def _text(key: str, language: str, **fields: object) -> str:
    return _TEXTS[key][LANGUAGES.index(language)].format(**fields)


def _write(console: Console, chosen: Sequence[Exercise], language: str) -> None:
    name = chosen[0].name if len(chosen) == 1 else chosen[0].chapter
    for exercise in chosen:
        try:
            with Path(exercise.file).open("x", encoding="utf-8") as file:
                file.write(exercise.template)
        except FileExistsError:
            console.print(escape(_text("there", language, file=exercise.file)))
        except OSError as error:
            raise StorageError(
                f"{exercise.file}: cannot be written ({error.strerror}): go to another directory"
            ) from None
        else:
            console.print(escape(_text("wrote", language, file=exercise.file, task=exercise.task(language))))
    console.print(_text("next", language, name=name))


def _check(console: Console, exercise: Exercise, language: str) -> bool:
    path = Path(exercise.file)
    with console.status(exercise.file):
        found = exercise.check(path, language)
    _remember(exercise, path, found.problem is None)
    mark = "[green]✔[/]" if found.problem is None else "[red]✘[/]"
    console.print(f"{mark} [bold]{exercise.name}[/] {escape(exercise.task(language))}")
    if found.problem:
        console.print(f"  {escape(found.problem)}")
        source = path.read_text(encoding="utf-8").splitlines()
        for line in found.lines:
            if line <= len(source):
                console.print(f"  {line:4} │ {escape(source[line - 1])}", style="dim")
        return False
    console.print(f"  {_text('correct', language)}")
    _print_numbers(console, found, language)
    return True


def _print_numbers(console: Console, found: ExerciseCheck, language: str) -> None:
    for each in found.traffic:
        console.print(f"  {escape(_traffic(each, language))}", style="dim")
    if found.speed:
        speed = found.speed
        said = _text("speed", language, device=speed.device, rate=speed.rate / 1e9)
        said += _text("limit", language, share=speed.rate / speed.limit) if speed.limit else ""
        console.print(f"  {escape(said)}")


def _traffic(each: Traffic, language: str) -> str:
    verb = _text("write" if each.writes else "read", language)
    name = "shared" if each.shared else "device"
    return _text(name, language, verb=verb, array=each.array, moved=each.moved, least=each.least)


def _states() -> dict[str, dict[str, object]]:
    try:
        found = json.loads(_STATES.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and all(isinstance(each, dict) for each in found.values()) else {}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _remember(exercise: Exercise, path: Path, passed: bool) -> None:
    states = _states() | {exercise.name: {"digest": _digest(path), "passed": passed}}
    _STATES.write_text(json.dumps(states, indent=1) + "\n", encoding="utf-8")


def _state(exercise: Exercise) -> str:
    """Of the file in this directory."""
    path = Path(exercise.file)
    if not path.is_file() or path.read_bytes() == exercise.template.encode():
        return "not begun"
    known = _states().get(exercise.name, {})
    if known.get("digest") != _digest(path):
        return "not checked"
    return "passed" if known.get("passed") is True else "failing"


def _list(console: Console, language: str) -> None:
    table = Table.grid(padding=(0, 2))
    states = [_state(exercise) for exercise in EXERCISES]
    colours = {"passed": "green", "failing": "red", "not checked": "yellow", "not begun": "dim"}
    for exercise, state in zip(EXERCISES, states, strict=True):
        said = f"[{colours[state]}]{_text(state, language)}[/]"
        table.add_row(exercise.name, escape(exercise.task(language)), said)
    console.print(table)
    console.print(_text("count", language, passed=states.count("passed"), count=len(states)))
