"""Measures a model part by part; each finished part is kept, so that an interrupted run goes on after it."""

import hashlib
import json
import os
import shutil
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

import warpbus
from warpbus.bench.records import now
from warpbus.bench.train_process import ProcessMeasurement, TrainBenchTask, job
from warpbus.bench.train_variants import Variant
from warpbus.cuda.cpu import cpu_model
from warpbus.cuda.devices import free_memory
from warpbus.dist import Processes
from warpbus.errors import DataError, DeviceError, UsageError, WarpbusError
from warpbus.evaluation import Evaluation, check_data, evaluate, measure_speed
from warpbus.formats import Checkpoint
from warpbus.formats.files import replace_file
from warpbus.models import ModelConfig, read_config
from warpbus.quantization import LayerResult, quantize
from warpbus.quantization import Progress as Quantizing
from warpbus.story.options import StoryOptions
from warpbus.story.rows import (
    CPU,
    GENERATE,
    GPTQ4,
    GPU,
    ORIGINAL,
    QUANTIZE,
    RTN4,
    RTN8,
    TRAIN,
    Quality,
    Story,
    StoryRow,
)
from warpbus.train.memory import num_trained

KEPT = "parts.json"
FORMS = {RTN8: ("w8a16", "rtn"), RTN4: ("w4a16-g128", "rtn"), GPTQ4: ("w4a16-g128", "gptq")}
_GENERATED = (ORIGINAL, RTN8, GPTQ4)  # RTN's 4 bits are as fast as GPTQ's
_METHODS = ("full", "lora")
_SAMPLES, _FEW_SAMPLES = 128, 32  # with 32, GPTQ is hardly better than RTN
_WARM, _STEPS = 2, 5
_TRAIN_ROWS = {CPU: (2, 64), GPU: (2, 1024)}  # rows per device, tokens per row
_BUSY = 0.7  # load per core
_QUICK_TOKENS = 4  # on a CPU for which the model is large
_LARGE = 1_000_000_000  # bytes of weights in float32, with which a CPU takes seconds per token
_TRAINED_ON_CPU = 300_000_000  # parameters at most
_QUANTIZED_ON_CPU = 3_000_000_000

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Work:
    """What is measured.

    Attributes:
        name, model: of the unquantized model, and its directory.
        directory: for the quantized models and the finished parts.
        data: documents that the perplexity is measured on.
        calibration: texts that quantization is calibrated on; None for the packaged ones.
        device: the GPU, or the CPU.
        options: see `StoryOptions`.
        command: what was typed.
    """

    name: str
    model: Path
    directory: Path
    data: Path
    calibration: Path | None
    device: torch.device
    options: StoryOptions
    command: str


def tell(work: Work, progress: Progress = lambda what, done, total: None) -> Story:
    """Measure all parts that this machine can; those that an earlier run has finished are read.

    Raises:
        UsageError: more GPUs than the machine has, or an option that cannot be.
        CheckpointError: the model cannot be read, or is quantized already.
        DataError: the data are missing or malformed.
        StorageError: the directory cannot be written.
    """
    return _Teller(work, progress).tell()


class _Parts:
    """The finished parts in the directory."""

    def __init__(self, path: Path, key: str, *, restart: bool) -> None:
        self._path, self._key = path, key
        self._found: dict[str, Any] = {}
        if path.exists() and not restart:
            try:
                kept = json.loads(path.read_text(encoding="utf-8"))
                self._found = kept["parts"] if kept["key"] == key else {}
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path}: is damaged ({error}): add --restart to measure again") from None

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    def keep(self, name: str, value: Any) -> None:
        self._found[name] = value
        text = json.dumps({"key": self._key, "parts": self._found}, indent=2, ensure_ascii=False)
        replace_file(self._path, lambda partial_path: partial_path.write_text(text, encoding="utf-8"))


class _Teller:
    def __init__(self, work: Work, progress: Progress) -> None:
        self.work, self.progress = work, progress
        self.options = work.options
        self.home = GPU if work.device.type == "cuda" else CPU
        self.missing: list[str] = []
        self.config: ModelConfig = read_config(Checkpoint(work.model, weights=False))
        self.counts = self._counts()
        check_data(work.model, data=work.data, limit=self.options.documents)
        self.parts = _Parts(work.directory / KEPT, self._key(), restart=self.options.restart)

    def tell(self) -> Story:
        rows: list[StoryRow] = []
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > _BUSY * cores and any(name not in self.parts for name, _ in self._planned()):
            self.missing.append(f"Other programs used the CPU (load {load:.1f} on {cores} cores): times vary.")
        for name, measure in self._planned():
            row = self._part(name, measure)
            if row is not None:
                rows.append(StoryRow(**row))
        quality = self._part("perplexity", self._quality) or {}
        self._say_what_is_missing()
        return Story(
            model=self.work.name,
            rows=tuple(rows),
            quality={form: Quality(**found) for form, found in quality.items()},
            prices={CPU: self.options.cpu_price, GPU: self.options.price},
            machine=self.machine,
            date=now(),
            command=self.work.command,
            data=self.work.data.name,
            missing=tuple(dict.fromkeys(self.missing)),
        )

    @cached_property
    def machine(self) -> str:
        """The names of the devices."""
        if self.home == CPU:
            return cpu_model()
        count = max(self.counts)
        name = torch.cuda.get_device_name(self.work.device)
        return f"{f'{count} x ' if count > 1 else ''}{name}, {cpu_model()}"

    def _counts(self) -> tuple[int, ...]:
        counts, there = self.options.counts, torch.cuda.device_count() if self.home == GPU else 0
        if counts and self.home == CPU:
            raise UsageError("--gpus: this runs on the CPU: leave it out, or see what warpbus doctor says about GPUs")
        if self.home == CPU:
            return (1,)
        if self.work.device.index:
            raise UsageError(f"--device {self.work.device}: GPUs are taken from the first one on: leave the number out")
        if counts and not 1 <= min(counts) <= max(counts) <= there:
            raise UsageError(f"--gpus {','.join(map(str, counts))}: this machine has {there} GPU(s)")
        return tuple(sorted({1, *(counts or (there,))}))

    def _key(self) -> str:
        """What the parts depend on: other models, data or machines have parts of their own."""
        files = sorted(self.work.model.glob("*.safetensors")) or sorted(self.work.model.iterdir())
        facts = [
            *((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files),
            *(str(self.work.data.resolve()), str(self.work.calibration), self.machine, warpbus.__version__),
            *(self.options.samples, self.options.documents, self.options.tokens),
            *FORMS.items(),
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _planned(self) -> list[tuple[str, Callable[[], Any]]]:
        """The parts, each with a name of its own."""
        planned: list[tuple[str, Callable[[], Any]]] = []
        for count in self.counts:
            forms = FORMS if count == 1 else (GPTQ4,)
            planned += [(f"quantize {form} {count}", partial(self._quantize, form, count)) for form in forms]
        places = (CPU, GPU) if self.home == GPU else (CPU,)
        for place in places:
            planned += [(f"generate {form} {place}", partial(self._generate, form, place)) for form in _GENERATED]
        for place in places:
            for count in self.counts if place == GPU else (1,):
                planned += [
                    (f"train {method} {place} {count}", partial(self._train, method, place, count))
                    for method in _METHODS
                ]
        return planned

    def _part(self, name: str, measure: Callable[[], Any]) -> Any:
        """What an earlier run has kept, or what is measured now; None if it cannot be, which is noted."""
        if name not in self.parts:
            try:
                found = measure()
            except (WarpbusError, torch.OutOfMemoryError) as error:
                self.missing.append(f"not measured: {name}: {' '.join(str(error).split())[:300]}")
                return None
            finally:
                if self.home == GPU:
                    torch.cuda.empty_cache()  # other processes measure the next parts
            if found is None:
                return None
            self.parts.keep(name, found)
        return self.parts[name]

    def _directory(self, form: str, count: int = 1) -> Path:
        """Where a form of the model is."""
        if form == ORIGINAL:
            return self.work.model
        return self.work.directory / "-".join([*FORMS[form], *([f"{count}-gpus"] if count > 1 else [])])

    def _quantize(self, form: str, count: int) -> dict[str, Any] | None:
        scheme, algorithm = FORMS[form]
        if self.home == CPU and self.config.num_parameters > _QUANTIZED_ON_CPU:
            raise DeviceError("quantization of a model of this size takes hours on a CPU")

        def show(done: int, total: int, result: LayerResult) -> None:
            del result
            self.progress(f"quantizing: {scheme}, {algorithm}", done, total)

        output = self._directory(form, count)
        slow = self.home == CPU and self.config.num_parameters > _TRAINED_ON_CPU
        done = quantize(
            self.work.model,
            output,
            scheme=scheme,
            algorithm=algorithm,
            calibration=None if algorithm == "rtn" else self.work.calibration,
            samples=self.options.samples or (_FEW_SAMPLES if slow else _SAMPLES),
            device=self.work.device.type,
            gpus=str(count) if self.home == GPU else "all",
            overwrite=True,
            progress=Quantizing(matrix=show),
        )
        if count > 1:
            shutil.rmtree(output)  # it equals that of one GPU
        memory = done.peak_memory if done.peak_gpu_memory is None else done.peak_gpu_memory
        error = f"{done.mean_error:.2%}"
        row = StoryRow(QUANTIZE, self.home, count, form, 1 / done.seconds, done.energy_joules, memory, error)
        return asdict(row)

    def _quality(self) -> dict[str, Any]:
        models = {form: self._directory(form) for form in (ORIGINAL, *FORMS)}
        found = evaluate(
            [(form, path) for form, path in models.items() if form == ORIGINAL or path.exists()],
            data=self.work.data,
            length=2048,
            limit=self.options.documents,
            speed=False,
            device=self.work.device,
            progress=self.progress,
        )
        return {each.name: asdict(_quality_of(each)) for each in found}

    def _generate(self, form: str, place: str) -> dict[str, Any] | None:
        path = self._directory(form)
        if not path.exists():
            return None  # what kept it from being quantized is noted
        tokens, device = self.options.tokens, torch.device("cpu") if place == CPU else self.work.device
        if place == CPU:
            needed = 4 * self.config.num_parameters
            free = free_memory(device)
            if form == ORIGINAL and free is not None and 1.2 * needed > free:
                raise DeviceError(f"float32 weights take {needed / 1e9:.0f} GB, free are {free / 1e9:.0f} GB")
            if needed > _LARGE:
                tokens = min(tokens, _QUICK_TOKENS)
        what = f"generating on the {place}"
        done = _GENERATED.index(form)
        self.progress(what, done, len(_GENERATED))
        speed = measure_speed(path, device=str(device), tokens=tokens)
        self.progress(what, done + 1, len(_GENERATED))
        row = StoryRow(GENERATE, place, 1, form, speed.tokens_per_second, speed.joules_per_token, speed.peak_bytes)
        return asdict(row)

    def _train(self, method: str, place: str, count: int) -> dict[str, Any] | None:
        if place == CPU and self.config.num_parameters > _TRAINED_ON_CPU:
            raise DeviceError(f"a CPU takes minutes for a step of {self.config.num_parameters / 1e9:.1f} B parameters")
        rows, length = _TRAIN_ROWS[place]
        length = min(length, self.config.max_context)
        variant = Variant(method, "fp32" if place == CPU else "bf16", "eager")
        settings = replace(variant.settings(length, rows * count, 0, "w4a16-g128", "ddp"), rows_at_once=rows)
        task = TrainBenchTask(self.config, settings, False, False, _WARM, _STEPS)
        devices = [torch.device("cpu")] if place == CPU else [torch.device("cuda", at) for at in range(count)]
        said: list[ProcessMeasurement] = []
        what = f"training on the {place}"
        self.progress(what, _METHODS.index(method), len(_METHODS))
        with Processes(job, devices=devices, receive=said.append, apart=True) as processes:
            processes.run(task)
        self.progress(what, _METHODS.index(method) + 1, len(_METHODS))
        tokens = rows * count * length
        known = [each.joules for each in said if each.joules is not None]
        joules = sum(known) / (tokens * _STEPS) if len(known) == count else None
        trained = num_trained(self.config, settings) / 1e6
        detail = f"{trained:,.0f} M" if trained >= 100 else f"{trained:.3g} M"
        rate = tokens / statistics.median(said[0].seconds)
        return asdict(StoryRow(TRAIN, place, count, method, rate, joules, said[0].memory, detail))

    def _say_what_is_missing(self) -> None:
        if self.home == CPU:
            self.missing += [
                "This run used no GPU: the CPU is not compared with a GPU, nor one GPU with several.",
                "Energy was not measured: Warpbus reads the sensors of NVIDIA GPUs only (NVML).",
            ]
        elif max(self.counts) == 1:
            self.missing.append("There is one GPU: it is not compared with several.")


def _quality_of(found: Evaluation) -> Quality:
    return Quality(found.perplexity, found.divergence, found.agreement, found.tokens, found.disk_bytes, found.scheme)


def partially_kept(directory: Path) -> int:
    """How many finished parts a directory holds."""
    try:
        found: Mapping[str, Any] = json.loads((directory / KEPT).read_text(encoding="utf-8"))
        return len(found["parts"])
    except (OSError, ValueError, KeyError):
        return 0
