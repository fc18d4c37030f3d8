"""Capturing CUDA graphs in a program that goes on meanwhile.

A capture fails when its own thread waits for the GPU or gives memory back, and when any thread waits for the whole GPU.
Both happen where nobody expects them: Python's garbage collector finds objects that nobody needs any more at any
moment, and with an engine go the memory of its cache and its graphs.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Held by whoever captures, and by whoever waits for a whole GPU.
_alone = threading.RLock()


@contextmanager
def capture(
    graph: torch.cuda.CUDAGraph, *, pool: Any = None, stream: torch.cuda.Stream | None = None
) -> Iterator[None]:
    """Capture what this thread launches. Nothing is collected meanwhile; other threads may launch and allocate.

    Args:
        pool: `torch.cuda.graph_pool_handle()` of the graphs that share memory.
        stream: what is captured on; torch's own by default.
    """
    with _alone, _uncollected():
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            # PyTorch leaves the generator waiting for the end of a capture that failed: no more random numbers.
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
