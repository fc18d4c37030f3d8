"""`StoredTensor`: a tensor of a checkpoint, whether it lies in a file as it is or is computed when it is read."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from warpbus.formats.safetensors_io import CHUNK_BYTES, raw_bytes

_ELEMENTS_AT_ONCE = 2**22


class StoredTensor(Protocol):
    """A tensor on disk."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...
    def read(self) -> Tensor: ...
    def chunks(self) -> Iterator[bytes | memoryview]: ...


@dataclass(frozen=True)
class ComputedTensor:
    """A `StoredTensor` that is computed when it is read, such as a matrix that is dequantized.

    Attributes:
        shape, dtype: of the result.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def bands(self) -> Iterator[Tensor]:
        """The tensor in order, some of its rows at a time, on the CPU; each band is rounded to `dtype`, if at all, when
        it is copied."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """The whole tensor."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        start = 0
        for band in self.bands():
            whole[start : start + len(band)] = band
            start += len(band)
        return whole

    def chunks(self) -> Iterator[bytes | memoryview]:
        """See `Checkpoint.chunks`."""
        for band in self.bands():
            data = raw_bytes(band.to(self.dtype))
            yield from (data[start : start + CHUNK_BYTES] for start in range(0, data.nbytes, CHUNK_BYTES))


def row_bands(shape: tuple[int, ...]) -> Iterator[slice]:
    """The rows of a matrix, some at a time, so that what is computed in between stays small."""
    rows, columns = shape
    step = max(1, _ELEMENTS_AT_ONCE // columns)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
