"""CUDA graphs of functions that launch thousands of small kernels."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from warpbus.cuda import green
from warpbus.cuda.capture import Graph, GraphMemory, capture
from warpbus.cuda.green import GreenContext

Function = Callable[..., tuple[Tensor, ...]]
"""A function of tensors on one device and of constants. It does not wait for the GPU and changes none of its
arguments."""


@dataclass(frozen=True)
class Call:
    """A call of a function with tensors and hashable constants."""

    function: Function
    tensors: tuple[Tensor, ...]
    constants: dict[str, object] = field(default_factory=dict)

    @property
    def key(self) -> object:
        """Equal for calls that launch the same kernels, on the same GPU and in the same green context."""
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
    """Call a function directly; has the signature of `Replayed`."""
    return function(*tensors, **constants)


class Replayed:
    """Calls functions; from the second call with the same shapes on as one launch of a CUDA graph.

    Unless it was prepared, the first call runs without a graph, which compiles and allocates what is needed once. On
    the CPU no call uses a graph. The results of a replayed call are overwritten by the next call of any function of
    this `Replayed`. Each GPU and each green context has its own graphs.
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
        """Capture a call in advance; nothing is launched.

        Kernels of Warpbus may be compiled and loaded meanwhile. The one-time setup of torch and its libraries must have
        been done by an ordinary call that uses the same operators. Other threads may use the GPU meanwhile, but not its
        random numbers.

        Args:
            call: on a GPU, with tensors of any content, which this object keeps and overwrites.
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
            del self._memories[place]  # torch behaves as if the capture into it went on
            raise
        return _Captured(graph, call.tensors, results)
