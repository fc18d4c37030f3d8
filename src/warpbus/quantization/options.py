"""The options of a quantization run. The command line reads them, and therefore this module imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class QuantizationOptions:
    """Options of `warpbus.quantize`, which explains them: the format, the calibration data, the devices and the files.

    Attributes:
        least: the lower limits of numbers.
    """

    layout: str = "compressed-tensors"
    head: str | None = None
    samples: int = 128
    seqlen: int = 2048
    seed: int = 0
    device: str = "auto"
    gpus: str | int = "all"
    processes: int = 1
    cluster: str | None = None
    damping: float = 0.01
    overwrite: bool = False
    restart: bool = False
    rank_timeout: float = 300.0

    least: ClassVar[Mapping[str, int]] = {"samples": 1, "seqlen": 1, "damping": 0}
