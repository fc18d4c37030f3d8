"""The progress bar that every long verb shows, on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each thing that is done; call what is yielded with the thing's name, how much is done and how much
    there is."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        current: list[tuple[str, int]] = []

        def show(what: str, done: int, total: int) -> None:
            if not current or current[0][0] != what:
                if current:
                    task = bar.tasks[-1]
                    bar.update(task.id, completed=task.total)
                current[:] = [(what, bar.add_task(what, total=total))]
            bar.update(bar.tasks[-1].id, completed=done, total=total)

        yield show
