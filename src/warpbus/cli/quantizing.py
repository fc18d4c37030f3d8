"""What the terminal shows while a model is quantized, all of it on stderr."""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console

from warpbus.cli.progress import progress_bar
from warpbus.cli.tables import estimate_table
from warpbus.formats import FinishedParts
from warpbus.quantization import Progress, QuantizationEstimate
from warpbus.quantization.job import Begun


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a run as Ctrl-C does."""


@contextmanager
def shown(output: Path) -> Iterator[Progress]:
    """The progress to hand to `quantize`: what the run needs, what was there already, then a bar.

    Raises:
        typer.Exit: after Ctrl-C and SIGTERM, with 128 and the signal's number; what is kept and how to go on has been
            said.
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
                say(f"{output}: what an earlier run had finished is removed")
            elif found.layers:
                say(f"{output}: {found.layers} layers are finished already: going on from there")
            # Not before: what is printed beside a bar breaks it.
            show = stack.enter_context(progress_bar())
            progress.matrix = lambda done, total, result: show("quantizing", done, total)

        progress = Progress(estimated=estimated, checked=checked, begun=begun)
        try:
            with _terminated():
                yield progress
        except KeyboardInterrupt as stopped:
            checking.close()
            stack.close()
            kept = FinishedParts(output)
            count = len(kept.parts())
            said = "terminated" if isinstance(stopped, Terminated) else "interrupted"
            say(
                f"{said}: {count} finished parts are kept in {kept.directory}: the same command goes on from there"
                if count
                else f"{said}: nothing was finished yet"
            )
            number = signal.SIGTERM if isinstance(stopped, Terminated) else signal.SIGINT
            raise typer.Exit(128 + number) from None


@contextmanager
def _terminated() -> Iterator[None]:
    """Within it, the first SIGTERM raises `Terminated`; later ones do nothing, since parts are being written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
