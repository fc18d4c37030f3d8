"""The estimate before a quantization: memory of every GPU, main memory, disk space and time.

Sizes follow from the shapes alone. The lower end of the time is that of the matrix products at the rates measured on
the device; the upper end adds the time of recorded runs for reading, writing, attention, norms and the search for
scales.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from warpbus.cuda.devices import default_dtype
from warpbus.cuda.rates import matmul_rates
from warpbus.dist import SHARES
from warpbus.errors import DeviceError, StorageError, UsageError
from warpbus.formats.files import free_space
from warpbus.formats.resumable_checkpoint import WAITING
from warpbus.kernels.reference.trellis import SEAM
from warpbus.models import MoESpec
from warpbus.models.cost import FILE_RATE, MemoryNeed, TimeRange
from warpbus.qtensor.trellis import STATES, STEPS
from warpbus.quantization.algorithms.awq import TRIALS
from warpbus.quantization.algorithms.gptq import SWEEPS
from warpbus.quantization.algorithms.linear_algebra import PRODUCTS
from warpbus.quantization.calibration import Calibration
from warpbus.quantization.methods import EXPERT_SQUARES, SOLVE_ROWS, solved_at_once
from warpbus.quantization.preflight import Matrix, Plan
from warpbus.quantization.report import FALLBACK_TOKENS, LEAST_TOKENS
from warpbus.quantization.states import COMPARED_TOKENS, ROUTED_TOKENS
from warpbus.quantization.statistics import DRIFT, MOMENTS
from warpbus.quantization.survey import RankDevice
from warpbus.quantization.tuning import BATCH_TOKENS as TUNING_BATCH
from warpbus.quantization.tuning import EPOCHS, LOGIT_TOKENS
from warpbus.quantization.tuning_parts import STATE_BYTES as TUNING_STATE_BYTES
from warpbus.quantization.tuning_parts import groups_of, tuning_bytes

# Square matrices of a stage: of each kind of moments a sum over shares (log2 of their number, and one) and one more
# that is being added to it; then those of the solve: both moments, ordered copies of them, the factor and its source.
_SUMS = SHARES.bit_length() + 1
_SOLVE_SQUARES = 7
_ALLOWANCE = {"cuda": 10**9, "cpu": 4 * 10**8}  # bytes: libraries, their workspaces, what the allocator cannot use
_DISK_ALLOWANCE = 16 * 10**6  # bytes: config, index, report, pictures

# How much longer than its products a stage takes at most. On GPUs the records in `benchmarks/results` are within it. On
# a CPU runs of gptq and awq on glm-poet are, by the time that they had a core: everything but the products took as long
# as these, so that the products alone stay below the time of a quiet machine even where a busy one halves their rate.
_SLOWDOWN = {
    "cuda": {"tuning": 6.0, "forward": 1.7, "moments": 1.4, "factors": 2.0, "solve": 7.0, "search": 60.0},
    "cpu": {"tuning": 3.0, "forward": 2.5, "moments": 2.2, "factors": 10.0, "solve": 13.0, "search": 8.0},
}
_SEARCH_FLOP = 7 * STATES / 2 * (1 + 2 * SEAM / STEPS)  # a weight: of each state and pair of weights, in both passes
_MATRIX_SECONDS = 0.03  # that a matrix takes besides, for the thousands of small steps of its factors and its solve
_START_SECONDS = 6.0  # starting the processes and loading libraries, and giving the model its name at the end


@dataclass(frozen=True)
class QuantizationEstimate:
    """The resources that a run needs.

    Attributes:
        gpus: those of each GPU, in rank order; empty on the CPU.
        memory: main memory of the processes of one machine; with several machines, of the one with the least left.
        disk: the disk of the output.
        keep: whether the inputs of the last matrix of a layer can be kept while it is solved (see `LayerQuantization`).
        tokens: number of calibration tokens; 0 without calibration.
        columns: columns of the widest matrix.
        seconds: time of each kind of matrix product on the device with the most work; empty without calibration.
        time: the duration of the run; None without calibration.
    """

    gpus: tuple[MemoryNeed, ...]
    memory: MemoryNeed
    disk: MemoryNeed
    keep: bool
    tokens: int
    columns: int
    seconds: Mapping[str, float]
    time: TimeRange | None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about main memory, which are not errors because memory can be swapped or added to a virtual
        machine."""
        found = []
        if not self.memory.fits:
            found.append(f"{self.memory.shortage()}: it may get slow or be killed: close other programs, or use a GPU")
        if 0 < self.tokens < self.columns:
            found.append(
                f"the calibration data has {self.tokens:,} tokens, the widest matrix {self.columns:,} columns: too few "
                "to tell which of them matter: give more or longer texts"
            )
        return tuple(found)

    def check(self) -> None:
        """Refuse a run that does not fit.

        Raises:
            DeviceError: a GPU has too little memory.
            StorageError: the disk has too little space.
        """
        for need in self.gpus:
            if not need.fits:
                raise DeviceError(f"{need.shortage()}: {self._remedy(need)}")
        if not self.disk.fits:
            raise StorageError(f"{self.disk.shortage()}: make room or name a directory on another disk")

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary; sizes in bytes, times in seconds."""
        return asdict(self)

    def figures(self) -> dict[str, float]:
        """The estimate in the report: of a calibrated run the `seconds` at least and `most_seconds`; bytes of main
        `memory`, of the `disk` and, where there are GPUs, the `gpu_memory` of the fullest one.
        """
        found: dict[str, float] = {"memory": self.memory.total, "disk": self.disk.total}
        if self.time is not None:
            found |= {"seconds": self.time.least, "most_seconds": self.time.most}
        return found | ({"gpu_memory": max(gpu.total for gpu in self.gpus)} if self.gpus else {})

    def _remedy(self, need: MemoryNeed) -> str:
        growing = sum(need.parts.get(name, 0) for name in ("states", "activations"))  # with the tokens
        rest = (need.available or 0) - (need.total - growing)
        if growing == 0 or rest <= 0:
            return "use GPUs with more memory, or --device cpu"
        share = math.floor(100 * rest / growing)
        return f"use fewer --samples or a shorter --seqlen ({share} % of the tokens fit), more GPUs, or --device cpu"


def estimate(
    plan: Plan,
    *,
    output: Path,
    algorithm: str,
    needed: frozenset[str],
    tokens: int,
    batch_tokens: int,
    ranks: Sequence[RankDevice],
    rates: Mapping[torch.dtype, float],
    tuned: Calibration | None = None,
    kept_bytes: int = 0,
    finished: Collection[int] = (),
    passed: Collection[int] | None = None,
) -> QuantizationEstimate:
    """The resources for quantizing a model.

    Args:
        plan: the model.
        output: the path of the result on this machine.
        algorithm: "gptq", "awq" or another.
        needed: the statistics of the algorithm, see `Collector`.
        tokens: number of calibration tokens; 0 for an algorithm without calibration.
        batch_tokens: tokens per batch.
        ranks: the devices of all ranks, in their order.
        rates: the rates of the first rank's device, see `device_rates`.
        tuned: the data that scales are tuned on and checked with; None without tuning.
        kept_bytes: bytes that an earlier run has already written.
        finished: the numbers of the layers that it has finished.
        passed: those of the layers that the calibration data pass through, finished ones among them; None: all.

    Raises:
        UsageError: if there are more ranks than shares of the work.
    """
    if not 1 <= len(ranks) <= SHARES:
        raise UsageError(f"{len(ranks)} devices: the work is cut into {SHARES} shares: use 1 to {SHARES} devices")
    device, world = torch.device(ranks[0].device), len(ranks)
    kind, machines = device.type, Counter(rank.machine for rank in ranks)
    most = math.ceil(SHARES / world) / SHARES  # shares go to ranks as a whole
    dtype = default_dtype(device, plan.dtype)
    matrices = plan.layer(0).values()
    part = plan.bytes_quantized // len(plan.config.all_layers)
    disk = {"model": plan.bytes_after + _DISK_ALLOWANCE} | ({"tuning": tuning_bytes(plan)} if tuned else {})
    disk |= {"there already": -kept_bytes} if kept_bytes else {}
    shared = max(machines.values()) if kind == "cpu" else 1  # processes on one CPU share its cores
    # The weights of finished layers are read too: their hashes are compared.
    moved = plan.checkpoint.total_bytes + max(0, plan.bytes_after - (kept_bytes if finished else 0))
    solved = [matrix for matrix in plan.matrices if matrix.layer not in finished]
    through = plan.matrices if passed is None else [matrix for matrix in plan.matrices if matrix.layer in passed]
    products = _seconds(plan, algorithm, needed, tokens, most, device, rates, through, finished)
    seconds = {name: shared * value for name, value in products.items()}
    if tuned:
        seconds["tuning"] = _tuning_flop(plan, tuned.tokens) / rates[torch.float32]

    tuning = _tuning_memory(plan, tuned, kind) if tuned else {}
    waiting = {"finished layers": (WAITING + 2) * part}  # with the first rank; one is copied as a whole

    def made(*, keep: bool) -> QuantizationEstimate:
        at_once = {shape: solved_at_once(shape) if algorithm == "gptq" else 1 for shape in plan.shapes}
        together = max(batch_tokens, ROUTED_TOKENS[kind] if plan.config.has_experts else 0)
        stacks = kind == "cuda" and plan.config.has_experts
        working = _working_memory(
            plan, needed, at_once, tokens, together, most, dtype.itemsize, keep=keep, stacks=stacks
        )
        return QuantizationEstimate(
            gpus=_gpu_memory(ranks, {**working, **waiting}, working, tuning) if kind == "cuda" else (),
            memory=_main_memory(plan, ranks, working, waiting, tuning),
            disk=MemoryNeed(str(output.resolve().parent), disk, free_space(output)),
            keep=keep,
            tokens=tokens,
            columns=max(matrix.columns for matrix in matrices),
            seconds=seconds,
            time=time_range(seconds, kind, matrices=len(solved), file_bytes=moved) if tokens else None,
        )

    kept = made(keep=True)
    return kept if all(need.fits for need in (*kept.gpus, kept.memory)) else made(keep=False)


def _gpu_memory(
    ranks: Sequence[RankDevice], first: dict[str, int], others: dict[str, int], tuning: dict[str, int]
) -> tuple[MemoryNeed, ...]:
    """The memory of each GPU: bytes of the `first` one, which also tunes, and of the `others`."""
    distinct = len({rank.device for rank in ranks}) == len(ranks)
    needs = []
    for number, rank in enumerate(ranks):
        # On a cluster each process has a cuda:0 of its own.
        name = rank.device if distinct else f"process {number} on {rank.machine}"
        parts = _larger(first, tuning) if number == 0 else others
        needs.append(MemoryNeed(name, {**parts, "libraries": _ALLOWANCE["cuda"]}, rank.free))
    return tuple(needs)


def _main_memory(
    plan: Plan,
    ranks: Sequence[RankDevice],
    working: dict[str, int],
    waiting: dict[str, int],
    tuning: dict[str, int],
) -> MemoryNeed:
    """The main memory of the machine that has least to spare; the last three arguments are bytes of a process."""
    on_cpu, machines = torch.device(ranks[0].device).type == "cpu", Counter(rank.machine for rank in ranks)
    needs = []
    for rank in {rank.machine: rank for rank in ranks}.values():
        count, parts = machines[rank.machine], {"a layer of the file": plan.largest_unit}  # mapped: it is shared
        if on_cpu:
            parts |= {name: size * count for name, size in working.items()}
        if rank.machine == ranks[0].machine:
            parts |= waiting if on_cpu else {"finished layers": plan.bytes_quantized // len(plan.config.all_layers)}
            parts = _larger(parts, tuning) if on_cpu else parts
        parts["processes"] = (_ALLOWANCE["cpu"] if on_cpu else 2 * _ALLOWANCE["cuda"]) * count
        name = "main memory" if len(machines) == 1 else f"main memory of {rank.machine}"
        needs.append(MemoryNeed(name, parts, rank.memory))
    return min(needs, key=lambda need: math.inf if need.available is None else need.available - need.total)


def _working_memory(
    plan: Plan,
    needed: frozenset[str],
    at_once: Mapping[Matrix, int],
    tokens: int,
    batch_tokens: int,
    most: float,
    itemsize: int,
    *,
    keep: bool,
    stacks: bool,
) -> dict[str, int]:
    """Bytes that the rank with most to do needs on its device.

    Args:
        at_once: how many matrices of a shape are solved together.
        stacks: experts are copied to be computed together.
    """
    config, matrices = plan.config, plan.shapes
    if not tokens:
        # One matrix at a time: itself, in float32, and what it becomes.
        return {"a matrix": max(sum(matrix.rows) * matrix.columns for matrix in matrices) * 16}
    own, models = math.ceil(tokens * most), 2 if DRIFT in needed else 1
    layers = set(config.all_layers)
    attended = config.attention.width
    inner = max(layer.mlp.inner for layer in layers)
    squares = len(needed & {MOMENTS, DRIFT})
    gathering = max(4 * squares * _SUMS * at_once[matrix] * matrix.columns**2 for matrix in matrices)
    solving = max(
        4
        * at_once[matrix]
        * matrix.columns
        * (
            bool(squares) * (EXPERT_SQUARES if at_once[matrix] > 1 else _SOLVE_SQUARES) * matrix.columns
            + SOLVE_ROWS * sum(matrix.rows) * most
        )
        for matrix in matrices
    )
    return {
        "states": own * models * config.hidden_size * itemsize,
        "activations": own * max(models * attended, keep * inner) * itemsize,
        "a batch": min(own, batch_tokens) * (6 * inner * itemsize + 16 * config.hidden_size),
        # While one is worked on, the next one is read.
        "layers": max(layer.num_weights for layer in layers) * (models + 1 + stacks) * itemsize,
        "moments and solve": max(gathering, math.ceil(solving)),
    }


def _larger(layers: dict[str, int], tuning: dict[str, int]) -> dict[str, int]:
    """The larger of the two needs of the first process, which tunes after the layers."""
    return max(layers, tuning, key=lambda parts: sum(parts.values()))


def _tuning_memory(plan: Plan, data: Calibration, kind: str) -> dict[str, int]:
    """Bytes on the device that tunes, see `Tuning`."""
    config, itemsize = plan.config, torch.float32.itemsize
    inner = max(layer.mlp.inner for layer in config.all_layers)
    longest = max(map(len, data.sequences))
    batch = max(TUNING_BATCH, longest)
    # On a GPU scores and probabilities of a layer, and their gradients, are in memory; a CPU computes them in blocks.
    scores = 4 * batch * longest * config.attention.num_heads * itemsize if kind == "cuda" else 0
    return {
        "quantized model": plan.bytes_quantized + TUNING_STATE_BYTES * groups_of(plan),
        "states": data.tokens * config.hidden_size * itemsize,
        "activations": scores + batch * itemsize * ((config.num_layers + 24) * config.hidden_size + 24 * inner),
        "logits": LOGIT_TOKENS * config.vocab_size * itemsize * 6,
        "layers": 3 * max(layer.num_weights for layer in config.all_layers) * itemsize,
        "head": config.vocab_size * config.hidden_size * itemsize,
    }


def _tuning_flop(plan: Plan, tokens: int) -> float:
    """Operations of tuning: the unquantized model once; per epoch each quantized layer twice, and its gradients."""
    products = 2.0 * plan.config.vocab_size * plan.config.hidden_size * 3 * EPOCHS
    for matrix in plan.matrices:
        layer = plan.config.all_layers[matrix.layer]
        routed = 1.0
        if layer.matrix(matrix.linear).expert is not None and isinstance(layer.mlp, MoESpec):
            routed = layer.mlp.router.top_k / layer.mlp.router.experts
        products += 2 * routed * sum(matrix.rows) * matrix.columns * (1 + 4 * EPOCHS)
    return tokens * products


def device_rates(device: torch.device, stored: torch.dtype, *, tuned: bool = False) -> dict[torch.dtype, float]:
    """FLOP per second of a device in the dtypes of a quantization, see `matmul_rates`.

    Args:
        stored: the dtype of the checkpoint.
        tuned: whether scales are tuned, see `Tuning`.
    """
    dtypes = default_dtype(device, stored), _solve_dtype(device), *([torch.float32] if tuned else [])
    return matmul_rates(device, list(dict.fromkeys(dtypes)), tf32=device.type == "cuda")


def _solve_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which factors and solves are computed, see `algorithms.linear_algebra`."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def time_range(seconds: Mapping[str, float], kind: str, *, matrices: int, file_bytes: int) -> TimeRange:
    """The range of the duration of a quantization, from the products alone to everything that recorded runs took.

    Args:
        seconds: time of each kind of product, see `QuantizationEstimate`.
        kind: "cuda" or "cpu".
        matrices: number of quantized matrices.
        file_bytes: bytes that are read and written.
    """
    stages = math.fsum(_SLOWDOWN[kind][name] * value for name, value in seconds.items())
    most = stages + _MATRIX_SECONDS * matrices + file_bytes / FILE_RATE + _START_SECONDS
    return TimeRange(math.fsum(seconds.values()), most)


def _seconds(
    plan: Plan,
    algorithm: str,
    needed: frozenset[str],
    tokens: int,
    most: float,
    device: torch.device,
    rates: Mapping[torch.dtype, float],
    through: Sequence[Matrix],
    finished: Collection[int],
) -> dict[str, float]:
    """Seconds of the rank with most to do, by kind of product.

    Args:
        through: the matrices that the calibration data pass through.
        finished: the numbers of the layers among theirs that are not solved again.
    """
    if not tokens:
        return {}
    compared = (DRIFT in needed) * (0.5 if tokens > COMPARED_TOKENS else 1.0)
    flop: dict[str, float] = dict.fromkeys(("forward", "moments", "factors", "solve", "search"), 0.0)
    for matrix in through:
        rows, columns = sum(matrix.rows), matrix.columns
        layer = plan.config.all_layers[matrix.layer]
        spec = layer.matrix(matrix.linear)
        routed = calibrated = float(tokens)
        if spec.expert is not None and isinstance(layer.mlp, MoESpec):
            routed *= layer.mlp.router.top_k / layer.mlp.router.experts
            calibrated = routed if routed >= LEAST_TOKENS else min(tokens, FALLBACK_TOKENS)
        # A product takes two operations an element; the original model may run alongside.
        flop["forward"] += 2 * (1 + compared) * routed * rows * columns * most
        if matrix.layer in finished:
            continue
        # x x^T is symmetric, (o - x) x^T is not. For a norm that several parameters read, awq needs x x^T twice.
        squares = (MOMENTS in needed) * (2 if algorithm == "awq" and layer.shared_norm(spec) else 1)
        flop["moments"] += (squares + 2 * compared) * calibrated * columns**2 * most
        if algorithm == "gptq":
            flop["factors"] += columns**3 / 3 * (PRODUCTS if device.type == "cuda" else 1)
            # Products: corrected target two, propagated errors half of one, descent one and two per sweep, losses two.
            flop["solve"] += 2 * rows * columns**2 * (2 + 0.5 + 1 + 2 * SWEEPS + 2) * most
            flop["search"] += matrix.scheme.is_trellis * _SEARCH_FLOP * rows * columns * most
        elif algorithm == "awq":
            flop["solve"] += 2 * rows * columns**2 * TRIALS * most
    forward, solve = rates[default_dtype(device, plan.dtype)], rates[_solve_dtype(device)]
    speed = {"forward": forward, "moments": forward, "factors": solve, "solve": solve, "search": solve}
    return {name: value / speed[name] for name, value in flop.items() if value}
