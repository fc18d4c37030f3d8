"""`warpbus eval`: models side by side."""

import json
import logging
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from warpbus.cli.completion import complete_model
from warpbus.cli.language import Console
from warpbus.cli.models import DEMO, model_directory, model_name
from warpbus.cli.options import Device
from warpbus.cli.progress import progress_bar
from warpbus.dist.interpreters import permanent_objects
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
    data: Annotated[
        Path | None,
        typer.Option(help=".jsonl of conversations or texts, or .txt to predict; demo: the packaged poems"),
    ] = None,
    choices: Annotated[Path | None, typer.Option(help=".jsonl of multiple-choice questions")] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="NAMES", help="tasks of lm-evaluation-harness, separated by commas")
    ] = None,
    task_path: Annotated[
        Path | None, typer.Option(help="a directory of further tasks (.yaml); they can run Python code")
    ] = None,
    fewshot: Annotated[int | None, typer.Option(min=0, help="examples before each question of the tasks")] = None,
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

    With --tasks, the metrics of these tasks instead: warpbus eval MODELS --tasks hellaswag,gsm8k --limit 100
    """
    if tasks is not None:
        if data is not None or choices is not None or plot is not None or html is not None:
            raise UsageError("--tasks excludes --data, --choices, --plot and --html: leave these out")
        _evaluate_tasks(models, tasks, task_path, fewshot, limit, device, dtype, as_json=as_json)
        return
    if task_path is not None or fewshot is not None:
        raise UsageError("--task-path and --fewshot have no part without --tasks: name the tasks")
    with permanent_objects():
        from warpbus.cuda.devices import resolve_device, resolve_dtype
        from warpbus.demo import evaluation_paths
        from warpbus.evaluation import evaluate as measure
        from warpbus.evaluation import report
        from warpbus.formats.files import check_files

    check_files(plot, html)
    if data is None and models[0] != DEMO:
        raise UsageError(
            "--data is missing: give a .jsonl of conversations or texts, a .txt, or demo for the packaged poems"
        )
    if data is None or data == Path(DEMO):
        data, questions = evaluation_paths()
        choices = choices or questions
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


def _evaluate_tasks(
    models: list[str],
    tasks: str,
    directory: Path | None,
    fewshot: int | None,
    limit: int | None,
    device: str,
    dtype: str,
    *,
    as_json: bool,
) -> None:
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--tasks {tasks!a:.60}: expected names separated by commas, such as hellaswag,gsm8k")
    from warpbus.evaluation.task_names import check_task_names

    check_task_names(names, directory)
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness's bars; read when tqdm is imported
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with permanent_objects():
        from warpbus.engine import LLM
        from warpbus.evaluation.tasks import TaskScore, check_tasks, evaluate_tasks

    paths = [model_directory(model) for model in models]
    manager = check_tasks(names, directory)
    scores: dict[str, list[TaskScore]] = {}
    for model, path in zip(models, paths, strict=True):
        label = model_name(model)
        label = str(path) if label in scores else label
        with progress_bar() as show:
            llm = LLM(path, device=device, dtype=dtype)
            scores[label] = evaluate_tasks(
                llm, names, manager, fewshot=fewshot, limit=limit, tell=partial(show, f"{label}: prompts")
            )
        del llm
    if as_json:
        print(json.dumps({name: [asdict(score) for score in found] for name, found in scores.items()}))
        return
    table = Table(title="Tasks of lm-evaluation-harness", title_justify="left")
    for column in ("task", "metric", "questions", *scores):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for row in zip(*scores.values(), strict=True):
        first = row[0]
        arrow = {True: " ↑", False: " ↓", None: ""}[first.higher_is_better]
        cells = [f"{each.value:.4f}" + (f" ± {each.error:.4f}" if each.error is not None else "") for each in row]
        table.add_row(first.task, first.metric + arrow, f"{first.questions:,}", *cells)
    Console().print(table)
