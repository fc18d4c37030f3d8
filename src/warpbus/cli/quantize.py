"""`warpbus quantize`: write a quantized copy of a model."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from warpbus.cli.models import DEMO, model_directory
from warpbus.cli.progress import progress_bar


def quantize(
    model: Annotated[str, typer.Argument(help="model directory, or demo")],
    output: Annotated[Path, typer.Argument(help="a new directory for the quantized model")],
    scheme: Annotated[
        str, typer.Option(help="w<2|3|4|8>a16, then -g32, -g64 or -g128 (else one scale a row), then -asym")
    ] = "w4a16-g128",
    algorithm: Annotated[str, typer.Option(help="gptq, or rtn: quick, no calibration, worse")] = "gptq",
    calibration: Annotated[Path | None, typer.Option(help=".txt, or .jsonl of texts or conversations")] = None,
    samples: Annotated[int, typer.Option(min=1, help="sequences to calibrate on, at most")] = 128,
    seqlen: Annotated[int, typer.Option(min=1, help="tokens of a sequence, at most")] = 2048,
    seed: Annotated[int, typer.Option(help="of the draw of the sequences")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    damping: Annotated[float, typer.Option(min=0.0, help="share of the mean added to each Hessian's diagonal")] = 0.01,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the model at OUTPUT")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw the errors as a PNG here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Quantize the linear layers of MODEL and write it to OUTPUT, which vLLM, SGLang and transformers load too.

    The packaged model brings its calibration data: warpbus quantize demo poet-w4
    """
    from warpbus.demo import calibration_path
    from warpbus.quantization import quantize as run

    if calibration is None and model == DEMO and algorithm == "gptq":
        calibration = calibration_path()
    with progress_bar() as show:
        report = run(
            model_directory(model),
            output,
            scheme=scheme,
            algorithm=algorithm,
            calibration=calibration,
            samples=samples,
            seqlen=seqlen,
            seed=seed,
            device=device,
            damping=damping,
            overwrite=overwrite,
            progress=lambda done, total, what: show("quantizing", done, total),
        )
    if plot is not None:
        report.draw(plot)
    if as_json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
        return
    console = Console()
    console.print(report.table())
    console.print(report.summary(), highlight=False, markup=False, soft_wrap=True)
