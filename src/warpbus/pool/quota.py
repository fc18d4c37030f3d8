"""The part of a GPU that a tenant may use."""

from dataclasses import dataclass
from typing import Self

from warpbus.cuda.memory_size import gigabytes, parse_memory
from warpbus.errors import UsageError


@dataclass(frozen=True)
class Quota:
    """A part of one GPU.

    Attributes:
        memory: bytes.
        share: of its multiprocessors, or of its time; 1.0 is all of it.

    Raises:
        UsageError: no memory, or a share that is not above 0 and at most 1.
    """

    memory: int
    share: float

    def __post_init__(self) -> None:
        if self.memory <= 0:
            raise UsageError(f"memory is {self.memory} bytes: give more than 0")
        if not 0 < self.share <= 1:
            raise UsageError(f"share is {self.share}: give a part of the GPU above 0 and at most 1, such as 0.25")

    @classmethod
    def parse(cls, memory: str | int, share: float = 1.0, *, card: int | None = None) -> Self:
        """The quota from flags; `memory` is parsed by `parse_memory` for a card with `card` bytes.

        Raises:
            UsageError: no such amount or share, or more than the card has.
        """
        return cls(parse_memory(memory, card), share)

    def __str__(self) -> str:
        return f"{gigabytes(self.memory)} and {self.share:.0%} of the GPU"
