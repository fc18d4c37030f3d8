"""`warpbus demo`: the packaged model quantized, compared with the original, and writing."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.columns import Columns
from rich.panel import Panel

from warpbus.cli.language import Console
from warpbus.cli.options import Device
from warpbus.cli.progress import progress_bar
from warpbus.errors import UsageError

REQUEST = "写一首题为《春夜》的五言绝句。"


def demo(
    output: Annotated[Path, typer.Option(help="where the quantized models and the reports go")] = Path("demo-output"),
    request: Annotated[str, typer.Option(help="prompt for the models")] = REQUEST,
    device: Device = "auto",
    seed: Annotated[int, typer.Option(min=0, help="random seed of the poems")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print the measurements and poems as JSON")] = False,
) -> None:
    """Quantize the packaged model, compare it with the original and let both write a poem.

    The model is glm-poet, a small GLM that was trained with this program on classical Chinese poems.
    """
    if not request.strip():
        raise UsageError("--request is empty: give the prompt for the models")
    from warpbus.cuda.devices import resolve_device
    from warpbus.demo import showcase
    from warpbus.evaluation import report
    from warpbus.formats.files import check_parent

    check_parent(output / "comparison.html")
    chosen = resolve_device(device)
    with progress_bar() as show:
        models = showcase.quantize_all(output, str(chosen), show)
        evaluations = showcase.compare(models, chosen, show)
    title = "glm-poet: the original and its quantized versions"
    report.draw(evaluations, output / "comparison.png")
    report.write_page(evaluations, title, output / "comparison.html", command="warpbus demo")
    poets = showcase.write_poems(models, request, str(chosen), seed)
    if as_json:
        poems = [vars(poet) for poet in poets]
        print(json.dumps({"models": report.to_json(evaluations), "poems": poems}, ensure_ascii=False))
        return
    console = Console()
    console.print(report.table(evaluations, title))
    console.print(
        f"Measured on {evaluations[0].tokens:,} tokens of poems that no model has seen; "
        "choices: which of four couplets comes next.\n",
        style="dim",
    )
    console.print(f"[bold]{request}[/]")
    console.print(Columns([Panel(poet.text, title=poet.name, padding=(0, 2)) for poet in poets]))
    console.print(f"\nPicture: {output / 'comparison.png'}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"Page: {output / 'comparison.html'}\n", highlight=False, markup=False, soft_wrap=True)
    _next_steps(console, models[showcase.BEST])


def _next_steps(console: Console, poet: Path) -> None:
    """The next steps after the demo. Commands stand on lines of their own, whole, so that they can be copied."""
    console.print("[bold]What next?[/]")
    for purpose, command in (
        ("Talk to the 4-bit poet:", f"warpbus chat {shlex.quote(str(poet))}"),
        ("Quantize a model of your own:", "warpbus quantize MODEL OUTPUT"),
        ("See what that cost:", "warpbus eval MODEL OUTPUT --data texts.jsonl"),
        ("See what this machine can run:", "warpbus doctor"),
    ):
        console.print(f"  {purpose}", style="dim", highlight=False)
        console.print(f"    {command}", highlight=False, markup=False, soft_wrap=True)
    console.print("[dim]The command is in .venv/bin; `. .venv/bin/activate` puts it on your path.[/]", highlight=False)
