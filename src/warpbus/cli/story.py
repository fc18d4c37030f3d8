"""`warpbus bench story`: a whole model on the CPU and on GPUs, in 16 bits and in fewer, in one page."""

import json
import shlex
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from warpbus.cli.completion import complete_model
from warpbus.cli.language import Console
from warpbus.cli.models import DEMO, model_directory, model_name
from warpbus.cli.options import Device, FieldOption, options_of
from warpbus.cli.progress import progress_bar
from warpbus.story.options import StoryOptions

PAGE, PICTURE = "story.html", "story.png"


@options_of(
    {"given": StoryOptions},
    output=...,
    data=...,
    calibration=...,
    device=...,
    gpus=FieldOption("numbers of GPUs, such as 1,2,4; default: 1 and all", field="counts"),
    samples=FieldOption("calibration sequences; default: 128; on a CPU, 32 for large models", default=None),
    documents="documents that the perplexity is measured on, at most",
    tokens="tokens that are generated in each run",
    price="dollars per GPU-hour, to compute the cost",
    cpu_price="dollars per hour of this machine without a GPU",
    restart="measure again what an earlier run has finished",
)
def story(
    context: typer.Context,
    given: dict[str, Any],
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", autocompletion=complete_model, help="model directory, name on a hub, or demo"),
    ] = DEMO,
    output: Annotated[
        Path | None, typer.Option(help="directory for page, picture, records and models; default: story-MODEL")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help=".jsonl or .txt to measure the perplexity on; default: packaged poems or an article"),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help=".jsonl or .txt to calibrate on", show_default="packaged texts")
    ] = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print the records as JSON")] = False,
) -> None:
    """A whole model before and after: CPU and GPU, 16, 8 and 4 bits, one GPU and several, generation and training.

    Measures time, energy, cost and quality, and writes one page, a picture and records. Without a GPU, it measures what
    a CPU can and says what is missing. The same command resumes an interrupted run.
    """
    from warpbus.bench.records import to_json, write
    from warpbus.cuda.devices import resolve_device
    from warpbus.demo import calibration_path, data_path
    from warpbus.formats.files import check_parent
    from warpbus.story import report
    from warpbus.story.measure import Work, partially_kept, tell

    directory, name = model_directory(model), model_name(model)
    place = output or Path(f"story-{name}")
    check_parent(place / PAGE)
    if data is None:
        data = data_path("validation.jsonl" if model == DEMO else "wikitext-page.txt")
    if calibration is None and model == DEMO:
        calibration = calibration_path()
    options = StoryOptions(**given)
    work = Work(name, directory, place, data, calibration, resolve_device(device), options, _typed(context))
    try:
        with progress_bar() as show:
            results = tell(work, show)
    except KeyboardInterrupt:
        count = partially_kept(place)
        parts = "1 finished part" if count == 1 else f"{count} finished parts"
        text = f"Interrupted. {parts} kept in {place}: run the same command to resume."
        Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)
        raise typer.Exit(128 + signal.SIGINT) from None
    found = report.records(results)
    path = write(found, place)
    report.draw(results, place / PICTURE)
    report.write_page(results, place / PAGE)
    if as_json:
        print(json.dumps(to_json(found), ensure_ascii=False))
        return
    console = Console()
    console.print(report.table(results))
    for label, file in (("Page", place / PAGE), ("Picture", place / PICTURE), ("Records", path)):
        console.print(f"{label}: {file}", highlight=False, markup=False, soft_wrap=True)


def _typed(context: typer.Context) -> str:
    """The command line as typed, which measures the same again."""
    words = ["warpbus", "bench", "story"]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in ("output", "as_json", "restart"):
            continue
        value = context.params[name]
        words += [str(value)] if name == "model" else [parameter.opts[0], str(value)]
    return shlex.join(words)
