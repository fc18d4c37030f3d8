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

from warpbus.cuda import driver, green
from warpbus.cuda.green import GreenContext

# Held by whoever captures, and by whoever waits for a whole GPU.
_alone = threading.RLock()


@dataclass(frozen=True)
class _Lane:
    """What graphs that share memory are captured on. It lasts as long as the process.

    Attributes:
        stream: ours, in torch's context or in a green one, with which it ends.
        workspace: memory for a workspace of cuBLAS on it.
        replayed: recorded behind each replay of these graphs.
    """

    stream: torch.cuda.Stream
    workspace: torch.cuda.MemPool
    replayed: torch.cuda.Event


# Lanes that nobody has, by the GPU and, within a green context, by that context.
_idle: defaultdict[tuple[torch.device, GreenContext | None], list[_Lane]] = defaultdict(list)


class GraphMemory:
    """What graphs share that are replayed one after another: memory for what lies between, and a workspace of cuBLAS.

    PyTorch has a workspace for each stream, which graphs keep the address of. It frees it nevertheless when
    `torch.compile` captures graphs, and later versions whenever a graph ends that was captured on the stream
    (pytorch/pytorch#193402). So these graphs have a stream to themselves, and their workspace a pool from which nothing
    else comes: free or not, that memory stays where it is, and is nobody else's for as long as they live, nor before
    their last replay has ended.

    Within `GreenContext.running()` the stream belongs to that green context: the kernels of the graphs run on its
    multiprocessors wherever they are replayed, and count on no more.

    Attributes:
        between: the handle of the memory for what lies between.
        stream: what they are captured on; a first run on it allocates what they allocate once.
        replayed: an event behind the last replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.between = torch.cuda.graph_pool_handle()
        context = green.current(device)
        idle = _idle[device, context]
        try:
            lane = idle.pop()
        except IndexError:
            lane = _new_lane(device, context)
        lane.replayed.synchronize()  # graphs that are gone may still run, and use the workspace
        weakref.finalize(self, idle.append, lane).atexit = False
        self.stream, self._workspace, self.replayed = lane.stream, lane.workspace, lane.replayed
        self.take_workspace()

    def take_workspace(self) -> None:
        """Let what this thread launches on `stream` have the workspace, again and again the same one."""
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self._workspace):
            torch.cuda.current_blas_handle()


class Graph(torch.cuda.CUDAGraph):
    """A CUDA graph with what it shares."""

    memory: GraphMemory

    def replay(self) -> None:
        """Launch it on the current stream of its GPU."""
        super().replay()
        self.memory.replayed.record(torch.cuda.current_stream(self.memory.stream.device))


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


def _new_lane(device: torch.device, context: GreenContext | None) -> _Lane:
    synchronize(device)  # makes torch's context, if need be
    with torch.cuda.device(device):
        workspace = torch.cuda.MemPool()
        handle = driver.create_stream() if context is None else context.create_stream()
        stream = torch.cuda.ExternalStream(handle, device)
    # Never destroyed, not even when Python ends: that would end the process at once if a capture has failed before.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(workspace))
    return _Lane(stream, workspace, torch.cuda.Event())
