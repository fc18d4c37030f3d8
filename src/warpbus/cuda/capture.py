"""Capturing CUDA graphs in a program that goes on meanwhile.

A capture fails when its own thread waits for the GPU or gives memory back, and when any thread waits for the whole GPU.
Both happen where nobody expects them: Python's garbage collector finds objects that nobody needs any more at any
moment, and with an engine go the memory of its cache and its graphs.
"""

import ctypes
import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from warpbus.cuda import driver

# Held by whoever captures, and by whoever waits for a whole GPU.
_alone = threading.RLock()


@dataclass(frozen=True)
class _Lane:
    """A stream of ours, and memory for a workspace of cuBLAS on it. Both last as long as the process."""

    stream: torch.cuda.Stream
    workspace: torch.cuda.MemPool


_idle: defaultdict[torch.device, list[_Lane]] = defaultdict(list)


class GraphMemory:
    """What graphs share that are replayed one after another: memory for what lies between, and a workspace of cuBLAS.

    PyTorch has a workspace for each stream, which graphs keep the address of. It frees it nevertheless when
    `torch.compile` captures graphs, and later versions whenever a graph ends that was captured on the stream
    (pytorch/pytorch#193402). So these graphs have a stream to themselves, and their workspace a pool from which nothing
    else comes: free or not, that memory stays where it is, and is nobody else's for as long as they live.

    Attributes:
        between: the handle of the memory for what lies between.
        stream: what they are captured on; a first run on it allocates what they allocate once.
    """

    def __init__(self, device: torch.device) -> None:
        self.between = torch.cuda.graph_pool_handle()
        try:
            lane = _idle[device].pop()
        except IndexError:
            lane = _new_lane(device)
        weakref.finalize(self, _idle[device].append, lane).atexit = False
        self.stream, self._workspace = lane.stream, lane.workspace
        self.take_workspace()

    def take_workspace(self) -> None:
        """Let what this thread launches on `stream` have the workspace, again and again the same one."""
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self._workspace):
            torch.cuda.current_blas_handle()


class Graph(torch.cuda.CUDAGraph):
    """A CUDA graph with what it shares."""

    memory: GraphMemory


@contextmanager
def capture(memory: GraphMemory | None = None) -> Iterator[Graph]:
    """Capture what this thread launches. Nothing is collected meanwhile; other threads may launch and allocate.

    Args:
        memory: shared with other graphs, on the current GPU; after a capture that failed it is of no more use. None:
            the graph's own.
    """
    with _alone, _uncollected():
        graph = Graph()
        graph.memory = memory or GraphMemory(torch.device("cuda", torch.cuda.current_device()))
        graph.memory.take_workspace()
        pool, stream = graph.memory.between, graph.memory.stream
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield graph
        except BaseException:
            # PyTorch goes on as if a capture that failed still went on: frees no memory, and gives no random numbers.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise


def synchronize(device: torch.device | int) -> None:
    """Wait for everything that was launched on a GPU, and before for a capture that another thread is at."""
    with _alone:
        torch.cuda.synchronize(device)


@contextmanager
def _uncollected() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _new_lane(device: torch.device) -> _Lane:
    synchronize(device)  # makes torch's context, if need be
    with torch.cuda.device(device):
        workspace = torch.cuda.MemPool()
        stream = torch.cuda.ExternalStream(driver.create_stream(), device)
    # Never destroyed, not even when Python ends: that would end the process at once if a capture has failed before.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(workspace))
    return _Lane(stream, workspace)
