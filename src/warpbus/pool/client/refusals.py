"""The operations that `warpbus:0` does not support, and their errors, which suggest an alternative.

`docs/remote_gpu.md` has a table of all refusals.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload

from warpbus.pool.client.tensors import NAME, is_remote

_KINDS = {
    "SparsePrivateUse1": "sparse",
    "SparseCsrPrivateUse1": "sparse",
    "NestedTensorPrivateUse1": "nested",
    "QuantizedPrivateUse1": "quantized",
}
"""By PyTorch's dispatch key: kinds of tensors that are more than numbers in a storage."""

_WAYS_OUT = {
    "sparse": "compute it on the CPU, or use dense tensors",
    "nested": "use layout=torch.jagged, or padding and a mask",
    "quantized": "fake quantization works; or quantize for Warpbus's own kernels by warpbus.quantize",
}

# Parts of operators' names.
_MAKERS = {"sparse": "sparse", "nested": "nested", "quantize": "quantized"}


def register(library: torch.library.Library) -> None:
    """Add the refusals to a library of fallbacks."""
    library.fallback(_refuse, "PrivateUse1")
    for key, kind in _KINDS.items():
        library.fallback(functools.partial(_refuse_kind, kind), key)
    wrapper: Any = torch._TorchCompileInductorWrapper
    wrapper.__call__ = _compiling_for_others(wrapper.__call__)
    jitted: Any = torch.cuda.jiterator._JittedFunction
    jitted.__call__ = _jitting_for_others(jitted.__call__)


def _refuse(operator: OpOverload, *_: Any, **__: Any) -> NoReturn:
    for part, kind in _MAKERS.items():
        if part in operator.name():
            _refuse_kind(kind, operator)
    raise NotImplementedError(
        f"{operator.name()} is not among the operators that a pool runs: compute it on the CPU (.cpu()) and move on"
    )


def _refuse_kind(kind: str, operator: OpOverload, *_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(f"{operator.name()} of {kind} tensors does not run on a remote GPU: {_WAYS_OUT[kind]}")


def _jitting_for_others(launch: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.cuda.jiterator`, whose CUDA code is compiled and launched by the program itself."""

    def call(self: Any, *tensors: Tensor, **kwargs: Any) -> Any:
        if any(is_remote(each) for each in tensors):
            raise NotImplementedError(
                f"{self.kernel_name}: torch.cuda.jiterator compiles CUDA code for GPUs of this machine, not for a "
                "remote GPU: compute the same by PyTorch's operators"
            )
        return launch(self, *tensors, **kwargs)

    return call


def _compiling_for_others(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` with inductor, which generates code for devices of this machine: a graph of remote tensors runs
    operator by operator instead."""

    def call(self: Any, graph: Any, inputs: list[Tensor]) -> Any:
        if not any(isinstance(each, Tensor) and (each.device.type == NAME or is_remote(each)) for each in inputs):
            return compile_graph(self, graph, inputs)
        warnings.warn(
            "torch.compile: inductor generates no code for a remote GPU, so that the graph runs operator by operator, "
            'as with backend="aot_eager"; gpu.record() runs a step as one CUDA graph',
            stacklevel=2,
        )
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return call
