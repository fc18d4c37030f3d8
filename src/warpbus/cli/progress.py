"""The progress bar that every long verb shows, on stderr."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from warpbus.cli.language import Console
from warpbus.language import translated


@contextmanager
def progress_bar(*, of_bytes: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each thing that is done; call what is yielded with the thing's name, how much is done and how much
    there is: things that are counted, or bytes."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if of_bytes else MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with ExitStack() as stack:
        bar = Progress(*columns, console=Console(stderr=True))
        current: list[tuple[str, int]] = []

        def show(what: str, done: int, total: int) -> None:
            if not current:
                stack.enter_context(bar)  # not before: without anything to show it would leave an empty line
            if not current or current[0][0] != what:
                if current:
                    task = bar.tasks[-1]
                    bar.update(task.id, completed=task.total)
                current[:] = [(what, bar.add_task(translated(what), total=total))]
            bar.update(bar.tasks[-1].id, completed=done, total=total)

        yield show


@contextmanager
def download_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for a download, from its first bytes on; call what is yielded with the bytes that are there and all."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with ExitStack() as stack:
        bar = Progress(*columns, console=Console(stderr=True))
        task = bar.add_task(translated(f"downloading {escape(name)}"), start=False)

        def show(done: int, total: int) -> None:
            if not bar.tasks[task].started:
                # Bytes that were there before do not count in the speed.
                bar.update(task, completed=done, total=total)
                bar.start_task(task)
                stack.enter_context(bar)
            bar.update(task, completed=done, total=total)

        yield show
