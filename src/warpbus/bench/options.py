"""The options of the benchmarks of whole models, and those of a run of any benchmark.

`warpbus bench` builds the options of its commands from these fields, so this module imports nothing that is slow to
load.
"""

from dataclasses import dataclass
from pathlib import Path

SCHEME = "w4a16-g128"


@dataclass(kw_only=True)
class RunOptions:
    """The options of a run of a benchmark.

    Attributes:
        variants, shape: `None` or empty means the benchmark's own.
        profile: also say where the time goes.
        quick: few cases and few samples.
    """

    variants: tuple[str, ...] = ()
    shape: str | None = None
    profile: bool = False
    quick: bool = False


@dataclass(frozen=True)
class QuantizeBenchOptions:
    """The measurements of `warpbus bench quantize`; `counts` are numbers of GPUs, ascending."""

    shape: str = "chatglm2-6b"
    layers: int | None = None
    counts: tuple[int, ...] = ()
    samples: int = 128
    seqlen: int = 2048
    scheme: str = SCHEME
    algorithm: str = "gptq"
    directory: Path | None = None


@dataclass(frozen=True)
class ServingBenchOptions:
    """The measurements of `warpbus bench serving`; see `ServingEffort` for the defaults of empty fields."""

    shape: str | None = None
    scheme: str = SCHEME
    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    prompt: int | None = None
    tokens: int | None = None
    url: str | None = None
    serve: str | None = None
    activation_dtype: str = "auto"
    peer: bool = True


@dataclass(frozen=True)
class ParallelBenchOptions:
    """The measurements of `warpbus bench parallel`; `counts` are numbers of GPUs, ascending."""

    shape: str | None = None
    layers: int | None = None
    scheme: str | None = None
    counts: tuple[int, ...] = ()
    tokens: int | None = None
    expert_parallel: bool = False


@dataclass(frozen=True)
class TrainBenchOptions:
    """The measurements of `warpbus bench train`; `counts` are numbers of GPUs, ascending."""

    shape: str | None = None
    layers: int | None = None
    counts: tuple[int, ...] = ()
    length: int | None = None
    rows: int | None = None
    recompute: int = 0
    scheme: str = SCHEME
    sharding: str = "ddp"
    price: float | None = None
    peer: bool = True


@dataclass(frozen=True)
class PoolBenchOptions:
    """The measurements of `warpbus bench pool`; empty `parts` are all."""

    parts: tuple[str, ...] = ()
    gigabits: tuple[float, ...] = (1.0, 10.0)
    shape: str | None = None
