"""CUDA graphs of functions that launch thousands of small kernels."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from warpbus.cuda.capture import Graph, GraphMemory, capture

Function = Callable[..., tuple[Tensor, ...]]
"""Of tensors on one device and of constants; it does not wait for the GPU, and changes none of its arguments."""


@dataclass(frozen=True)
class Call:
    """A call of a function: with tensors, and constants that have to be hashable."""

    function: Function
    tensors: tuple[Tensor, ...]
    constants: dict[str, object] = field(default_factory=dict)

    @property
    def key(self) -> object:
        """The same for calls that launch the same."""
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in self.tensors)
        return self.function, shapes, tuple(sorted(self.constants.items(), key=lambda item: item[0]))

    def __call__(self) -> tuple[Tensor, ...]:
        return self.function(*self.tensors, **self.constants)


@dataclass(frozen=True)
class _Captured:
    """A call as a graph: it reads `arguments` and writes `results`."""

    graph: Graph
    arguments: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


def at_once(function: Function, *tensors: Tensor, **constants: object) -> tuple[Tensor, ...]:
    """Call a function as it is, where a `Replayed` may stand."""
    return function(*tensors, **constants)


class Replayed:
    """Calls functions; from the second call for the same shapes on as one launch of a CUDA graph.

    The first call is an ordinary one, unless it was prepared: what is compiled or allocated on first use is so then. On
    the CPU all are. Results of a replayed call are overwritten by the next call of any function of this `Replayed`: use
    them before.
    """

    def __init__(self) -> None:
        self._captured: dict[object, _Captured | None] = {}
        self._memory: GraphMemory | None = None

    def __call__(self, function: Function, *tensors: Tensor, **constants: object) -> tuple[Tensor, ...]:
        """`function(*tensors, **constants)`; the constants have to be hashable."""
        call = Call(function, tensors, constants)
        if tensors[0].device.type != "cuda":
            return call()
        if call.key not in self._captured:
            self._captured[call.key] = None
            return call()
        captured = self._captured[call.key]
        if captured is None:
            own = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors)
            captured = self._captured[call.key] = self._capture(Call(function, own, constants))
        for argument, given in zip(captured.arguments, tensors, strict=True):
            argument.copy_(given)
        captured.graph.replay()
        return captured.results

    def prepare(self, call: Call) -> None:
        """Capture a call before it comes; nothing is launched.

        What it compiles or loads on first use has to be: a call for smaller shapes does that. Other threads may use the
        GPU meanwhile, but not its random numbers.

        Args:
            call: on a GPU, with tensors of any content, which are this object's from now on.
        """
        if self._captured.get(call.key) is None:
            self._captured[call.key] = self._capture(call)

    def _capture(self, call: Call) -> _Captured:
        self._memory = self._memory or GraphMemory(call.tensors[0].device)
        try:
            with torch.no_grad(), capture(self._memory) as graph:
                results = call()
        except BaseException:
            self._memory = None  # torch takes it for one that is still captured into
            raise
        return _Captured(graph, call.tensors, results)
