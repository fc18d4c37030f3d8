"""CUDA graphs of functions that launch thousands of small kernels."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from warpbus.cuda import green
from warpbus.cuda.capture import Graph, GraphMemory, capture
from warpbus.cuda.green import GreenContext

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
        """The same for calls that launch the same, on the same GPU and in the same green context."""
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in self.tensors)
        return self.function, shapes, self.place, tuple(sorted(self.constants.items(), key=lambda item: item[0]))

    @property
    def place(self) -> tuple[torch.device, GreenContext | None]:
        """Where it runs: the GPU of its tensors, and the green context that is current there."""
        device = self.tensors[0].device
        return device, green.current(device)

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
    them before. Calls on several GPUs or in several green contexts have graphs of their own.
    """

    def __init__(self) -> None:
        self._captured: dict[object, _Captured | None] = {}
        self._memories: dict[tuple[torch.device, GreenContext | None], GraphMemory] = {}

    def __call__(self, function: Function, *tensors: Tensor, **constants: object) -> tuple[Tensor, ...]:
        """`function(*tensors, **constants)`; the constants have to be hashable."""
        call = Call(function, tensors, constants)
        if tensors[0].device.type != "cuda":
            return call()
        key = call.key
        if key not in self._captured:
            self._captured[key] = None
            return call()
        captured = self._captured[key]
        if captured is None:
            own = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors)
            captured = self._captured[key] = self._capture(Call(function, own, constants))
        for argument, given in zip(captured.arguments, tensors, strict=True):
            argument.copy_(given)
        captured.graph.replay()
        return captured.results

    def prepare(self, call: Call) -> None:
        """Capture a call before it comes; nothing is launched.

        Our kernels may be compiled and loaded meanwhile; what torch and its libraries set up on first use has to be
        ready, by an ordinary call that uses the same operators. Other threads may use the GPU meanwhile, but not its
        random numbers.

        Args:
            call: on a GPU, with tensors of any content, which are this object's from now on.
        """
        if self._captured.get(call.key) is None:
            self._captured[call.key] = self._capture(call)

    def _capture(self, call: Call) -> _Captured:
        place = call.place
        if place not in self._memories:
            self._memories[place] = GraphMemory(place[0])
        try:
            with torch.no_grad(), torch.cuda.device(place[0]), capture(self._memories[place]) as graph:
                results = call()
        except BaseException:
            del self._memories[place]  # torch takes it for one that is still captured into
            raise
        return _Captured(graph, call.tensors, results)
