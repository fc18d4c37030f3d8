"""`quantize`: how long a model takes to quantize with 1, 2, ... GPUs, what each stage takes, and whether all agree."""

import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import warpbus
from warpbus.bench import compressor
from warpbus.bench.cases import WHOLE, Benchmark, Plot, Progress, Result, Run, Task, distribution
from warpbus.bench.findings import stages
from warpbus.bench.options import QuantizeBenchOptions
from warpbus.bench.quantization_floors import Floors
from warpbus.bench.quantization_process import Timed, timed_run
from warpbus.bench.records import Parameter
from warpbus.dist import SHARES
from warpbus.errors import DeviceError, UsageError
from warpbus.formats import Checkpoint
from warpbus.formats.files import check_space
from warpbus.models import SHAPES, ModelConfig
from warpbus.models.random_checkpoint import write_random_checkpoint
from warpbus.qtensor import QTensor, Scheme
from warpbus.quantization.methods import METHODS
from warpbus.quantization.preflight import Plan, prepare

_DTYPE = torch.float16
_SHORTEST = 1e-6  # seconds: a record holds no zero


def quantize_benchmark(work: QuantizeBenchOptions, progress: Progress = lambda what, done, total: None) -> Benchmark:
    """The benchmark of some work; `progress` is called for the matrices of each run."""
    return Benchmark(
        "quantize",
        f"Quantizing {work.shape} with random weights",
        lambda run: _cases(run, work, progress),
        Plot(x=None, stacked="stage", finding=stages),
        takes=(),
    )


def _cases(run: Run, work: QuantizeBenchOptions, progress: Progress) -> list[Task]:
    """One piece of work: what was written once is read by all runs, and the first one's result compared with others."""
    if work.shape not in SHAPES:
        raise UsageError(f"--shape {work.shape}: there is no such shape: choose among {', '.join(SHAPES)}")
    if work.algorithm not in METHODS:
        raise UsageError(f"--algorithm {work.algorithm}: choose one that is calibrated: {', '.join(METHODS)}")
    if not METHODS[work.algorithm].fits(Scheme.parse(work.scheme)):
        raise UsageError(
            f"--algorithm {work.algorithm}: it cannot quantize to {work.scheme}: choose another of the two"
        )
    for option, value in (("layers", work.layers), ("samples", work.samples), ("seqlen", work.seqlen)):
        if value is not None and value < 1:
            raise UsageError(f"--{option} {value}: it has to be at least 1")
    if run.device.index:
        raise UsageError(f"--device {run.device}: GPUs are taken from the first one on: leave the number out")
    most = min(SHARES, torch.cuda.device_count() if run.on_gpu else SHARES)
    counts = work.counts or tuple(sorted({1, most if run.on_gpu else 2}))
    for count in counts:
        if not 1 <= count <= most:
            raise UsageError(f"--gpus {count}: give numbers from 1 to {most}")
    return [partial(_measure, run, work, counts, progress)]


def _measure(run: Run, work: QuantizeBenchOptions, counts: tuple[int, ...], progress: Progress) -> list[Result]:
    parent = Path(tempfile.gettempdir()) if work.directory is None else work.directory
    if not parent.is_dir():
        raise UsageError(f"--directory {parent}: there is no such directory: make it or name another")
    with tempfile.TemporaryDirectory(prefix="warpbus-bench-", dir=parent) as place:
        model, first = Path(place) / "model", Path(place) / f"quantized-{counts[0]}"
        check_space(model, _disk_bytes(work))
        progress("writing the model", 0, 1)
        started = time.perf_counter()
        write_random_checkpoint(model, work.shape, _DTYPE, layers=work.layers, device=run.device)
        run.note(f"the model was written in {time.perf_counter() - started:.1f} s, which is in none of the times")
        progress("writing the model", 1, 1)
        plan = prepare(model, first, Scheme.parse(work.scheme))
        floors = Floors.measured(
            plan, run.device, work.algorithm, work.samples * min(work.seqlen, plan.config.max_context)
        )
        if run.on_gpu:
            torch.cuda.empty_cache()  # other processes work there from now on
        peers = _peers(run, work)
        results: list[Result] = []
        base: Timed | None = None
        for count in counts:
            output = Path(place) / f"quantized-{count}"
            name = _named(run, count)
            timed = timed_run(
                model,
                output,
                scheme=work.scheme,
                algorithm=work.algorithm,
                samples=work.samples,
                seqlen=work.seqlen,
                device=run.device.type,
                count=count,
                progress=partial(progress, name),
            )
            base = timed if base is None else base
            rows = _QuantizeResults(run, work, count, f"warpbus, {_named(run, counts[0])}", plan.config)
            results += rows.times(timed, base, floors.of(count), peers)
            results += rows.costs(timed, base)
            if output != first:
                results.append(rows.agreement(100 * equal_share(plan, first, output)))
                shutil.rmtree(output)
        return results


def _disk_bytes(work: QuantizeBenchOptions) -> int:
    """The model, a quantized one to compare with, and the one that is being written."""
    config = SHAPES[work.shape].resized(num_layers=work.layers)
    layers = sum(layer.num_weights for layer in config.layers)
    ends = config.num_parameters - layers
    scheme = Scheme.parse(work.scheme)
    bits = scheme.bits_per_weight(config.hidden_size)
    return _DTYPE.itemsize * (layers + 3 * ends) + int(2 * layers * bits / 8)


def equal_share(plan: Plan, one: Path, other: Path) -> float:
    """The share of the quantized integers that two quantized models have in common, from 0 to 1."""
    left, right = Checkpoint(one), Checkpoint(other)
    same = total = 0
    for matrix in plan.matrices:
        for source in matrix.sources:
            prefix = source.removesuffix(".weight")
            a, b = (plan.format.from_tensors(each, prefix, matrix.scheme) for each in (left, right))
            count = a.shape[0] * a.shape[1]
            total += count
            same += count if torch.equal(_bytes(a), _bytes(b)) else int((_integers(a) == _integers(b)).sum())
    return same / total


def _bytes(weight: QTensor) -> torch.Tensor:
    return weight.qweight.contiguous().view(torch.uint8)


def _integers(weight: QTensor) -> torch.Tensor:
    return _bytes(weight) if weight.holds_values else weight.codes()


def _named(run: Run, count: int) -> str:
    what = "GPU" if run.on_gpu else "process"
    return f"{count} {what}" if count == 1 else f"{count} {what}{'s' if run.on_gpu else 'es'}"


def _peers(run: Run, work: QuantizeBenchOptions) -> list[tuple[str, str, float]]:
    """Seconds of others that are installed."""
    version = distribution("llmcompressor")
    if version is None:
        run.note("llm-compressor is not installed: it was not measured")
        return []
    try:
        seconds = compressor.timed(work.shape, work.layers, work.scheme, work.samples, work.seqlen)
    except (DeviceError, UsageError) as error:
        run.note(f"llm-compressor was not measured: {error}")
        return []
    return [("llm-compressor", version, seconds)]


@dataclass(frozen=True)
class _QuantizeResults:
    """The results of a run.

    Attributes:
        count: of the GPUs, or processes.
        beside: the name of the run that it is held against.
        config: of the model.
    """

    run: Run
    work: QuantizeBenchOptions
    count: int
    beside: str
    config: ModelConfig

    def times(
        self, timed: Timed, base: Timed, floors: Mapping[str, float], peers: list[tuple[str, str, float]]
    ) -> list[Result]:
        """Of all stages together and of each."""
        rows = [self._row({"stage": WHOLE}, "time", "s", timed.seconds, base.seconds, floors[WHOLE], peers)]
        for stage, seconds in timed.stages.items():
            own, other = max(seconds, _SHORTEST), max(base.stages.get(stage, 0.0), _SHORTEST)
            rows.append(self._row({"stage": stage}, "time", "s", own, other, floors.get(stage)))
        return rows

    def costs(self, timed: Timed, base: Timed) -> list[Result]:
        """Memory, and what the GPUs took of time and energy as far as it is known."""
        own, other = timed.report, base.report
        figures: list[tuple[dict[str, str], str, str, float | None, float | None, float]] = [
            ({"of": "each GPU"}, "memory", "GB", own.peak_gpu_memory, other.peak_gpu_memory, 1e-9),
            ({"of": "the first process"}, "memory", "GB", own.peak_memory, other.peak_memory, 1e-9),
            ({}, "time", "GPU-seconds", own.gpu_seconds, other.gpu_seconds, 1.0),
            ({}, "energy", "J", own.energy_joules, other.energy_joules, 1.0),
        ]
        return [
            self._row(parameters, metric, unit, scale * value, scale * beside, None)
            for parameters, metric, unit, value, beside, scale in figures
            if value and beside
        ]

    def agreement(self, share: float) -> Result:
        """The share of the quantized integers that are those of the run that it is held against, in per cent."""
        return self._row({}, "agreement", "%", share, 100.0, 100.0)

    def _row(
        self,
        parameters: Mapping[str, str],
        metric: str,
        unit: str,
        ours: float,
        base: float,
        floor: float | None,
        peers: list[tuple[str, str, float]] | None = None,
    ) -> Result:
        shared: dict[str, Parameter] = {
            "shape": self.work.shape,
            "layers": self.config.num_layers,
            "variant": self.work.scheme,
            "algorithm": self.work.algorithm,
            "samples": self.work.samples,
            "seqlen": self.work.seqlen,
            "gpus" if self.run.on_gpu else "processes": self.count,
        }
        beside = [(self.beside, warpbus.__version__, [base])]
        beside += [(name, version, [seconds]) for name, version, seconds in peers or []]
        return Result({**shared, **parameters, "timed": "clock"}, metric, unit, [ours], beside, floor)
