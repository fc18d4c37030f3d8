"""The terminal output of a training run, on stderr."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from warpbus.cli.language import Console
from warpbus.cli.signals import Terminated, terminated
from warpbus.language import translated
from warpbus.train import Stopped, TrainingProgress, TrainingStarted


def is_silent() -> bool:
    """Whether this process prints nothing: only the first process of a torchrun job does."""
    return os.environ.get("RANK", "0") != "0"


@contextmanager
def shown(output: Path) -> Iterator[tuple[Callable[[TrainingStarted], None], Callable[[TrainingProgress], None]]]:
    """The callbacks `begun` and `report` for `train`: a progress bar with loss, speed and remaining time.

    Raises:
        typer.Exit: after SIGINT or SIGTERM, with 128 and the signal's number, after a message on how to resume.
    """
    console = Console(stderr=True, soft_wrap=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[steps]}", style="progress.download"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    silent = is_silent()

    def say(text: str) -> None:
        if not silent:
            console.print(text, highlight=False, markup=False)

    try:
        with terminated(), Progress(*columns, console=console, disable=silent) as bar:
            task = bar.add_task(translated("reading model and data"), total=None, steps="", figures="")

            def begun(start: TrainingStarted) -> None:
                if start.step:
                    say(f"{output}: resuming after {start.step:,} of {start.steps:,} steps")
                if start.random:
                    say("the model has no weights: training starts from random ones")
                share = start.trained / start.parameters
                say(f"trainable parameters: {start.trained:,} of {start.parameters:,} ({share:.1%})")
                numbers = (
                    f"{start.documents:,} documents, steps: {start.steps:,} of {start.settings.rows_per_step:,} rows"
                )
                say(f"epochs: {start.epochs:.3g} of {numbers}")
                warmup, reached = start.settings.warmup or 0, start.settings.rate(start.steps - 1)
                if warmup > start.steps:
                    say(
                        f"--warmup {warmup:,}: longer than the run of {start.steps:,} steps, so the learning rate only "
                        f"rises to {reached:.2g}: lower it"
                    )
                # The remaining time is estimated from the steps of this session only.
                bar.reset(task, total=start.steps, completed=start.step, description=translated("training"))
                bar.update(task, steps=f"{start.step:,}/{start.steps:,}")

            def report(step: TrainingProgress) -> None:
                speed = step.tokens_per_second
                rate = f"{speed / 1e3:,.0f}k" if speed >= 1e4 else f"{speed:,.0f}"
                figures = f"loss {step.loss:.3f}  {rate} tokens/s"
                if step.expert_load is not None:
                    figures += f"  busiest expert {step.expert_load:.2f}x"
                steps = f"{step.step:,}/{step.steps:,}"
                bar.update(task, completed=step.step, steps=steps, figures=translated(figures))
                if step.valid_loss is not None:
                    say(f"step {step.step:,}: loss {step.loss:.4f}, validation {step.valid_loss:.4f}")

            yield begun, report
    except Stopped as stopped:
        resume = "" if stopped.state is None else "; run the same command to resume"
        say(f"{stopped}{resume}")
        raise typer.Exit(128 + stopped.signal) from None
    except KeyboardInterrupt as stopped:  # before the first step; from then on it is `Stopped`
        number = signal.SIGTERM if isinstance(stopped, Terminated) else signal.SIGINT
        cause = translated("Terminated" if number == signal.SIGTERM else "Interrupted")
        say(f"{cause}. Run the same command to resume from the last checkpoint, if there is one.")
        raise typer.Exit(128 + number) from None
