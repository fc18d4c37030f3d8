"""Counters by which the blocks of one kernel find out which of them comes last.

Kernels find zeros and leave zeros, and touch them only once the kernel before has ended (`griddepcontrol.wait`, where
kernels overlap). So those that run one after another share theirs: the kernels of one stream, and those of captured
graphs that are replayed one after another, if somebody has `lent` them some. What else is captured runs wherever its
graph is replayed: each such kernel has counters of its own, from a reserve that is set aside beforehand, since in a
capture nothing can be zeroed once and for all.
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
def lent(buffer: Tensor) -> Iterator[None]:
    """Let the kernels that this thread launches or captures meanwhile count in `buffer`.

    Args:
        buffer: int32 zeros on their GPU, used by nothing that may run beside them: no graph that was captured with it
            may be replayed before the last one has ended. A kernel that needs more has others.
    """
    before = getattr(_of_thread, "lent", None)
    _of_thread.lent = buffer
    try:
        yield
    finally:
        _of_thread.lent = before


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` int32 zeros for a kernel that is launched next on the current stream of a GPU."""
    buffer: Tensor | None = getattr(_of_thread, "lent", None)
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
