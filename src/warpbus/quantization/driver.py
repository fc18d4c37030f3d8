"""`quantize`: a checkpoint in, a quantized checkpoint out, one layer in memory at a time."""

import copy
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import warpbus
from warpbus.cuda.devices import default_dtype, resolve_device
from warpbus.errors import CheckpointError, DeviceError, UsageError, WarpbusError
from warpbus.formats import Checkpoint, CheckpointWriter, from_tensors, quantization_config, to_tensors
from warpbus.models import DecoderLayer, load_layer, tensor_map
from warpbus.models.templates import find_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.qtensor import QTensor, Scheme
from warpbus.quantization.algorithms import aim, gptq, rtn
from warpbus.quantization.algorithms.grid import check_weight
from warpbus.quantization.calibration import Calibration, read_calibration
from warpbus.quantization.hessian import Hessian
from warpbus.quantization.layerwise import States, embed, pass_through, quantize_layer
from warpbus.quantization.loss import relative, squared_loss
from warpbus.quantization.preflight import REPORT_NAME, Matrix, Plan, prepare
from warpbus.quantization.report import LayerResult, Report, peak_memory, versions
from warpbus.quantization.resume import FinishedLayers

ALGORITHMS = ("gptq", "rtn")

Progress = Callable[[int, int, str], None]
"""Called with the matrices that are done, all there are, and the name of the last one."""

# Tokens that go through a layer at once: enough to keep the device busy, little next to the layer's own memory.
_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}

_LARGEST_SHARD = 4 * 2**30
_SMALLEST_SHARD = 2**24


def quantize(
    model: str | Path,
    output: str | Path,
    *,
    scheme: str | Scheme = "w4a16-g128",
    algorithm: str = "gptq",
    calibration: str | Path | None = None,
    samples: int = 128,
    seqlen: int = 2048,
    seed: int = 0,
    device: str | torch.device = "auto",
    damping: float = 0.01,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Quantize the linear layers of a model and write it in the format `pack-quantized` of compressed-tensors.

    Embedding, head, norms and biases are copied as they are; tensors keep their names. The output directory is there
    complete or not at all. The same arguments give the same result on the same device. Layers that gptq has finished
    are kept in `OUTPUT.quantization` until the model is complete: after an interruption, the same call goes on there.

    Args:
        model: a model directory, not quantized.
        output: a new directory.
        scheme: see `Scheme`.
        algorithm: "gptq" (Frantar et al., 2022), which needs calibration data; or "rtn", round to nearest.
        calibration: see `read_calibration`; rtn does not look at it.
        samples: sequences to calibrate on, at most.
        seqlen: tokens of a sequence, at most; the model's context is a limit too.
        seed: of the draw of the sequences.
        device: "auto" (the first GPU, else the CPU), "cpu", "cuda" or "cuda:N". The CPU computes in float32, a GPU
            in the checkpoint's dtype.
        damping: see `gptq`.
        overwrite: replace a model that is at `output`.
        progress: see `Progress`.

    Returns:
        the report, which is also in the output directory as `warpbus-report.json`.

    Raises:
        UsageError: if an argument is wrong, or gptq has no calibration data.
        SchemeError: if the scheme does not exist or does not fit a matrix.
        CheckpointError: if the model cannot be read, is not complete, or is quantized already.
        DataError: if the calibration data cannot be used.
        NumericError: if a matrix cannot be quantized; the message names it.
        DeviceError: if the device is not there or has too little memory.
        StorageError: if the output exists, cannot be written, or does not fit on the disk.
    """
    started = time.perf_counter()
    scheme = Scheme.parse(scheme) if isinstance(scheme, str) else scheme
    _check_arguments(algorithm, calibration, samples, seqlen, damping)
    place = resolve_device(device)
    plan = prepare(Path(model), Path(output), scheme)
    data = None
    if algorithm == "gptq" and calibration is not None:
        data = _read_data(plan, Path(calibration), samples, min(seqlen, plan.config.max_context), seed)
    if place.type == "cuda":
        torch.cuda.init()  # the statistics exist from then on
        torch.cuda.reset_peak_memory_stats(place)
    shard = min(max(plan.largest_unit // 4, _SMALLEST_SHARD), _LARGEST_SHARD)
    # Finished layers are on the disk twice until the model is complete.
    needed = plan.bytes_after + (plan.bytes_quantized if data else 0)
    with CheckpointWriter(output, shard_bytes=shard, overwrite=overwrite, expected_bytes=needed) as writer:
        run = _Run(plan, writer, place, damping, progress)
        run.copy()
        finished = None
        try:
            if data is None:
                run.round_to_nearest()
            else:
                finished = FinishedLayers(Path(output), _identity(plan, data, place, damping))
                run.calibrate(data, finished)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{place}: out of memory: use fewer --samples or a shorter --seqlen, a larger GPU, or --device cpu"
            ) from error
        except WarpbusError:
            if finished is not None:
                finished.remove()
            raise
        settings = {"calibration": str(calibration), "samples": samples, "seqlen": seqlen, "seed": seed}
        report = Report(
            model=str(model),
            output=str(output),
            scheme=str(scheme),
            algorithm=algorithm,
            settings={} if data is None else settings | {"damping": damping},
            calibration_tokens=0 if data is None else data.tokens,
            device=str(place),
            layers=tuple(run.results),
            bytes_before=plan.checkpoint.total_bytes,
            bytes_after=run.written,
            resumed_layers=run.resumed,
            seconds=time.perf_counter() - started,
            peak_memory=peak_memory(),
            peak_gpu_memory=torch.cuda.max_memory_allocated(place) if place.type == "cuda" else None,
            versions=versions(place),
        )
        writer.write_json(REPORT_NAME, report.to_json())
        writer.finish()
    if finished is not None:
        finished.remove()
    return report


@dataclass
class _Run:
    """One model on its way from `plan` to `writer`."""

    plan: Plan
    writer: CheckpointWriter
    device: torch.device
    damping: float
    progress: Progress | None
    results: list[LayerResult] = field(default_factory=list)
    written: int = 0
    resumed: int = 0

    def copy(self) -> None:
        """What stays as it is, and the configuration."""
        plan = self.plan
        described = quantization_config(plan.scheme, plan.unquantized)
        self.writer.write_json("config.json", plan.checkpoint.config | {"quantization_config": described})
        for file in plan.companions:
            self.writer.copy_file(file)
        for name in plan.copied:
            self._write(name, plan.checkpoint.tensor(name))

    def round_to_nearest(self) -> None:
        """Each tensor of the checkpoint by itself: rows do not depend on each other."""
        for matrix in self.plan.matrices:
            started = time.perf_counter()
            lost = total = 0.0
            for source in matrix.sources:
                weight = self.plan.checkpoint.tensor(source).to(self.device)
                quantized = rtn(weight, self.plan.scheme, scale_dtype=self.plan.scale_dtype, name=source)
                changes = squared_loss(weight, quantized)
                lost, total = lost + changes[0], total + changes[1]
                self._write_quantized(source, quantized)
            self._finished(matrix, relative(lost, total), started)

    def calibrate(self, data: Calibration, finished: FinishedLayers) -> None:
        """Layer after layer, each on what the quantized layers before it give; those finished before are read."""
        plan, checkpoint = self.plan, self.plan.checkpoint
        dtype = default_dtype(self.device, plan.scale_dtype)
        batches = list(data.batches(_BATCH_TOKENS[self.device.type]))
        table = checkpoint.tensor(tensor_map(plan.config)["embedding.weight"][0])
        states = embed(batches, table, plan.config, self.device, dtype)
        del table
        for index in range(plan.config.num_layers):
            layer = load_layer(checkpoint, plan.config, index, device=self.device, dtype=dtype)
            kept = finished.load(index)
            if kept is not None:
                unquantized = copy.deepcopy(layer)
                self._restore(index, layer, *kept)
                pass_through(layer, unquantized, index, states)
            else:
                tensors, results = self._quantize_layer(index, layer, states)
                finished.save(index, tensors, results)

    def _quantize_layer(
        self, index: int, layer: DecoderLayer, states: list[States]
    ) -> tuple[dict[str, Tensor], list[LayerResult]]:
        """Quantize a layer and move the states past it; gives what was written and how it went."""
        matrices = self.plan.layer(index)
        tensors: dict[str, Tensor] = {}
        started = time.perf_counter()

        def solve(linear: str, module: nn.Linear, hessian: Hessian) -> None:
            nonlocal started
            error, stored = self._solve(matrices[linear], module, hessian)
            tensors.update(stored)
            self._finished(matrices[linear], error, started)
            started = time.perf_counter()

        quantize_layer(layer, index, states, solve, f"layers.{index}")
        return tensors, self.results[-len(matrices) :]

    def _restore(self, index: int, layer: DecoderLayer, kept: Checkpoint, results: list[LayerResult]) -> None:
        """Take a layer from an earlier run."""
        for matrix in self.plan.layer(index).values():
            prefixes = [source.removesuffix(".weight") for source in matrix.sources]
            parts = [from_tensors(kept, prefix, self.plan.scheme).to(self.device) for prefix in prefixes]
            weight = layer.get_submodule(matrix.linear).get_parameter("weight").data
            weight.copy_(QTensor.concatenate(parts).dequantize(weight.dtype))
        for name in kept.names():
            self._write(name, kept.tensor(name).clone())
        for result in results:
            self._record(result)
        self.resumed += 1

    def _solve(self, matrix: Matrix, module: nn.Linear, hessian: Hessian) -> tuple[float, dict[str, Tensor]]:
        """Quantize a matrix and put what it now is into the module; gives its relative error and what was written."""
        plan, moments, weight = self.plan, hessian.moments(), module.weight.data
        check_weight(weight, matrix.name)
        aimed = aim(weight, moments, hessian.drift(), damping=self.damping, name=matrix.name)
        quantized = gptq(
            aimed, moments, plan.scheme, scale_dtype=plan.scale_dtype, damping=self.damping, name=matrix.name
        )
        error = relative(*squared_loss(aimed, quantized, moments))
        weight.copy_(quantized.dequantize(weight.dtype))
        start = 0
        stored: dict[str, Tensor] = {}
        for source, rows in zip(matrix.sources, matrix.rows, strict=True):
            stored |= self._write_quantized(source, quantized.rows(start, start + rows))
            start += rows
        return error, stored

    def _finished(self, matrix: Matrix, error: float, started: float) -> None:
        seconds = time.perf_counter() - started
        self._record(LayerResult(matrix.layer, matrix.linear, str(self.plan.scheme), error, seconds))

    def _record(self, result: LayerResult) -> None:
        self.results.append(result)
        if self.progress is not None:
            self.progress(len(self.results), len(self.plan.matrices), f"layers.{result.layer}.{result.linear}")

    def _write_quantized(self, source: str, weight: QTensor) -> dict[str, Tensor]:
        tensors = to_tensors(source.removesuffix(".weight"), weight)
        for name, tensor in tensors.items():
            self._write(name, tensor)
        return tensors

    def _write(self, name: str, tensor: Tensor) -> None:
        self.writer.add(name, tensor)
        self.written += tensor.nbytes


def _check_arguments(algorithm: str, calibration: str | Path | None, samples: int, seqlen: int, damping: float) -> None:
    if algorithm not in ALGORITHMS:
        raise UsageError(f"algorithm is {algorithm!r}: choose from {', '.join(ALGORITHMS)}")
    if algorithm == "gptq" and calibration is None:
        raise UsageError(
            "gptq needs calibration data: pass --calibration with a .txt or .jsonl of texts like those that the "
            "model is for, or use --algorithm rtn"
        )
    for name, value, least in (("samples", samples, 1), ("seqlen", seqlen, 1)):
        if value < least:
            raise UsageError(f"{name} is {value}: it has to be at least {least}")
    if not 0 <= damping < float("inf"):
        raise UsageError(f"damping is {damping}: it has to be a number from 0 up, 0.01 for instance")


def _read_data(plan: Plan, path: Path, samples: int, seqlen: int, seed: int) -> Calibration:
    directory = plan.checkpoint.directory
    tokenizer = load_tokenizer(directory)
    template = find_template(directory, plan.checkpoint.config, tokenizer)
    data = read_calibration(path, tokenizer, template, samples=samples, seqlen=seqlen, seed=seed)
    largest = max(map(max, data.sequences))
    if largest >= plan.config.vocab_size:
        raise CheckpointError(
            f"{directory}: its tokenizer gives token {largest}, but the vocabulary has {plan.config.vocab_size}: "
            "check that the tokenizer belongs to this model"
        )
    return data


def _identity(plan: Plan, data: Calibration, device: torch.device, damping: float) -> dict[str, object]:
    """All that decides the result of a calibrated run."""
    files = sorted(file for file in plan.checkpoint.directory.iterdir() if file.suffix in (".safetensors", ".bin"))
    return {
        "model": str(plan.checkpoint.directory.resolve()),
        "weights": [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files],
        "config": plan.checkpoint.config,
        "scheme": str(plan.scheme),
        "damping": damping,
        "tokens": hashlib.sha256(repr(data.sequences).encode()).hexdigest(),
        "device": device.type,
        "versions": [warpbus.__version__, torch.__version__],
    }
