"""Bytes on their way between a device's storages and what the host sends, receives or writes to a disk.

A GPU's memory goes through two pinned buffers in turns: while the host deals with one, the GPU fills or empties the
other. Memory of the CPU is handed out as it is.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

CHUNK = 4 * 2**20
"""Bytes that are moved at once, at most."""

Label = TypeVar("Label")


@dataclass
class _PinnedBuffer:
    """Pinned memory, and what the GPU last did with it."""

    memory: Tensor
    used: torch.cuda.Event


@dataclass(frozen=True)
class _StagedBatch(Generic[Label]):
    label: Label
    sizes: list[int]
    buffer: _PinnedBuffer


class HostCopy:
    """Bytes on their way from a GPU, which goes on with what comes after them.

    Args:
        source: uint8 `[nbytes]` on the GPU.
        buffer: at least as much pinned memory, which nothing else uses.
        unused: gets the buffer once the bytes have been taken; None if it is not used again.
    """

    @torch.inference_mode()
    def __init__(self, source: Tensor, buffer: _PinnedBuffer, unused: list[_PinnedBuffer] | None = None) -> None:
        self._nbytes, self._buffer, self._unused = len(source), buffer, unused
        with torch.cuda.device(source.device):
            buffer.memory[: self._nbytes].copy_(source, non_blocking=True)
            buffer.used.record()

    @property
    def arrived(self) -> bool:
        """Whether they are here. Raises what the GPU met on the way."""
        return self._buffer.used.query()

    def take(self) -> bytes | memoryview:
        """The bytes, once they are here. For one call."""
        data = self._buffer.memory.numpy().data[: self._nbytes]
        if self._unused is None:
            return data
        self._unused.append(self._buffer)
        return bytes(data)


class HostCopies:
    """Makes copies of a GPU's memory; small ones use the same buffers again, which cost more to make than to fill."""

    _FEW = 4096

    def __init__(self) -> None:
        self._unused: list[_PinnedBuffer] = []

    def begin(self, source: Tensor) -> HostCopy:
        """A copy of a uint8 tensor `[nbytes]`."""
        if len(source) > self._FEW:
            return HostCopy(source, _pinned(len(source)))
        return HostCopy(source, self._unused.pop() if self._unused else _pinned(self._FEW), self._unused)


def _pinned(nbytes: int) -> _PinnedBuffer:
    return _PinnedBuffer(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())


class ByteStaging:
    """Moves bytes out of and into tensors of uint8 `[n]` on one device. For one thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[_PinnedBuffer] = []
        self._turn = 0

    def read(self, chunks: Iterable[tuple[Label, Sequence[Tensor]]]) -> Iterator[tuple[Label, list[memoryview]]]:
        """The bytes of each chunk, which may have `CHUNK` of them at most.

        They stay as they are until the next chunk is asked for. What was launched on the device before has been done
        to them; the next chunk may have been read already then.
        """
        if self.device.type != "cuda":
            for label, tensors in chunks:
                yield label, [tensor.numpy().data for tensor in tensors]
            return
        ahead: _StagedBatch[Label] | None = None
        for label, tensors in chunks:
            ahead, ready = self._leave(label, tensors), ahead
            if ready is not None:
                yield self._left(ready)
        if ahead is not None:
            yield self._left(ahead)

    @torch.inference_mode()  # as the storages' tensors are made
    def write(self, parts: Sequence[tuple[Tensor, memoryview]]) -> None:
        """Fill tensors with bytes, `CHUNK` of them together at most. On a GPU it is done when its stream gets there."""
        if self.device.type != "cuda":
            for tensor, data in parts:
                np.copyto(tensor.numpy(), np.frombuffer(data, np.uint8))
            return
        buffer = self._next()
        pinned, at = buffer.memory.numpy(), 0
        with torch.cuda.device(self.device):
            for tensor, data in parts:
                end = at + len(data)
                np.copyto(pinned[at:end], np.frombuffer(data, np.uint8))
                tensor.copy_(buffer.memory[at:end], non_blocking=True)
                at = end
            buffer.used.record()

    @torch.inference_mode()
    def _leave(self, label: Label, tensors: Sequence[Tensor]) -> _StagedBatch[Label]:
        buffer, at = self._next(), 0
        with torch.cuda.device(self.device):
            for tensor in tensors:
                buffer.memory[at : at + len(tensor)].copy_(tensor, non_blocking=True)
                at += len(tensor)
            buffer.used.record()
        return _StagedBatch(label, [len(tensor) for tensor in tensors], buffer)

    @staticmethod
    def _left(leaving: _StagedBatch[Label]) -> tuple[Label, list[memoryview]]:
        leaving.buffer.used.synchronize()
        view, at, parts = leaving.buffer.memory.numpy().data, 0, []
        for size in leaving.sizes:
            parts.append(view[at : at + size])
            at += size
        return leaving.label, parts

    def _next(self) -> _PinnedBuffer:
        """The buffer whose turn it is, once the GPU is done with it."""
        if not self._buffers:
            for _ in range(2):
                self._buffers.append(_pinned(CHUNK))
        buffer = self._buffers[self._turn]
        self._turn = 1 - self._turn
        buffer.used.synchronize()
        return buffer
