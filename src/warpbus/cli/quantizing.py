"""The terminal output of a quantization run, on stderr."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import typer

from warpbus.cli.language import Console
from warpbus.cli.progress import progress_bar
from warpbus.cli.signals import Terminated, terminated
from warpbus.cli.tables import estimate_table
from warpbus.formats import FinishedParts
from warpbus.language import translated
from warpbus.quantization import Progress, QuantizationEstimate
from warpbus.quantization.job import Begun


@contextmanager
def shown(output: Path) -> Iterator[Progress]:
    """The progress callbacks for `quantize`: print the estimate and what an earlier run finished, then show a bar.

    Raises:
        typer.Exit: after Ctrl-C and SIGTERM, with 128 and the signal's number, after a message on how to resume.
    """
    console = Console(stderr=True, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    def estimated(needs: QuantizationEstimate) -> None:
        console.print(estimate_table(needs), soft_wrap=False)
        for warning in needs.warnings:
            say(f"warning: {warning}")

    with ExitStack() as stack, ExitStack() as checking:

        def checked(done: int, total: int) -> None:
            show = checking.enter_context(progress_bar(of_bytes=True))
            progress.checked = lambda done, total: show("checking the weights of finished layers", done, total)
            progress.checked(done, total)

        def begun(found: Begun) -> None:
            checking.close()
            if found.found == "removed parts":
                say(f"{output}: the finished layers of an earlier run were removed")
            elif found.layers:
                layers = "1 finished layer" if found.layers == 1 else f"{found.layers} finished layers"
                say(f"{output}: resuming after {layers}")
            # Not before: printing while a bar is shown breaks it.
            show = stack.enter_context(progress_bar())
            progress.matrix = lambda done, total, result: show("quantizing", done, total)
            progress.tuning = lambda done, total: show("tuning", done, total)

        progress = Progress(estimated=estimated, checked=checked, begun=begun)
        try:
            with terminated():
                yield progress
        except KeyboardInterrupt as stopped:
            checking.close()
            stack.close()
            kept = FinishedParts(output)
            count = len(kept.parts())
            cause = translated("Terminated" if isinstance(stopped, Terminated) else "Interrupted")
            parts = "1 finished part" if count == 1 else f"{count} finished parts"
            say(
                f"{cause}. {parts} kept in {kept.directory}: run the same command to resume."
                if count
                else f"{cause}. No part was finished."
            )
            number = signal.SIGTERM if isinstance(stopped, Terminated) else signal.SIGINT
            raise typer.Exit(128 + number) from None
