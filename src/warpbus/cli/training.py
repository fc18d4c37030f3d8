"""What the terminal shows of a training run, all of it on stderr."""

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
    """Whether another process of a torchrun job speaks for this one."""
    return os.environ.get("RANK", "0") != "0"


@contextmanager
def shown(output: Path) -> Iterator[tuple[Callable[[TrainingStarted], None], Callable[[TrainingProgress], None]]]:
    """The functions to hand to `train` as `begun` and `report`: a bar with the loss, the speed and the time left.

    Raises:
        typer.Exit: after SIGINT or SIGTERM; what is kept and how to go on has been said.
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
                    say(f"{output}: {start.step:,} of {start.steps:,} steps are done: going on from there")
                say(f"training {start.trained:,} numbers of a model of {start.parameters:,}")
                # The time left is reckoned from the steps of this session alone.
                bar.reset(task, total=start.steps, completed=start.step, description="training")
                bar.update(task, steps=f"{start.step:,}/{start.steps:,}")

            def report(step: TrainingProgress) -> None:
                speed = step.tokens_per_second
                told = f"{speed / 1e3:,.0f}k" if speed >= 1e4 else f"{speed:,.0f}"
                figures = f"loss {step.loss:.3f}  {told} tokens/s"
                bar.update(task, completed=step.step, steps=f"{step.step:,}/{step.steps:,}", figures=figures)
                if step.valid_loss is not None:
                    say(f"step {step.step:,}: loss {step.loss:.4f}, validation {step.valid_loss:.4f}")

            yield begun, report
    except Stopped as stopped:
        going_on = "" if stopped.state is None else "; the same command goes on from there"
        say(f"{stopped}{going_on}")
        raise typer.Exit(128 + stopped.signal) from None
    except KeyboardInterrupt:
        say("interrupted: the same command goes on from what was saved, if there is something")
        raise typer.Exit(128 + signal.SIGINT) from None


def plan_table(plan: Plan) -> Table:
    """Memory and time by the number of GPUs."""
    steps = "1 step" if plan.steps == 1 else f"{plan.steps:,} steps"
    title = (
        f"{steps}, {plan.tokens:,} tokens; {plan.trained:,} of {plan.parameters:,} numbers are trained\n"
        "memory of each GPU in GB"
    )
    table = Table(title=title, title_justify="left", caption_justify="left")
    for name in ("GPUs", "in all", *_PARTS.values(), "other", "time"):
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
        table.caption = "the time needs a GPU: it follows from how fast that multiplies"
    else:
        table.caption = f"time: at least, at {plan.flops_per_second / 1e12:,.0f} TFLOP/s in products of {plan.device}"
    return table


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
