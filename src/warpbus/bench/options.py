"""The options of the benchmarks of whole models; each dataclass declares the options of one command.

`warpbus bench` builds the options of its commands from these fields, so this module imports nothing that is slow to
load.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warpbus.errors import UsageError

SCHEME = "w4a16-g128"
_SHAPE_OR_SMALL = "chatglm2-6b (default), glm-4-9b or llama-3-8b; small is the default without a GPU"


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """Distinct whole numbers, separated by commas in `text`, ascending; raises UsageError for other text."""
    pieces = text.split(",")
    if not all(piece.isascii() and piece.isdigit() for piece in pieces):
        raise UsageError(f"--{option} {text}: expected whole numbers separated by commas, such as 1,2,4")
    return tuple(sorted(set(map(int, pieces))))


def parse_numbers(option: str, text: str) -> tuple[float, ...]:
    """Distinct positive numbers, separated by commas in `text`, ascending; raises UsageError for other text."""
    try:
        found = tuple(sorted(set(map(float, text.split(",")))))
    except ValueError:
        found = ()
    if not found or not all(0 < each < float("inf") for each in found):
        raise UsageError(f"--{option} {text}: expected positive numbers separated by commas")
    return found


def _described(
    help: str, *, name: str | None = None, parse: Callable[[str, str], tuple[float, ...]] | None = None
) -> dict[str, Any]:
    """The metadata of a field: how the command line shows its option.

    Args:
        help: the help text of the option.
        name: of the option, if it is not that of the field.
        parse: converts the option's name and text to the value.
    """
    return {"help": help, "name": name, "parse": parse}


_LAYERS = _described("number of layers, instead of the shape's, for a quick look")
_GPUS = _described(
    "numbers of GPUs (of processes on the CPU), such as 1,2,4; default: 1 and more, up to all",
    name="gpus",
    parse=parse_counts,
)


@dataclass(frozen=True)
class QuantizeBenchOptions:
    """What `warpbus bench quantize` measures; `counts` are numbers of GPUs, ascending."""

    shape: str = field(default="chatglm2-6b", metadata=_described("chatglm2-6b, glm-4-9b or llama-3-8b"))
    layers: int | None = field(default=None, metadata=_LAYERS)
    counts: tuple[int, ...] = field(default=(), metadata=_GPUS)
    samples: int = field(default=128, metadata=_described("number of random calibration sequences"))
    seqlen: int = field(default=2048, metadata=_described("tokens per calibration sequence"))
    scheme: str = field(default=SCHEME, metadata=_described("quantization scheme"))
    algorithm: str = field(default="gptq", metadata=_described("gptq, awq or smoothquant"))
    directory: Path | None = field(
        default=None, metadata=_described("directory for temporary models; default: the system's temporary directory")
    )


@dataclass(frozen=True)
class ServingBenchOptions:
    """What `warpbus bench serving` measures; see `ServingEffort` for the defaults of empty fields."""

    shape: str | None = field(default=None, metadata=_described(_SHAPE_OR_SMALL))
    scheme: str = field(default=SCHEME, metadata=_described("quantization scheme of the layers"))
    concurrency: tuple[int, ...] = field(
        default=(), metadata=_described("numbers of concurrent requests, such as 1,16,64,256", parse=parse_counts)
    )
    rates: tuple[float, ...] = field(
        default=(),
        metadata=_described(
            "arrival rates, relative to the throughput at the highest concurrency: 0.25,0.5", parse=parse_numbers
        ),
    )
    prompt: int | None = field(default=None, metadata=_described("tokens per prompt"))
    tokens: int | None = field(default=None, metadata=_described("tokens per answer"))
    url: str | None = field(default=None, metadata=_described("measure the server at this URL"))
    serve: str | None = field(
        default=None, metadata=_described("serve this model directory, or demo, and measure that server")
    )
    peer: bool = field(default=True, metadata=_described("also measure transformers, which takes a minute"))


@dataclass(frozen=True)
class ParallelBenchOptions:
    """What `warpbus bench parallel` measures; `counts` are numbers of GPUs, ascending."""

    shape: str | None = field(
        default=None,
        metadata=_described("glm-4-9b (default), chatglm2-6b or llama-3-8b; small is the default without a GPU"),
    )
    layers: int | None = field(default=None, metadata=_LAYERS)
    scheme: str | None = field(
        default=None, metadata=_described("quantization scheme of the layers; default: none, 16 bits")
    )
    counts: tuple[int, ...] = field(default=(), metadata=_GPUS)
    tokens: int | None = field(default=None, metadata=_described("tokens to generate"))


@dataclass(frozen=True)
class TrainBenchOptions:
    """What `warpbus bench train` measures; `counts` are numbers of GPUs, ascending."""

    shape: str | None = field(
        default=None, metadata=_described("1b (default), chatglm2-6b, ...; tiny is the default without a GPU")
    )
    layers: int | None = field(default=None, metadata=_LAYERS)
    counts: tuple[int, ...] = field(default=(), metadata=_GPUS)
    length: int | None = field(default=None, metadata=_described("tokens per row"))
    rows: int | None = field(default=None, metadata=_described("rows per GPU and forward pass"))
    recompute: int = field(
        default=0, metadata=_described("recompute the activations of every n-th layer; 0: of no layer")
    )
    scheme: str = field(default=SCHEME, metadata=_described("quantization scheme of qlora"))
    sharding: str = field(default="ddp", metadata=_described("between GPUs: ddp or fsdp"))
    price: float | None = field(
        default=None, metadata=_described("dollars per GPU hour, to compute the cost of a million tokens")
    )
    peer: bool = field(default=True, metadata=_described("also measure PyTorch's own layers"))


@dataclass(frozen=True)
class PoolBenchOptions:
    """What `warpbus bench pool` measures; empty `parts` are all."""

    parts: tuple[str, ...] = field(
        default=(),
        metadata=_described("measure this part (a wrong name lists them); can be given more than once", name="part"),
    )
    gigabits: tuple[float, ...] = field(
        default=(1.0, 10.0),
        metadata=_described(
            "rates of the links between network namespaces, in Gbit/s; default: 1,10", parse=parse_numbers
        ),
    )
    shape: str | None = field(default=None, metadata=_described(_SHAPE_OR_SMALL))
