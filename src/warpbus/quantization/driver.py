"""`quantize`: a checkpoint in, a quantized checkpoint out, on all GPUs, one layer in memory at a time."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import warpbus
from warpbus.cuda.devices import resolve_device
from warpbus.dist import SHARES, Patience, Processes
from warpbus.dist.cluster import ClusterProcesses
from warpbus.dist.watchdog import check_limit
from warpbus.errors import CheckpointError, DataError, NumericError, StorageError, UsageError
from warpbus.formats import FinishedParts, discard_parts
from warpbus.formats.files import check_kept
from warpbus.formats.hub import find_model
from warpbus.formats.kv_cache import KVCacheScheme
from warpbus.models import check_loadable
from warpbus.models.templates import find_template
from warpbus.models.tokenizers import load_tokenizer
from warpbus.qtensor import Scheme, Schemes
from warpbus.quantization.calibration import Calibration
from warpbus.quantization.estimate import QuantizationEstimate
from warpbus.quantization.job import Begun, Job, run_job
from warpbus.quantization.methods import METHODS, fitting_algorithms, suits
from warpbus.quantization.options import QuantizationOptions
from warpbus.quantization.preflight import Plan, check_end, check_kv_cache, prepare
from warpbus.quantization.prestart import ENVIRONMENT
from warpbus.quantization.report import LayerResult, Report
from warpbus.quantization.sources import Checked
from warpbus.quantization.survey import model_hash
from warpbus.quantization.texts import GENERAL_TEXTS, read_calibration
from warpbus.quantization.tuning import TuningStep, split
from warpbus.quantization.tuning_parts import check_tunable, check_tuning, tuning_bytes

ALGORITHMS = (*METHODS, "rtn")


@dataclass
class Progress:
    """Callbacks that report the progress of a quantization; replace those that you need.

    Attributes:
        estimated: called before the first layer with the estimate of memory, disk space and time.
        checked: called while the weights of finished parts are hashed again, with the bytes done and in total.
        begun: called with the finished parts of an earlier run, see `Begun`.
        tuning: called after each step of a tuning with the number of steps done, and their total.
        matrix: called after each matrix with the number of finished matrices, their total, and the result.
    """

    estimated: Callable[[QuantizationEstimate], None] = field(default=lambda estimate: None)
    checked: Callable[[int, int], None] = field(default=lambda done, total: None)
    begun: Callable[[Begun], None] = field(default=lambda begun: None)
    tuning: Callable[[int, int], None] = field(default=lambda done, total: None)
    matrix: Callable[[int, int, LayerResult], None] = field(default=lambda done, total, result: None)


def quantize(
    model: str | Path,
    output: str | Path,
    *,
    scheme: str | Scheme | Schemes = "w4a16-g128",
    algorithm: str = "gptq",
    format: str = QuantizationOptions.format,
    head: str | Scheme | None = QuantizationOptions.head,
    embedding: str | Scheme | None = QuantizationOptions.embedding,
    kv_cache: str | None = QuantizationOptions.kv_cache,
    effort: str = QuantizationOptions.effort,
    calibration: str | Path | Calibration | None = None,
    samples: int | None = QuantizationOptions.samples,
    tokens: int | None = QuantizationOptions.tokens,
    seqlen: int = QuantizationOptions.seqlen,
    seed: int = QuantizationOptions.seed,
    device: str | torch.device = QuantizationOptions.device,
    gpus: str | int = QuantizationOptions.gpus,
    processes: int = QuantizationOptions.processes,
    cluster: str | None = QuantizationOptions.cluster,
    damping: float = QuantizationOptions.damping,
    overwrite: bool = QuantizationOptions.overwrite,
    restart: bool = QuantizationOptions.restart,
    rank_timeout: float = QuantizationOptions.rank_timeout,
    remarks: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Quantize the linear layers of a model and write the result to a new directory.

    Norms, biases and, without `head` and `embedding`, the head and the embedding are copied unchanged, unless the
    algorithm folds scales into them; tensors keep their names. The output directory is written completely or not at
    all. The same arguments give
    the same bits on the same kind of device, for any number of GPUs. Finished layers are kept in `OUTPUT.quantization`
    until the model is complete: after an interruption, the same call continues from there if hashes show that the
    weights have not changed.

    Args:
        model: the directory of an unquantized model, or a name on a hub, see `formats.hub.find_model`.
        output: a new directory.
        scheme: see `Scheme`; `Schemes` if the matrices have different schemes.
        algorithm: "gptq" (Frantar et al., 2022), "awq" (Lin et al., 2023) or, for 8-bit activations, "smoothquant"
            (Xiao et al., 2022), which need calibration data; or "rtn", round to nearest.
        format: the format to write, see `formats.format_named`.
        head: the scheme of the head, with 16-bit activations, for instance "w8a16-g128"; None does not quantize it. A
            model with tied embeddings gets a separate head. Only in compressed-tensors.
        embedding: the scheme of the embedding, 8 bits with 16-bit activations, for instance "w8a16-g128"; None does not
            quantize it. Without `head`, a head that is tied to it is the same quantized matrix. Only in
            compressed-tensors.
        kv_cache: calibrates scales for an 8-bit KV cache on the quantized model and writes them to the checkpoint:
            "fp8" or "int8" with one scale for the keys and one for the values of a layer; "fp8-head" or "int8-head"
            with one per KV head. Only in compressed-tensors, and not with rtn.
        effort: "normal", or "high": after the algorithm, the scales of all groups are trained on the predictions of the
            unquantized model (see `tuning`). Only with calibration, for schemes of integer weights and 16-bit
            activations, and on the CPU, where one process does it; not with `kv_cache`.
        calibration: a file, see `read_calibration`, or tokenized sequences; by default the packaged `GENERAL_TEXTS`.
            Not used by rtn.
        samples: maximum number of calibration sequences.
        tokens: number of calibration tokens in all sequences together. Without `samples` and `tokens`: 262,144 tokens,
            or all of the file, in at most 4,096 sequences.
        seqlen: maximum tokens per sequence; also limited by the model's context.
        seed: random seed for drawing the sequences.
        device: "auto" (GPUs, else the CPU), "cpu", "cuda" (GPUs) or "cuda:N" (only this GPU). The CPU computes in
            float32, a GPU in the checkpoint's dtype.
        gpus: the number of GPUs, "all", or their indexes, such as "0,2". rtn uses the first one.
        processes: number of processes on the CPU or on a cluster.
        cluster: a Ray cluster: "auto" for the one that this machine belongs to, or "ray://HOST:PORT". Each process gets
            a GPU, or with device "cpu" a core. Model and output must have the same paths on all machines.
        damping: see `algorithms.factored`.
        overwrite: replace a model that is at `output`.
        restart: discard the finished layers of an earlier run to the same output.
        rank_timeout: seconds without a heartbeat of a process after which the run ends. A stopped process is logged
            after 30 s.
        remarks: additional entries of the report's settings, such as the reason for scheme and algorithm.
        progress: see `Progress`.

    Returns:
        The report, which is also written to the output directory as `warpbus-report.json`.

    Raises:
        UsageError: an argument is wrong, or an interrupted run to the same output had other arguments or weights; the
            message names the difference.
        SchemeError: the scheme does not exist, or does not fit a matrix, the algorithm or the format.
        CheckpointError: the model cannot be read, is incomplete, or is already quantized.
        DataError: the calibration data cannot be used.
        NumericError: a matrix cannot be quantized; the message names it.
        DeviceError: a device does not exist, has too little memory, or fails; or a process died, or sent no heartbeat
            for `rank_timeout`.
        StorageError: the output exists, cannot be written, or does not fit on the disk.
    """
    started = time.time()
    progress = progress or Progress()
    check_limit("rank_timeout", rank_timeout)
    patience = Patience(rank_timeout)
    head = Scheme.parse(head) if isinstance(head, str) else head
    embedding = Scheme.parse(embedding) if isinstance(embedding, str) else embedding
    options = QuantizationOptions(
        format=format,
        head=None if head is None else str(head),
        embedding=None if embedding is None else str(embedding),
        kv_cache=kv_cache,
        effort=effort,
        samples=samples,
        tokens=tokens,
        seqlen=seqlen,
        seed=seed,
        device=str(device),
        gpus=gpus,
        processes=processes,
        cluster=cluster,
        damping=damping,
    )
    schemes, devices = check_arguments(scheme, algorithm, options)
    calibration = GENERAL_TEXTS if calibration is None else calibration
    model = find_model(model, check=check_loadable)
    state = _JobState(progress)
    workers: AbstractContextManager[Callable[[Job], None]]
    if cluster is None:
        workers = _here(devices, state, patience)
    else:
        model, output = Path(model).absolute(), Path(output).absolute()
        workers = nullcontext(partial(_on_cluster, cluster, devices, state, patience))
    # The other processes start while this one looks at the model.
    with workers as run:
        cached = None if kv_cache is None else KVCacheScheme.parse(kv_cache)
        plan = prepare(Path(model), Path(output), schemes, format, head=head, embedding=embedding, kv_cache=cached)
        if not suits(algorithm, plan.config):
            raise UsageError(
                f"{algorithm} moves factors of a matrix's inputs into the operation before it, which the blocks of "
                f"{model} ({plan.config.family}) do not allow: use gptq, or rtn"
            )
        data = held = None
        if algorithm in METHODS:
            if not isinstance(calibration, Calibration):
                check_kept(Path(output), Path(calibration))
            data = read_data(plan, calibration, options)
        identity = _identity(plan, algorithm, data, devices[0].type, damping)
        settings = _settings(plan, data, calibration, options)
        if data is not None and effort == "high":
            check_tunable(plan)
            data, held = split(data)
            identity["effort"] = settings["effort"] = effort
        state.matrices = len(plan.matrices)
        job = Job(
            model=Path(model),
            output=Path(output),
            schemes=schemes,
            format=format,
            algorithm=algorithm,
            data=data,
            held=held,
            head=head,
            embedding=embedding,
            kv_cache=cached,
            damping=damping,
            overwrite=overwrite,
            restart=restart,
            expected_bytes=plan.bytes_after + (0 if held is None else tuning_bytes(plan)),
            identity=identity,
            settings=settings | dict(remarks or {}),
            model_hash=model_hash(plan.checkpoint),
            started=started,
        )
        with _leaving_nothing_useless(Path(output)):
            run(job)
    assert state.report is not None
    return state.report


def check_arguments(
    scheme: str | Scheme | Schemes,
    algorithm: str,
    options: QuantizationOptions,
) -> tuple[Schemes, Sequence[torch.device]]:
    """The checks of the arguments of `quantize` that need no model.

    Returns:
        the schemes, and the device of each process.

    Raises:
        UsageError, SchemeError, DeviceError: as `quantize`.
    """
    schemes = _schemes(scheme)
    if algorithm not in ALGORITHMS:
        raise UsageError(f"algorithm is {algorithm!r}: choose from {', '.join(ALGORITHMS)}")
    for each in schemes.distinct():
        fitting = fitting_algorithms(each)
        if algorithm not in fitting:
            raise UsageError(f"{algorithm} cannot quantize to {each}: choose from {', '.join(fitting)}")
    for what, asked in (("head", options.head), ("embedding", options.embedding)):
        if asked is None:
            continue
        check_end(what, Scheme.parse(asked), options.format)
        if any(each.element is not None for each in schemes.distinct()):
            raise UsageError(
                f"--{what} {asked}: layers in FP4 or trellis codes exclude it: no program reads such a model"
            )
    if options.kv_cache is not None:
        cached, calibrated = KVCacheScheme.parse(options.kv_cache), algorithm in METHODS
        check_kv_cache(cached, schemes, options.format, calibrated=calibrated)
    if options.effort not in options.efforts:
        raise UsageError(f"effort is {options.effort!a:.60}: choose from {', '.join(options.efforts)}")
    for name in ("samples", "tokens", "seqlen"):
        value, least = getattr(options, name), options.least[name]
        if value is not None and value < least:
            raise UsageError(f"{name} is {value}: it has to be at least {least}")
    if not options.least["damping"] <= options.damping < float("inf"):
        raise UsageError(f"damping is {options.damping}: it has to be a number from 0 up, 0.01 for instance")
    chosen = _devices if options.cluster is None else _devices_of_cluster
    devices = chosen(options.device, options.gpus, options.processes, algorithm)
    if options.effort == "high":
        check_tuning(schemes, calibrated=algorithm in METHODS, kv_cache=options.kv_cache)
    return schemes, devices


@dataclass
class _JobState:
    """Counts the messages of the processes and passes them on to `progress`."""

    progress: Progress
    matrices: int = 0
    done: int = 0
    report: Report | None = None

    def receive(self, message: object) -> None:
        if isinstance(message, QuantizationEstimate):
            self.progress.estimated(message)
        elif isinstance(message, Checked):
            self.progress.checked(message.done, message.total)
        elif isinstance(message, Begun):
            self.progress.begun(message)
        elif isinstance(message, TuningStep):
            self.progress.tuning(message.done, message.total)
        elif isinstance(message, LayerResult):
            self.done += 1
            self.progress.matrix(self.done, self.matrices, message)
        else:
            assert isinstance(message, Report)
            self.report = message


def _schemes(scheme: str | Scheme | Schemes) -> Schemes:
    if isinstance(scheme, str):
        scheme = Scheme.parse(scheme)
    return Schemes(scheme) if isinstance(scheme, Scheme) else scheme


def _devices(device: str, gpus: str | int, processes: int, algorithm: str) -> Sequence[torch.device]:
    """The device of each process."""
    if not 1 <= processes <= SHARES:
        raise UsageError(f"processes is {processes}: it has to be from 1 to {SHARES}")
    first = resolve_device(device)
    if str(gpus) != "all" and (first.type == "cpu" or ":" in device):
        wanted = f"--gpus {str(gpus)!a:.60}".replace("'", "")
        if device == "auto":
            raise UsageError(f"{wanted}: no GPU was found on this machine: leave it out, or see `warpbus doctor`")
        meant = "the CPU" if first.type == "cpu" else "one GPU"
        raise UsageError(f"{wanted}: --device {device} means {meant}: leave one of the two out")
    if first.type == "cpu":
        return [first] * (processes if algorithm in METHODS else 1)
    if processes > 1:
        raise UsageError(f"processes is {processes}: that is for the CPU; on GPUs there is one per GPU: use --gpus")
    numbers = [first.index or 0] if ":" in device else _gpu_numbers(gpus)
    return [resolve_device(f"cuda:{number}") for number in numbers[: SHARES if algorithm in METHODS else 1]]


def _devices_of_cluster(device: str, gpus: str | int, processes: int, algorithm: str) -> Sequence[torch.device]:
    """The kind of device of each process on a cluster."""
    if device not in ("auto", "cuda", "cpu"):
        raise UsageError(f"device is {device!a:.60}: a cluster has GPUs (auto or cuda), or CPU cores with cpu")
    if str(gpus) != "all":
        raise UsageError(f"gpus is {str(gpus)!a:.60}: on a cluster the number of GPUs is that of --processes")
    if not 1 <= processes <= SHARES:
        raise UsageError(f"processes is {processes}: it has to be from 1 to {SHARES}")
    return [torch.device("cpu" if device == "cpu" else "cuda")] * (processes if algorithm in METHODS else 1)


@contextmanager
def _leaving_nothing_useless(output: Path) -> Iterator[None]:
    """After numbers that cannot be quantized: remove parts among which no layer is, or say that layers are kept."""
    try:
        yield
    except NumericError as error:
        parts = FinishedParts(output)
        layers = sum(part.startswith("layer-") for part in parts.parts())
        if not layers:
            discard_parts(output)
            raise
        raise NumericError(
            f"{error}. The finished layers ({layers}) are kept in {parts.directory}: once this is mended, the same "
            "command goes on from there; with --restart another one starts anew; without either, remove it"
        ) from error


@contextmanager
def _here(devices: Sequence[torch.device], state: _JobState, patience: Patience) -> Iterator[Callable[[Job], None]]:
    """Runs a job on this machine, in processes that start at once."""
    with Processes(
        run_job, devices=devices, receive=state.receive, environment=ENVIRONMENT, exit_early=True, patience=patience
    ) as processes:
        yield processes.run


def _on_cluster(address: str, devices: Sequence[torch.device], state: _JobState, patience: Patience, job: Job) -> None:
    """Run a job on a cluster; what it writes has to arrive here."""
    with ClusterProcesses(
        run_job,
        processes=len(devices),
        address=address,
        gpus=devices[0].type == "cuda",
        receive=state.receive,
        patience=patience,
    ) as processes:
        processes.run(job)
    if not job.output.is_dir():
        raise StorageError(
            f"{job.output}: written on a machine of the cluster, but not seen here: name a directory that all share"
        )


def _gpu_numbers(gpus: str | int) -> list[int]:
    """The numbers of the GPUs that were asked for."""
    there = torch.cuda.device_count()
    text = str(gpus)
    shown = f"gpus is {text!a:.60}"
    wanted = f"{shown}: expected all, a number of GPUs, or their numbers separated by commas"
    if text == "all":
        return list(range(there))
    pieces = text.split(",")
    if not all(piece.isascii() and piece.isdigit() and len(piece) < 5 for piece in pieces):
        raise UsageError(wanted)
    numbers = [int(piece) for piece in pieces]
    if len(numbers) == 1:
        most = min(there, SHARES)
        if not 1 <= numbers[0] <= most:
            raise UsageError(f"{shown}: there are {there} here, of which {most} can share the work: give 1 to {most}")
        return list(range(numbers[0]))
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{wanted}, each once")
    if max(numbers) >= there:
        raise UsageError(f"{shown}: there are {there} here: their numbers are 0 to {there - 1}")
    return numbers


def read_data(plan: Plan, source: str | Path | Calibration, options: QuantizationOptions) -> Calibration:
    """The calibration data of a model: sequences that are already tokenized, or drawn from a file.

    Args:
        plan: of the model, for its tokenizer, vocabulary and context.
        source: as `calibration` of `quantize`.
        options: `samples`, `tokens`, `seqlen` and `seed` of the draw.

    Raises:
        DataError: if it cannot be used.
        CheckpointError: if the tokenizer does not belong to the model.
    """
    directory, size = plan.checkpoint.directory, plan.config.vocab_size
    if isinstance(source, Calibration):
        if not source.sequences or not all(source.sequences):
            raise DataError("calibration: expected sequences of at least one token each")
        for token in (min(map(min, source.sequences)), max(map(max, source.sequences))):
            if not 0 <= token < size:
                raise DataError(f"calibration: token {token}: the model has tokens 0 to {size - 1}")
        return source
    tokenizer = load_tokenizer(directory)
    template = find_template(directory, plan.checkpoint.config, tokenizer)
    data = read_calibration(
        Path(source),
        tokenizer,
        template,
        seqlen=min(options.seqlen, plan.config.max_context),
        seed=options.seed,
        samples=options.samples,
        tokens=options.tokens,
    )
    largest = max(map(max, data.sequences))
    if largest >= size:
        raise CheckpointError(
            f"{directory}: its tokenizer gives token {largest}, but the vocabulary has {size}: "
            "check that the tokenizer belongs to this model"
        )
    return data


def _identity(plan: Plan, algorithm: str, data: Calibration | None, kind: str, damping: float) -> dict[str, object]:
    """All that decides the result of a run but the weights, whose hashes the finished parts have: see `sources`."""
    found: dict[str, object] = {
        "config.json": plan.checkpoint.config,
        "scheme": plan.schemes.to_json(),
        "algorithm": algorithm,
        "format": plan.format.name,
        "head": None if plan.head is None else str(plan.head.scheme),
        "damping": damping,
        "calibration tokens": None if data is None else hashlib.sha256(repr(data.sequences).encode()).hexdigest(),
        "device": kind,
        "warpbus": warpbus.__version__,
        "torch": torch.__version__,
    }
    if plan.embedding is not None:
        found["embedding"] = str(plan.embedding.scheme)
    return found if plan.kv_cache is None else found | {"KV cache": str(plan.kv_cache)}


def _settings(
    plan: Plan, data: Calibration | None, calibration: str | Path | Calibration, options: QuantizationOptions
) -> dict[str, Any]:
    """The report's entry on the calibration; `samples` of it draws the same sequences again."""
    if data is None:
        return {}
    given = f"{len(data.sequences)} sequences" if isinstance(calibration, Calibration) else str(calibration)
    if calibration == GENERAL_TEXTS:
        given = "packaged general texts"
    found = {
        "calibration": given,
        "samples": len(data.sequences),
        "seqlen": options.seqlen,
        "seed": options.seed,
        "damping": options.damping,
    }
    return found if plan.kv_cache is None else found | {"kv_cache": str(plan.kv_cache)}
