"""`warpbus learn`: exercises of the tutorial, which are checked on the CPU."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from warpbus.cli.completion import one_of
from warpbus.cli.language import Console
from warpbus.cuda.exercises import EXERCISES, exercise_of
from warpbus.errors import DataError, StorageError

_CHAPTERS = tuple(exercise.chapter for exercise in EXERCISES)


def learn(
    chapter: Annotated[
        str | None,
        typer.Argument(metavar="CHAPTER", help=", ".join(_CHAPTERS), autocompletion=one_of(*_CHAPTERS)),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="test the file in this directory")] = False,
) -> None:
    """Practise CUDA: write the exercise of CHAPTER into this directory, or check it.

    Checks run on the CPU: no GPU is needed, but a C++ compiler. Without CHAPTER, the exercises are listed.
    """
    console = Console(soft_wrap=True, highlight=False)
    if chapter is None:
        _list(console)
        return
    exercise = exercise_of(chapter)
    path = Path(exercise.file)
    if check:
        if not path.exists():
            raise DataError(f"{path}: is not in this directory: run `warpbus learn {exercise.chapter}` first")
        exercise.check(path)
        console.print(f"[green]passed[/]: {exercise.task}, with both orders of threads")
        return
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(exercise.template)
    except FileExistsError:
        raise StorageError(
            f"{path}: exists already: check it with `warpbus learn {exercise.chapter} --check`, or remove it"
        ) from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}): go to another directory") from None
    console.print(f"{path}: {exercise.task}. Fill in the kernel, then: warpbus learn {exercise.chapter} --check")


def _list(console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    for exercise in EXERCISES:
        table.add_row(exercise.chapter, exercise.task, exercise.file if Path(exercise.file).exists() else "")
    console.print(table)
