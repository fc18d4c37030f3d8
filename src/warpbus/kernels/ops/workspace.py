"""Counters with which the thread blocks of one kernel find out which of them finishes last.

Each kernel finds zeros and leaves zeros, and touches its counters only after the previous kernel has ended
(`griddepcontrol.wait`, where kernels overlap). Kernels that run one after another therefore share counters: the kernels
of one stream, and those of CUDA graphs that are replayed one after another, if they are captured under `use_counters`.
Any other captured kernel may run at any time its graph is replayed, so it gets counters of its own, from a reserve that
is allocated and zeroed before the capture.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOST_OF_A_PRODUCT = 1 << 14
"""No kernel that multiplies needs more counters. Attention needs one for each KV head of a row."""

_RESERVE = 1 << 18

_of_stream: dict[tuple[torch.device, int], Tensor] = {}
_reserves: dict[torch.device, Tensor] = {}
_used_up: list[Tensor] = []  # reserves that graphs count in, which may be replayed as long as the process lives
_of_thread = threading.local()
_dividing = threading.Lock()  # of the reserves


@contextmanager
def use_counters(buffer: Tensor) -> Iterator[None]:
    """Within the block, kernels that this thread launches or captures count in `buffer`.

    Args:
        buffer: int32 zeros on their GPU, used by nothing that may run at the same time: a graph captured with it may be
            replayed only after the previous replay has ended. A kernel that needs more counters gets others.
    """
    before = getattr(_of_thread, "buffer", None)
    _of_thread.buffer = buffer
    try:
        yield
    finally:
        _of_thread.buffer = before


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` int32 zeros for a kernel that is launched next on the current stream of a GPU."""
    buffer: Tensor | None = getattr(_of_thread, "buffer", None)
    if buffer is not None and buffer.device == device and buffer.numel() >= count:
        return buffer
    if _captures(device):
        return _captured(device, count)
    with _dividing:
        reserve = _reserves.get(device)
        if reserve is None or reserve.numel() < _RESERVE // 2:  # for some five hundred kernels of the next graphs
            if reserve is not None:
                _used_up.append(reserve)
            _reserves[device] = torch.zeros(_RESERVE, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    held = _of_stream.get(key)
    if held is None or held.numel() < count:
        held = _of_stream[key] = torch.zeros(max(count, MOST_OF_A_PRODUCT), dtype=torch.int32, device=device)
    return held


def _captures(device: torch.device) -> bool:
    """Whether this thread captures on its current stream of a GPU, which need not be the current GPU."""
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _captured(device: torch.device, count: int) -> Tensor:
    with _dividing:
        reserve = _reserves.get(device)
        if reserve is not None and reserve.numel() >= count:
            taken, _reserves[device] = reserve[:count], reserve[count:]
            return taken
    # Right, but zeroed by a node of the graph's own at every replay.
    return torch.zeros(count, dtype=torch.int32, device=device)
