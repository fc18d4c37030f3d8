"""`warpbus convert`: write a quantized model in the format of another program."""

import json
from pathlib import Path
from typing import Annotated

import typer

from warpbus.cli.completion import complete_model
from warpbus.cli.language import Console
from warpbus.cli.models import model_directory
from warpbus.cli.progress import progress_bar
from warpbus.dist.interpreters import permanent_objects


def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_model,
            help="a quantized model: directory, GGUF file, or name on a hub",
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="a new directory; for GGUF a new file")],
    to: Annotated[
        str,
        typer.Option(
            help="compressed-tensors, gptq, gptq-v2 or awq; float16 or bfloat16: not quantized any more; gguf: codes "
            "unchanged where GGUF has them; gguf-q4_k and others, fp8-block: rounded to that type"
        ),
    ],
    pad_ffn: Annotated[
        str, typer.Option(help="widen the FFN with zeros: none, auto (2 and 4 GPUs can share it), or a size")
    ] = "none",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the model at OUTPUT")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print what was done as JSON")] = False,
) -> None:
    """Convert MODEL between quantized formats, its codes unchanged, and compare what was written bit for bit.

    It reads compressed-tensors, GPTQ, AWQ, THUDM's int4 and int8, and GGUF.
    """
    with permanent_objects():
        from warpbus.models.convert import convert as run

    directory = model_directory(model)
    with progress_bar() as show:
        done = run(directory, output, to=to, pad_ffn=pad_ffn, overwrite=overwrite, progress=show)
    if as_json:
        print(json.dumps(done.to_json(), ensure_ascii=False))
    else:
        for line in done.summary().splitlines():
            Console().print(line, highlight=False, markup=False, soft_wrap=True)
