"""Counters of kernels without a GPU: one set for each stream, one of its own for each captured kernel."""

from types import SimpleNamespace

import pytest
import torch

from warpbus.kernels.ops import workspace
from warpbus.kernels.ops.workspace import counters

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch):
    """What stands for CUDA's state: the current stream, and whether it is captured."""
    state = SimpleNamespace(stream=0, capturing=False)
    monkeypatch.setattr(workspace, "_of_stream", {})
    monkeypatch.setattr(workspace, "_reserves", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=state.stream))
    return state


def overlap(one, other):
    places = [range(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (one, other)]
    return max(p.start for p in places) < min(p.stop for p in places)


def test_kernels_of_one_stream_share_theirs(gpu):
    first = counters(CPU, 10)
    assert first.dtype == torch.int32
    assert first.numel() >= 10
    assert not first.any()
    assert counters(CPU, first.numel()) is first
    gpu.stream = 1
    assert not overlap(counters(CPU, 10), first)
    gpu.stream = 0
    assert counters(CPU, 3) is first


def test_a_larger_kernel_gets_more(gpu):
    first = counters(CPU, 10)
    more = counters(CPU, first.numel() + 1)
    assert more.numel() > first.numel()
    assert not more.any()
    assert counters(CPU, 10) is more


def test_each_captured_kernel_has_its_own(gpu):
    eager = counters(CPU, 10)
    gpu.capturing = True
    taken = [counters(CPU, count) for count in (5, 1000, 5)]
    assert [part.numel() for part in taken] == [5, 1000, 5]
    together = [eager, *taken]
    assert not any(overlap(a, b) for i, a in enumerate(together) for b in together[:i])
    gpu.capturing = False
    assert counters(CPU, 10) is eager


@pytest.mark.parametrize("prepared", [False, True])
def test_a_capture_without_a_reserve_zeroes_its_own(gpu, prepared):
    if prepared:
        counters(CPU, 1)
    gpu.capturing = True
    large = counters(CPU, workspace._RESERVE + 1)
    assert large.numel() == workspace._RESERVE + 1
    assert not large.any()
    if prepared:
        assert counters(CPU, workspace._RESERVE).numel() == workspace._RESERVE
        assert counters(CPU, 1).numel() == 1
