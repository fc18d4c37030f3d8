"""What a run is going to need, before its first layer: memory of every GPU, main memory, disk, time.

Sizes follow from the shapes alone. Times are those of the matrix products, at rates that are measured on the device,
so a run takes at least as long: reading, writing, attention and the search for scales come on top.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from warpbus.cuda.devices import default_dtype
from warpbus.dist import SHARES
from warpbus.errors import DeviceError, StorageError, UsageError
from warpbus.formats.files import free_space
from warpbus.formats.growing import WAITING
from warpbus.quantization.algorithms.awq import TRIALS
from warpbus.quantization.algorithms.cholesky import PRODUCTS
from warpbus.quantization.algorithms.gptq import SWEEPS
from warpbus.quantization.preflight import Plan
from warpbus.quantization.states import COMPARED_TOKENS
from warpbus.quantization.statistics import DRIFT, MOMENTS
from warpbus.quantization.survey import Place

# Square matrices of a stage: of each kind of moments a sum over shares (log2 of their number, and one) and one more
# that is being added to it; then those of the solve: both moments, ordered copies of them, the factor and its source.
_SUMS = SHARES.bit_length() + 1
_SOLVE_SQUARES = 7
_SOLVE_ROWS = 7  # float32 matrices [in, rows] at a time
_ALLOWANCE = {"cuda": 10**9, "cpu": 4 * 10**8}  # bytes: libraries, their workspaces, what the allocator cannot use
_DISK_ALLOWANCE = 16 * 10**6  # bytes: config, index, report, pictures


@dataclass(frozen=True)
class Need:
    """Bytes that one place has to have.

    Attributes:
        place: "cuda:0", "main memory", or the full path of the directory that the output is going to be in.
        parts: what they are made of.
        available: what is there; `None` where the system does not say.
    """

    place: str
    parts: Mapping[str, int]
    available: int | None

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether there is enough, as far as is known."""
        return self.available is None or self.total <= self.available


@dataclass(frozen=True)
class Rates:
    """FLOP a second of a device's matrix products.

    Attributes:
        forward: in the dtype of the activations.
        solve: in what factors and solves are computed in: on a GPU 16 bits, see `algorithms.precision`.
    """

    forward: float
    solve: float

    @classmethod
    def measured(cls, device: torch.device, dtype: torch.dtype) -> "Rates":
        """The best of some products of random matrices: a tenth of a second or two besides a GPU's first use."""
        solve = _rate(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
        # Tensor cores are as fast with the one format of 16 bits as with the other.
        alike = device.type == "cpu" or dtype in (torch.float16, torch.bfloat16)
        return cls(solve if alike else _rate(device, dtype), solve)


@dataclass(frozen=True)
class Estimate:
    """What a run needs.

    Attributes:
        gpus: of each GPU, in the order of the ranks; empty on the CPU.
        memory: main memory of the processes of one machine, of several machines of that which has least to spare.
        disk: where the model is going to be.
        keep: whether there is room for the inputs of each last matrix while it is solved (see `LayerQuantization`).
        tokens: that the model is calibrated on; 0 where nothing is calibrated.
        columns: of the widest matrix.
        seconds: of each kind of matrix product, on the device that has most to do.
    """

    gpus: tuple[Need, ...]
    memory: Need
    disk: Need
    keep: bool
    tokens: int
    columns: int
    seconds: Mapping[str, float]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What may go wrong: main memory can be swapped, and some virtual machines get more when they ask for it."""
        found = []
        if not self.memory.fits:
            found.append(f"{_shortage(self.memory)}: it may get slow or be killed: close other programs, or use a GPU")
        if 0 < self.tokens < self.columns:
            found.append(
                f"the calibration data has {self.tokens:,} tokens, the widest matrix {self.columns:,} columns: too few "
                "to tell which of them matter: give more or longer texts"
            )
        return tuple(found)

    def check(self) -> None:
        """Refuse what cannot work.

        Raises:
            DeviceError: if a GPU has too little memory.
            StorageError: if the disk has too little space.
        """
        for need in self.gpus:
            if not need.fits:
                raise DeviceError(f"{_shortage(need)}: {self._remedy(need)}")
        if not self.disk.fits:
            raise StorageError(f"{_shortage(self.disk)}: make room or name a directory on another disk")

    def table(self) -> Table:
        """A table for the terminal, at most 100 columns wide; GPUs that need the same share a row."""
        drawn = Table(title="what this run needs", title_justify="left", title_style="bold", header_style="bold")
        drawn.add_column("", max_width=36, overflow="fold")
        for name in ("needs", "free"):
            drawn.add_column(name, justify="right", no_wrap=True)
        drawn.add_column("of which", max_width=52)
        for need, last in self._rows():
            style = None if need.fits else "bold red"
            place = need.place if last is None else f"{need.place} to {last}"
            free = "?" if need.available is None else _size(need.available)
            drawn.add_row(Text(place), _size(need.total), free, _listed(need.parts), style=style)
        if self.seconds:
            kinds = ", ".join(f"{name} {_duration(value)}" for name, value in self.seconds.items())
            drawn.add_row("time, at least", _duration(sum(self.seconds.values())), "", kinds)
        return drawn

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary; sizes in bytes, times in seconds."""
        return asdict(self)

    def figures(self) -> dict[str, float]:
        """What the report keeps of it: seconds; bytes of memory, disk and, where there are any, of the fullest GPU."""
        found: dict[str, float] = {
            "seconds": sum(self.seconds.values()),
            "memory": self.memory.total,
            "disk": self.disk.total,
        }
        return found | ({"gpu_memory": max(gpu.total for gpu in self.gpus)} if self.gpus else {})

    def _rows(self) -> list[tuple[Need, str | None]]:
        """All needs; of GPUs in a row that are alike the first, and the name of the last."""
        rows: list[tuple[Need, str | None]] = []
        for need in self.gpus:
            if rows and rows[-1][0].parts == need.parts and rows[-1][0].fits == need.fits:
                rows[-1] = rows[-1][0], need.place
            else:
                rows.append((need, None))
        return [*rows, (self.memory, None), (self.disk, None)]

    def _remedy(self, need: Need) -> str:
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
    places: Sequence[Place],
    kept_bytes: int = 0,
    rates: Rates | None = None,
) -> Estimate:
    """What quantizing a model is going to need.

    Args:
        plan: the model.
        output: where it is going to be, as this process sees it.
        algorithm: "gptq", "awq" or another.
        needed: the statistics that it asks for, see `Collector`.
        tokens: that the model is calibrated on; 0 for an algorithm without calibration.
        batch_tokens: that go through a layer at once.
        places: of each rank.
        kept_bytes: what an earlier run has written already.
        rates: of a device; measured on that of the first rank if not given, which then has to be this process.

    Raises:
        UsageError: if there are more ranks than shares of the work.
    """
    if not 1 <= len(places) <= SHARES:
        raise UsageError(f"{len(places)} devices: the work is cut into {SHARES} shares: use 1 to {SHARES} devices")
    device, world = torch.device(places[0].device), len(places)
    kind, machines = device.type, Counter(place.machine for place in places)
    distinct = len({place.device for place in places}) == world
    most = math.ceil(SHARES / world) / SHARES  # shares go to ranks as a whole
    dtype = default_dtype(device, plan.dtype)
    if rates is None:
        rates = Rates.measured(device, dtype)
        torch.cuda.empty_cache()  # another process may be the one that works there
    matrices = plan.layer(0).values()
    part = plan.bytes_quantized // plan.config.num_layers
    disk = {"model": plan.bytes_after + _DISK_ALLOWANCE} | ({"there already": -kept_bytes} if kept_bytes else {})
    shared = max(machines.values()) if kind == "cpu" else 1  # processes on one CPU share its cores

    def made(*, keep: bool) -> Estimate:
        working = _working_memory(plan, needed, tokens, batch_tokens, most, dtype.itemsize, keep=keep)
        waiting = {"finished layers": (WAITING + 1) * part}  # with the first rank
        gpus = []
        for rank, place in enumerate(places if kind == "cuda" else ()):
            # On a cluster each process has a cuda:0 of its own.
            name = place.device if distinct else f"process {rank} on {place.machine}"
            parts = {**working, **(waiting if rank == 0 else {}), "libraries": _ALLOWANCE[kind]}
            gpus.append(Need(name, parts, place.free))
        memories = []
        for place in {place.machine: place for place in places}.values():
            count, host = machines[place.machine], {"a layer of the file": plan.largest_unit}  # mapped: it is shared
            if kind == "cpu":
                host |= {name: size * count for name, size in working.items()}
            if place.machine == places[0].machine:
                host |= waiting if kind == "cpu" else {"finished layers": part}
            host["processes"] = (_ALLOWANCE["cpu"] if kind == "cpu" else 2 * _ALLOWANCE["cuda"]) * count
            name = "main memory" if len(machines) == 1 else f"main memory of {place.machine}"
            memories.append(Need(name, host, place.memory))
        return Estimate(
            gpus=tuple(gpus),
            memory=min(memories, key=lambda need: math.inf if need.available is None else need.available - need.total),
            disk=Need(str(output.resolve().parent), disk, free_space(output)),
            keep=keep,
            tokens=tokens,
            columns=max(matrix.columns for matrix in matrices),
            seconds={
                name: shared * value
                for name, value in _seconds(plan, algorithm, needed, tokens, most, kind, rates).items()
            },
        )

    kept = made(keep=True)
    return kept if all(need.fits for need in (*kept.gpus, kept.memory)) else made(keep=False)


def _working_memory(
    plan: Plan, needed: frozenset[str], tokens: int, batch_tokens: int, most: float, itemsize: int, *, keep: bool
) -> dict[str, int]:
    """Bytes that the rank with most to do needs on its device."""
    config, matrices = plan.config, plan.shapes
    if not tokens:
        # One matrix at a time: itself, in float32, and what it becomes.
        return {"a matrix": max(sum(matrix.rows) * matrix.columns for matrix in matrices) * 16}
    own, models = math.ceil(tokens * most), 2 if DRIFT in needed else 1
    layers = set(config.layers)
    attended = config.attention.width
    inner = max(layer.mlp.ffn_size for layer in layers)
    squares = len(needed & {MOMENTS, DRIFT})
    gathering = max(squares * _SUMS * 4 * matrix.columns**2 for matrix in matrices)
    solving = max(
        4 * matrix.columns * (bool(squares) * _SOLVE_SQUARES * matrix.columns + _SOLVE_ROWS * sum(matrix.rows) * most)
        for matrix in matrices
    )
    return {
        "states": own * models * config.hidden_size * itemsize,
        "activations": own * max(models * attended, keep * inner) * itemsize,
        "a batch": min(own, batch_tokens) * (6 * inner * itemsize + 16 * config.hidden_size),
        # While one is worked on, the next one is read.
        "layers": max(sum(each.num_weights for each in layer.matrices) for layer in layers) * (models + 1) * itemsize,
        "moments and solve": max(gathering, math.ceil(solving)),
    }


def _seconds(
    plan: Plan, algorithm: str, needed: frozenset[str], tokens: int, most: float, kind: str, rates: Rates
) -> dict[str, float]:
    """Seconds of the rank with most to do, by kind of product."""
    if not tokens:
        return {}
    compared = (DRIFT in needed) * (0.5 if tokens > COMPARED_TOKENS else 1.0)
    flop: dict[str, float] = dict.fromkeys(("forward", "moments", "factors", "solve"), 0.0)
    for matrix in plan.matrices:
        rows, columns = sum(matrix.rows), matrix.columns
        # A product takes two operations an element; the original model may run alongside.
        flop["forward"] += 2 * (1 + compared) * tokens * rows * columns * most
        # x x^T is symmetric, (o - x) x^T is not.
        flop["moments"] += ((MOMENTS in needed) + 2 * compared) * tokens * columns**2 * most
        if algorithm == "gptq":
            flop["factors"] += columns**3 / 3 * (PRODUCTS if kind == "cuda" else 1)
            # What to aim at: two products; errors carried on: half a one; descent: one, and two a sweep; losses: two.
            flop["solve"] += 2 * rows * columns**2 * (2 + 0.5 + 1 + 2 * SWEEPS + 2) * most
        elif algorithm == "awq":
            flop["solve"] += 2 * rows * columns**2 * TRIALS * most
    speed = {"forward": rates.forward, "moments": rates.forward, "factors": rates.solve, "solve": rates.solve}
    return {name: value / speed[name] for name, value in flop.items() if value}


def _rate(device: torch.device, dtype: torch.dtype) -> float:
    size = 4096 if device.type == "cuda" else 512
    left = torch.randn(size, size, device=device).to(dtype)
    (left @ left)[0, 0].item()  # the first one loads what it needs
    seconds: list[float] = []
    while sum(seconds) < 0.02:
        started = time.perf_counter()
        (left @ left)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def _shortage(need: Need) -> str:
    available = 0 if need.available is None else need.available
    return f"{need.place}: needs about {_size(need.total)} ({_listed(need.parts)}), {_size(available)} free"


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_size(size)}" for name, size in parts.items())


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if abs(count) >= 1e9 else f"{count / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
