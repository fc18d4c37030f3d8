"""The work of each process of a run: layer after layer, from the checkpoint to finished parts of the new one.

All processes process all layers together; the first one writes. `layerwise` processes a layer, `methods` quantizes a
matrix.
"""

import json
import math
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.devices import default_dtype
from warpbus.cuda.energy import EnergyMeter
from warpbus.cuda.jit import architecture
from warpbus.dist import Group
from warpbus.dist.outcome import Send
from warpbus.errors import CheckpointError, DeviceError, StorageError, WarpbusError
from warpbus.formats import FinishedParts, ResumableCheckpoint
from warpbus.formats.kv_cache import KVCacheScheme
from warpbus.kernels.ops.arguments import ELEMENTS, gpu_has_kernels
from warpbus.kernels.units import compile_ahead
from warpbus.models import DecoderLayer
from warpbus.qtensor import QTensor, Scheme, Schemes
from warpbus.quantization.algorithms import rtn
from warpbus.quantization.algorithms.weights import relative, squared_loss
from warpbus.quantization.calibration import Calibration
from warpbus.quantization.estimate import QuantizationEstimate, device_rates, estimate
from warpbus.quantization.layerwise import LayerQuantization
from warpbus.quantization.methods import METHODS, Method, solve_small
from warpbus.quantization.output_parts import (
    end_parts,
    is_readable,
    kept_end_parts,
    kept_tensors,
    kv_scale_tensors,
    layer_part,
    quantized_matrix,
    restore_kept,
    stored_layer,
    stored_tensors,
    written_config,
)
from warpbus.quantization.preflight import REPORT_NAME, Plan, prepare
from warpbus.quantization.report import EndResult, LayerResult, Report, TuningResult, peak_memory, versions
from warpbus.quantization.saved_states import SavedStates, saved_layer
from warpbus.quantization.sources import Reading, Sources, check_finite
from warpbus.quantization.states import embed, enter_mtp
from warpbus.quantization.statistics import DRIFT
from warpbus.quantization.stopwatch import Stopwatch
from warpbus.quantization.survey import RankDevice, check_model
from warpbus.quantization.tuning_parts import STATE_PART, tune_parts, tuned_part

_TURN_SECONDS = 0.0001

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens that go through a layer at once: enough to keep the device busy, little next to the layer's own memory."""

_END_ELEMENTS = 2**24  # of the head or the embedding that are rounded at a time

_KERNELS = ("gptq/", "step/norm", "step/activation")
"""The kernels that a run needs, compiled while the first weights are read."""


@dataclass(frozen=True)
class Job:
    """The description of a run that every process gets.

    Attributes:
        model, output: directories.
        schemes: the schemes of the matrices.
        format: the name of the format to write.
        algorithm: one of `METHODS`, or "rtn".
        data: the calibration data; `None` without calibration.
        held: the calibration data that is held back to tune with; `None` without tuning.
        head: the scheme of the head; None does not quantize it.
        embedding: the same for the embedding.
        kv_cache: the scheme of the KV cache whose scales are calibrated; None for none.
        damping: see `algorithms.factored`.
        overwrite: replace a model at `output`.
        restart: discard the finished layers of an earlier run.
        expected_bytes: the number of bytes to write.
        identity: all settings that determine the result, as JSON.
        settings: the entries of the report about the calibration.
        model_hash: see `survey.model_hash`.
        started: when the run began, in seconds since the epoch.
    """

    model: Path
    output: Path
    schemes: Schemes
    format: str
    algorithm: str
    data: Calibration | None
    held: Calibration | None
    head: Scheme | None
    embedding: Scheme | None
    kv_cache: KVCacheScheme | None
    damping: float
    overwrite: bool
    restart: bool
    expected_bytes: int
    identity: Mapping[str, Any]
    settings: Mapping[str, Any]
    model_hash: str
    started: float


@dataclass(frozen=True)
class Begun:
    """A message: the first process has checked the parts of an earlier run.

    Attributes:
        found: "nothing", "finished parts" or "removed parts", see `ResumableCheckpoint`.
        layers: how many layers are finished already.
    """

    found: str
    layers: int


@contextmanager
def _quick_turns() -> Iterator[None]:
    """Python's threads take turns more often: the one that gives the GPU its work has to go on beside those that read
    and write, for each of which it would wait 5 ms again and again."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def get_ready(device: torch.device) -> None:
    """Load the libraries of every calibrated run while the process waits for its job."""
    if device.type != "cuda":
        return
    with suppress(WarpbusError, RuntimeError):  # what is wrong with the device, the job says
        check_gpu(device)
        dtype = torch.float16
        compile_ahead(_KERNELS, architecture(device), ELEMENTS[dtype])
        solve_small(Scheme.parse("w4a16-g128"), dtype, dtype, device)


def run_job(group: Group, send: Send, job: Job) -> None:
    """Do the part of a run that belongs to this process.

    The first process sends a `QuantizationEstimate`, `Checked` where parts are finished already, `Begun`, a
    `LayerResult` for each matrix, `TuningStep` after each step of a tuning, and at last the `Report`.

    Raises:
        WarpbusError: as `quantize`.
    """
    try:
        with ExitStack() as stack, _quick_turns():
            _QuantizationRun.open(group, send, job, stack).run()
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"{group.device}: out of memory: use fewer --samples or a shorter --seqlen, more or larger GPUs, "
            "or --device cpu"
        ) from error


@dataclass
class _QuantizationRun:
    """One process's side of a run."""

    group: Group
    send: Send
    job: Job
    plan: Plan
    watch: Stopwatch
    writer: ResumableCheckpoint | None
    sources: Sources | None
    parts: FinishedParts
    finished: frozenset[int]
    keep: bool
    estimate: Mapping[str, float]
    reading: Reading | None
    method: Method | None
    results: list[LayerResult] = field(default_factory=list)
    tuning: TuningResult | None = None
    ends: Future[None] | None = None

    @classmethod
    def open(cls, group: Group, send: Send, job: Job, stack: ExitStack) -> "_QuantizationRun":
        """Plan, and find out what is finished already. The first process says so to the others."""
        watch = Stopwatch(group.device)
        if group.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(group.device)
        plan = _planned(group, job)
        if group.device.type == "cuda":
            if job.data is not None:
                check_gpu(group.device)
            element = ELEMENTS[default_dtype(group.device, plan.dtype)]
            compile_ahead(_KERNELS, architecture(group.device), element)
        rank_device = RankDevice.of(group.device)  # before anything is taken of what is free
        reading, method = None, None
        rates = _rates(group, plan, tuned=job.held is not None)  # of a device that does nothing else
        if job.data is not None:
            # It begins while the method gets ready, and while the processes still find each other.
            reading, method = Reading(plan, group.device), _ready(job.algorithm, group, plan)
        needs, keep = _agreed(group, send, job, plan, rank_device, rates)
        done = torch.zeros(len(plan.config.all_layers), dtype=torch.int64, device=group.device)
        writer, sources = None, None
        parts = FinishedParts(job.output)
        if group.is_first:
            writer = stack.enter_context(
                ResumableCheckpoint(
                    job.output,
                    identity=job.identity,
                    overwrite=job.overwrite,
                    restart=job.restart,
                    expected_bytes=job.expected_bytes,
                )
            )
            parts = writer
            sources = stack.enter_context(Sources(plan))
            for index in range(len(done)):
                done[index] = is_readable(writer, layer_part(index))
            sources.check(writer, done.nonzero()[:, 0].tolist(), send)
            send(Begun(writer.found, int(done.sum())))
        # Read on the host: only then has the first process made its directory, GPUs add up behind the host's back.
        finished = frozenset(group.sum(done).nonzero()[:, 0].tolist())
        if not parts.directory.is_dir():
            raise StorageError(
                f"{parts.directory}: not there on {socket.gethostname()}, though process 0 has made it: name an output "
                "that all machines see"
            )
        expected = {} if needs is None else needs.figures()
        return cls(group, send, job, plan, watch, writer, sources, parts, finished, keep, expected, reading, method)

    @torch.no_grad()
    def run(self) -> None:
        """Quantize all layers, and put the model in its place."""
        with EnergyMeter([self.group.device]) as energy, ThreadPoolExecutor(1, "ends") as pool:
            # Checking and hashing the embedding and the head takes seconds, which a GPU does not wait for. Where the
            # CPU computes, it would only take memory beside the first layer.
            self.ends = pool.submit(self._commit_ends)
            if self.group.device.type == "cpu":
                self.ends.result()
                if self.writer is not None:
                    self.writer.drain()
            if self.job.data is None or self.method is None or self.reading is None:
                self._round_to_nearest()
            else:
                self._calibrate(self.job.data, self.method, self.reading)
            self.ends.result()
            self._commit_quantized_ends()
        peaks, joules = self._gathered(energy.total)
        if self.writer is None:
            return  # nobody needs this process any more
        self.writer.drain()
        self.watch.lap("writing")
        layers, left_out = [layer_part(index) for index, _ in enumerate(self.plan.config.all_layers)], []
        if self.job.data is not None and self.job.held is not None:
            device = self.group.device
            self.method = self.reading = None  # their memory is free for the tuning
            if device.type == "cuda":
                torch.cuda.empty_cache()
            self.tuning = tune_parts(self.plan, self.job.data, self.job.held, self.writer, device, self.send)
            layers, left_out = [tuned_part(index) for index in range(len(layers))], [*layers, STATE_PART]
            if device.type == "cuda":
                peaks[0] = float(torch.cuda.max_memory_allocated(device))
            self.watch.lap("tuning")
        order = [*(part for part, _ in kept_end_parts(self.plan)), *layers]
        report = self._report(peaks, joules, order)
        files: list[tuple[str, Path | bytes]] = [*self.plan.companions.items()]
        files.append((REPORT_NAME, f"{json.dumps(report.to_json(), indent=2, ensure_ascii=False)}\n".encode()))
        self.writer.finish(written_config(self.plan), files, order, left_out)
        self.send(report)

    def _calibrate(self, data: Calibration, method: Method, reading: Reading) -> None:
        """Layer after layer, each on what the quantized layers before it give.

        A run that is resumed begins at the layer whose states are saved (`SavedStates`), computes those that are
        finished after it, and ends with the last one that is not.
        """
        plan, device = self.plan, self.group.device
        count = len(plan.config.all_layers)
        missing = [index for index in range(count) if index not in self.finished]
        dtype = default_dtype(device, plan.dtype)
        drift = DRIFT in method.needed
        states = embed(data, BATCH_TOKENS[device.type], reading.table(), plan.config, self.group, dtype, drift=drift)
        saved = SavedStates(self.parts, states, plan.config, self.group, reserved=self.job.expected_bytes)
        begin, end = (saved.load(missing[0]), missing[-1] + 1) if missing else (count, count)
        self.watch.lap("reading")
        self._tell_recorded(range(begin))
        for index, layer in enumerate(reading.layers(begin, end), begin):
            self.watch.lap("reading")
            if index == plan.config.num_layers:
                enter_mtp(states, layer, plan.checkpoint, plan.config)
            through = LayerQuantization(
                layer,
                index,
                states,
                method.needed,
                group=self.group,
                watch=self.watch,
                keep=self.keep,
                matrices=self.plan.layer(index),
                scale_dtype=self.plan.scale_dtype,
                damping=self.job.damping,
                tell=self._tell,
                watch_kv=plan.kv_cache is not None,
            )
            if index in self.finished:
                through.skip(partial(self._restore, index, layer))
            else:
                self._check_layer(index)
                through.quantize(method)
                self._write(index, through)
            if index + 1 < end and saved.is_due(index + 1):
                if self.writer is not None:
                    self.writer.drain()  # the states are those after layers that are on the disk
                saved.save(index + 1)
                self.watch.lap("writing")
        self._tell_recorded(range(end, count))
        saved.remove()

    def _write(self, index: int, done: LayerQuantization) -> None:
        """Hand a layer that is quantized to the writer."""
        if self.writer is None:
            return
        tensors = kept_tensors(self.plan, index, done.changed)
        for linear, matrix in self.plan.layer(index).items():
            tensors |= stored_tensors(self.plan, matrix, done.quantized[linear])
        tensors |= kv_scale_tensors(self.plan, index, done.largest_kv)
        self._commit_layer(index, tensors, done.results)

    def _commit_layer(self, index: int, tensors: Mapping[str, Tensor], results: Sequence[LayerResult]) -> None:
        """Hand the tensors of a finished layer to the writer, which writes them in the background."""
        assert self.writer is not None
        assert self.sources is not None
        assert self.ends is not None
        self.ends.result()  # no layer is kept of a model that is refused
        facts = {"results": [asdict(result) for result in results]}
        self.writer.commit(layer_part(index), tensors, facts | self.sources.layer_facts(index))
        self.watch.lap("writing")

    def _restore(self, index: int, layer: DecoderLayer) -> None:
        """Put what an earlier run made of a layer in its place."""
        part = stored_layer(self.parts, index)
        for linear, matrix in self.plan.layer(index).items():
            weight = layer.get_submodule(linear).get_parameter("weight").data
            stored = quantized_matrix(self.plan, part, matrix)
            weight.copy_(stored.to(self.group.device).dequantize(weight.dtype))
        restore_kept(self.plan, part, index, layer)
        self._tell_recorded([index])

    def _round_to_nearest(self) -> None:
        """Each tensor of the checkpoint by itself: rows do not depend on each other. One process does it."""
        if self.writer is None:
            return
        for index, _ in enumerate(self.plan.config.all_layers):
            if index in self.finished:
                self._tell_recorded([index])
                continue
            self._check_layer(index)
            tensors, results = kept_tensors(self.plan, index, {}), []
            for matrix in self.plan.layer(index).values():
                started = time.perf_counter()
                lost = total = 0.0
                for source in matrix.sources:
                    weight = self.plan.checkpoint.tensor(source).to(self.group.device)
                    self.watch.lap("reading")
                    rounded = rtn(weight, matrix.scheme, scale_dtype=self.plan.scale_dtype, name=source)
                    changes = squared_loss(weight, rounded)
                    lost, total = lost + changes[0], total + changes[1]
                    tensors |= self.plan.format.to_tensors(source.removesuffix(".weight"), rounded)
                    self.watch.lap("solve")
                error, seconds = relative(lost, total), time.perf_counter() - started
                results.append(LayerResult(index, matrix.linear, str(matrix.scheme), error, seconds))
                self._tell(results[-1])
            self._commit_layer(index, tensors, results)

    def _commit_ends(self) -> None:
        """The tensors outside of the layers, unchanged."""
        if self.writer is None or self.sources is None:
            return
        kept = {part: names for part, names in end_parts(self.plan) if not is_readable(self.writer, part)}
        quantized = [e.source for part, e in self.plan.quantized_ends.items() if not is_readable(self.writer, part)]
        check_finite(self.plan.checkpoint, quantized)  # before the layers, not after all the work
        side_by_side = self.group.device.type == "cuda"  # a CPU would only keep more in memory
        if side_by_side:
            names = [name for part in kept.values() for name in part]
            self.sources.begin(names)
            with ThreadPoolExecutor(thread_name_prefix="checking") as pool:
                tuple(pool.map(lambda name: check_finite(self.plan.checkpoint, [name]), names))
        for part, names in kept.items():
            if not side_by_side:
                check_finite(self.plan.checkpoint, names)
            tensors = {name: self.plan.checkpoint.tensor(name) for name in names}
            self.writer.commit(part, tensors, self.sources.end_facts(names))

    def _commit_quantized_ends(self) -> None:
        """Round the head and the embedding, if that was asked for, as an engine does at load (`models.placement`)."""
        if self.writer is None or self.sources is None:
            return
        for part, end in self.plan.quantized_ends.items():
            if is_readable(self.writer, part):
                continue
            started = time.perf_counter()
            weight = self.plan.checkpoint.tensor(end.source)
            pieces, lost, total = [], 0.0, 0.0
            for rows in weight.split(max(1, _END_ELEMENTS // end.shape[1])):
                piece = rows.to(self.group.device)
                rounded = rtn(piece, end.scheme, scale_dtype=self.plan.scale_dtype, name=end.source)
                changes = squared_loss(piece, rounded)
                lost, total = lost + changes[0], total + changes[1]
                pieces.append(rounded.to("cpu"))
            tensors = self.plan.format.to_tensors(end.name.removesuffix(".weight"), QTensor.concatenate(pieces))
            seconds = time.perf_counter() - started
            tied = part == "embedding" and self.plan.head is None and self.plan.config.tie_embeddings
            result = EndResult(str(end.scheme), relative(lost, total), seconds, untied=end.is_untied, tied=tied)
            self.writer.commit(part, tensors, {"result": asdict(result)} | self.sources.end_facts([end.source]))
            self.writer.drain()
            self.watch.lap(part)

    def _check_layer(self, index: int) -> None:
        """Begin to hash a layer, and refuse NaN in what is not quantized; a matrix is checked where it is solved."""
        if self.sources is not None:
            self.sources.begin_layer(index)
        check_finite(self.plan.checkpoint, self.plan.kept[index])

    def _tell(self, result: LayerResult) -> None:
        self.results.append(result)
        if self.group.is_first:
            self.send(result)

    def _tell_recorded(self, layers: Iterable[int]) -> None:
        """The results of finished layers."""
        for index in layers:
            for row in self.parts.facts(layer_part(index))["results"]:
                self._tell(LayerResult(**row))

    def _end_result(self, part: str) -> EndResult | None:
        return EndResult(**self.parts.facts(part)["result"]) if part in self.plan.quantized_ends else None

    def _gathered(self, joules: float | None) -> tuple[list[float], list[float]]:
        """Of all processes the bytes that their GPUs held at most, and the joules of their layers, NaN if unknown."""
        device = self.group.device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        own = torch.tensor([[peak, math.nan if joules is None else joules]], dtype=torch.float64, device=device)
        peaks, energies = self.group.gather(own).T.tolist()
        return peaks, energies

    def _report(self, peaks: list[float], energies: list[float], parts: Sequence[str]) -> Report:
        """The work of all processes; `parts` are those of the model."""
        group, job, device = self.group, self.job, self.group.device
        on_gpu = device.type == "cuda"
        seconds = time.time() - job.started
        written = 0
        if self.writer is not None:
            written = sum(entry.nbytes for part in parts for entry in self.writer.read(part).values())
        return Report(
            model=str(job.model),
            output=str(job.output),
            scheme=str(job.schemes),
            algorithm=job.algorithm,
            settings=dict(job.settings),
            calibration_tokens=0 if job.data is None else job.data.tokens,
            device=str(device),
            layers=tuple(self.results),
            head=self._end_result("head"),
            embedding=self._end_result("embedding"),
            tuning=self.tuning,
            bytes_before=self.plan.checkpoint.total_bytes,
            bytes_after=written,
            resumed_layers=len(self.finished),
            seconds=seconds,
            peak_memory=peak_memory(),
            peak_gpu_memory=int(max(peaks)) if on_gpu else None,
            versions=versions(device),
            devices=(torch.cuda.get_device_name(device) if on_gpu else "cpu",) * group.world,
            stages=dict(self.watch.seconds),
            estimate=dict(self.estimate),
            gpu_seconds=seconds * group.world if on_gpu else None,
            energy_joules=None if any(map(math.isnan, energies)) else sum(energies),
        )


def check_gpu(device: torch.device) -> None:
    """Refuse a GPU that the kernels of a calibrated run are not made for. Raises DeviceError."""
    if not gpu_has_kernels(device):
        raise DeviceError(f"{device}: calibrated quantization needs an Ampere GPU or a later one: use --device cpu")


def _planned(group: Group, job: Job) -> Plan:
    """The plan as the starting process made it, if this one sees the same model."""
    try:
        plan = prepare(
            *(job.model, job.output, job.schemes, job.format),
            head=job.head,
            embedding=job.embedding,
            kv_cache=job.kv_cache,
        )
    except CheckpointError as error:
        raise CheckpointError(f"process {group.rank} on {socket.gethostname()}: {error}") from error
    check_model(plan.checkpoint, job.model_hash)
    return plan


def _ready(algorithm: str, group: Group, plan: Plan) -> Method:
    """A method that has done what it can before the first layer."""
    method = METHODS[algorithm]()
    dtype = default_dtype(group.device, plan.dtype)
    with suppress(torch.OutOfMemoryError):  # what is missing is said by the estimate
        method.prepare(plan.shapes, group, scale_dtype=plan.scale_dtype, dtype=dtype)
    return method


def _rates(group: Group, plan: Plan, *, tuned: bool) -> Mapping[torch.dtype, float] | None:
    """Those of the first process count; the other GPUs load their libraries by measuring theirs."""
    if group.is_first or group.device.type == "cuda":
        return device_rates(group.device, plan.dtype, tuned=tuned)
    return None


def _passed_layers(layers: int, finished: Sequence[int], parts: FinishedParts, device: torch.device) -> range:
    """The layers that the calibration data pass through: see `_QuantizationRun._calibrate`."""
    missing = [index for index in range(layers) if index not in finished]
    if not missing:
        return range(0)
    return range(saved_layer(parts, missing[0]) if device.type == "cpu" else 0, missing[-1] + 1)


def _agreed(
    group: Group, send: Send, job: Job, plan: Plan, rank_device: RankDevice, rates: Mapping[torch.dtype, float] | None
) -> tuple[QuantizationEstimate | None, bool]:
    """The needs of the run, found by the first process, and whether all keep inputs: see `LayerQuantization`."""
    keep = torch.zeros(1, dtype=torch.int64, device=group.device)
    needs = None
    ranks = rank_device.gathered(group)
    if group.is_first:
        assert rates is not None, "the first process always measures"
        earlier = FinishedParts(job.output)
        parts = earlier.parts()
        count = len(plan.config.all_layers)
        finished = [] if job.restart else [index for index in range(count) if layer_part(index) in parts]
        needs = estimate(
            plan,
            output=job.output,
            algorithm=job.algorithm,
            needed=METHODS[job.algorithm].needed if job.data else frozenset(),
            tokens=job.data.tokens if job.data else 0,
            tuned=Calibration(job.data.sequences + job.held.sequences) if job.data and job.held else None,
            batch_tokens=BATCH_TOKENS[group.device.type],
            ranks=ranks,
            rates=rates,
            kept_bytes=sum(earlier.tensors_file(part).stat().st_size for part in parts),
            finished=finished,
            passed=_passed_layers(count, finished, earlier, group.device),
        )
        send(needs)
        needs.check()
        keep[0] = needs.keep
    return needs, bool(group.sum(keep))
