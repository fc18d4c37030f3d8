"""`warpbus bench`: measures operators and whole models on this machine, compared with other libraries."""

import importlib
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warpbus.bench.options import (
    ParallelBenchOptions,
    PoolBenchOptions,
    QuantizeBenchOptions,
    RunOptions,
    ServingBenchOptions,
    TrainBenchOptions,
)
from warpbus.cli.help import PlainGroup
from warpbus.cli.language import Console
from warpbus.cli.options import Device, FieldOption, options_of
from warpbus.cli.progress import progress_bar
from warpbus.cli.story import story
from warpbus.errors import UsageError

if TYPE_CHECKING:
    from warpbus.bench import Benchmark, Record, Run

Size = Annotated[list[int] | None, typer.Option(help="measure this size; can be given more than once")]
Dtype = Annotated[str | None, typer.Option(help="float16 or bfloat16")]
Output = Annotated[Path | None, typer.Option(help="the directory of the records, in place of ./benchmarks/results")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="draw the PNG here, not beside the records")]
AsJson = Annotated[bool, typer.Option("--json", help="print the records as JSON")]

_VARIANT = FieldOption("measure this variant (a wrong name lists them); can be given more than once", field="variants")
_QUICK = "few cases and few samples"
_SHAPE_OR_SMALL = "chatglm2-6b (default), glm-4-9b or llama-3-8b; small is the default without a GPU"
_LAYERS = "number of layers, instead of the shape's, for a quick look"
_GPUS = FieldOption(
    "numbers of GPUs (of processes on the CPU), such as 1,2,4; default: 1 and more, up to all", field="counts"
)

# Options that do not affect the figures are not part of the recorded command.
_NOT_RECORDED = {"output", "plot", "as_json", "directory"}


def _paragraphs(text: str) -> str:
    """Join the lines of each paragraph of a help text: typer keeps the line breaks of all but the first."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


bench = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    help=_paragraphs(
        """Measure operators and models, compared with torch, cuBLAS and the limits of this machine.

        Each command prints a table and writes its records and a picture to ./benchmarks/results, replacing those of an
        earlier run; docs/benchmark_cases.md explains the records.
        """
    ),
)


def _measure(
    context: typer.Context,
    run: dict[str, Any],
    size: Size = None,
    dtype: Dtype = None,
    device: Device = "auto",
    output: Output = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Run the benchmark of the catalog that has the command's name."""
    from warpbus.bench import Run
    from warpbus.bench import run as run_benchmark
    from warpbus.bench.catalog import BENCHMARKS
    from warpbus.cuda.devices import resolve_device, resolve_dtype

    if dtype not in (None, "float16", "bfloat16"):
        raise UsageError(f"--dtype {dtype}: give float16 or bfloat16")
    _check_output(output, plot)
    benchmark = BENCHMARKS[str(context.info_name)]
    settings = Run(
        resolve_device(device),
        _command(context),
        sizes=tuple(size or ()),
        dtype=resolve_dtype(dtype) if dtype else None,
        **run,
    )
    with progress_bar() as show:
        records = run_benchmark(benchmark, settings, show)
    _show(benchmark, settings, records, output, plot, as_json)


measure = options_of({"run": RunOptions}, size=..., variant=_VARIANT, dtype=..., quick=_QUICK)(_measure)
measure_decode = options_of(
    {"run": RunOptions},
    shape="chatglm2-6b (default), glm-4-9b or llama-3-8b",
    size=...,
    variant=_VARIANT,
    dtype=...,
    profile="also show where the time of a token goes, kernel by kernel",
    quick=_QUICK,
)(_measure)


def measure_model(options: type, **listed: str | FieldOption) -> Callable[..., None]:
    """The command that measures a whole model.

    Args:
        options: a dataclass of `warpbus.bench.options`: what is measured.
        listed: options for the fields of `options` and `RunOptions`, see `options_of`.
    """

    @options_of({"work": options, "run": RunOptions}, **listed)
    def measure_this(
        context: typer.Context,
        work: dict[str, Any],
        run: dict[str, Any],
        device: Device = "auto",
        output: Output = None,
        plot: PlotFile = None,
        as_json: AsJson = False,
    ) -> None:
        from warpbus.bench import Run
        from warpbus.bench import run as run_benchmark
        from warpbus.cuda.devices import resolve_device

        _check_output(output, plot)
        name = str(context.info_name)
        benchmark_of = getattr(importlib.import_module(f"warpbus.bench.{name}"), f"{name}_benchmark")
        settings = Run(resolve_device(device), _command(context), **run)
        with progress_bar() as show:
            benchmark = benchmark_of(options(**work), show)
            records = run_benchmark(benchmark, settings)
        _show(benchmark, settings, records, output, plot, as_json)

    return measure_this


def _check_output(output: Path | None, plot: Path | None) -> None:
    """Refuse an output that could not be written, before anything is measured."""
    from warpbus.bench.records import RESULTS
    from warpbus.formats.files import check_files, check_parent

    check_parent((output or RESULTS) / "record.json")
    check_files(plot)


def _show(
    benchmark: "Benchmark",
    settings: "Run",
    records: "Sequence[Record]",
    output: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Write the records and their picture, and print a table or JSON."""
    from warpbus.bench import geometric_means
    from warpbus.bench.plots import draw
    from warpbus.bench.records import RESULTS, results_path, to_json, write
    from warpbus.bench.report import table

    path = write(records, output or RESULTS)
    picture = plot or results_path(path.parent, benchmark.name, settings.device_name).with_suffix(".png")
    draw(records, benchmark.title, benchmark.plot, picture)
    if as_json:
        print(json.dumps(to_json(records), ensure_ascii=False))
        return
    console = Console()
    console.print(table(records, benchmark.title, geometric_means(benchmark, records), settings.notes))
    console.print(f"records: {path}\npicture: {picture}", highlight=False, markup=False, soft_wrap=True)


# The help texts are here and not with the benchmarks, whose import takes a second.
for _name, _help in {
    "vector-add": """Vector addition by size, CPU against GPU, with and without the transfers.

    In float32. Without a GPU: the operator's CPU path, compared with numpy.
    """,
    "matmul": """Square matrix products by size, CPU against GPU, with and without the transfers.

    Variants are rungs of the ladder; naive, tiled and wmma by default. Without a GPU: the operator's CPU path, compared
    with numpy.
    """,
    "ladder": """Every rung of the ladder, compared with cuBLAS: what each optimization gains. Needs a GPU.

    Without --dtype, rungs that do not support 16 bits are measured in float32.
    """,
    "gemm": """GEMM, compared with cuBLAS: square matrices, and prefill of the layers of ChatGLM2-6B. Needs a GPU.

    With --size, only square matrices of these sizes.
    """,
    "gemv": """GEMV, compared with cuBLAS: one token through ChatGLM2-6B, on 1 GPU or sharded on 2 or 4. Needs a GPU.

    With --size, only square matrices of these sizes.
    """,
    "linear": """A layer sigmoid(Wx + b) in one kernel, compared with torch and torch.compile.

    Without a GPU: the operator's CPU path.
    """,
    "wna16": """Weight-only quantized layers of ChatGLM2-6B, compared with cuBLAS, tinygemm and humming. Needs a GPU.

    Variants are quantization schemes; w4a16-g128 by default. With --size, only these numbers of tokens. humming is
    measured if the package humming-kernels is installed.
    """,
    "wna8": """Layers with weights of few bits, activations in FP8 or INT8, compared with cuBLAS and wna16. Needs a GPU.

    Variants are quantization schemes, w4a16-g128 by default: in FP8 (from Ada on), or in INT8 (from Ampere on) as
    w4a16-g128+int8. With --size, only these numbers of tokens, 512 or more.
    """,
    "w8a8": """8-bit weights and activations, compared with cuBLAS in 16 bits and torch in 8 bits. Needs a GPU.

    Variants are fp8 and int8. With --size, only these numbers of tokens.
    """,
    "trellis": """Layers of GLM-4-9B whose weights are a trellis, compared with w4a16-g128 and cuBLAS. Needs a GPU.

    Variants are w3a16-trellis and w2a16-trellis. With --size, only these numbers of tokens.
    """,
    "moe": """Experts of one layer with 4-bit weights, compared with torch's grouped product in 16 bits. Needs a GPU.

    Variants are shapes of models: glm-4.7-flash, glm-4.5-air (both by default), glm-5 and qwen3-30b-a3b. With :16-bit
    or :w8a8-fp8 behind the shape, experts are unquantized or in FP8. With --size, only these numbers of tokens.
    """,
    "attention": """Decode attention over the KV cache, compared with torch's fused attention. Needs a GPU.

    Variants are dtypes of the KV cache: auto (that of the activations), int8, fp8 or int4. With --size, only these
    contexts.
    """,
    "mla": """Multi-head latent attention of GLM-4.7-Flash, compared with torch's matrix products. Needs a GPU.

    Variants are dtypes of the KV cache: auto (that of the activations) and fp8. sparse and sparse-fp8 are GLM-5's
    sparse attention instead, indexer included. With --size, only these contexts.
    """,
}.items():
    bench.command(_name, help=_paragraphs(_help))(measure)

bench.command(
    "decode",
    help=_paragraphs(
        """Generation with a model of random weights, compared with other engines. Needs a GPU.

        Measures decoded tokens per second (256 tokens after a prompt of 128), and the memory for prefilling 2048 and
        for generating 8192 tokens, as reported by the driver. Variants are quantization schemes. --size sets the number
        of tokens.
        """
    ),
)(measure_decode)

MODEL_BENCHMARKS = {
    "quantize": (
        measure_model(
            QuantizeBenchOptions,
            shape="chatglm2-6b, glm-4-9b or llama-3-8b",
            layers=_LAYERS,
            gpus=_GPUS,
            samples="number of random calibration sequences",
            seqlen="tokens per calibration sequence",
            scheme="quantization scheme",
            algorithm="gptq, awq or smoothquant",
            directory="directory for temporary models; default: the system's temporary directory",
        ),
        """A whole model of random weights is quantized, by 1 GPU and by more: seconds, by stage, and limits.

        Also memory, GPU-seconds, energy, and the share of the quantized integers that are the same whatever the number
        of GPUs. Every run is a fresh process, whose start is counted. Without a GPU: processes on the CPU, for which a
        small --layers, --samples and --seqlen are advised.
        """,
    ),
    "serving": (
        measure_model(
            ServingBenchOptions,
            shape=_SHAPE_OR_SMALL,
            scheme="quantization scheme of the layers",
            concurrency="numbers of concurrent requests, such as 1,16,64,256",
            rates="arrival rates, relative to the throughput at the highest concurrency: 0.25,0.5",
            prompt="tokens per prompt",
            tokens="tokens per answer",
            url="measure the server at this URL",
            serve="serve this model directory, or demo, and measure that server",
            activation_dtype="activations of prompts: auto (16 bits), fp8 (from Ada on) or int8 (Ampere)",
            peer="also measure transformers, which takes a minute",
            quick=_QUICK,
        ),
        """Many requests at once: throughput and latencies, beside transformers' continuous batching.

        An engine with a model of random weights, in this process; with --url or --serve a server, over HTTP. Requests
        of random tokens come from so many clients that each wait for their answer (closed loops), and at random moments
        (open loops). In this process also: what the host takes of a step, how long a step lasts while the cache grows,
        and how fast the weights leave and come back. Without a GPU: a small shape.
        """,
    ),
    "parallel": (
        measure_model(
            ParallelBenchOptions,
            shape="glm-4-9b (default), chatglm2-6b or llama-3-8b; small is the default without a GPU",
            layers=_LAYERS,
            scheme="quantization scheme of the layers; default: none, 16 bits",
            gpus=_GPUS,
            tokens="tokens to generate",
            expert_parallel="mixtures of experts: each GPU has whole experts instead of a part of every expert",
            quick=_QUICK,
        ),
        """One sequence of a model of random weights that 1, 2, ... GPUs share: milliseconds per token.

        In bfloat16, after a prompt of 128 tokens. Without a GPU: a small shape and processes on the CPU.
        """,
    ),
    "train": (
        measure_model(
            TrainBenchOptions,
            shape="1b (default), chatglm2-6b, ...; tiny is the default without a GPU",
            layers=_LAYERS,
            gpus=_GPUS,
            length="tokens per row",
            rows="rows per GPU and forward pass",
            recompute="recompute the activations of every n-th layer; 0: of no layer",
            scheme="quantization scheme of qlora",
            sharding="between GPUs: ddp or fsdp",
            price="dollars per GPU hour, to compute the cost of a million tokens",
            peer="also measure PyTorch's own layers",
            variant=FieldOption(
                "method, precision and mode, such as lora-bf16-compiled; can be given more than once", field="variants"
            ),
            quick=_QUICK,
        ),
        """A model of random weights is trained: tokens per second, share of what products allow, memory, energy, cost.

        By every method (full, lora, qlora, ptuning), in fp32, tf32, bf16 and fp8, eager and compiled, by 1, 2, ...
        GPUs, beside the same in PyTorch's own parts; and what a token takes of the models afterwards. Each run has
        processes of its own. Without a GPU: a tiny shape.
        """,
    ),
    "pool": (
        measure_model(
            PoolBenchOptions,
            part=FieldOption("measure this part (a wrong name lists them); can be given more than once", field="parts"),
            gigabits="rates of the links between network namespaces, in Gbit/s; default: 1,10",
            shape=_SHAPE_OR_SMALL,
            quick=_QUICK,
        ),
        """A GPU that is reached over a pool, beside this machine's own: operators, steps, shares, moves.

        Daemons and clients are processes of this machine. Parts: operators (what one costs the client, and a read),
        transfers, training (a step of a GPT), decode (a token of our engine), links (the same between network
        namespaces at 1 and 10 Gbit/s, which needs root), shares (two tenants who want all; needs a GPU) and migration
        (how long a move stops its client). Without a GPU: small sizes.
        """,
    ),
}

bench.command("story", help=_paragraphs(story.__doc__ or ""))(story)

for _name, (_measure_it, _help) in MODEL_BENCHMARKS.items():
    bench.command(_name, help=_paragraphs(_help))(_measure_it)


def _command(context: typer.Context) -> str:
    """The command line as typed, which measures the same again."""
    words = ["warpbus", "bench", str(context.info_name)]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in _NOT_RECORDED:
            continue
        value = context.params[name]
        if isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            for each in value if isinstance(value, list | tuple) else [value]:
                words += [parameter.opts[0], str(each)]
    return shlex.join(words)
