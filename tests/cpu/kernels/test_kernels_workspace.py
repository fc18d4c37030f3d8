"""Counters of kernels without a GPU: one set per stream, and per captured kernel, or those of `use_counters`."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from warpbus.kernels.ops import workspace
from warpbus.kernels.ops.workspace import counters, use_counters

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch):
    """What stands for CUDA's state: the current stream, and whether it is captured."""
    state = SimpleNamespace(stream=0, capturing=False)
    monkeypatch.setattr(workspace, "_of_stream", {})
    monkeypatch.setattr(workspace, "_reserves", {})
    monkeypatch.setattr(workspace, "_used_up", [])
    monkeypatch.setattr(workspace, "_captures", lambda device: state.capturing)
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


def test_a_reserve_is_renewed_between_captures(gpu):
    """Else the kernels of a program's tenth graph would be slowed down by a zeroing each.

    A graph knows the addresses of its kernels' counters and holds nothing: they have to stay theirs.
    """
    counters(CPU, 1)
    places = []
    for _ in range(20):
        gpu.capturing = True
        taken = counters(CPU, workspace._RESERVE // 2 + 1)
        places.append((taken.data_ptr(), taken.data_ptr() + taken.nbytes))
        assert workspace._reserves[CPU].data_ptr() == places[-1][1]  # the rest lies behind it
        del taken
        gpu.capturing = False
        counters(CPU, 1)
    places.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


def test_threads_that_capture_at_once_share_no_counters(gpu, monkeypatch):
    """The reserve is divided while another thread has read it and not yet taken its part."""

    class Slow(dict):
        def get(self, device):
            found = super().get(device)
            time.sleep(0.01)
            return found

    counters(CPU, 1)
    monkeypatch.setattr(workspace, "_reserves", Slow(workspace._reserves))
    gpu.capturing = True
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: counters(CPU, 100), range(8)))
    assert not any(overlap(a, b) for i, a in enumerate(taken) for b in taken[:i])


def test_the_stream_that_is_asked_about_is_that_of_the_tensors_gpu(monkeypatch):
    on, capturing = [0], {0: False, 1: True}

    @contextmanager
    def device(chosen):
        before, on[0] = on[0], chosen.index
        yield
        on[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: on[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[on[0]])
    assert workspace._captures(torch.device("cuda", 1))
    assert not workspace._captures(torch.device("cuda", 0))


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


@pytest.mark.parametrize("capturing", [False, True])
def test_kernels_share_the_counters_they_are_given(gpu, capturing):
    counters(CPU, 1)
    gpu.capturing = capturing
    left = workspace._reserves[CPU].numel()
    buffer, inner = torch.zeros(100, dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    with use_counters(buffer):
        assert counters(CPU, 100) is counters(CPU, 3) is buffer
        with use_counters(inner):
            assert counters(CPU, 3) is inner
        assert counters(CPU, 3) is buffer
        assert counters(torch.device("meta"), 3).device.type == "meta"
        assert not overlap(counters(CPU, 101), buffer)
    assert not overlap(counters(CPU, 3), buffer)
    assert workspace._reserves[CPU].numel() == left - 101 * capturing - 3 * capturing


def test_counters_are_given_to_one_thread(gpu):
    buffer, found = torch.zeros(100, dtype=torch.int32), []
    with use_counters(buffer):
        other = threading.Thread(target=lambda: found.append(counters(CPU, 3)))
        other.start()
        other.join()
    assert not overlap(found[0], buffer)


def test_it_is_given_back_where_something_fails(gpu):
    buffer = torch.zeros(100, dtype=torch.int32)
    with pytest.raises(ValueError, match="no"), use_counters(buffer):
        raise ValueError("no")
    assert counters(CPU, 3) is not buffer
