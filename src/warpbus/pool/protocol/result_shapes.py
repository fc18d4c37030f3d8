"""Results of operators for which PyTorch has no meta kernel, declared: dtypes and shapes that follow from arguments."""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload

from warpbus.errors import UsageError
from warpbus.pool.protocol.geometry import MAX_BYTES, Geometry, contiguous
from warpbus.pool.protocol.signature import Argument, Input, New, Output, Signature

Named: TypeAlias = dict[str, Any]
"""Arguments by name: a `Geometry` for a tensor, a tuple for a list, None for what was left out, else the value."""
Outline: TypeAlias = tuple[torch.dtype, tuple[int, ...]]


def named_arguments(operator: OpOverload, signature: Signature) -> Named:
    """The arguments of a call by the names that the operator's schema gives them."""
    schema = operator._schema.arguments
    named = {argument.name: argument.default_value for argument in schema}
    given = zip(named, signature.arguments, strict=False)
    named.update((name, _resolved(value, signature)) for name, value in (*given, *signature.keywords))
    return named


def _resolved(argument: Argument, signature: Signature) -> Any:
    if isinstance(argument, Input):
        return signature.inputs[argument.index]
    if isinstance(argument, tuple):
        return tuple(_resolved(item, signature) for item in argument)
    return argument


def declared_results(operator: OpOverload, signature: Signature) -> tuple[Output, ...] | None:
    """The results of a call, if they are declared here.

    Raises:
        UsageError: the arguments do not fit the operator, or the results would be too large for any lease.
    """
    shape_of = _RESULTS.get(operator._overloadpacket.__name__)
    if shape_of is None or any(argument.is_out for argument in operator._schema.arguments):
        return None
    try:
        outlines = tuple(shape_of(named_arguments(operator, signature)))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise UsageError(f"{signature.operator}: arguments of other kinds or sizes than it takes") from None
    return tuple(None if outline is None else _new(signature.operator, *outline) for outline in outlines)


def _new(operator: str, dtype: torch.dtype, shape: tuple[int, ...]) -> New:
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > MAX_BYTES:
        raise UsageError(f"{operator} would give a tensor of shape {shape}: give it other sizes")
    place = contiguous(dtype, shape)
    return New(place, place.extent)


def _like(*names: str) -> Callable[[Named], Iterable[Outline]]:
    """Results with the dtypes and shapes of these tensors; "mask" is a bool tensor of the shape of `self`."""

    def shape_of(named: Named) -> Iterable[Outline]:
        for name in names:
            like: Geometry = named["self" if name == "mask" else name]
            yield (torch.bool if name == "mask" else like.dtype), like.shape

    return shape_of


def _bin_edges(named: Named) -> Iterable[Outline]:
    for count in named["bins"]:
        yield named["self"].dtype, (count + 1,)


def _counts(named: Named) -> Iterable[Outline]:
    yield named["self"].dtype, tuple(named["bins"])


def _counts_between(named: Named) -> Iterable[Outline]:
    yield named["self"].dtype, tuple(edges.shape[0] - 1 for edges in named["bins"])


def _learned(named: Named) -> Iterable[Outline]:
    """The gradients of a fake quantization: of its input, its scale and its zero point."""
    dtype, channels = named["self"].dtype, named["self"].shape[named["axis"]] if "axis" in named else 1
    return (dtype, named["self"].shape), (dtype, (channels,)), (dtype, (channels,))


def _attention_gradients(named: Named) -> Iterable[Outline | None]:
    """The gradients of efficient attention: of its query, key and value, and of a bias that asks for one."""
    for name in ("query", "key", "value"):
        yield named[name].dtype, named[name].shape
    bias: Geometry | None = named["bias"] if named["bias_requires_grad"] else None
    yield None if bias is None else (bias.dtype, bias.shape)


_FAKE = "_fake_quantize_learnable_per_"
_RESULTS: dict[str, Callable[[Named], Iterable[Outline | None]]] = {
    "_ctc_loss_backward": _like("log_probs"),
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _like("self", "mask"),
    **{f"{_FAKE}{kind}_affine": _like("self") for kind in ("tensor", "channel")},
    **{f"{_FAKE}{kind}_affine_backward": _learned for kind in ("tensor", "channel")},
    **{f"fake_quantize_per_{kind}_affine_cachemask": _like("self", "mask") for kind in ("tensor", "channel")},
    "_efficient_attention_backward": _attention_gradients,
    "_histogramdd_bin_edges": _bin_edges,
    "_histogramdd_from_bin_cts": _counts,
    "_histogramdd_from_bin_tensors": _counts_between,
}
"""By the name of the operator."""
