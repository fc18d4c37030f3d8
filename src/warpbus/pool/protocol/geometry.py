"""The location of a tensor in a storage: everything that the two sides of a connection exchange about a tensor."""

from dataclasses import dataclass, field

import torch

from warpbus.errors import ProtocolError

MAX_DIMENSIONS = 64
MAX_BYTES = 1 << 48


@dataclass(frozen=True, slots=True)
class Geometry:
    """A strided tensor's place in a storage.

    Args:
        dtype: of an element.
        shape: number of elements along each axis.
        stride: elements from one index of an axis to the next.
        offset: of the first element, in elements from the storage's start.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    is_contiguous: bool = field(init=False, compare=False, repr=False)
    """Row-major at the storage's start, as new tensors are unless something else is asked for."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_contiguous", not self.offset and self.stride == _row_major(self.shape))

    @property
    def extent(self) -> int:
        """Bytes from the storage's start to the end of the last element; 0 for a tensor without elements."""
        if 0 in self.shape:
            return 0
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def check(self, nbytes: int) -> None:
        """Raises ProtocolError unless every element lies in a storage of `nbytes` bytes."""
        if len(self.shape) != len(self.stride) or len(self.shape) > MAX_DIMENSIONS:
            raise ProtocolError(
                f"a tensor of shape {self.shape} and strides {self.stride}: expected as many strides as axes, "
                f"and at most {MAX_DIMENSIONS} axes"
            )
        if self.offset < 0 or min((*self.shape, *self.stride), default=0) < 0:
            raise ProtocolError(f"{self}: negative sizes, strides and offsets are not allowed")
        if self.extent > min(nbytes, MAX_BYTES):
            raise ProtocolError(f"{self} reaches byte {self.extent} of a storage of {nbytes} bytes: it must end inside")


def contiguous(dtype: torch.dtype, shape: tuple[int, ...]) -> Geometry:
    """The geometry of a row-major tensor at the start of its storage."""
    return Geometry(dtype, shape, _row_major(shape))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))
