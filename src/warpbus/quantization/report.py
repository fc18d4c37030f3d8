"""The report of a quantization, with its errors, time, energy and cost: as JSON, a table and a picture."""

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
"""An expert with fewer calibration tokens is calibrated on the tokens of all experts, weighted by the router's
scores."""

FALLBACK_TOKENS = 2**15
"""The maximum number of these tokens; of more tokens, every second, third, ... is used."""

_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class LayerResult:
    """The result of quantizing one matrix.

    Attributes:
        layer: the number of its decoder layer.
        linear: its name in the layer, for instance "mlp.down".
        scheme: the scheme it was quantized to.
        error: with calibration, sqrt(tr(dW H dW^T) / tr(W H W^T)), the relative error of its outputs on the calibration
            data, where W is the `corrected_target` of the matrix; without calibration, the relative error of its
            weights in the Frobenius norm.
        seconds: duration of its quantization, including calibration.
        algorithm: its algorithm; `None` if it is the report's.
        routed_tokens: calibration tokens that were routed to its expert; `None` if it belongs to no expert.
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
class EndResult:
    """The result of quantizing the head or the embedding.

    Attributes:
        scheme: the scheme it was rounded to.
        error: the relative error of its weights in the Frobenius norm.
        seconds: duration.
        untied: a head; the original has tied embeddings, and the result has a separate head.
        tied: an embedding, and the head is the same matrix.
    """

    scheme: str
    error: float
    seconds: float
    untied: bool = False
    tied: bool = False

    def sentence(self, what: str) -> str:
        """The result in a sentence; `what` is "head" or "embedding"."""
        added = "; the embedding was the head before" if self.untied else ""
        added = "; the head is the same matrix" if self.tied else added
        return f"{what} {self.scheme}: relative error of the weights {self.error:.2%}{added}"


@dataclass(frozen=True)
class TuningResult:
    """The effect of tuning.

    Attributes:
        before, after: the divergence on the sequences that were held back, nats per token, with the scales of the
            algorithm and with the chosen ones.
        epoch: the epoch after which the scales were the best; 0 if those of the algorithm are.
    """

    before: float
    after: float
    epoch: int

    def __str__(self) -> str:
        if not self.epoch:
            return f"tuning: no lower KL than {self.before:.4f} on the sequences held back: the scales stay"
        return f"tuning: KL {self.before:.4f} -> {self.after:.4f} on the sequences held back"


def _merged(linear: str, rows: Sequence[LayerResult]) -> LayerResult:
    """One row for the experts of a layer."""
    scheme = Counter(row.scheme for row in rows).most_common(1)[0][0]
    error = math.fsum(row.error for row in rows) / len(rows)
    seconds = math.fsum(row.seconds for row in rows)
    return LayerResult(rows[0].layer, linear, scheme, error, seconds, rows[0].algorithm)


@dataclass(frozen=True)
class Report:
    """The report of `quantize`.

    Attributes:
        model, output: directories.
        scheme, algorithm: as requested; those of each matrix are in `layers`.
        settings: other settings that affect the result: calibration file, samples, seqlen, seed, damping; empty for
            rtn.
        calibration_tokens: number of calibration tokens; 0 for rtn.
        device: the device of the run.
        layers: one row per matrix, in the order of the computation.
        bytes_before, bytes_after: of all tensors.
        resumed_layers: number of decoder layers that an interrupted earlier run had finished.
        seconds: total duration of this run.
        peak_memory: the peak resident size of the process, in bytes.
        peak_gpu_memory: the peak size that torch allocated on a GPU, in bytes; `None` on the CPU.
        versions: versions of the packages that the result may depend on.
        devices: the names of all devices of the run.
        stages: seconds of each stage: reading, forward, hessians and so on.
        estimate: the estimate before the run, see `QuantizationEstimate.figures`.
        gpu_seconds: number of GPUs times the seconds of their use; `None` on the CPU.
        energy_joules: energy of the GPUs; `None` if it was not measured.
        prices: the prices for `cost`: gpu_hour, kwh; empty without prices.
        head: the result for the head; `None` if it was not quantized as a matrix of its own.
        embedding: the result for the embedding; `None` if it was not quantized.
        tuning: the result of tuning; `None` with normal effort.
        cost: in the currency of the prices; `None` without prices, or if the priced quantity was not measured.
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
    head: EndResult | None = None
    embedding: EndResult | None = None
    tuning: TuningResult | None = None

    @property
    def ends(self) -> dict[str, EndResult]:
        """The results for what is quantized outside of the layers: "embedding" and "head"."""
        found = {"embedding": self.embedding, "head": self.head}
        return {name: result for name, result in found.items() if result is not None}

    @property
    def error_kind(self) -> str:
        """The quantity that `LayerResult.error` measures."""
        return f"relative error of the {'outputs' if self.calibration_tokens else 'weights'}"

    @property
    def mean_error(self) -> float:
        """The mean error of all matrices."""
        return math.fsum(row.error for row in self.layers) / len(self.layers)

    @property
    def worst(self) -> LayerResult:
        """The matrix with the largest error."""
        return max(self.layers, key=lambda row: row.error)

    def priced(self, *, gpu_hour: float | None = None, kwh: float | None = None) -> Self:
        """The same report with the cost of GPUs and electricity at the given prices.

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
        """The report from the dictionary of `to_json` or its JSON; unknown keys of a later version are ignored.

        Raises:
            DataError: if it is not such a report.
        """
        try:
            values = {each.name: found[each.name] for each in fields(cls) if each.name in found}
            layers = tuple(LayerResult(**row) for row in found["layers"])
            if not layers:
                raise KeyError("layers")
            ends = {name: found[name] and EndResult(**found[name]) for name in ("head", "embedding") if name in found}
            tuning = None if found.get("tuning") is None else TuningResult(**found["tuning"])
            values |= {"layers": layers, "devices": tuple(found.get("devices", ())), "tuning": tuning} | ends
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise DataError(
                f"not a report of a quantization: {error}: give warpbus-report.json of its output"
            ) from None

    @cached_property
    def rows(self) -> tuple[LayerResult, ...]:
        """`layers` with one row per layer for all routed experts: the mean of their errors, the sum of their seconds.

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
        """The number of calibration tokens of each expert, for each layer with experts."""
        found: dict[int, list[int]] = {}
        for row in self.layers:
            if row.routed_tokens is not None and row.linear.endswith(".down"):
                found.setdefault(row.layer, []).append(row.routed_tokens)
        return {layer: tuple(counts) for layer, counts in found.items()}

    @property
    def sparse_experts(self) -> dict[int, tuple[int, ...]]:
        """The experts with fewer than `LEAST_TOKENS` tokens, for each layer with experts."""
        return {
            layer: tuple(expert for expert, count in enumerate(counts) if count < LEAST_TOKENS)
            for layer, counts in self.expert_tokens.items()
        }

    def cell(self, row: LayerResult, separator: str = "\n") -> str:
        """An error as text, with scheme and algorithm if they differ from the report's."""
        chosen = [row.scheme] * (row.scheme != self.scheme)
        if row.algorithm is not None and row.algorithm != self.algorithm:
            chosen.append(row.algorithm)
        return separator.join([f"{row.error:.2%}", *([" ".join(chosen)] if chosen else [])])

    def summary(self) -> str:
        """One line: size, time, memory, and energy and cost if they are known."""
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
        """The devices, with their number: "4 x NVIDIA H200"."""
        counts = {name: self.devices.count(name) for name in self.devices}
        return " and ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items()) or self.device

    @property
    def energy_text(self) -> str:
        if self.energy_joules is None:
            return "not measured"
        return f"{self.energy_joules / 1000:,.2f} kJ ({self.energy_joules / 3600:,.2f} Wh)"

    @property
    def prices_text(self) -> str:
        units = {"gpu_hour": "per GPU-hour", "kwh": "per kWh"}
        return " and ".join(f"{price:g} {units[name]}" for name, price in self.prices.items())

    @property
    def cost_text(self) -> str:
        """The cost, or the reason why it is unknown."""
        if self.cost is not None:
            return f"about {self.cost:.2g}"
        return "not known: " + ("no GPU" if self.gpu_seconds is None else "energy not measured")


def peak_memory() -> int:
    """The peak resident size of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # Linux: `ru_maxrss` would count the process that started this one, too.
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if "VmHWM" in line)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions(device: torch.device) -> dict[str, str]:
    """Versions of the packages that a result may depend on, and the name of the device."""
    found = {"warpbus": warpbus.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return found
