"""What the terminal shows while a model is quantized, all of it on stderr."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import typer
from rich.console import Console

from warpbus.cli.progress import progress_bar
from warpbus.formats import FinishedParts
from warpbus.quantization import Estimate, Progress
from warpbus.quantization.job import Begun

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it: 128 and the signal's number."""


@contextmanager
def shown(output: Path) -> Iterator[Progress]:
    """The progress to hand to `quantize`: what the run needs, what was there already, then a bar.

    Raises:
        typer.Exit: after Ctrl-C; what is kept and how to go on has been said.
    """
    console = Console(stderr=True, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    def estimated(needs: Estimate) -> None:
        console.print(needs.table(), soft_wrap=False)
        for warning in needs.warnings:
            say(f"warning: {warning}")

    with ExitStack() as stack:

        def begun(found: Begun) -> None:
            if found.found == "another run":
                say(f"{output}: what a run with other settings had finished is removed")
            elif found.layers:
                say(f"{output}: {found.layers} layers are finished already: going on from there")
            # Not before: what is printed beside a bar breaks it.
            show = stack.enter_context(progress_bar())
            progress.matrix = lambda done, total, result: show("quantizing", done, total)

        progress = Progress(estimated=estimated, begun=begun)
        try:
            yield progress
        except KeyboardInterrupt:
            stack.close()
            kept = FinishedParts(output)
            count = len(kept.parts())
            say(
                f"interrupted: {count} finished parts are kept in {kept.directory}: the same command goes on from there"
                if count
                else "interrupted: nothing was finished yet"
            )
            raise typer.Exit(INTERRUPTED) from None
