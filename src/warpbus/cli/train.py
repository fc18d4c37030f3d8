"""`warpbus train`: trains a model from scratch, continues training one, or trains an adapter for one."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from warpbus.cli.models import model_directory


def train(
    model: Annotated[
        str,
        typer.Argument(help="directory with config.json, a tokenizer and weights if there are any, or a name on a hub"),
    ],
    output: Annotated[Path, typer.Argument(help="a new directory for the trained model or adapter")],
    data: Annotated[Path, typer.Option(help=".jsonl of conversations or texts, or .txt")],
    valid: Annotated[Path | None, typer.Option(help="held-out data of the same form")] = None,
    method: Annotated[str, typer.Option(help="full: all weights; or an adapter: lora or ptuning")] = "full",
    steps: Annotated[int, typer.Option(min=0, help="optimizer steps; 0: computed from --epochs")] = 0,
    epochs: Annotated[float, typer.Option(min=0.001, help="passes over the data")] = 1.0,
    length: Annotated[int, typer.Option(min=8, help="tokens per row; documents are packed into rows")] = 512,
    rows: Annotated[
        int | None, typer.Option(min=1, help="rows per optimizer step, over all GPUs (128; adapters: 16)")
    ] = None,
    rows_at_once: Annotated[
        int | None, typer.Option(min=1, help="rows per forward pass; gradients are accumulated (128; adapters: 4)")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=0.0, help="peak learning rate (0.001; lora: 0.0003; ptuning: 0.01)")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="steps over which the learning rate rises (200; adapters: 20)")
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(min=0.0, help="of matrices; biases and norms have none (0.1; adapters: 0)")
    ] = None,
    clip: Annotated[float, typer.Option(min=0.0, help="maximum gradient norm")] = 1.0,
    rank: Annotated[int, typer.Option(min=1, help="lora: rank")] = 8,
    alpha: Annotated[float, typer.Option(min=0.0, help="lora: scaling times rank")] = 16.0,
    dropout: Annotated[float, typer.Option(min=0.0, help="lora: dropout rate of its inputs")] = 0.0,
    target: Annotated[
        list[str] | None, typer.Option(help="lora: a matrix such as attention.qkv; repeatable; all by default")
    ] = None,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="ptuning: length of the prefix in tokens")] = 64,
    quantize: Annotated[
        str | None, typer.Option(metavar="SCHEME", help="adapters: quantize the model while loading, such as w4a16-g64")
    ] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="multiply matrices of the layers in FP8")] = False,
    recompute: Annotated[
        int, typer.Option(min=0, help="recompute the activations of every n-th layer instead of keeping them")
    ] = 0,
    compile: Annotated[bool, typer.Option("--compile", help="use torch.compile")] = False,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32, or auto: bfloat16 on a GPU")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    gpus: Annotated[int, typer.Option(min=1, help="number of GPUs of this machine; torchrun works too")] = 1,
    processes: Annotated[int, typer.Option(min=1, help="number of processes, with --device cpu or --cluster")] = 1,
    cluster: Annotated[
        str | None, typer.Option(help="a Ray cluster with --processes GPUs: auto, or ray://HOST:PORT")
    ] = None,
    sharding: Annotated[
        str, typer.Option(help="ddp: each GPU has the whole model; fsdp: each has a shard of it")
    ] = "ddp",
    valid_every: Annotated[int, typer.Option(min=1, help="steps between validations")] = 250,
    save_every: Annotated[int, typer.Option(min=1, help="steps between checkpoints")] = 500,
    keep: Annotated[str, typer.Option(help="weights to write: last step, or best step by validation loss")] = "last",
    workers: Annotated[int, typer.Option(min=1, help="number of tokenizing processes")] = min(16, os.cpu_count() or 1),
    seed: Annotated[int, typer.Option(min=0, help="of initial weights, shuffling and dropout")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace OUTPUT if it exists")] = False,
    rank_timeout: Annotated[
        float, typer.Option(min=10, help="seconds after which the run ends if one of its processes is stalled")
    ] = 300.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only estimate memory and time per number of GPUs")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Train MODEL, or an adapter for it, on --data and write the result to OUTPUT.

    OUTPUT.training holds checkpoints: the same command resumes an interrupted run, on any number of GPUs.
    """
    from warpbus.cli.tables import training_table
    from warpbus.cli.training import is_silent, shown
    from warpbus.cuda.devices import resolve_device
    from warpbus.train import TrainingSettings
    from warpbus.train import train as run
    from warpbus.train.job import check_arguments
    from warpbus.train.plan import plan_training

    resolved = resolve_device(device)
    on_gpus = device != "cpu" if cluster else resolved.type == "cuda"
    settings = TrainingSettings.of(
        method,
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
        dtype=("bfloat16" if on_gpus else "float32") if dtype == "auto" else dtype,
        fp8=fp8,
        recompute=recompute,
        sharding=sharding,
        valid_every=valid_every,
        save_every=save_every,
        keep=keep,
        seed=seed,
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        targets=tuple(target or ()),
        prefix_tokens=prefix_tokens,
        quantize=quantize,
    )
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
    from warpbus.evaluation.curve import draw_training  # loads matplotlib

    curve = draw_training(output)
    if as_json:
        print(json.dumps(summary, ensure_ascii=False))
    else:
        console = Console(stderr=True)
        validated = summary["valid_loss"]
        losses = f"loss {summary['loss']:.4f}" + ("" if validated is None else f", validation {validated:.4f}")
        if keep == "best":
            losses += f" after step {summary['best_step']:,}, which was written"
        text = f"{output}: {summary['tokens']:,} tokens in {summary['seconds']:,.0f} s, {losses}"
        console.print(f"{text}\nloss curve: {curve}", highlight=False, markup=False)
