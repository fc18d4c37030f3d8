"""Sleep mode: offloads a model's weights from the GPU to main memory, and loads them back to the same addresses.

All tensors of the model are in one `Arena`, whose addresses stay reserved while they have no memory. So pointers, and
the CUDA graphs captured with them, are valid again after waking. Knows nothing of caches, requests or graphs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpbus.cuda import capture
from warpbus.cuda.memory_size import rounded_up
from warpbus.cuda.vmm import PIECE, Arena
from warpbus.errors import DeviceError, UsageError

ALIGNMENT = 256
"""Bytes: at least the alignment of torch's tensors and the one that the kernels require."""

# Of the copy in main memory. A power of two, since torch rounds pinned allocations up to one.
_CHUNK = 256 * 2**20
# How much freed memory torch may cache before `empty_cache` is called.
_KEPT = 128 * 2**20


@dataclass(frozen=True)
class Transfer:
    """The cost of going to sleep or of waking.

    Attributes:
        nbytes: bytes copied; 0 if there was nothing to do.
        copying: seconds of the copy.
        seconds: of everything, mapping or unmapping included, and at the first sleep the allocation of main memory.
    """

    nbytes: int
    copying: float
    seconds: float


@dataclass(frozen=True)
class _OffloadedRange:
    """A part of a storage that tensors use: the bytes `[start, end)`, which move to `offset` in the arena."""

    tensors: list[Tensor]
    start: int
    end: int
    offset: int


class OffloadableModel:
    """A model whose tensors are in an arena, so that its memory can be returned and taken again.

    The constructor moves parameters and buffers to the arena one after another, those that share memory together. They
    remain the same objects: other references to them, such as the packed form of a `QuantizedLinear`, see the moved
    data. Graphs captured before become invalid, so create this first. A model on the CPU is treated in the same way.

    Args:
        model: on one device; parts of a model on a GPU may be on the CPU, and stay there.
        make_arena: creates an arena of a size in bytes on a device.

    Attributes:
        device: of the awake model.
        nbytes: its size there.
        asleep: its tensors have no memory and must not be accessed.

    Raises:
        UsageError: the model is on several GPUs, or has no tensors.
        DeviceError: the memory does not suffice for the model and one tensor more; the model can still be used.
    """

    def __init__(self, model: nn.Module, *, make_arena: Callable[[int, torch.device], Arena] = Arena) -> None:
        self.device = _device(model)
        spans = _spans(model, self.device)
        self.nbytes = spans[-1].offset + rounded_up(spans[-1].end - spans[-1].start, ALIGNMENT)
        self.asleep = False
        self._arena = make_arena(self.nbytes, self.device)
        self._copy: list[Tensor] = []
        self._move(spans)

    @torch.inference_mode()
    def sleep(self) -> Transfer:
        """Copy the tensors to main memory and return the GPU's. Waits for the GPU.

        Main memory is allocated at the first sleep, and kept.

        Raises:
            DeviceError: main memory does not suffice; the model stays awake.
        """
        if self.asleep:
            return Transfer(0, 0.0, 0.0)
        start = time.perf_counter()
        if not self._copy:
            self._copy = self._take_copy()
        self._synchronize()
        copying = time.perf_counter()
        for kept, part in zip(self._copy, self._parts(), strict=True):
            kept.copy_(part, non_blocking=True)
        self._synchronize()
        copied = time.perf_counter()
        self.asleep = True
        self._arena.resize(0)
        return Transfer(self.nbytes, copied - copying, time.perf_counter() - start)

    @torch.inference_mode()
    def wake(self) -> Transfer:
        """Copy the tensors back.

        Raises:
            DeviceError: the GPU's memory does not suffice; the model stays asleep and can be woken later.
        """
        if not self.asleep:
            return Transfer(0, 0.0, 0.0)
        start = time.perf_counter()
        self._arena.resize(self.nbytes)
        copying = time.perf_counter()
        for kept, part in zip(self._copy, self._parts(), strict=True):
            part.copy_(kept, non_blocking=True)
        self._synchronize()
        end = time.perf_counter()
        self.asleep = False
        return Transfer(self.nbytes, end - copying, end - start)

    @torch.no_grad()
    def _move(self, spans: list[_OffloadedRange]) -> None:
        left = 0
        for span in spans:
            size = rounded_up(span.end - span.start, ALIGNMENT)
            # In whole pieces: mapping a piece takes the same time whatever its size.
            self._arena.resize(min(rounded_up(span.offset + size, PIECE), self.nbytes))
            target = self._arena.tensor((size,), torch.uint8, span.offset)
            old = _bytes(span)
            target[: old.numel()].copy_(old)
            del old
            for tensor in span.tensors:
                first = (tensor.storage_offset() * tensor.element_size() - span.start) // tensor.element_size()
                tensor.data = target.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), first)
            left += size
            if self.device.type == "cuda" and (left >= _KEPT or span is spans[-1]):
                torch.cuda.empty_cache()
                left = 0

    def _take_copy(self) -> list[Tensor]:
        pinned = self.device.type == "cuda"
        sizes = [min(_CHUNK, self.nbytes - start) for start in range(0, self.nbytes, _CHUNK)]
        try:
            return [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise DeviceError(
                f"{self.device}: the model cannot sleep: no {self.nbytes:,} bytes of main memory for a copy of it "
                f"({reason}): free memory on this machine"
            ) from error

    def _parts(self) -> list[Tensor]:
        return list(self._arena.tensor((self.nbytes,), torch.uint8).split(_CHUNK))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            capture.synchronize(self.device)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.nbytes]


def _device(model: nn.Module) -> torch.device:
    """The GPU that holds the model, or the CPU."""
    found = {tensor.device for tensor in _tensors(model)}
    if not found:
        raise UsageError("a model without tensors cannot sleep")
    gpus = sorted(str(device) for device in found if device.type == "cuda")
    if len(gpus) > 1:
        raise UsageError(f"the model is on {', '.join(gpus)}: only a model on one GPU can sleep")
    return torch.device(gpus[0] if gpus else "cpu")


def _spans(model: nn.Module, device: torch.device) -> list[_OffloadedRange]:
    """The tensors to move and their destinations, in the order of the model, which is about the order of allocation."""
    groups: dict[int, list[Tensor]] = {}
    for tensor in _tensors(model):
        if tensor.device == device:
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    spans, offset = [], 0
    for tensors in groups.values():
        # From a multiple of the alignment, so that all tensors keep theirs.
        start = min(tensor.storage_offset() * tensor.element_size() for tensor in tensors) // ALIGNMENT * ALIGNMENT
        end = max(_end(tensor) for tensor in tensors)
        spans.append(_OffloadedRange(tensors, start, end, offset))
        offset += rounded_up(end - start, ALIGNMENT)
    return spans


def _end(tensor: Tensor) -> int:
    """The end of a tensor in its storage, in bytes."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + steps + 1) * tensor.element_size()


def _bytes(span: _OffloadedRange) -> Tensor:
    """The bytes of a span, uint8 `[end - start]`."""
    tensor = span.tensors[0]
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), span.start, (span.end - span.start,), (1,))
