"""Capturing CUDA graphs while other threads of the program use the GPU.

A capture fails if its own thread waits for the GPU or frees memory, or if any thread synchronizes with the whole GPU.
Both can happen at any moment, because Python's garbage collector may delete an engine with its cache and its graphs.
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

# Held while a thread captures, and while a thread synchronizes with a whole GPU.
_alone = threading.RLock()


@dataclass(frozen=True)
class _Lane:
    """A stream on which graphs that share memory are captured. It lasts as long as the process.

    Attributes:
        stream: used for nothing else; in torch's context, or in a green context, with which it ends.
        workspace: memory for a workspace of cuBLAS on this stream.
        replayed: an event that is recorded after each replay of these graphs.
    """

    stream: torch.cuda.Stream
    workspace: torch.cuda.MemPool
    replayed: torch.cuda.Event


# Lanes that are not in use, per GPU and green context.
_idle: defaultdict[tuple[torch.device, GreenContext | None], list[_Lane]] = defaultdict(list)


class GraphMemory:
    """Memory that is shared by graphs that are replayed one after another: intermediate results, and a workspace of
    cuBLAS.

    PyTorch has one cuBLAS workspace per stream, and graphs keep its address. But it frees the workspace when
    `torch.compile` captures graphs, and later versions whenever a graph ends that was captured on the stream
    (pytorch/pytorch#193402). So these graphs have a stream of their own, and their workspace has a memory pool of its
    own: even after PyTorch has freed the workspace, its memory is not used for anything else while the graphs exist or
    still run.

    Within `GreenContext.running()` the stream belongs to that green context: the kernels of the graphs run on its
    multiprocessors wherever the graphs are replayed, and size their grids for them.

    Attributes:
        between: the handle of the memory pool of intermediate results.
        stream: the stream of the capture. A warm-up run on it makes one-time allocations.
        replayed: an event after the last replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.between = torch.cuda.graph_pool_handle()
        context = green.current(device)
        idle = _idle[device, context]
        try:
            lane = idle.pop()
        except IndexError:
            lane = _new_lane(device, context)
        lane.replayed.synchronize()  # deleted graphs may still run and use the workspace
        weakref.finalize(self, idle.append, lane).atexit = False
        self.stream, self._workspace, self.replayed = lane.stream, lane.workspace, lane.replayed
        self.take_workspace()

    def take_workspace(self) -> None:
        """Make this thread's cuBLAS calls on `stream` use the workspace, always the same one."""
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self._workspace):
            torch.cuda.current_blas_handle()


class Graph(torch.cuda.CUDAGraph):
    """A CUDA graph and the memory that it shares."""

    memory: GraphMemory

    def replay(self) -> None:
        """Launch it on the current stream of its GPU."""
        super().replay()
        self.memory.replayed.record(torch.cuda.current_stream(self.memory.stream.device))


@contextmanager
def capture(memory: GraphMemory | None = None) -> Iterator[Graph]:
    """Capture what this thread launches. Garbage collection is off meanwhile; other threads may launch and allocate.

    Args:
        memory: shared with other graphs, on the current GPU; unusable after a capture that failed. None: the graph gets
            its own.
    """
    with _alone, _uncollected():
        graph = Graph()
        graph.memory = memory or GraphMemory(torch.device("cuda", torch.cuda.current_device()))
        graph.memory.take_workspace()
        pool, stream = graph.memory.between, graph.memory.stream
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield graph
            # PyTorch resets the offset of the graph's random numbers on this stream before the capture. Where the GPU
            # is slow to get there, the first replay, on another stream, would set the offset before it is reset.
            stream.synchronize()
        except BaseException:
            _recover(graph.memory)
            raise


class PiecewiseCapture:
    """Captures what a thread launches as several graphs, one behind the other; made by `capture_piecewise`.

    Attributes:
        graphs: those that have ended.
    """

    def __init__(self, memory: GraphMemory) -> None:
        self.graphs: list[Graph] = []
        self._memory = memory

    def begin(self) -> None:
        """Begin a graph. It may use what earlier ones have written to memory that is still allocated."""
        self._memory.take_workspace()
        graph = Graph()
        graph.memory = self._memory
        self.graphs.append(graph)
        graph.capture_begin(pool=self._memory.between, capture_error_mode="thread_local")

    def end(self) -> None:
        """End the graph. Until the next one begins, what is launched is not captured."""
        self.graphs[-1].capture_end()
        self._memory.stream.synchronize()  # as in `capture`


@contextmanager
def capture_piecewise(memory: GraphMemory) -> Iterator[PiecewiseCapture]:
    """Capture several graphs that are replayed in this order, while something else is launched between them.

    The first one has begun, and the last one ends with the block. Garbage collection is off meanwhile.

    Args:
        memory: shared with other graphs, on the current GPU; unusable after a capture that failed.
    """
    with _alone, _uncollected():
        torch.cuda.synchronize(memory.stream.device)
        torch.cuda.empty_cache()  # memory that the graphs need may lie there
        with torch.cuda.stream(memory.stream):
            made = PiecewiseCapture(memory)
            try:
                made.begin()
                yield made
                made.end()
            except BaseException:
                with suppress(RuntimeError):  # it may have ended
                    made.graphs[-1].capture_end()
                _recover(memory)
                raise


def _recover(memory: GraphMemory) -> None:
    """After a failed capture PyTorch behaves as if it were still capturing: it frees no memory and gives no random
    numbers."""
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(memory.stream.device_index, memory.between)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


def synchronize(device: torch.device | int) -> None:
    """Wait for everything that was launched on a GPU, after the end of a capture by another thread."""
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
    synchronize(device)  # creates torch's context if there is none
    with torch.cuda.device(device):
        workspace = torch.cuda.MemPool()
        handle = driver.create_stream() if context is None else context.create_stream()
        stream = torch.cuda.ExternalStream(handle, device)
    # Never destroyed, not even at interpreter exit: after a failed capture that would abort the process.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(workspace))
    return _Lane(stream, workspace, torch.cuda.Event())
