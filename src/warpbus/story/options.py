"""The options of `warpbus bench story`; this module imports nothing that is slow to load."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class StoryOptions:
    """What is measured, and what it is multiplied with.

    Attributes:
        counts: numbers of GPUs; by default 1 and all.
        samples: calibration sequences; by default 128, and 32 for models above 300 million parameters on a CPU.
        documents: that the perplexity is measured on, at most.
        tokens: generated in each run.
        price: dollars per hour of a GPU, with the machine around it.
        cpu_price: dollars per hour of this machine without a GPU.
        restart: measure parts again that an earlier run has measured.
        least: the lower limits of numbers.
    """

    least: ClassVar[Mapping[str, float]] = {"samples": 1, "documents": 1, "tokens": 1, "price": 0, "cpu_price": 0}

    counts: tuple[int, ...] = ()
    samples: int | None = None
    documents: int = 40
    tokens: int = 32
    price: float = 2.0
    cpu_price: float = 0.2
    restart: bool = False
