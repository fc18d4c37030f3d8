"""`warpbus plan`: where a model's weights go on a GPU that need not be here, and how fast it will be."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warpbus.cli.completion import complete_model
from warpbus.cli.language import Console
from warpbus.cli.options import FieldOption, options_of
from warpbus.cuda.cards import CARDS, Card, card_named
from warpbus.cuda.memory_size import parse_memory, short_size
from warpbus.engine.options import ServiceOptions
from warpbus.errors import DownloadError, UsageError

if TYPE_CHECKING:  # both load torch
    from warpbus.engine.plan import Stored


@options_of(
    {"service": ServiceOptions},
    gpu=...,
    memory="what may be taken of the GPU's memory: 6GB, 5.5GiB, 50%; default: all of it",
    scheme=...,
    max_model_len="context length in tokens; default: as long as fits",
    max_num_seqs=FieldOption("maximum number of sequences in a batch", default=1),
    kv_cache_dtype=FieldOption("dtype of the KV cache: auto, int8, fp8, int4 or unquantized", field="kv_dtype"),
    tensor_parallel_size=FieldOption("number of GPUs that share the model", field="tensor_parallel"),
    expert_parallel="with --tensor-parallel-size: each GPU has whole experts instead of a part of every expert",
    as_json=...,
)
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_model,
            help="a model directory (config.json is enough), the name of a downloaded model, or a known shape",
        ),
    ],
    service: dict[str, Any],
    gpu: Annotated[str | None, typer.Option(help=f"{', '.join(CARDS)}; default: the one here")] = None,
    scheme: Annotated[
        str | None, typer.Option(help="plan for weights quantized to this, such as w4a16-g128; default: as stored")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
) -> None:
    """Plan MODEL for a GPU: where its weights go, room for the KV cache, and tokens per second. Nothing is loaded."""
    from warpbus.cli.tables import forecast_table
    from warpbus.engine.forecast import forecast
    from warpbus.engine.kv_cache import stored_dtype

    stored = _stored(model, scheme)
    card = _card_here() if gpu is None else card_named(gpu)
    options = ServiceOptions(**service)
    limit = card.memory if options.memory is None else parse_memory(options.memory, card.memory)
    if options.max_model_len is not None and options.max_model_len > stored.config.max_context:
        raise UsageError(
            f"max_model_len is {options.max_model_len:,}: the model's context is {stored.config.max_context:,}"
        )
    if options.tensor_parallel > 1:
        stored = stored.shared(options.tensor_parallel, expert_parallel=options.expert_parallel)
    stored_dtype(stored.config, options.kv_dtype, stored.dtype)
    try:
        found = forecast(
            stored,
            card,
            limit,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            kv_dtype=options.kv_dtype,
        )
    except UsageError as error:
        raise UsageError(f"{model} does not fit {short_size(limit)} of {card.name}: {error}") from None
    if as_json:
        print(json.dumps({"model": model} | found.to_json(), ensure_ascii=False))
    else:
        Console().print(forecast_table(found, model))


def _stored(model: str, scheme: str | None) -> "Stored":
    """The kind of the weights: as the checkpoint stores them, or all of one scheme."""
    import torch

    from warpbus.engine.plan import Stored
    from warpbus.formats import Checkpoint
    from warpbus.formats.hub import find_model
    from warpbus.kernels.ops.arguments import HALVES
    from warpbus.models import SHAPES, quantized_parameters, read_config
    from warpbus.models.stored_schemes import dtype_of_weights
    from warpbus.qtensor import Scheme

    parsed = None if scheme is None else Scheme.parse(scheme)
    if model in SHAPES and not Path(model).exists():
        return Stored.uniform(SHAPES[model], torch.bfloat16, parsed)
    try:
        directory = find_model(model, download=False)
    except DownloadError:
        directory = None
    if directory is None or not directory.exists():
        raise UsageError(
            f"{model}: is not on this machine: download it with `warpbus pull`, or give a directory with a config.json "
            f"or a known shape: {', '.join(SHAPES)}"
        )
    if parsed is None:
        checkpoint = Checkpoint(directory)
        config = read_config(checkpoint)
        dtype = dtype_of_weights(checkpoint, config)
        quantized = quantized_parameters(checkpoint, config, trellises=True)
        return Stored(config, dtype if dtype in HALVES else torch.bfloat16, quantized)
    checkpoint = Checkpoint(directory, weights=False)
    if checkpoint.config.get("quantization_config"):
        raise UsageError(f"{model} is quantized already: leave --scheme out")
    return Stored.uniform(read_config(checkpoint), torch.bfloat16, parsed)


def _card_here() -> Card:
    """The GPU of this machine."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError(f"there is no GPU here: name one with --gpu: {', '.join(CARDS)}")
    memory = torch.cuda.get_device_properties(0).total_memory
    return replace(card_named(torch.cuda.get_device_name()), memory=memory)
