"""`warpbus merge`: a model that has taken up a LoRA."""

import json
from pathlib import Path
from typing import Annotated

import typer

from warpbus.cli.completion import complete_model
from warpbus.cli.language import Console
from warpbus.cli.models import model_directory
from warpbus.cli.progress import progress_bar
from warpbus.dist.interpreters import permanent_objects


def merge(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_model,
            help="model directory, name on a hub, or demo; not quantized",
        ),
    ],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="directory of a LoRA in PEFT's format")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="a new directory")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the model at OUTPUT")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print what was done as JSON")] = False,
) -> None:
    """Add the LoRA at ADAPTER to the weights of MODEL, and write the result to OUTPUT.

    To quantize the result, run warpbus quantize on OUTPUT: a quantized MODEL is refused.
    """
    with permanent_objects():
        from warpbus.models.adapters import merge_lora

    directory = model_directory(model)
    with progress_bar() as show:
        done = merge_lora(directory, adapter, output, overwrite=overwrite, progress=show)
    if as_json:
        print(json.dumps(done.to_json(), ensure_ascii=False))
    else:
        Console().print(done.summary(), highlight=False, markup=False, soft_wrap=True)
