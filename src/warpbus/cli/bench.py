"""`warpbus bench`: how fast the operators are on this machine, beside what others offer."""

import json
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from warpbus.cli.progress import progress_bar
from warpbus.errors import UsageError

if TYPE_CHECKING:
    from warpbus.bench import Benchmark, Record, Run
    from warpbus.bench.cases import Progress

Size = Annotated[list[int] | None, typer.Option(help="measure this size; can be given more than once")]
Variant = Annotated[
    list[str] | None, typer.Option(help="measure this variant (a wrong name lists them); can be given more than once")
]
Dtype = Annotated[str | None, typer.Option(help="float16 or bfloat16")]
Shape = Annotated[str | None, typer.Option(help="chatglm2-6b (default), glm-4-9b or llama-3-8b", show_default=False)]
Profile = Annotated[bool, typer.Option("--profile", help="also show where the time of a token goes, kernel by kernel")]
Quick = Annotated[bool, typer.Option("--quick", help="few cases and few samples")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Output = Annotated[
    Path | None, typer.Option(help="the directory of the records, in place of ./benchmarks/results", show_default=False)
]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="draw the PNG here, not beside the records")]
QuantizedShape = Annotated[str, typer.Option("--shape", help="chatglm2-6b, glm-4-9b or llama-3-8b")]
Layers = Annotated[
    int | None, typer.Option(help="so many layers, in place of the shape's, for a quick look", show_default=False)
]
Gpus = Annotated[
    str | None,
    typer.Option(help="numbers of GPUs (of processes on the CPU), 1,2,4 for instance; default: 1 and all there are"),
]
Samples = Annotated[int, typer.Option(help="random sequences to calibrate on")]
Seqlen = Annotated[int, typer.Option(help="tokens of a sequence")]
SchemeName = Annotated[str, typer.Option("--scheme", help="what it is quantized to")]
Algorithm = Annotated[str, typer.Option(help="gptq, awq or smoothquant")]
ServedShape = Annotated[
    str | None,
    typer.Option("--shape", help="chatglm2-6b (default), glm-4-9b or llama-3-8b; small is the default without a GPU"),
]
ParallelShape = Annotated[
    str | None,
    typer.Option("--shape", help="glm-4-9b (default), chatglm2-6b or llama-3-8b; small is the default without a GPU"),
]
ParallelScheme = Annotated[
    str | None, typer.Option("--scheme", help="of the layers; default: none, they are in 16 bits", show_default=False)
]
Concurrency = Annotated[
    str | None, typer.Option(help="requests at once, 1,16,64,256 for instance, each measured", show_default=False)
]
Rates = Annotated[
    str | None,
    typer.Option(help="rates of arrival, as shares of what the most at once get: 0.25,0.5", show_default=False),
]
PromptTokens = Annotated[int | None, typer.Option("--prompt", help="tokens of a prompt", show_default=False)]
AnswerTokens = Annotated[int | None, typer.Option("--tokens", help="tokens of an answer", show_default=False)]
Url = Annotated[str | None, typer.Option(help="measure the server that runs there", show_default=False)]
Serve = Annotated[
    str | None, typer.Option(help="serve this model directory, or demo, and measure that", show_default=False)
]
Parts = Annotated[
    list[str] | None,
    typer.Option("--part", help="measure this (a wrong name lists them); can be given more than once"),
]
Gigabits = Annotated[str, typer.Option("--gigabits", help="rates of the links between network namespaces, in Gbit/s")]
WithPeer = Annotated[bool, typer.Option("--peer/--no-peer", help="also measure transformers, which takes a minute")]
TrainedShape = Annotated[
    str | None,
    typer.Option("--shape", help="1b (default), chatglm2-6b, ...; tiny is the default without a GPU"),
]
TrainingVariant = Annotated[
    list[str] | None,
    typer.Option(
        "--variant", help="method, precision and mode, such as lora-bf16-compiled; can be given more than once"
    ),
]
RowLength = Annotated[int | None, typer.Option("--length", help="tokens of a row", show_default=False)]
RowsOfGpu = Annotated[int | None, typer.Option("--rows", help="rows that each GPU takes at once", show_default=False)]
Recompute = Annotated[int, typer.Option(help="compute activations of every n-th layer again; 0: of none")]
Sharding = Annotated[str, typer.Option(help="between GPUs: ddp or fsdp")]
Price = Annotated[float | None, typer.Option(help="dollars for an hour of a GPU: what a million tokens cost")]
WithTorch = Annotated[bool, typer.Option("--peer/--no-peer", help="also measure PyTorch's own parts")]
Directory = Annotated[
    Path | None, typer.Option(help="where the models are written meanwhile; default: the system's", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="print the records as JSON")]

# What does not change the figures is no part of the command that measures them again.
_NOT_RECORDED = {"output", "plot", "as_json", "directory"}


def _paragraphs(text: str) -> str:
    """A help text whose paragraphs are one line each: typer keeps the line breaks of all but the first."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


bench = typer.Typer(
    no_args_is_help=True,
    help=_paragraphs(
        """Measure the operators beside torch, cuBLAS and the limits of this machine.

        Each prints a table, and writes its records and a picture to ./benchmarks/results in place of those of an
        earlier run; docs/benchmarks.md says what is in them.
        """
    ),
)


def measure(
    context: typer.Context,
    size: Size = None,
    variant: Variant = None,
    dtype: Dtype = None,
    quick: Quick = False,
    device: Device = "auto",
    output: Output = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure the benchmark that has the command's name."""
    _measure(context, size, variant, dtype, quick, device, output, plot, as_json)


def measure_decode(
    context: typer.Context,
    shape: Shape = None,
    size: Size = None,
    variant: Variant = None,
    dtype: Dtype = None,
    profile: Profile = False,
    quick: Quick = False,
    device: Device = "auto",
    output: Output = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure a whole model, of which there are more to choose among."""
    _measure(context, size, variant, dtype, quick, device, output, plot, as_json, shape, profile)


def _measure(
    context: typer.Context,
    size: list[int] | None,
    variant: list[str] | None,
    dtype: str | None,
    quick: bool,
    device: str,
    output: Path | None,
    plot: Path | None,
    as_json: bool,
    shape: str | None = None,
    profile: bool = False,
) -> None:
    from warpbus.bench import Run, run
    from warpbus.bench.catalog import BENCHMARKS
    from warpbus.cuda.devices import resolve_device, resolve_dtype

    if dtype not in (None, "float16", "bfloat16"):
        raise UsageError(f"--dtype {dtype}: give float16 or bfloat16")
    benchmark = BENCHMARKS[str(context.info_name)]
    settings = Run(
        resolve_device(device),
        _command(context),
        sizes=tuple(size or ()),
        variants=tuple(variant or ()),
        dtype=resolve_dtype(dtype) if dtype else None,
        shape=shape,
        profile=profile,
        quick=quick,
    )
    with progress_bar() as show:
        records = run(benchmark, settings, show)
    _show(benchmark, settings, records, output, plot, as_json)


def measure_quantize(
    context: typer.Context,
    shape: QuantizedShape = "chatglm2-6b",
    layers: Layers = None,
    gpus: Gpus = None,
    samples: Samples = 128,
    seqlen: Seqlen = 2048,
    scheme: SchemeName = "w4a16-g128",
    algorithm: Algorithm = "gptq",
    directory: Directory = None,
    device: Device = "auto",
    output: Output = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure the quantization of a whole model."""
    from warpbus.bench import Run
    from warpbus.bench.quantize import QuantizeBenchOptions, parse_counts, quantize_benchmark
    from warpbus.cuda.devices import resolve_device

    work = QuantizeBenchOptions(
        shape=shape,
        layers=layers,
        counts=parse_counts(gpus) if gpus else (),
        samples=samples,
        seqlen=seqlen,
        scheme=scheme,
        algorithm=algorithm,
        directory=directory,
    )
    settings = Run(resolve_device(device), _command(context))
    _measure_whole(partial(quantize_benchmark, work), settings, output, plot, as_json)


def measure_serving(
    context: typer.Context,
    shape: ServedShape = None,
    scheme: SchemeName = "w4a16-g128",
    concurrency: Concurrency = None,
    rates: Rates = None,
    prompt: PromptTokens = None,
    tokens: AnswerTokens = None,
    url: Url = None,
    serve: Serve = None,
    peer: WithPeer = True,
    quick: Quick = False,
    device: Device = "auto",
    output: Output = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure many requests at once."""
    from warpbus.bench import Run
    from warpbus.bench.quantize import parse_counts
    from warpbus.bench.serving import ServingBenchOptions, parse_numbers, serving_benchmark
    from warpbus.cuda.devices import resolve_device

    work = ServingBenchOptions(
        shape=shape,
        scheme=scheme,
        concurrency=parse_counts(concurrency, "concurrency") if concurrency else (),
        rates=parse_numbers("rates", rates) if rates else (),
        prompt=prompt,
        tokens=tokens,
        url=url,
        serve=serve,
        peer=peer,
    )
    settings = Run(resolve_device(device), _command(context), quick=quick)
    _measure_whole(partial(serving_benchmark, work), settings, output, plot, as_json)


def measure_parallel(
    context: typer.Context,
    shape: ParallelShape = None,
    layers: Layers = None,
    scheme: ParallelScheme = None,
    gpus: Gpus = None,
    tokens: AnswerTokens = None,
    quick: Quick = False,
    device: Device = "auto",
    output: Output = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure one sequence on several GPUs."""
    from warpbus.bench import Run
    from warpbus.bench.parallel import ParallelBenchOptions, parallel_benchmark
    from warpbus.bench.quantize import parse_counts
    from warpbus.cuda.devices import resolve_device

    counts = parse_counts(gpus) if gpus else ()
    work = ParallelBenchOptions(shape=shape, layers=layers, scheme=scheme, counts=counts, tokens=tokens)
    settings = Run(resolve_device(device), _command(context), quick=quick)
    _measure_whole(partial(parallel_benchmark, work), settings, output, plot, as_json)


def measure_train(
    context: typer.Context,
    shape: TrainedShape = None,
    layers: Layers = None,
    variant: TrainingVariant = None,
    gpus: Gpus = None,
    length: RowLength = None,
    rows: RowsOfGpu = None,
    recompute: Recompute = 0,
    scheme: SchemeName = "w4a16-g128",
    sharding: Sharding = "ddp",
    price: Price = None,
    peer: WithTorch = True,
    quick: Quick = False,
    device: Device = "auto",
    output: Output = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure training."""
    from warpbus.bench import Run
    from warpbus.bench.quantize import parse_counts
    from warpbus.bench.train import TrainBenchOptions, train_benchmark
    from warpbus.cuda.devices import resolve_device

    work = TrainBenchOptions(
        shape=shape,
        layers=layers,
        counts=parse_counts(gpus) if gpus else (),
        length=length,
        rows=rows,
        recompute=recompute,
        scheme=scheme,
        sharding=sharding,
        price=price,
        peer=peer,
    )
    settings = Run(resolve_device(device), _command(context), variants=tuple(variant or ()), quick=quick)
    _measure_whole(partial(train_benchmark, work), settings, output, plot, as_json)


def measure_pool(
    context: typer.Context,
    part: Parts = None,
    gigabits: Gigabits = "1,10",
    shape: ServedShape = None,
    quick: Quick = False,
    device: Device = "auto",
    output: Output = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure a GPU that is reached over a pool."""
    from warpbus.bench import Run
    from warpbus.bench.pool import PoolBenchOptions, pool_benchmark
    from warpbus.bench.serving import parse_numbers
    from warpbus.cuda.devices import resolve_device

    work = PoolBenchOptions(parts=tuple(part or ()), gigabits=parse_numbers("gigabits", gigabits), shape=shape)
    settings = Run(resolve_device(device), _command(context), quick=quick)
    _measure_whole(partial(pool_benchmark, work), settings, output, plot, as_json)


def _measure_whole(
    made: "Callable[[Progress], Benchmark]", settings: "Run", output: Path | None, plot: Path | None, as_json: bool
) -> None:
    """Measure what takes long enough to tell of its parts."""
    from warpbus.bench import run

    with progress_bar() as show:
        benchmark = made(show)
        records = run(benchmark, settings)
    _show(benchmark, settings, records, output, plot, as_json)


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


# Their own description stands with the commands: to import the benchmarks takes a second.
for _name, _help in {
    "vector-add": """Vector addition by size, CPU against GPU, with and without the transfers.

    In float32. Without a GPU: the operator's CPU path beside numpy.
    """,
    "matmul": """Square matrix products by size, CPU against GPU, with and without the transfers.

    Variants are rungs of the ladder; naive, tiled and wmma unless others are named. Without a GPU: the operator's CPU
    path beside numpy.
    """,
    "ladder": """Every rung of the ladder beside cuBLAS: what each step gains. Needs a GPU.

    Without --dtype, rungs that know no 16 bits are measured in float32.
    """,
    "gemm": """Matrix products beside cuBLAS: squares, and prompts through the layers of ChatGLM2-6B. Needs a GPU.

    With --size, squares of these sizes alone.
    """,
    "gemv": """One token through the layers of ChatGLM2-6B, whole or shared by 2 or 4 GPUs, beside cuBLAS. Needs a GPU.

    With --size, square matrices of these sizes alone.
    """,
    "linear": """A layer sigmoid(Wx + b) in one kernel, beside torch and torch.compile.

    Without a GPU: the operator's CPU path.
    """,
    "wna16": """Weights of few bits in the layers of ChatGLM2-6B, beside cuBLAS, tinygemm and humming. Needs a GPU.

    Variants are quantization schemes; w4a16-g128 unless others are named. With --size, these numbers of tokens alone.
    humming takes part if the package humming-kernels is installed.
    """,
    "w8a8": """Weights and activations of 8 bits, beside cuBLAS in 16 bits and torch's 8-bit products. Needs a GPU.

    Variants are fp8 and int8. With --size, these numbers of tokens alone.
    """,
    "attention": """One new token of every sequence against its cache, beside torch's fused attention. Needs a GPU.

    Variants say what the cache is kept in: auto (as the activations), int8 or fp8. With --size, these contexts alone.
    """,
}.items():
    bench.command(_name, help=_paragraphs(_help))(measure)

bench.command(
    "decode",
    help=_paragraphs(
        """A whole model of random weights generates, beside other ways to run one of its shape. Needs a GPU.

        Tokens a second after the first, 256 of them after a prompt of 128; and by the driver's account the memory that
        reading 2048 tokens and generating 8192 takes. Variants are quantization schemes. With --size, so many tokens.
        """
    ),
)(measure_decode)

bench.command(
    "quantize",
    help=_paragraphs(
        """A whole model of random weights is quantized, by 1 GPU and by more: seconds, by stage, and limits.

        Also memory, GPU-seconds, energy, and the share of the quantized integers that are the same whatever the number
        of GPUs. Every run is a fresh process, whose start is counted. Without a GPU: processes on the CPU, for which a
        small --layers, --samples and --seqlen are advised.
        """
    ),
)(measure_quantize)

bench.command(
    "serving",
    help=_paragraphs(
        """Many requests at once: throughput and latencies, beside transformers' continuous batching.

        An engine with a model of random weights, in this process; with --url or --serve a server, over HTTP. Requests
        of random tokens come from so many clients that each wait for their answer (closed loops), and at random moments
        (open loops). In this process also: what the host takes of a step, how long a step lasts while the cache grows,
        and how fast the weights leave and come back. Without a GPU: a small shape.
        """
    ),
)(measure_serving)

bench.command(
    "parallel",
    help=_paragraphs(
        """One sequence of a model of random weights that 1, 2, ... GPUs share: milliseconds a token.

        In bfloat16, after a prompt of 128 tokens. Without a GPU: a small shape and processes on the CPU.
        """
    ),
)(measure_parallel)

bench.command(
    "train",
    help=_paragraphs(
        """A model of random weights is trained: tokens a second, share of what products allow, memory, energy, cost.

        By every method (full, lora, qlora, ptuning), in fp32, tf32, bf16 and fp8, eager and compiled, by 1, 2, ...
        GPUs, beside the same in PyTorch's own parts; and what a token takes of the models afterwards. Each run has
        processes of its own. Without a GPU: a tiny shape.
        """
    ),
)(measure_train)

bench.command(
    "pool",
    help=_paragraphs(
        """A GPU that is reached over a pool, beside this machine's own: operators, steps, shares, moves.

        Daemons and clients are processes of this machine. Parts: operators (what one costs the client, and a read),
        transfers, training (a step of a GPT), decode (a token of our engine), links (the same between network
        namespaces at 1 and 10 Gbit/s, which needs root), shares (two tenants who want all; needs a GPU) and migration
        (how long a move stops its client). Without a GPU: small sizes.
        """
    ),
)(measure_pool)


def _command(context: typer.Context) -> str:
    """What was typed, as a command that measures the same again."""
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
