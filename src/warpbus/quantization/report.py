"""What was done to a model, and what it cost: as JSON, a table and a picture."""

import math
import platform
import re
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

import warpbus
from warpbus.errors import DataError, UsageError

LEAST_TOKENS = 256
"""An expert that is reached by fewer calibration tokens is calibrated on tokens of all experts, weighted by the
router's scores."""

FALLBACK_TOKENS = 2**15
"""So many of them, at most: each second or third ... of all tokens, where there are more."""

_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class LayerResult:
    """A matrix that was quantized.

    Attributes:
        layer: the number of its decoder layer.
        linear: its name there, for instance "mlp.down".
        scheme: what it was quantized to.
        error: where the run was calibrated sqrt(tr(dW H dW^T) / tr(W H W^T)), the relative error that rounding makes in
            its outputs on the calibration data, W being the matrix that was rounded (see `aim`); otherwise the relative
            error of its weights, in the Frobenius norm.
        seconds: what quantizing it took, calibration included.
        algorithm: what it was quantized by; `None` where that is the report's.
        routed_tokens: calibration tokens that the router sent to its expert; `None` if it belongs to no expert.
    """

    layer: int
    linear: str
    scheme: str
    error: float
    seconds: float
    algorithm: str | None = None
    routed_tokens: int | None = None

    @property
    def name(self) -> str:
        return f"layers.{self.layer}.{self.linear}"


@dataclass(frozen=True)
class HeadResult:
    """The head that was quantized.

    Attributes:
        scheme: what it was rounded to.
        error: the relative error of its weights, in the Frobenius norm.
        seconds: what that took.
        untied: the original used its embedding as the head; now there is a head besides the embedding.
    """

    scheme: str
    error: float
    seconds: float
    untied: bool

    def __str__(self) -> str:
        added = "; the embedding was the head before, and is kept as it is" if self.untied else ""
        return f"head {self.scheme}: relative error of the weights {self.error:.2%}{added}"


def _merged(linear: str, rows: Sequence[LayerResult]) -> LayerResult:
    """One row for the experts of a layer."""
    scheme = Counter(row.scheme for row in rows).most_common(1)[0][0]
    error = math.fsum(row.error for row in rows) / len(rows)
    seconds = math.fsum(row.seconds for row in rows)
    return LayerResult(rows[0].layer, linear, scheme, error, seconds, rows[0].algorithm)


@dataclass(frozen=True)
class Report:
    """What `quantize` did.

    Attributes:
        model, output: directories.
        scheme, algorithm: as asked for; what a single matrix got is in `layers`.
        settings: what else decides the result: calibration file, samples, seqlen, seed, damping; empty for rtn.
        calibration_tokens: tokens that the model was calibrated on; 0 for rtn.
        device: what it ran on.
        layers: a row for each matrix, in the order of the computation.
        bytes_before, bytes_after: of all tensors.
        resumed_layers: decoder layers that an earlier run, which was cut off, had finished.
        seconds: in all, this run.
        peak_memory: the greatest resident size of the process, in bytes.
        peak_gpu_memory: the greatest size that torch allocated on the GPU, in bytes; `None` on the CPU.
        versions: of what the result may depend on.
        devices: the names of all devices that took part.
        stages: seconds of each stage of the work: reading, forward, hessians and so on.
        estimate: what the preflight check expected, see `QuantizationEstimate.figures`.
        gpu_seconds: GPUs times the seconds that they were held; `None` on the CPU.
        energy_joules: what the GPUs took; `None` where it was not measured.
        prices: what `cost` is computed from: gpu_hour, kwh; empty where no price is known.
        head: what became of the head; `None` where it is as it was.
        cost: in the currency of the prices; `None` where no price is known, or what it is to be paid for is not.
    """

    model: str
    output: str
    scheme: str
    algorithm: str
    settings: dict[str, Any]
    calibration_tokens: int
    device: str
    layers: tuple[LayerResult, ...]
    bytes_before: int
    bytes_after: int
    resumed_layers: int
    seconds: float
    peak_memory: int
    peak_gpu_memory: int | None
    versions: dict[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    stages: dict[str, float] = field(default_factory=dict)
    estimate: dict[str, float] = field(default_factory=dict)
    gpu_seconds: float | None = None
    energy_joules: float | None = None
    prices: dict[str, float] = field(default_factory=dict)
    cost: float | None = None
    head: HeadResult | None = None

    @property
    def error_kind(self) -> str:
        """What `LayerResult.error` measures."""
        return f"relative error of the {'outputs' if self.calibration_tokens else 'weights'}"

    @property
    def mean_error(self) -> float:
        """Over all matrices."""
        return math.fsum(row.error for row in self.layers) / len(self.layers)

    @property
    def worst(self) -> LayerResult:
        """The matrix of the greatest error."""
        return max(self.layers, key=lambda row: row.error)

    def priced(self, *, gpu_hour: float | None = None, kwh: float | None = None) -> Self:
        """The same report with its cost: what GPUs and electricity cost by these prices, each where it is given.

        Args:
            gpu_hour: the price of a GPU for an hour.
            kwh: the price of a kilowatt-hour.

        Raises:
            UsageError: if a price is negative or no number.
        """
        prices = {name: price for name, price in (("gpu_hour", gpu_hour), ("kwh", kwh)) if price is not None}
        for name, price in prices.items():
            if not 0 <= price < math.inf:
                raise UsageError(f"the price {name} is {price}: it has to be a number from 0 up")
        amounts = {
            "gpu_hour": None if self.gpu_seconds is None else self.gpu_seconds / 3600,
            "kwh": None if self.energy_joules is None else self.energy_joules / 3.6e6,
        }
        parts = [None if (amount := amounts[name]) is None else price * amount for name, price in prices.items()]
        known = [part for part in parts if part is not None]
        return replace(self, prices=prices, cost=sum(known) if known and len(known) == len(parts) else None)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        """The report that `to_json` gave, also after it was JSON; of a later version, what this one knows.

        Raises:
            DataError: if it is not such a report.
        """
        try:
            values = {each.name: found[each.name] for each in fields(cls) if each.name in found}
            layers = tuple(LayerResult(**row) for row in found["layers"])
            if not layers:
                raise KeyError("layers")
            head = None if found.get("head") is None else HeadResult(**found["head"])
            return cls(**values | {"layers": layers, "devices": tuple(found.get("devices", ())), "head": head})
        except (KeyError, TypeError) as error:
            raise DataError(
                f"not a report of a quantization: {error}: give warpbus-report.json of its output"
            ) from None

    @cached_property
    def rows(self) -> tuple[LayerResult, ...]:
        """`layers`, with one row for all routed experts of a layer: the mean of their errors, the sum of their seconds.

        Its `linear` has "*" for the number of the expert; its `scheme` is that of most.
        """
        found: dict[tuple[int, str], list[LayerResult]] = {}
        for row in self.layers:
            found.setdefault((row.layer, _EXPERT.sub(".experts.*.", row.linear)), []).append(row)
        return tuple(rows[0] if len(rows) == 1 else _merged(linear, rows) for (_, linear), rows in found.items())

    @property
    def linears(self) -> tuple[str, ...]:
        """The names of a layer's matrices in `rows`, in their order."""
        return tuple(dict.fromkeys(row.linear for row in self.rows))

    @property
    def expert_tokens(self) -> dict[int, tuple[int, ...]]:
        """Of each layer with experts the calibration tokens that were routed to each of them."""
        found: dict[int, list[int]] = {}
        for row in self.layers:
            if row.routed_tokens is not None and row.linear.endswith(".down"):
                found.setdefault(row.layer, []).append(row.routed_tokens)
        return {layer: tuple(counts) for layer, counts in found.items()}

    @property
    def sparse_experts(self) -> dict[int, tuple[int, ...]]:
        """Of each layer with experts those that fewer than `LEAST_TOKENS` tokens reached."""
        return {
            layer: tuple(expert for expert, count in enumerate(counts) if count < LEAST_TOKENS)
            for layer, counts in self.expert_tokens.items()
        }

    def cell(self, row: LayerResult, separator: str = "\n") -> str:
        """An error as text, and where they are not those of the whole, scheme and algorithm."""
        chosen = [row.scheme] * (row.scheme != self.scheme)
        if row.algorithm is not None and row.algorithm != self.algorithm:
            chosen.append(row.algorithm)
        return separator.join([f"{row.error:.2%}", *([" ".join(chosen)] if chosen else [])])

    def summary(self) -> str:
        """One line: size, time, memory, and what is known of energy and cost."""
        parts = [
            f"{self.output}: {self.bytes_before / 1e6:,.1f} MB -> {self.bytes_after / 1e6:,.1f} MB "
            f"in {self.seconds:.1f} s on {self.where}"
        ]
        if self.resumed_layers:
            parts.append(f"going on after layer {self.resumed_layers - 1}")
        parts.append(f"peak memory {self.peak_memory / 1e9:.2f} GB")
        if self.peak_gpu_memory is not None:
            parts.append(f"{self.peak_gpu_memory / 1e9:.2f} GB on the GPU")
        if self.gpu_seconds is not None:
            parts += [f"{self.gpu_seconds:.1f} GPU-seconds", f"energy {self.energy_text}"]
        if self.prices:
            parts.append(f"cost {self.cost_text} at {self.prices_text}")
        return ", ".join(parts)

    @property
    def where(self) -> str:
        """The devices, equal ones counted: "4 x NVIDIA H200"."""
        counts = {name: self.devices.count(name) for name in self.devices}
        return " and ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items()) or self.device

    @property
    def energy_text(self) -> str:
        if self.energy_joules is None:
            return "not measured"
        return f"{self.energy_joules / 1000:,.2f} kJ ({self.energy_joules / 3600:,.2f} Wh)"

    @property
    def prices_text(self) -> str:
        units = {"gpu_hour": "a GPU-hour", "kwh": "a kWh"}
        return " and ".join(f"{price:g} {units[name]}" for name, price in self.prices.items())

    @property
    def cost_text(self) -> str:
        """The cost, or why it is not known."""
        if self.cost is not None:
            return f"about {self.cost:.2g}"
        return "not known: " + ("no GPU" if self.gpu_seconds is None else "energy not measured")


def peak_memory() -> int:
    """The greatest resident size that this program has had, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # Linux: `ru_maxrss` would count the process that started this one, too.
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if "VmHWM" in line)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions(device: torch.device) -> dict[str, str]:
    """Versions that a result may depend on, and the name of the device."""
    found = {"warpbus": warpbus.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return found
