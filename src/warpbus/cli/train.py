"""`warpbus train`: train a model from scratch, or go on training one."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from warpbus.cli.models import model_directory
from warpbus.errors import DeviceError, UsageError


def train(
    model: Annotated[
        str,
        typer.Argument(help="directory with config.json, a tokenizer and weights if there are any, or a name on a hub"),
    ],
    output: Annotated[Path, typer.Argument(help="a new directory for the trained model")],
    data: Annotated[Path, typer.Option(help=".jsonl of conversations or texts, or .txt")],
    valid: Annotated[Path | None, typer.Option(help="held-out data of the same form")] = None,
    steps: Annotated[int, typer.Option(min=0, help="optimizer steps; 0: as many as --epochs makes")] = 0,
    epochs: Annotated[float, typer.Option(min=0.001, help="passes over the data")] = 1.0,
    length: Annotated[int, typer.Option(min=8, help="tokens in a row; documents are packed into rows")] = 512,
    rows: Annotated[int, typer.Option(min=1, help="rows in an optimizer step, over all GPUs")] = 128,
    rows_at_once: Annotated[int, typer.Option(min=1, help="rows in one forward pass; more are accumulated")] = 128,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="at its peak")] = 1e-3,
    warmup: Annotated[int, typer.Option(min=0, help="steps over which the learning rate rises")] = 200,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="of matrices; biases and norms have none")] = 0.1,
    clip: Annotated[float, typer.Option(min=0.0, help="largest norm of a gradient")] = 1.0,
    compile: Annotated[bool, typer.Option("--compile", help="use torch.compile")] = False,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32, or auto: bfloat16 on a GPU")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of this machine; torchrun works too")] = 1,
    valid_every: Annotated[int, typer.Option(min=1, help="steps between validations")] = 250,
    save_every: Annotated[int, typer.Option(min=1, help="steps between checkpoints")] = 500,
    workers: Annotated[int, typer.Option(min=1, help="processes to tokenize with")] = min(16, os.cpu_count() or 1),
    seed: Annotated[int, typer.Option(min=0, help="of fresh weights and of the shuffles")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace OUTPUT if it exists")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Train MODEL on --data and write it to OUTPUT.

    The state is kept in OUTPUT.training; the same command goes on where an interrupted run stopped.
    """
    import torch

    from warpbus.cuda.devices import resolve_device
    from warpbus.dist import relaunch
    from warpbus.train import TrainingSettings
    from warpbus.train import train as run
    from warpbus.train.pretrain import Progress as Step

    place = resolve_device(device).type
    if gpus > 1 and "WORLD_SIZE" not in os.environ:
        if place != "cuda":
            raise UsageError(f"--gpus {gpus}: this would run on the CPU: leave it out, or see warpbus doctor")
        if gpus > torch.cuda.device_count():
            raise DeviceError(f"--gpus {gpus}: this machine has {torch.cuda.device_count()}: give fewer")
        relaunch(gpus, sys.argv[1:])
    settings = TrainingSettings(
        steps=steps,
        epochs=epochs,
        length=length,
        rows_per_step=rows,
        rows_at_once=rows_at_once,
        learning_rate=learning_rate,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        compile=compile,
        dtype=("bfloat16" if place == "cuda" else "float32") if dtype == "auto" else dtype,
        valid_every=valid_every,
        save_every=save_every,
        seed=seed,
    )
    directory = model_directory(model)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    silent = os.environ.get("RANK", "0") != "0"
    with Progress(*columns, console=console, disable=silent) as bar:
        task = bar.add_task("reading the data", total=None, figures="")

        def show(step: Step) -> None:
            figures = f"loss {step.loss:.3f}  {step.tokens_per_second / 1e3:,.0f}k tokens/s"
            bar.update(task, description="training", completed=step.step, total=step.steps, figures=figures)
            if step.valid_loss is not None:
                bar.console.print(f"step {step.step:,}: loss {step.loss:.4f}, validation {step.valid_loss:.4f}")

        summary = run(
            directory,
            output,
            data=data,
            valid=valid,
            settings=settings,
            device=device,
            workers=workers,
            overwrite=overwrite,
            report=show,
        )
    if silent:
        return
    if as_json:
        print(json.dumps(summary, ensure_ascii=False))
    else:
        validated = summary["valid_loss"]
        held_out = "" if validated is None else f", validation {validated:.4f}"
        console.print(f"{output}: {summary['tokens']:,} tokens in {summary['seconds']:,.0f} s{held_out}")
        console.print(f"loss curve: {output / 'training.png'}")
