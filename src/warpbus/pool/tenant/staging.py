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
