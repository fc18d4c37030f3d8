"""The terminal output of a training run, on stderr."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from warpbus.train import Stopped, TrainingProgress, TrainingStarted
from warpbus.train.plan import Plan

_PARTS = {"weights": "weights", "gradients": "gradients", "optimizer": "moments", "activations": "activations"}


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
        with Progress(*columns, console=console, disable=silent) as bar:
            task = bar.add_task("reading model and data", total=None, steps="", figures="")

            def begun(start: TrainingStarted) -> None:
                if start.step:
                    say(f"{output}: resuming after {start.step:,} of {start.steps:,} steps")
                share = start.trained / start.parameters
                say(f"trainable parameters: {start.trained:,} of {start.parameters:,} ({share:.1%})")
                # The remaining time is estimated from the steps of this session only.
                bar.reset(task, total=start.steps, completed=start.step, description="training")
                bar.update(task, steps=f"{start.step:,}/{start.steps:,}")

            def report(step: TrainingProgress) -> None:
                speed = step.tokens_per_second
                rate = f"{speed / 1e3:,.0f}k" if speed >= 1e4 else f"{speed:,.0f}"
                figures = f"loss {step.loss:.3f}  {rate} tokens/s"
                bar.update(task, completed=step.step, steps=f"{step.step:,}/{step.steps:,}", figures=figures)
                if step.valid_loss is not None:
                    say(f"step {step.step:,}: loss {step.loss:.4f}, validation {step.valid_loss:.4f}")

            yield begun, report
    except Stopped as stopped:
        resume = "" if stopped.state is None else "; run the same command to resume"
        say(f"{stopped}{resume}")
        raise typer.Exit(128 + stopped.signal) from None
    except KeyboardInterrupt:
        say("Interrupted. Run the same command to resume from the last checkpoint, if there is one.")
        raise typer.Exit(128 + signal.SIGINT) from None


def plan_table(plan: Plan) -> Table:
    """A table of memory and time per number of GPUs."""
    steps = "1 step" if plan.steps == 1 else f"{plan.steps:,} steps"
    title = (
        f"{steps}, {plan.tokens:,} tokens; trainable parameters: {plan.trained:,} of {plan.parameters:,}\n"
        "memory per GPU in GB"
    )
    table = Table(title=title, title_justify="left", caption_justify="left")
    for name in ("GPUs", "total", *_PARTS.values(), "other", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for need in plan.needs:
        memory = need.memory
        parts = [getattr(memory, name) for name in _PARTS]
        fits = plan.device_memory is None or memory.total <= plan.device_memory
        table.add_row(
            str(need.gpus),
            f"{memory.total / 1e9:.2f}" + ("" if fits else ", too much"),
            *(f"{part / 1e9:.2f}" for part in parts),
            f"{max(0, memory.total - sum(parts)) / 1e9:.2f}",
            "-" if need.seconds is None else _duration(need.seconds),
        )
    if plan.flops_per_second is None:
        table.caption = "no time: it is estimated from the speed of a GPU, and none was found"
    else:
        table.caption = (
            f"time: lower bound, at {plan.flops_per_second / 1e12:,.0f} TFLOP/s of matrix products on {plan.device}"
        )
    return table


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
