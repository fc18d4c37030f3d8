"""Putting a model to sleep: its weights leave the GPU for main memory, and come back to where they were.

All tensors of the model lie in one `Arena`, whose addresses stay reserved while there is no memory behind them. So
pointers, and the CUDA graphs that were captured with them, are valid again after waking. Knows nothing of caches,
requests or graphs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpbus.cuda import capture
from warpbus.cuda.address_space import PIECE, rounded_up
from warpbus.cuda.vmm import Arena
from warpbus.errors import DeviceError, UsageError

ALIGNMENT = 256
"""Bytes: at least what torch gives to tensors, and what the kernels ask of them."""

# Of the copy in main memory. A power of two, to which torch rounds pinned memory up.
_CHUNK = 256 * 2**20
# What torch may keep of the memory that tensors have left, before it has to give it back.
_KEPT = 128 * 2**20


@dataclass(frozen=True)
class Transfer:
    """What a model's going to sleep or waking took.

    Attributes:
        nbytes: copied; 0 where there was nothing to do.
        copying: seconds of the copy.
        seconds: of all, with the mapping or unmapping, and at the first sleep with taking main memory for the copy.
    """

    nbytes: int
    copying: float
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Of the whole, not of the copy alone."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class _Span:
    """Part of a storage that tensors use: the bytes `[start, end)`, which go to `offset` in the arena."""

    tensors: list[Tensor]
    start: int
    end: int
    offset: int


class OffloadableModel:
    """A model whose tensors lie in an arena, so that it can sleep.

    The parameters and buffers move at once, one after the other, those that share memory together. They remain the
    same objects: what else refers to them, such as the packed form of a `QuantizedLinear`, sees them moved. So a graph
    that was captured before is void: make this first. A model on the CPU is held in the same way, and sleeps in an
    ordinary tensor.

    Args:
        model: all on one device; or on one GPU and, in part, on the CPU, where that part stays.
        make_arena: makes the arena of so many bytes on a device.

    Attributes:
        device: where it is when it is awake.
        nbytes: what it takes there.
        asleep: its tensors must not be touched.

    Raises:
        UsageError: the model is on several GPUs, or has no tensors.
        DeviceError: there is not enough memory for one tensor more than the model; it can be used all the same.
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
        """Copy the tensors to main memory and give their memory back. Waits for what runs on the GPU.

        Main memory is taken at the first sleep, and kept.

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
        """Bring the tensors back.

        Raises:
            DeviceError: the GPU's memory does not suffice; the model sleeps on, and can be woken later.
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
    def _move(self, spans: list[_Span]) -> None:
        left = 0
        for span in spans:
            size = rounded_up(span.end - span.start, ALIGNMENT)
            # By whole pieces: a piece takes as long to map whatever its size.
            self._arena.resize(min(rounded_up(span.offset + size, PIECE), self.nbytes))
            place = self._arena.tensor((size,), torch.uint8, span.offset)
            old = _bytes(span)
            place[: old.numel()].copy_(old)
            del old
            for tensor in span.tensors:
                first = (tensor.storage_offset() * tensor.element_size() - span.start) // tensor.element_size()
                tensor.data = place.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), first)
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
    """The GPU where the model is, or the CPU."""
    found = {tensor.device for tensor in _tensors(model)}
    if not found:
        raise UsageError("a model without tensors cannot sleep")
    gpus = sorted(str(device) for device in found if device.type == "cuda")
    if len(gpus) > 1:
        raise UsageError(f"the model is on {', '.join(gpus)}: only a model on one GPU can sleep")
    return torch.device(gpus[0] if gpus else "cpu")


def _spans(model: nn.Module, device: torch.device) -> list[_Span]:
    """What is to be moved and where to, in the model's order: that in which it was allocated, more or less."""
    groups: dict[int, list[Tensor]] = {}
    for tensor in _tensors(model):
        if tensor.device == device:
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    spans, offset = [], 0
    for tensors in groups.values():
        # From a multiple of the alignment, so that all keep theirs.
        start = min(tensor.storage_offset() * tensor.element_size() for tensor in tensors) // ALIGNMENT * ALIGNMENT
        end = max(_end(tensor) for tensor in tensors)
        spans.append(_Span(tensors, start, end, offset))
        offset += rounded_up(end - start, ALIGNMENT)
    return spans


def _end(tensor: Tensor) -> int:
    """Where a tensor ends in its storage, bytes."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + steps + 1) * tensor.element_size()


def _bytes(span: _Span) -> Tensor:
    """What a span holds, as uint8 `[end - start]`."""
    tensor = span.tensors[0]
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), span.start, (span.end - span.start,), (1,))
