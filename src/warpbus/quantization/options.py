"""The options of a quantization run. The command line reads them, and therefore this module imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class QuantizationOptions:
    """Options of `warpbus.quantize`, which explains them: the format, the calibration data, the devices and the files.

    Attributes:
        least: the lower limits of numbers.
        efforts: the values of `effort`.
        default_tokens, most_sequences: limits of the calibration data, in tokens and sequences, if neither `samples`
            nor `tokens` is given.
    """

    format: str = "compressed-tensors"
    head: str | None = None
    embedding: str | None = None
    kv_cache: str | None = None
    effort: str = "normal"
    samples: int | None = None
    tokens: int | None = None
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

    least: ClassVar[Mapping[str, int]] = {"samples": 1, "tokens": 1, "seqlen": 1, "damping": 0}
    efforts: ClassVar[tuple[str, ...]] = ("normal", "high")
    default_tokens: ClassVar[int] = 262_144
    most_sequences: ClassVar[int] = 4096
