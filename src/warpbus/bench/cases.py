"""The parts of a benchmark, and the one loop that measures all of them."""

import importlib.metadata
import itertools
import math
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

import warpbus
from warpbus.bench.options import RunOptions
from warpbus.bench.records import Parameter, Peer, Record, now, ratio
from warpbus.bench.timing import FULL, QUICK, Call, Inputs, Timing, TimingEffort, measure
from warpbus.cuda.cpu import cpu_model
from warpbus.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[str, int, int], None]

WHOLE = "all"
"""The value that stands for all others of a parameter, such as the stages of a run."""

# The unit of each metric that is derived from a time, and how many of it make one base unit (second, FLOP, byte).
_UNITS = {
    "time": ("us", 1e6),
    "throughput": ("TFLOP/s", 1e-12),
    "bandwidth": ("GB/s", 1e-9),
}


@dataclass(frozen=True)
class PeerContender:
    """A peer that is about to be measured.

    Either `call` takes turns with ours on the same inputs, or `alone` gives a timing that was taken without ours, for
    work that runs on another device.
    """

    name: str
    version: str
    call: Call | None = None
    alone: Callable[[], Timing] | None = None


@dataclass(frozen=True)
class Case:
    """One piece of work.

    Attributes:
        parameters: the parameters that identify it in its records.
        metric: "time", "throughput" or "bandwidth".
        work: FLOPs or bytes of one call, for the two rates; any positive number for a time.
        floor_seconds: the least time that the machine could need, or `None` where none is known.
        make, touched: see `timing.measure`.
    """

    parameters: Mapping[str, Parameter]
    metric: str
    work: float
    floor_seconds: float | None
    make: Callable[[], Inputs]
    ours: Call
    rivals: Sequence[PeerContender]
    touched: int | None = None

    def value(self, seconds: float) -> float:
        """A time of one call in the unit of the metric."""
        scale = _UNITS[self.metric][1]
        return seconds * scale if self.metric == "time" else self.work / seconds * scale


@dataclass(frozen=True)
class Result:
    """The measurements of one piece of work, all numbers in `unit`.

    Attributes:
        parameters: the parameters that identify it in its records.
        ours: our samples.
        peers: the name, version and samples of each peer.
        floor: the physical limit, or `None` where none is known.
    """

    parameters: Mapping[str, Parameter]
    metric: str
    unit: str
    ours: Sequence[float]
    peers: Sequence[tuple[str, str, Sequence[float]]]
    floor: float | None


# Something to measure: it says how that is done, or what came of it.
Task = Callable[[], Case | Sequence[Result]]


@dataclass
class Run(RunOptions):
    """One run of a benchmark: what was asked for, and what there is to say about it.

    Attributes:
        sizes, dtype: `None` or empty means the benchmark's own.
        notes: sentences for the reader of the table.
    """

    device: torch.device
    command: str
    sizes: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def effort(self) -> TimingEffort:
        """How long each case is measured."""
        return QUICK if self.quick else FULL

    @property
    def on_gpu(self) -> bool:
        """Whether the operators run on a GPU."""
        return self.device.type == "cuda"

    @cached_property
    def device_name(self) -> str:
        """As records have it."""
        return torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"

    def choose_sizes(self, full: Sequence[int], quick: Sequence[int]) -> tuple[int, ...]:
        """The sizes asked for, or the benchmark's."""
        return self.sizes or tuple(quick if self.quick else full)

    def choose_variants(self, known: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
        """The variants asked for, or the benchmark's.

        Raises:
            UsageError: one that does not exist.
        """
        for name in self.variants:
            if name not in known:
                raise UsageError(f"--variant {name}: there is no such variant: choose among {', '.join(known)}")
        return self.variants or tuple(default)

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True)
class Plot:
    """How the records of a benchmark are drawn.

    Attributes:
        x: the parameter of a logarithmic axis along which lines are drawn; `None` for one bar a case.
        x_label: the label of that axis.
        panels: parameters of which each combination of values gets a picture of its own.
        stacked: the parameter whose values are the pieces of one bar, all but `WHOLE`.
        relative: bars are relative to ours: for differences of a few percent over a wide range.
        figure: draws all of it in a way of its own.
        finding: the sentences above the picture, a line each; by default the speed against each peer.
    """

    x: str | None
    x_label: str = ""
    panels: tuple[str, ...] = ()
    stacked: str = ""
    relative: bool = False
    figure: "Callable[[Sequence[Record]], Figure] | None" = None
    finding: "Callable[[Sequence[Record]], str] | None" = None


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of `warpbus bench`.

    Attributes:
        name: the verb's argument.
        title: a title that names the compared things.
        cases: the cases of a run, each made when its turn comes.
        takes: the options of a run that it uses besides sizes: "variants", "dtype", "shape", "profile".
        needs_gpu: there is nothing to measure on the CPU.
        means: parameters and values whose cases' ratios are summed up, by the name of the group.
    """

    name: str
    title: str
    cases: Callable[[Run], Sequence[Task]]
    plot: Plot
    takes: tuple[str, ...] = ("variants", "dtype")
    needs_gpu: bool = False
    means: Mapping[str, Callable[[Mapping[str, Parameter]], bool]] = field(default_factory=dict)


def run(benchmark: Benchmark, settings: Run, progress: Progress = lambda what, done, total: None) -> list[Record]:
    """Measure every case of a benchmark.

    Returns:
        One record for each case and peer, in the order of the cases.

    Raises:
        DeviceError: the benchmark needs a GPU, or a case more memory than there is.
        UsageError: a size or variant that cannot be, or something that the benchmark does not look at.
    """
    for name in ("variants", "dtype", "shape", "profile"):
        if getattr(settings, name) and name not in benchmark.takes:
            raise UsageError(f"bench {benchmark.name} has no --{name.removesuffix('s')}: leave it out")
    if benchmark.needs_gpu and not settings.on_gpu:
        raise DeviceError(
            f"bench {benchmark.name}: needs an NVIDIA GPU, and this runs on the CPU: see what warpbus doctor says"
        )
    if any(size < 1 for size in settings.sizes):
        raise UsageError(f"--size {min(settings.sizes)}: a size is a positive number")
    prepared = benchmark.cases(settings)
    date, installed = now(), versions()
    records: list[Record] = []
    progress(benchmark.name, 0, len(prepared))
    for done, make in enumerate(prepared, 1):
        found = make()
        for result in [_result(found, settings)] if isinstance(found, Case) else found:
            records += _records(benchmark.name, result, settings, date, installed)
        progress(benchmark.name, done, len(prepared))
    return records


def _result(case: Case, settings: Run) -> Result:
    beside = [rival for rival in case.rivals if rival.call is not None]
    calls = [case.ours, *(rival.call for rival in beside if rival.call is not None)]
    ours, *timings = measure(calls, case.make, settings.effort, case.touched)
    if ours.method == "events":
        settings.note(
            "timed = events: a peer of that case waits for the GPU, so nothing of it was put into a CUDA graph."
        )
    # A peer that is measured alone often belongs to several cases, and comes from the first of them.
    by_name = {rival.name: timing for rival, timing in zip(beside, timings, strict=True)}
    by_name |= {rival.name: rival.alone() for rival in case.rivals if rival.alone is not None}

    def values(timing: Timing) -> list[float]:
        return [case.value(seconds) for seconds in timing.seconds]

    return Result(
        parameters={**case.parameters, "timed": ours.method},
        metric=case.metric,
        unit=_UNITS[case.metric][0],
        ours=values(ours),
        peers=[(rival.name, rival.version, values(by_name[rival.name])) for rival in case.rivals],
        floor=None if case.floor_seconds is None else case.value(case.floor_seconds),
    )


def _records(bench: str, result: Result, settings: Run, date: str, installed: Mapping[str, str]) -> list[Record]:
    value = statistics.median(result.ours)
    return [
        Record(
            bench=bench,
            case=result.parameters,
            metric=result.metric,
            unit=result.unit,
            ours=value,
            peer=Peer(name, version, statistics.median(samples)),
            ratio=ratio(result.metric, value, statistics.median(samples)),
            floor=result.floor,
            samples={"ours": list(result.ours), "peer": list(samples)},
            device=settings.device_name,
            versions=installed,
            date=date,
            command=settings.command,
        )
        for name, version, samples in result.peers
    ]


def geometric_means(benchmark: Benchmark, records: Sequence[Record]) -> dict[str, float]:
    """The geometric mean of the ratios of each group of the benchmark that was measured, for each variant and peer."""
    variants = list(dict.fromkeys(record.case.get("variant") for record in records))
    peers = list(dict.fromkeys(record.peer.name for record in records))
    means = {}
    for group, variant, peer in itertools.product(benchmark.means, variants, peers):
        belongs = benchmark.means[group]
        of_variant = [each for each in records if each.case.get("variant") == variant and each.peer.name == peer]
        ratios = [each.ratio for each in of_variant if belongs(each.case)]
        if ratios:
            name = f"{group}, {variant}" if len(variants) > 1 else group
            name = f"{name}, against {peer}" if len(peers) > 1 else name
            means[name] = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return means


def versions() -> dict[str, str]:
    """Of everything that has a part in a measurement and is installed."""
    found = {"warpbus": warpbus.__version__, "python": platform.python_version(), "torch": torch.__version__}
    found["processor"] = cpu_model()
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name, distributions in (
        ("numpy", ("numpy",)),
        ("triton", ("triton",)),
        ("nvrtc", ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")),
        ("cublas", ("nvidia-cublas", "nvidia-cublas-cu12")),
        ("humming", ("humming-kernels",)),
        ("transformers", ("transformers",)),
    ):
        version = distribution(*distributions)
        if version:
            found[name] = version
    return found


def torch_rival(call: Call) -> PeerContender:
    """torch doing the same elementwise work beside ours."""
    return PeerContender("torch", torch.__version__, call)


def cublas_rival(call: Call) -> PeerContender:
    """cuBLAS, called through torch, beside ours."""
    version = distribution("nvidia-cublas", "nvidia-cublas-cu12")
    return PeerContender("cuBLAS", version or f"of CUDA {torch.version.cuda}", call)


def cublas_vector_rival() -> PeerContender:
    """cuBLAS multiplying a weight with one row, as a model does that calls `F.linear` on one token."""
    return cublas_rival(lambda weight, x: F.linear(x[None], weight))


def cpu_rival(alone: Callable[[], Timing]) -> PeerContender:
    """torch on the CPU, measured by itself."""
    return PeerContender("torch CPU", f"{torch.__version__}, {torch.get_num_threads()} threads", alone=alone)


def distribution(*names: str) -> str | None:
    """The version of the first of these packages that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def normal(rows: int, columns: int, device: torch.device, dtype: torch.dtype, std: float = 1.0) -> Tensor:
    """A matrix of normal numbers. Activations have a deviation of 1, a weight with `in` columns one of in**-0.5, so
    that products are about normal again."""
    return torch.randn(rows, columns, device=device, dtype=dtype).mul_(std)
