"""`warpbus eval`: models side by side."""

import json
from pathlib import Path
from typing import Annotated

import typer

from warpbus.cli.completion import complete_model
from warpbus.cli.language import Console
from warpbus.cli.models import DEMO, model_directory, model_name
from warpbus.cli.options import Device
from warpbus.cli.progress import progress_bar
from warpbus.errors import UsageError


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODELS",
            autocompletion=complete_model,
            help="model directories, names on a hub, or demo; the first is the reference",
        ),
    ],
    data: Annotated[Path | None, typer.Option(help=".jsonl of conversations or texts, or .txt to predict")] = None,
    choices: Annotated[Path | None, typer.Option(help=".jsonl of multiple-choice questions")] = None,
    length: Annotated[int, typer.Option(min=2, help="tokens of a document; longer ones are cut")] = 2048,
    limit: Annotated[int | None, typer.Option(min=1, help="documents and questions at most")] = None,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="also measure tokens/s and peak memory")] = True,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="dtype of activations: auto, float32, float16 or bfloat16")] = "auto",
    plot: Annotated[Path | None, typer.Option(help="draw a PNG here")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the measurements as JSON")] = False,
) -> None:
    """Measure MODELS on the same text: perplexity, divergence from the first, choices, size, speed, memory.

    For the packaged model the poems that it was not trained on are the default: warpbus eval demo demo-output/*g128*
    """
    from warpbus.cuda.devices import resolve_device, resolve_dtype
    from warpbus.demo import data_path
    from warpbus.evaluation import evaluate as measure
    from warpbus.evaluation import report

    if data is None:
        if models[0] != DEMO:
            raise UsageError("--data is missing: give a .jsonl of conversations or texts, or a .txt, to predict")
        data, choices = data_path("validation.jsonl"), choices or data_path("next-verse.jsonl")
    named = [(model_name(model), model_directory(model)) for model in models]
    doubled = {name for name, _ in named if [other for other, _ in named].count(name) > 1}
    named = [(str(path) if name in doubled else name, path) for name, path in named]
    chosen = resolve_device(device)
    with progress_bar() as show:
        evaluations = measure(
            named,
            data=data,
            questions=choices,
            length=length,
            limit=limit,
            speed=speed,
            device=chosen,
            dtype=None if dtype == "auto" else resolve_dtype(dtype),
            progress=show,
        )
    title = f"{named[0][0]} on {data.name}" if len(named) == 1 else f"Models on {data.name}"
    if as_json:
        print(json.dumps(report.to_json(evaluations), ensure_ascii=False))
    else:
        Console().print(report.table(evaluations, title))
    if plot is not None:
        report.draw(evaluations, plot)
    if html is not None:
        report.write_page(evaluations, title, html)
