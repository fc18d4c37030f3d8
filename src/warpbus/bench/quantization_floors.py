"""The least time that the stages of a quantization could take, by what this machine was measured to do."""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from warpbus.bench.cases import WHOLE
from warpbus.formats import Checkpoint
from warpbus.formats.files import sync
from warpbus.quantization.estimate import device_rates, estimate
from warpbus.quantization.job import BATCH_TOKENS
from warpbus.quantization.methods import METHODS
from warpbus.quantization.preflight import Plan
from warpbus.quantization.survey import RankDevice

_WRITTEN_BYTES = 2**28  # of a file that is written to see how fast that is
_READS = 3

# The stages of a report, and the products of the estimate that they consist of.
_PRODUCTS = {"forward": "forward", "statistics": "moments", "factorization": "factors", "solve": "solve"}


@dataclass(frozen=True)
class Floors:
    """The least times.

    Attributes:
        products: from the number of GPUs to the seconds of each kind of matrix product (see `estimate`).
        files: seconds of reading the matrices onto a device, and of writing the quantized model to the disk.
    """

    products: Callable[[int], Mapping[str, float]]
    files: Mapping[str, float]

    @classmethod
    def measured(cls, plan: Plan, device: torch.device, algorithm: str, tokens: int) -> "Floors":
        """Measure the device, and the disk that the model is on.

        Args:
            plan: of a model that was just read or written, so that the system has it in memory.
            device: one of those that are going to share the work.
            algorithm: one of `METHODS`.
            tokens: that the model is calibrated on.
        """
        rates = device_rates(device, plan.dtype)

        def products(count: int) -> Mapping[str, float]:
            return estimate(
                plan,
                output=plan.checkpoint.directory,
                algorithm=algorithm,
                needed=METHODS[algorithm].needed,
                tokens=tokens,
                batch_tokens=BATCH_TOKENS[device.type],
                ranks=[RankDevice("", str(device), None, None)] * count,
                rates=rates,
            ).seconds

        directory = plan.checkpoint.directory.parent
        names = [name for matrix in plan.matrices for name in matrix.sources]
        files = {
            "reading": sum(map(plan.checkpoint.nbytes, names)) / _read_rate(plan.checkpoint, device),
            "writing": plan.bytes_after / _write_rate(directory, min(_WRITTEN_BYTES, plan.bytes_after)),
        }
        return cls(products, files)

    def of(self, count: int) -> dict[str, float]:
        """The floor of each stage that has one, and of all: files are read and written beside the products."""
        products = self.products(count)
        stages = {stage: products[name] for stage, name in _PRODUCTS.items() if name in products}
        return {**stages, **self.files, WHOLE: max(sum(stages.values()), *self.files.values())}


def _read_rate(checkpoint: Checkpoint, device: torch.device) -> float:
    """Bytes a second from a file that the system has in memory, as a model that was just written, to the device."""
    name = max(checkpoint.names(), key=checkpoint.nbytes)
    seconds = []
    for _ in range(_READS):
        started = time.perf_counter()
        checkpoint.tensor(name).to(device, copy=True).flatten()[-1].item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    return checkpoint.nbytes(name) / min(seconds)


def _write_rate(directory: Path, size: int) -> float:
    """Bytes a second of writing a file until the disk has it."""
    content = torch.randint(256, (size,), dtype=torch.uint8).numpy().data
    started = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        file.write(content)
        file.flush()
        sync(Path(file.name))
        return size / (time.perf_counter() - started)
