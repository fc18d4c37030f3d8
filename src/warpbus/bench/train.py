"""`train`: how fast a model is trained, in every precision and by every method, by one GPU and by more."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import warpbus
from warpbus.bench.cases import Benchmark, Plot, Progress, Result, Run, Task
from warpbus.bench.ceilings import precision_rate
from warpbus.bench.options import TrainBenchOptions
from warpbus.bench.records import Parameter
from warpbus.bench.report import number, say
from warpbus.bench.train_plot import train_figure, train_finding
from warpbus.bench.train_process import ProcessMeasurement, TrainBenchTask, answer, job
from warpbus.bench.train_variants import ONE_BILLION, TINY, Variant, chosen, scales, shape_named
from warpbus.dist import SHARES, Processes
from warpbus.errors import DeviceError, UsageError
from warpbus.models import ModelConfig
from warpbus.qtensor import Scheme
from warpbus.train.memory import num_trained
from warpbus.train.plan import flops_per_token
from warpbus.train.settings import TrainingSettings

_WARM, _STEPS = 3, 10
_QUICK_STEPS = 3
_LENGTH, _SHORT_LENGTH = 2048, 64
_ROWS = {ONE_BILLION: 4, TINY: 2}
_LARGE_ROWS = 4
_ANSWERS, _ANSWER_TOKENS = 3, 64


def train_benchmark(work: TrainBenchOptions, progress: Progress = lambda what, done, total: None) -> Benchmark:
    """The benchmark of some work; `progress` is called for each run."""
    return Benchmark(
        "train",
        "Training a model of random weights",
        lambda run: _cases(run, work, progress),
        Plot(x=None, figure=train_figure, finding=train_finding),
        takes=("variants",),
    )


def _cases(run: Run, work: TrainBenchOptions, progress: Progress) -> list[Task]:
    shape = work.shape or (ONE_BILLION if run.on_gpu else TINY)
    config = shape_named(shape, work.layers)
    variants = chosen(run, shape)
    if run.device.index:
        raise UsageError(f"--device {run.device}: GPUs are taken from the first one on: leave the number out")
    length = work.length or (_LENGTH if run.on_gpu else _SHORT_LENGTH)
    numbers = (("layers", work.layers), ("length", length), ("rows", work.rows), ("recompute", work.recompute or None))
    for option, value in numbers:
        if value is not None and value < 1:
            raise UsageError(f"--{option} {value}: it has to be at least 1")
    if length > config.max_context:
        raise UsageError(f"--length {length}: the context of {shape} is {config.max_context:,} tokens: lower it")
    if work.price is not None and not work.price > 0:
        raise UsageError(f"--price {work.price:g}: expected dollars for an hour of a GPU, above 0")
    most = torch.cuda.device_count() if run.on_gpu else SHARES
    for count in work.counts:
        if not 1 <= count <= most:
            raise UsageError(f"--gpus {count}: give numbers from 1 to {most}")
    counts = work.counts or tuple(each for each in (1, 2, 4, 8) if each <= (most if run.on_gpu else 1))
    every = bool(work.counts or run.variants)
    planned = [(each, count) for each in variants for count in counts if every or count == counts[0] or scales(each)]
    rows = work.rows or _ROWS.get(shape, _LARGE_ROWS)
    return [partial(_Measurements(run, work, shape, config, length, rows, progress).all, planned)]


@dataclass(frozen=True)
class _Measurements:
    """All runs of a benchmark, one after the other; `rows` are a GPU's."""

    run: Run
    work: TrainBenchOptions
    shape: str
    config: ModelConfig
    length: int
    rows: int
    progress: Progress

    def all(self, planned: Sequence[tuple[Variant, int]]) -> list[Result]:
        """Every variant with every number of GPUs; the first one is what the others are held against."""
        rates = {variant.precision: precision_rate(self.run.device, variant.precision) for variant, _ in planned}
        if self.run.on_gpu:
            torch.cuda.empty_cache()  # other processes work there from now on
        found: dict[tuple[Variant, int], list[ProcessMeasurement]] = {}
        plain: dict[tuple[Variant, int], list[ProcessMeasurement]] = {}
        for done, (variant, count) in enumerate(planned):
            self.progress(f"{variant}, {count}", done, len(planned))
            found[variant, count] = self._train(variant, count, plain=False)
            beside = variant.plain if self.work.peer else None
            if beside is not None and (beside, count) not in plain:
                self.progress(f"torch {beside}, {count}", done, len(planned))
                try:
                    plain[beside, count] = self._train(beside, count, plain=True)
                except DeviceError as error:  # for want of memory, above all
                    plain[beside, count] = []
                    self.run.note(f"torch, {beside}, {count}: not measured: {error}")
        answers = self._answers(planned)
        results: list[Result] = []
        for variant, count in planned:
            rows = _VariantResults(self, variant, count, planned[0], found[planned[0]])
            others = None if variant.plain is None else plain.get((variant.plain, count)) or None
            measured = rows.all(found[variant, count], others, rates[variant.precision])
            afterwards = statistics.median(answers[variant.method == "qlora"])
            medians = [f"{number(statistics.median(row.ours))} {row.unit}" for row in measured]
            medians.append(f"{number(afterwards)} ms for a token of its answers")
            self.run.note(f"{variant}, {rows.counted(count)}: {', '.join(medians)}")
            results += measured
        results += self._answer_rows(planned, answers)
        self.progress("train", len(planned), len(planned))
        return results

    def settings(self, variant: Variant, count: int) -> TrainingSettings:
        """Of a variant, with as many rows for each GPU however many there are."""
        work = self.work
        settings = variant.settings(self.length, self.rows * count, work.recompute, work.scheme, work.sharding)
        return replace(settings, rows_at_once=self.rows)

    def _train(self, variant: Variant, count: int, *, plain: bool) -> list[ProcessMeasurement]:
        settings = self.settings(variant, count)
        steps = _QUICK_STEPS if self.run.quick or not self.run.on_gpu else _STEPS
        task = TrainBenchTask(self.config, settings, variant.precision == "tf32", plain, _WARM, steps)
        said: list[ProcessMeasurement] = []
        self._in_processes(job, count, said, task)
        speed = count * self.rows * self.length / statistics.median(said[0].seconds)
        say(f"{'torch, ' if plain else ''}{variant}, {count}: {number(speed)} tokens/s")
        return said

    def _answers(self, planned: Sequence[tuple[Variant, int]]) -> dict[bool, list[float]]:
        """Milliseconds per token of the trained models: with plain weights, or rounded ones."""
        found: dict[bool, list[float]] = {}
        for rounded, name in sorted(self._schemes(planned).items()):
            said: list[list[float]] = []
            scheme = None if name is None else Scheme.parse(name)
            self._in_processes(answer, 1, said, self.config, scheme, _ANSWER_TOKENS, _ANSWERS)
            found[rounded] = [1e3 * each for each in said[0]]
        return found

    def _schemes(self, planned: Sequence[tuple[Variant, int]]) -> dict[bool, str | None]:
        return {variant.method == "qlora": self.settings(variant, 1).quantize for variant, _ in planned}

    def _answer_rows(self, planned: Sequence[tuple[Variant, int]], answers: Mapping[bool, list[float]]) -> list[Result]:
        schemes = {rounded: name or "none" for rounded, name in self._schemes(planned).items()}
        first = min(answers)
        parameters: dict[str, Parameter] = {"shape": self.shape, "layers": self.config.num_layers, "prompt": 128}
        return [
            Result(
                {**parameters, "task": "answer", "scheme": schemes[rounded], "timed": "clock"},
                metric="latency",
                unit="ms",
                ours=each,
                peers=[(f"warpbus, {schemes[first]}", warpbus.__version__, answers[first])],
                floor=None,
            )
            for rounded, each in answers.items()
        ]

    def _in_processes(self, what: Any, count: int, said: list[Any], *arguments: object) -> None:
        """Fresh ones, so that no run warms the next or takes its memory."""
        device = self.run.device
        devices = [torch.device("cuda", at) if self.run.on_gpu else device for at in range(count)]
        with Processes(what, devices=devices, receive=said.append, apart=True) as processes:
            processes.run(*arguments)


@dataclass(frozen=True)
class _VariantResults:
    """The results of one variant with one number of GPUs.

    Attributes:
        base, before: the run that it is held against, and what it found.
    """

    of: _Measurements
    variant: Variant
    count: int
    base: tuple[Variant, int]
    before: list[ProcessMeasurement]

    def all(self, ours: list[ProcessMeasurement], plain: list[ProcessMeasurement] | None, rate: float) -> list[Result]:
        """Speed, memory, energy, cost and what was learnt, as far as they are known.

        Args:
            plain: the results of PyTorch's own parts in the same place.
            rate: operations a second of a large product in this precision, on one GPU.
        """
        settings = self.of.settings(self.variant, self.count)
        once = replace(settings, recompute=0)
        limit = self.count * rate / flops_per_token(self.of.config, once, num_trained(self.of.config, once))
        rows = [
            self._row("speed", "tokens/s", self._speeds, ours, plain, floor=limit),
            self._row("time", "GPU-s/M tokens" if self.of.run.on_gpu else "s/M tokens", self._seconds, ours, plain),
            self._row("memory", "GB", lambda found, count: [found[0].memory / 1e9], ours, plain),
            self._row("energy", "J/1000 tokens", self._joules, ours, plain),
            self._row("cost", "dollars/M tokens", self._dollars, ours, plain),
            self._row("perplexity", "perplexity", lambda found, count: [_perplexity(found)], ours, plain),
        ]
        return [row for row in rows if row is not None]

    def counted(self, count: int) -> str:
        """So many GPUs or processes."""
        return (
            f"{count} {self._unit()}" if count == 1 else f"{count} {self._unit()}{'s' if self.of.run.on_gpu else 'es'}"
        )

    def _row(
        self,
        metric: str,
        unit: str,
        values: Any,
        ours: list[ProcessMeasurement],
        plain: list[ProcessMeasurement] | None,
        floor: float | None = None,
    ) -> Result | None:
        samples, base = values(ours, self.count), values(self.before, self.base[1])
        if not all(samples) or not all(base):
            return None
        variant, count = self.base
        apart = "" if count == self.count else f", {self.counted(count)}"
        peers = [(f"warpbus, {variant}{apart}", warpbus.__version__, base)]
        if plain is not None and all(values(plain, self.count)):
            peers.insert(0, (f"torch, {self.variant.plain}", torch.__version__, values(plain, self.count)))
        return Result(self._parameters(), metric, unit, samples, peers, floor)

    def _parameters(self) -> Mapping[str, Parameter]:
        of = self.of
        return {
            "shape": of.shape,
            "layers": of.config.num_layers,
            "method": self.variant.method,
            "precision": self.variant.precision,
            "mode": self.variant.mode,
            "gpus" if of.run.on_gpu else "processes": self.count,
            "length": of.length,
            "rows": of.rows,
            "recompute": of.work.recompute,
            "sharding": of.work.sharding,
            "timed": "clock",
        }

    def _tokens(self, count: int) -> int:
        return count * self.of.rows * self.of.length

    def _speeds(self, found: list[ProcessMeasurement], count: int) -> list[float]:
        return [self._tokens(count) / seconds for seconds in found[0].seconds]

    def _seconds(self, found: list[ProcessMeasurement], count: int) -> list[float]:
        """Of all GPUs together, for a million tokens."""
        return [1e6 * count / speed for speed in self._speeds(found, count)]

    def _joules(self, found: list[ProcessMeasurement], count: int) -> list[float]:
        joules = [each.joules for each in found if each.joules is not None]
        return [1e3 * sum(joules) / (self._tokens(count) * len(found[0].seconds))] if len(joules) == count else [0.0]

    def _dollars(self, found: list[ProcessMeasurement], count: int) -> list[float]:
        price = (self.of.work.price or 0.0) / 3600
        return [price * seconds for seconds in self._seconds(found, count)]

    def _unit(self) -> str:
        return "GPU" if self.of.run.on_gpu else "process"


def _perplexity(found: list[ProcessMeasurement]) -> float:
    return math.exp(found[0].loss)
