"""What was done to a model, and what it cost: as JSON, a table and a picture."""

import platform
import resource
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator
from rich.table import Table

import warpbus
from warpbus.errors import StorageError
from warpbus.models import LINEARS


@dataclass(frozen=True)
class LayerResult:
    """A matrix that was quantized.

    Attributes:
        layer: the number of its decoder layer.
        linear: its name there, for instance "mlp.down".
        scheme: what it was quantized to.
        error: for gptq sqrt(tr(dW H dW^T) / tr(W H W^T)), the relative error that rounding makes in its outputs on the
            calibration data, W being the matrix that was rounded (see `aim`); for rtn the relative error of its
            weights, in the Frobenius norm.
        seconds: what quantizing it took, calibration included.
    """

    layer: int
    linear: str
    scheme: str
    error: float
    seconds: float


@dataclass(frozen=True)
class Report:
    """What `quantize` did.

    Attributes:
        model, output: directories.
        scheme, algorithm: as asked for.
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

    @property
    def error_kind(self) -> str:
        """What `LayerResult.error` measures."""
        return "relative error of the outputs" if self.algorithm == "gptq" else "relative error of the weights"

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return asdict(self)

    def table(self) -> Table:
        """A table for the terminal: the error of each matrix, layer by layer."""
        title = f"{self.scheme}, {self.algorithm}: {self.error_kind}"
        drawn = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
        drawn.add_column("layer", justify="right")
        for linear in LINEARS:
            drawn.add_column(linear, justify="right")
        drawn.add_column("seconds", justify="right")
        for layer in sorted({row.layer for row in self.layers}):
            rows = {row.linear: row for row in self.layers if row.layer == layer}
            errors = [f"{rows[linear].error:.2%}" for linear in LINEARS]
            drawn.add_row(str(layer), *errors, f"{sum(row.seconds for row in rows.values()):.1f}")
        return drawn

    def summary(self) -> str:
        """One line: size, time and memory."""
        resumed = f", going on after layer {self.resumed_layers - 1}" if self.resumed_layers else ""
        gpu = "" if self.peak_gpu_memory is None else f", {self.peak_gpu_memory / 1e9:.2f} GB on the GPU"
        return (
            f"{self.output}: {self.bytes_before / 1e6:,.1f} MB -> {self.bytes_after / 1e6:,.1f} MB "
            f"in {self.seconds:.1f} s on {self.device}{resumed}, peak memory {self.peak_memory / 1e9:.2f} GB{gpu}"
        )

    def draw(self, path: Path) -> None:
        """Write a PNG: the error of every matrix over the layers.

        Raises:
            StorageError: if it cannot be written.
        """
        figure, axes = plt.subplots(figsize=(8, 4.5))
        for linear in LINEARS:
            rows = [row for row in self.layers if row.linear == linear]
            axes.plot([row.layer for row in rows], [100 * row.error for row in rows], marker="o", ms=4, label=linear)
        axes.set_title(f"{Path(self.model).name}: {self.scheme}, {self.algorithm}", loc="left")
        axes.set_xlabel("layer")
        axes.set_ylabel(f"{self.error_kind} (%)")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.tight_layout()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150, format="png")
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error
        finally:
            plt.close(figure)


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
