"""Captures without a GPU: nothing is collected meanwhile, and who waits for a GPU waits for the capture first."""

import gc
import threading
from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from warpbus.cuda import capture as module
from warpbus.cuda.capture import GraphMemory, capture, synchronize


@pytest.fixture
def gpu(monkeypatch):
    """What is asked of torch, in order, with whether the garbage collector is on."""
    calls = []

    @contextmanager
    def graph(graph, **options):
        calls.append(("begin", gc.isenabled(), graph.memory, options))
        yield
        calls.append(("end", gc.isenabled()))

    monkeypatch.setattr(module, "Graph", SimpleNamespace)
    monkeypatch.setattr(module, "GraphMemory", lambda device: Memory(calls))
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda *pool: calls.append(("ended", *pool)), raising=False
    )
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("wait", device)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(calls),))
    return calls


class Generator:
    """PyTorch's of a GPU, as far as a capture deals with it."""

    def __init__(self, calls):
        self.calls = calls

    def clone_state(self):
        return "what it was, without a capture"

    def graphsafe_set_state(self, state):
        self.calls.append(("random", state))


class Memory:
    """What a graph has of its own."""

    between = 3
    stream = SimpleNamespace(device_index=0, synchronize=lambda: None)

    def __init__(self, calls):
        self.calls = calls

    def take_workspace(self):
        self.calls.append(("workspace",))


class Cycle:
    def __init__(self, ends):
        self.itself = self
        self.ends = ends

    def __del__(self):
        self.ends.append(1)


def test_nothing_is_collected_while_a_graph_is_captured(gpu):
    ends = []
    memory = Memory(gpu)
    with capture(memory) as graph:
        for _ in range(3 * gc.get_threshold()[0]):
            Cycle(ends)
        assert not ends
    assert graph.memory is memory
    assert gpu == [
        ("workspace",),
        ("begin", False, memory, {"pool": 3, "stream": Memory.stream, "capture_error_mode": "thread_local"}),
        ("end", False),
    ]
    assert gc.isenabled()
    gc.collect()
    assert ends


def test_it_collects_again_after_a_capture_that_failed(gpu):
    with pytest.raises(ValueError, match="no"), capture():
        raise ValueError("no")
    assert gc.isenabled()
    assert gpu[-2:] == [("ended", 0, 3), ("random", "what it was, without a capture")]


def test_who_has_turned_collection_off_finds_it_off(gpu):
    gc.disable()
    try:
        with capture():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_another_thread_waits_for_the_gpu_after_the_capture(gpu):
    waiting = threading.Event()

    def wait():
        waiting.set()
        synchronize(2)

    other = threading.Thread(target=wait)
    with capture():
        other.start()
        waiting.wait()
        other.join(0.05)
        assert other.is_alive()
    other.join()
    assert [call[0] for call in gpu] == ["workspace", "begin", "end", "wait"]
    assert gpu[-1] == ("wait", 2)


def test_captures_of_two_threads_come_one_after_the_other(gpu):
    def capture_one():
        with capture():
            pass

    other = threading.Thread(target=capture_one)
    with capture():
        other.start()
        other.join(0.05)
    other.join()
    assert [call[0] for call in gpu] == ["workspace", "begin", "end"] * 2
    assert module._alone.acquire(blocking=False)
    module._alone.release()


@pytest.fixture
def lanes(monkeypatch):
    """The places that lanes were made for, the numbers of those that were waited for, and a green context."""
    made, waited = [], []

    def new_lane(device, context):
        made.append((device, context))
        number = len(made)
        return module._Lane(number, None, SimpleNamespace(synchronize=lambda: waited.append(number)))

    monkeypatch.setattr(module, "_new_lane", new_lane)
    monkeypatch.setattr(module, "_idle", defaultdict(list))
    monkeypatch.setattr(module.GraphMemory, "take_workspace", lambda memory: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 3)
    return made, waited, object()


def test_what_a_graph_was_captured_on_is_used_again_when_nobody_needs_it(lanes):
    made, waited, _ = lanes
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    first, second = GraphMemory(one), GraphMemory(one)
    assert (first.stream, second.stream) == (1, 2)
    del first
    gc.collect()
    assert GraphMemory(other).stream == 3  # another GPU's
    waited.clear()
    assert GraphMemory(one).stream == 1
    assert waited == [1]  # a graph that is gone may still run
    assert made == [(one, None), (one, None), (other, None)]


def test_graphs_of_a_green_context_are_captured_on_a_stream_of_it(lanes, monkeypatch):
    made, _, share = lanes
    gpu = torch.device("cuda", 0)
    assert GraphMemory(gpu).stream == 1
    gc.collect()
    monkeypatch.setattr(module.green, "current", lambda device: share)
    assert GraphMemory(gpu).stream == 2
    gc.collect()
    assert GraphMemory(gpu).stream == 2
    assert made == [(gpu, None), (gpu, share)]
