"""CUDA graphs of functions that launch thousands of small kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.capture import capture

Function = Callable[..., tuple[Tensor, ...]]
"""Of tensors on one device and of constants; it does not wait for the GPU, and changes none of its arguments."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    arguments: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


class Replayed:
    """Calls a function; from the second call for the same shapes on as one launch of a CUDA graph.

    The first call is an ordinary one, unless it is prepared: what is compiled or allocated on first use is so then. On
    the CPU all are.
    Results of a replayed call are overwritten by the next call of any function of this `Replayed`: use them before.
    """

    def __init__(self) -> None:
        self._captured: dict[object, _Captured | None] = {}
        self._pool: Any = None

    def __call__(self, function: Function, *tensors: Tensor, **constants: object) -> tuple[Tensor, ...]:
        """`function(*tensors, **constants)`; the constants have to be hashable."""
        if tensors[0].device.type != "cuda":
            return function(*tensors, **constants)
        key = _key(function, tensors, constants)
        if key not in self._captured:
            self._captured[key] = None
            return function(*tensors, **constants)
        captured = self._captured[key]
        if captured is None:
            arguments = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors)
            captured = self._captured[key] = self._capture(function, arguments, constants)
        for own, given in zip(captured.arguments, tensors, strict=True):
            own.copy_(given)
        captured.graph.replay()
        return captured.results

    def prepare(self, function: Function, *tensors: Tensor, **constants: object) -> None:
        """Capture a call before the first one; nothing is launched.

        Args:
            tensors: of the shapes and dtypes that are going to come, with any content. They are this object's from now
                on. What is compiled on first use has to be: by a call for smaller shapes.
        """
        key = _key(function, tensors, constants)
        if tensors[0].device.type == "cuda" and key not in self._captured:
            self._captured[key] = self._capture(function, tensors, constants)

    def _capture(self, function: Function, arguments: tuple[Tensor, ...], constants: dict[str, object]) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with capture(graph, pool=self._pool):
            results = function(*arguments, **constants)
        return _Captured(graph, arguments, results)


def _key(function: Function, tensors: tuple[Tensor, ...], constants: dict[str, object]) -> object:
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
    return function, shapes, tuple(sorted(constants.items(), key=lambda item: item[0]))
