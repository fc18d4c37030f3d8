"""`warpbus train`: trains a model from scratch, continues training one, or trains an adapter for one."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from warpbus.cli.completion import complete_model
from warpbus.cli.language import Console
from warpbus.cli.models import model_directory
from warpbus.cli.options import Device, FieldOption, options_of
from warpbus.dist.interpreters import permanent_objects
from warpbus.dist.watchdog import SHORTEST_LIMIT
from warpbus.train.options import TrainingOptions


@options_of(
    {"given": TrainingOptions},
    data=...,
    valid=...,
    method="full: all weights; or an adapter: lora or ptuning",
    steps="optimizer steps, instead of --epochs; 0: computed from --epochs, rounded up",
    epochs=FieldOption("passes over the data (1)", least=0.001, default=None),
    length=FieldOption("tokens per row; documents are packed into rows", least=8),
    rows=FieldOption("rows per optimizer step, over all GPUs (128; adapters: 16)", field="rows_per_step", default=None),
    rows_at_once=FieldOption("rows per forward pass; gradients are accumulated (128; adapters: 4)", default=None),
    learning_rate=FieldOption("peak learning rate (0.001; lora: 0.0003; ptuning: 0.01)", default=None),
    warmup=FieldOption("steps over which the learning rate rises (200; adapters: 20; at most a tenth of all)"),
    weight_decay=FieldOption("of matrices; biases and norms have none (0.1; adapters: 0)", default=None),
    clip=FieldOption("maximum gradient norm", least=0.0),
    balance_speed=FieldOption("full, experts: what correction biases change by per step", least=0.0),
    mtp_weight=FieldOption(
        "full: weight of the loss of multi-token prediction; 0: that layer is not trained", least=0.0
    ),
    rank="lora: rank",
    alpha=FieldOption("lora: scaling times rank", least=0.0),
    dropout="lora: dropout rate of its inputs",
    target=FieldOption("lora: a matrix such as attention.qkv; repeatable; all by default", field="targets"),
    prefix_tokens="ptuning: length of the prefix in tokens",
    quantize=FieldOption("adapters: quantize the model while loading, such as w4a16-g64", metavar="SCHEME"),
    fp8="multiply matrices of the layers in FP8",
    recompute="recompute the activations of every n-th layer instead of keeping them",
    compile="use torch.compile",
    dtype=...,
    device=...,
    gpus=...,
    processes=...,
    cluster=...,
    sharding="ddp: each GPU has the whole model; fsdp: each has a shard of it",
    valid_every="steps between validations",
    save_every="steps between checkpoints",
    keep="weights to write: last step, or best step by validation loss",
    workers=...,
    seed="of initial weights, shuffling and dropout",
)
def train(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_model,
            help="directory with config.json, a tokenizer and weights if there are any, or a name on a hub",
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="a new directory for the trained model or adapter")],
    data: Annotated[Path, typer.Option(help=".jsonl of conversations or texts, or .txt")],
    given: dict[str, Any],
    valid: Annotated[Path | None, typer.Option(help="held-out data of the same form")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32, or auto: bfloat16 on a GPU")] = "auto",
    device: Device = "auto",
    gpus: Annotated[int, typer.Option(min=1, help="number of GPUs of this machine; torchrun works too")] = 1,
    processes: Annotated[int, typer.Option(min=1, help="number of processes, with --device cpu or --cluster")] = 1,
    cluster: Annotated[
        str | None, typer.Option(help="a Ray cluster with --processes GPUs: auto, or ray://HOST:PORT")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="number of tokenizing processes")] = min(16, os.cpu_count() or 1),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace OUTPUT if it exists")] = False,
    rank_timeout: Annotated[
        float,
        typer.Option(min=SHORTEST_LIMIT, help="seconds after which the run ends if one of its processes is stalled"),
    ] = 300.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only estimate memory and time per number of GPUs")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Train MODEL, or an adapter for it, on --data and write the result to OUTPUT.

    OUTPUT.training holds checkpoints: the same command resumes an interrupted run, on any number of GPUs.
    """
    with permanent_objects():
        from warpbus.cli.tables import training_table
        from warpbus.cli.training import is_silent, shown
        from warpbus.cuda.devices import resolve_device
        from warpbus.train import TrainingSettings
        from warpbus.train import train as run
        from warpbus.train.job import check_arguments
        from warpbus.train.plan import plan_training

    resolved = resolve_device(device)
    on_gpus = device != "cpu" if cluster else resolved.type == "cuda"
    if dtype == "auto":
        dtype = "bfloat16" if on_gpus else "float32"
    settings = TrainingSettings.of(**given, dtype=dtype)
    if not dry_run:
        # Before anything is downloaded or drawn.
        check_arguments(valid, settings, device, gpus, processes, cluster)
    directory = model_directory(model)
    if dry_run:
        needs = plan_training(directory, data, settings, resolved, workers=workers)
        if as_json:
            print(json.dumps(needs.to_json(), ensure_ascii=False))
        else:
            Console().print(training_table(needs))
        return
    with shown(output) as (begun, report):
        summary = run(
            directory,
            output,
            data=data,
            valid=valid,
            settings=settings,
            device=device,
            gpus=gpus,
            processes=processes,
            cluster=cluster,
            workers=workers,
            overwrite=overwrite,
            rank_timeout=rank_timeout,
            begun=begun,
            report=report,
        )
    if is_silent():
        return
    if as_json:
        print(json.dumps(summary, ensure_ascii=False))
    else:
        console = Console(stderr=True)
        validated = summary["valid_loss"]
        losses = f"loss {summary['loss']:.4f}" + ("" if validated is None else f", validation {validated:.4f}")
        if settings.keep == "best":
            losses += f" after step {summary['best_step']:,}, which was written"
        if "expert_load" in summary:
            losses += f", busiest expert {summary['expert_load']:.2f} times the mean"
        text = f"{output}: {summary['tokens']:,} tokens in {summary['seconds']:,.0f} s, {losses}"
        lines = [text]
        for name, prefix in (("data", ""), ("validation data", "valid_")):
            truncated, dropped = (summary.get(f"{prefix}{each}", 0) for each in ("truncated", "dropped"))
            if truncated or dropped:
                whole = summary[f"{prefix}documents"] + dropped
                lines.append(
                    f"{name}: {whole:,} documents, {truncated:,} of them cut to "
                    f"--length {settings.length:,}, {dropped:,} left out because no answer begins within it"
                )
        for line in lines:
            console.print(line, highlight=False, markup=False)
    from warpbus.evaluation.curve import draw_training  # loads matplotlib

    # Last: the result is there, and told, where the picture cannot be written.
    curve = draw_training(output)
    if not as_json:
        console.print(f"loss curve: {curve}", highlight=False, markup=False)
