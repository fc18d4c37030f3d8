"""What a call will give, without running it: by meta tensors, which have shapes and no memory.

The client needs it to go on without waiting for the pool; the tenant, to know what a call allocates before it does.
"""

from typing import Any

import torch
from torch import Tensor

from warpbus.errors import DeviceError
from warpbus.pool.protocol.geometry import Geometry
from warpbus.pool.protocol.operators import operator
from warpbus.pool.protocol.signature import (
    Argument,
    DevicePlaceholder,
    Fixed,
    Input,
    New,
    Number,
    Output,
    Same,
    Signature,
)

_UNKNOWN_BEFORE = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})

MEASURED = frozenset(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))
"""What meta tensors promise of these is what the kernels of one version of PyTorch gave on one GPU."""

_SAMPLES = {"int": 1, "float": 1.0, "bool": True}
"""Numbers that stand for those of a call: none of them decides about a shape."""


def infer(signature: Signature) -> tuple[Output, ...] | None:
    """The results of a call of this kind; its own `outputs` are not looked at.

    Returns:
        The results in order; None where they are known only after the call ran, or are no tensors.

    Raises:
        Exception: what PyTorch raises for such arguments, as it would where the tensors are.
        NotImplementedError: meta tensors cannot tell, but the results are the same at every call.
    """
    call = operator(signature.operator)
    if call._overloadpacket.__name__ in MEASURED:
        raise NotImplementedError(f"{signature.operator}: only a call can tell what it gives")
    if not _UNKNOWN_BEFORE.isdisjoint(call.tags) or not gives_tensors(call):
        return None
    tensors = [torch.empty_strided(g.shape, g.stride, dtype=g.dtype, device="meta") for g in signature.inputs]
    arguments = [_filled(argument, tensors) for argument in signature.arguments]
    keywords = {name: _filled(argument, tensors) for name, argument in signature.keywords}
    with torch.no_grad():
        outputs = outputs_of(call(*arguments, **keywords), tensors)
    for tensor, geometry in zip(tensors, signature.inputs, strict=True):
        if tensor.shape != geometry.shape:
            raise DeviceError(f"{signature.operator} would make a tensor that it writes another size")
    return outputs


def gives_tensors(call: torch._ops.OpOverload) -> bool:
    """Whether an operator gives tensors, or a list of them; beside tensors there may be lengths."""
    kinds = [str(result.type) for result in call._schema.returns]
    if len(kinds) == 1:
        return kinds[0] in ("Tensor", "List[Tensor]")
    return set(kinds) <= {"Tensor", "int", "SymInt"} and set(kinds) != {"int"}


def outputs_of(result: Any, inputs: list[Tensor]) -> tuple[Output, ...]:
    """The results of a call on `inputs`, flattened and described."""
    places = {id(tensor): index for index, tensor in enumerate(inputs)}
    return tuple(_output(tensor, places) for tensor in flat(result))


def flat(result: Any) -> list[Tensor | int | None]:
    """The tensors of an operator's result, and lengths, lists flattened."""
    if result is None or isinstance(result, Tensor | int):
        return [] if result is None else [result]
    found: list[Tensor | int | None] = []
    for item in result:
        found.extend([None] if item is None else flat(item))
    return found


def _output(tensor: Tensor | int | None, places: dict[int, int]) -> Output:
    if tensor is None:
        return None
    if isinstance(tensor, int):
        return Fixed(tensor)
    if id(tensor) in places:
        return Same(places[id(tensor)])
    geometry = Geometry(tensor.dtype, tuple(tensor.shape), tensor.stride())
    return New(geometry, geometry.extent)


def _filled(argument: Argument, tensors: list[Tensor]) -> Any:
    if isinstance(argument, Input):
        return tensors[argument.index]
    if isinstance(argument, Number):
        return _SAMPLES[argument.kind]
    if isinstance(argument, DevicePlaceholder):
        return torch.device("meta")
    if isinstance(argument, tuple):
        return [_filled(item, tensors) for item in argument]
    return argument
