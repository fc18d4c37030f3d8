"""Infers the results of a call without running it, by meta tensors, which have shapes and no memory.

The client needs it to go on without waiting for the pool; the tenant, to know what a call allocates before it does.
"""

from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from warpbus.errors import DeviceError
from warpbus.pool.protocol.geometry import Geometry, contiguous
from warpbus.pool.protocol.meta_kernels import skip_compiler
from warpbus.pool.protocol.operators import operator
from warpbus.pool.protocol.result_shapes import declared_results, named_arguments
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

MEASURED = frozenset(
    {f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")}
    | {"_embedding_bag", "_embedding_bag_forward_only", "_grouped_mm", "log_sigmoid_forward"}
)
"""Their results, or the dtypes that they take, are others on a CPU and on each kind of GPU: one call shows them."""

WITHOUT_DROPOUT = frozenset({"_efficient_attention_backward", "_scaled_dot_product_efficient_attention_backward"})
"""With dropout their CUDA kernels read the seed from the memory of the host: one on the GPU, where all tensors of a
lease are, ends the process. `dropout_p` is a part of their definitions, so that each call is known to have none."""

_SAMPLES = {"int": 1, "float": 1.0, "bool": True}
"""Numbers that stand for those of a call: none of them decides about a shape."""

_16_BITS = frozenset({torch.float16, torch.bfloat16})


class OutputSizeError(DeviceError):
    """An operator would resize a tensor that it writes.

    Attributes:
        shapes: by the index of the tensor among the call's: the shape that it would get.
    """

    def __init__(self, operator: str, shapes: dict[int, tuple[int, ...]]) -> None:
        super().__init__(
            f"{operator} would make a tensor that it writes another size: give out= a tensor of shape "
            f"{[*next(iter(shapes.values()))]}, or an empty one"
        )
        self.shapes = shapes


def infer(signature: Signature, device: str = "cpu") -> tuple[Output, ...] | None:
    """The results of a call of this kind; its own `outputs` are not looked at.

    Args:
        signature: the kind of call.
        device: "cpu" or "cuda", the type of the device that will run it.

    Returns:
        The results in order; None where they are known only after the call ran, or are no tensors.

    Raises:
        Exception: PyTorch's error for such arguments, as it would be where the tensors are.
        NotImplementedError: meta tensors cannot tell, but the results are the same at every call.
    """
    call = operator(signature.operator)
    if device == "cuda" and call._overloadpacket.__name__ in WITHOUT_DROPOUT:
        _check_no_dropout(call, signature)
    if call._overloadpacket.__name__ in MEASURED:
        raise NotImplementedError(f"{signature.operator}: only a call can tell what it gives")
    if not _UNKNOWN_BEFORE.isdisjoint(call.tags) or not gives_tensors(call):
        return None
    declared = declared_results(call, signature)
    if declared is not None:
        return declared
    tensors = [*map(_meta, signature.inputs)]
    arguments = [_filled(argument, tensors) for argument in signature.arguments]
    keywords = {name: _filled(argument, tensors) for name, argument in signature.keywords}
    skip_compiler()
    with torch.no_grad():
        outputs = outputs_of(call(*arguments, **keywords), tensors)
    before = [geometry.shape for geometry in signature.inputs]
    resized = {
        index: tuple(t.shape) for index, (t, shape) in enumerate(zip(tensors, before, strict=True)) if t.shape != shape
    }
    if resized:
        raise OutputSizeError(signature.operator, resized)
    if _base_name(call) in _CONVOLUTIONS:
        return _convolved(outputs, named_arguments(call, signature), device)
    if _base_name(call) == "native_group_norm_backward":
        return _group_norm_gradients(outputs, named_arguments(call, signature))
    if device == "cpu" and _base_name(call) in _NORMS:
        return _normalized_on_cpu(outputs, named_arguments(call, signature), _base_name(call) in _EVALUATING)
    return outputs


def _meta(place: Geometry) -> Tensor:
    return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="meta")


def _check_no_dropout(call: torch._ops.OpOverload, signature: Signature) -> None:
    if named_arguments(call, signature)["dropout_p"] != 0:
        raise DeviceError(
            f"{signature.operator} with dropout is not among the operators that a pool runs: call "
            "torch.nn.functional.scaled_dot_product_attention, which has a derivative with dropout"
        )


def _base_name(call: torch._ops.OpOverload) -> str:
    """The operator's name without the underscore of one in place."""
    return call._overloadpacket.__name__.removesuffix("_")


_CONVOLUTIONS = frozenset({"convolution", "_convolution"})


def _convolved(outputs: tuple[Output, ...], named: dict[str, Any], device: str) -> tuple[Output, ...]:
    """The result of a convolution: channels last if its input or its weight is. The meta kernel of PyTorch 2.13 does
    not know the device and gives contiguous results, so that each convolution would copy its result to that layout."""
    layouts = {suggest_memory_format(_meta(named[each])) for each in ("input", "weight")} - {torch.contiguous_format}
    result = outputs[0]
    if not layouts or not isinstance(result, New):
        return outputs
    dtype, shape = result.geometry.dtype, result.geometry.shape
    # On a CPU the kernel decides in three dimensions; cuDNN has no kernels of float64 for the layout.
    undecided = len(shape) == 5 if device == "cpu" else dtype == torch.float64
    if undecided:
        return outputs
    placed = torch.empty(shape, dtype=dtype, device="meta", memory_format=layouts.pop())
    return (New(Geometry(dtype, shape, placed.stride()), result.nbytes),)


# Meta kernels say what a GPU saves for the backward of a norm. A CPU saves statistics in the dtype of the parameters,
# or of an input without parameters, and in evaluation none.

_NORMS = frozenset(
    {"native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "native_layer_norm"}
    | {"_native_batch_norm_legit_no_training", "_batch_norm_with_update", "_batch_norm_with_update_functional"}
    | {"_batch_norm_no_update", "native_group_norm"}
)
_EVALUATING = frozenset({"_native_batch_norm_legit_no_training", "_batch_norm_no_update"})
_PARAMETERS = ("weight", "bias", "running_mean", "running_var")


def _normalized_on_cpu(outputs: tuple[Output, ...], named: dict[str, Any], evaluates: bool) -> tuple[Output, ...]:
    """The results of a norm: the normalized input and two statistics; some give a reserve of bytes, or new running
    statistics."""
    result, mean, deviation, *rest = outputs
    given = [named[each].dtype for each in _PARAMETERS if isinstance(named.get(each), Geometry)]
    saved = named["input"].dtype
    if saved in _16_BITS and torch.float32 in given:
        saved = torch.float32
    kept = (0,) if evaluates or named.get("training") is False else None
    statistics = (_changed(each, saved, kept) for each in (mean, deviation))
    running = given[-1] if given else saved
    return result, *statistics, *(_changed(each, running, None) for each in rest)


def _group_norm_gradients(outputs: tuple[Output, ...], named: dict[str, Any]) -> tuple[Output, ...]:
    """Gradients have the dtypes of what they are of. The meta kernel gives that of the statistics."""
    dtype = named["input"].dtype
    of_parameters = named["weight"].dtype if isinstance(named["weight"], Geometry) else dtype
    return _changed(outputs[0], dtype, None), *(_changed(each, of_parameters, None) for each in outputs[1:])


def _changed(output: Output, dtype: torch.dtype, shape: tuple[int, ...] | None) -> Output:
    """A new floating-point result with another dtype and, unless it is None, another shape; another one as it is."""
    if not isinstance(output, New) or not output.geometry.dtype.is_floating_point:
        return output
    before = output.geometry
    place = Geometry(dtype, before.shape, before.stride) if shape is None else contiguous(dtype, shape)
    return New(place, place.extent)


def gives_tensors(call: torch._ops.OpOverload) -> bool:
    """Whether an operator returns tensors or a list of them, possibly together with lengths."""
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
    if geometry.extent < tensor.nbytes:
        # The meta kernel gave a view of an expanded tensor, but a result has memory of its own.
        geometry = contiguous(tensor.dtype, geometry.shape)
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
