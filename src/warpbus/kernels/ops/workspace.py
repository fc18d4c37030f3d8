"""Counters by which the blocks of one kernel find out which of them comes last.

Kernels find zeros and leave zeros. Those of one stream run one after another and share their counters. A captured
kernel runs wherever its graph is replayed, so each has counters of its own, from a reserve that is set aside
beforehand: in a capture nothing can be zeroed once and for all.
"""

import torch
from torch import Tensor

_SMALLEST = 1 << 14
_RESERVE = 1 << 18

_of_stream: dict[tuple[torch.device, int], Tensor] = {}
_reserves: dict[torch.device, Tensor] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` int32 zeros for a kernel that is launched next on the current stream of a GPU."""
    if torch.cuda.is_current_stream_capturing():
        return _captured(device, count)
    if device not in _reserves:
        _reserves[device] = torch.zeros(_RESERVE, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    held = _of_stream.get(key)
    if held is None or held.numel() < count:
        held = _of_stream[key] = torch.zeros(max(count, _SMALLEST), dtype=torch.int32, device=device)
    return held


def _captured(device: torch.device, count: int) -> Tensor:
    reserve = _reserves.get(device)
    if reserve is None or reserve.numel() < count:
        # Right, but zeroed by a node of the graph's own at every replay.
        return torch.zeros(count, dtype=torch.int32, device=device)
    taken, _reserves[device] = reserve[:count], reserve[count:]
    return taken
