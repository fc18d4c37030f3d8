"""Shapes that CPU kernels of PyTorch rely on without checking them, declared for each operator.

A client sends the sizes of saved tensors, outputs and list entries, and neither meta functions nor these kernels
compare them: a batch norm with 262,144 channels and a weight of one element reads a megabyte behind the weight. A GPU's
kernel reaches nothing but the lease's own memory on the GPU; a CPU's reaches everything in the tenant's process.

Shapes belong to the definition of a kind of call, so that each kind is checked once and its calls cost nothing more.
`tests/cpu/pool/pool_bounds.py` finds the operators that belong here.
"""

import math
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from warpbus.errors import ProtocolError
from warpbus.pool.protocol.geometry import Geometry, contiguous
from warpbus.pool.protocol.result_shapes import Named, named_arguments
from warpbus.pool.protocol.signature import Signature

Rule = Callable[[Named], None]
Shape = tuple[int, ...]


def check_shapes(operator: OpOverload, signature: Signature) -> None:
    """Raise ProtocolError where an operator's CPU kernel would leave the tensors of a signature."""
    outs = tuple(argument.name for argument in operator._schema.arguments if argument.is_out)
    rules = RULES.get(operator._overloadpacket.__name__.removesuffix("_"), ())
    if not rules and not outs:
        return
    named = named_arguments(operator, signature)
    for rule in (unexpanded(*outs), *rules):
        try:
            rule(named)
        except ProtocolError as error:
            raise ProtocolError(f"{signature.operator}: {error}") from None
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise ProtocolError(f"{signature.operator}: arguments that its shapes cannot be checked of") from None


# Kinds of rules. A tensor that is left out, or that an overload does not have, meets each of them.


def shaped(shape_of: Callable[[Named], Shape], *names: str) -> Rule:
    """Each of these tensors has the shape that follows from the other arguments."""

    def rule(named: Named) -> None:
        wanted = None
        for name in names:
            if isinstance(named.get(name), Geometry):
                wanted = shape_of(named) if wanted is None else wanted
                _equal(name, named[name].shape, wanted)

    return rule


def like(other: str, *names: str) -> Rule:
    """Each of these tensors has the shape of the tensor `other`."""
    return shaped(lambda named: named[other].shape, *names)


def dense(*names: str) -> Rule:
    """Each of these tensors is contiguous: its kernel takes it for that."""

    def rule(named: Named) -> None:
        for name in names:
            found = named.get(name)
            if not isinstance(found, Geometry):
                continue
            wanted = contiguous(found.dtype, found.shape).stride
            if any(a != b for a, b, n in zip(found.stride, wanted, found.shape, strict=True) if n != 1):
                raise ProtocolError(f"{name} has strides {found.stride}: expected a contiguous tensor")

    return rule


def of_dtype_of(other: str, *names: str) -> Rule:
    """Each of these tensors has the dtype of the tensor `other`."""

    def rule(named: Named) -> None:
        for name in names:
            found = named.get(name)
            if isinstance(found, Geometry) and found.dtype is not named[other].dtype:
                raise ProtocolError(f"{name} is {found.dtype}: expected {named[other].dtype}, as {other}")

    return rule


def one_element(*names: str) -> Rule:
    """Each of these tensors, or each entry of these lists, has one element."""

    def rule(named: Named) -> None:
        for name in names:
            found = named.get(name)
            for each in found if isinstance(found, tuple) else (found,):
                if isinstance(each, Geometry) and math.prod(each.shape) != 1:
                    raise ProtocolError(f"{name} has shape {each.shape}: expected one element")

    return rule


def lists_like(other: str, *names: str) -> Rule:
    """Each of these lists is empty, or has entries of the shapes of those of `other`; none is expanded."""

    def rule(named: Named) -> None:
        for name in names:
            found = named.get(name)
            if not found:
                continue
            _equal(f"the length of {name}", len(found), len(named[other]))
            for index, (each, wanted) in enumerate(zip(found, named[other], strict=True)):
                _equal(f"{name}[{index}]", each.shape, wanted.shape)
                if not _spans(each) or not _spans(wanted):
                    raise ProtocolError(
                        f"{name}[{index}] or {other}[{index}] is expanded: expected a tensor of its own"
                    )

    return rule


def as_long_as(other: str, *names: str) -> Rule:
    """Each of these lists has as many entries as `other`."""

    def rule(named: Named) -> None:
        for name in names:
            _equal(f"the length of {name}", len(named[name]), len(named[other]))

    return rule


def unexpanded(*names: str) -> Rule:
    """Each of these tensors has as much memory as elements: kernels that read it as contiguous stay inside."""

    def rule(named: Named) -> None:
        for name in names:
            found = named.get(name)
            if isinstance(found, Geometry) and not _spans(found):
                raise ProtocolError(f"{name} has strides {found.stride}: expected a tensor that is not expanded")

    return rule


def without_gaps(*names: str) -> Rule:
    """Each of these tensors fills its memory, in whatever order of axes: what a kernel reads is what was looked at."""

    def rule(named: Named) -> None:
        for name in names:
            found = named.get(name)
            if not isinstance(found, Geometry):
                continue
            expected = 1
            for step, n in sorted((step, n) for step, n in zip(found.stride, found.shape, strict=True) if n != 1):
                if step != expected and 0 not in found.shape:
                    raise ProtocolError(f"{name} has strides {found.stride}: expected a tensor without gaps")
                expected *= n

    return rule


def _spans(geometry: Geometry) -> bool:
    """Whether a tensor reaches from its first element at least as far as a contiguous one of its shape."""
    elements = math.prod(geometry.shape)
    return geometry.extent >= (geometry.offset + elements) * geometry.dtype.itemsize or not elements


def _equal(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise ProtocolError(f"{what} is {found}: expected {wanted}")


# Shapes that follow from the other arguments.


def _channels(named: Named) -> Shape:
    return (named["input"].shape[1],)


def _planes(axes: int) -> Callable[[Named], Shape]:
    """Of a gradient of pooling over the last `axes` axes: batch and channels of `self`, and sizes of its own."""

    def shape_of(named: Named) -> Shape:
        shape = named["self"].shape
        if 0 in shape[-axes:]:
            raise ProtocolError(f"self has shape {shape}: expected elements in each plane")
        planes = named["grad_output"].shape[-axes:]
        if "output_size" in named:
            _equal("output_size", tuple(named["output_size"]), planes)
            _equal("the length of kernel_size", len(named["kernel_size"]), axes)
        return (*shape[:-axes], *planes)

    return shape_of


def _normalized(named: Named) -> Shape:
    return tuple(named["normalized_shape"])


def _rows(named: Named) -> Shape:
    """The shape of the values that layer norm saves per row."""
    normalized = len(named["normalized_shape"])
    return (*named["input"].shape[: len(named["input"].shape) - normalized], *[1] * normalized)


def _sampled(named: Named) -> Shape:
    """Of what a grid samples: batch and channels of the input, sizes of the grid."""
    return (*named["input"].shape[:2], *named["grid"].shape[1:-1])


def _norms(named: Named) -> Shape:
    """Of the magnitudes of weight normalization: those of `v` on one axis, and 1 on the others."""
    v = named["v"] if "v" in named else named["saved_v"]
    if named["dim"] not in (0, len(v.shape) - 1):
        raise ProtocolError(f"dim is {named['dim']}: expected the first or the last axis of {v.shape}")
    if 0 in v.shape:
        raise ProtocolError(f"v has shape {v.shape}: expected elements")
    return tuple(n if axis == named["dim"] else 1 for axis, n in enumerate(v.shape))


def _padded(axes: int) -> Callable[[Named], Shape]:
    """Of a gradient of padding: `self` with what `padding` adds to its last `axes` axes, the last one first."""

    def shape_of(named: Named) -> Shape:
        shape, padding = list(named["self"].shape), named["padding"]
        _equal("the length of padding", len(padding), 2 * axes)
        for axis in range(axes):
            shape[-1 - axis] += padding[2 * axis] + padding[2 * axis + 1]
        return tuple(shape)

    return shape_of


def _pivots(named: Named) -> Shape:
    *batch, rows, columns = named["LU_data"].shape
    return (*batch, min(rows, columns))


def _classes(named: Named) -> Shape:
    return named["self"].shape[-1:]


def _pairs(named: Named) -> Shape:
    n = named["self"].shape[0]
    return (n * (n - 1) // 2,)


# Rules of one operator, or of one family.


def _batch_norm_statistics(named: Named) -> None:
    """The backward of batch norm reads what was saved in training, and the running statistics else."""
    training = named["train"] if "train" in named else named["update"]
    saved = [name for name in ("save_mean", "save_invstd", "save_var") if name in named]
    needed = saved if training else ["running_mean", "running_var"]
    for name in needed:
        if not isinstance(named[name], Geometry):
            raise ProtocolError(f"{name} is missing: expected a tensor where train is {training}")
        _equal(name, named[name].shape, _channels(named))


def _statistics_given(named: Named) -> None:
    """Batch norm without training normalizes by running statistics."""
    if not named.get("training", True) and not isinstance(named.get("running_mean"), Geometry):
        raise ProtocolError("running_mean is missing: expected a tensor where training is False")


def _groups(named: Named) -> None:
    """The sizes given to group norm are those of its input."""
    n, c, rest, groups = (named[name] for name in ("N", "C", "HxW", "group"))
    x = named["input"].shape
    _equal("N, C, HxW", (n, c, rest), (x[0], x[1], math.prod(x[2:])))
    if groups < 1 or c % groups:
        raise ProtocolError(f"{c} channels in {groups} groups: expected a divisor")


def _heads(named: Named) -> None:
    """Keys and values of attention fit the queries, and the mask fits both."""
    (batch, heads, rows, width), key = named["query"].shape, named["key"].shape
    _equal("value", named["value"].shape, key)
    _equal("key", key, (batch, key[1], key[2], width))
    if not key[1] or heads % key[1] or 0 in key:
        raise ProtocolError(f"key has shape {key}: expected a divisor of the {heads} heads of query, and elements")
    for name in ("query", "key", "value", "out"):
        if isinstance(named.get(name), Geometry) and named[name].stride[-1] != 1 and width > 1:
            raise ProtocolError(f"{name} has strides {named[name].stride}: expected 1 for the last axis")
    mask = named["attn_mask"]
    if isinstance(mask, Geometry):
        wanted = (batch, heads, rows, key[2])
        if len(mask.shape) not in (2, 4) or any(
            n not in (1, m) for n, m in zip(mask.shape[::-1], wanted[::-1], strict=False)
        ):
            raise ProtocolError(f"attn_mask has shape {mask.shape}: expected one that broadcasts to {wanted}")


def _heads_alike(named: Named) -> None:
    _equal("the heads of key", named["key"].shape[1], named["query"].shape[1])


def _axis_counted(named: Named) -> None:
    """The axis is counted from the first: these kernels count none from the last."""
    if not 0 <= named["dim"] < max(1, len(named["self"].shape)):
        raise ProtocolError(f"dim is {named['dim']}: expected an axis of {named['self'].shape}, counted from 0")


def _square(named: Named) -> None:
    factor, right = named["A"].shape, named["self"].shape
    _equal("A", factor, (*right[:-1], right[-2]))


def _bags(named: Named) -> None:
    """Indices belong to bags."""
    bags = named["offsets"].shape[0] - bool(named["include_last_offset"])
    if bags < 0 or (not bags and named["indices"].shape[0]):
        raise ProtocolError(f"offsets has shape {named['offsets'].shape}: expected a bag for the indices")


def _bag_gradient(named: Named) -> None:
    """Each index has a bag, and a gradient of the bag; the row that it is of has a gradient of as many columns."""
    grad, indices, offset2bag = named["grad"], named["indices"], named["offset2bag"]
    _equal("the axes of grad, indices", (len(grad.shape), len(indices.shape)), (2, 1))
    if offset2bag.shape != (0,) or "offsets" not in named:  # from offsets the kernel makes it itself
        _equal("offset2bag", offset2bag.shape, indices.shape)
    if "weight" in named:
        _equal("weight", named["weight"].shape[1:], grad.shape[1:])
    if "bag_size" in named:
        _equal("bag_size", named["bag_size"].shape, grad.shape[:1])
        if named["num_weights"] < 0:
            raise ProtocolError(f"num_weights is {named['num_weights']}: expected a number of rows")
    if named["mode"] == _MAXIMUM and "maximum_indices" in named:
        _equal("maximum_indices", named["maximum_indices"].shape, grad.shape)
    if named.get("sparse"):
        raise ProtocolError("the gradient of sparse tensors does not run on a pool: expected sparse=False")


def _label_lengths(named: Named) -> None:
    """Of CTC loss: input lengths lie in the scores, target lengths in the targets, and what is saved fits both."""
    scores, targets = named["log_probs"], named["targets"]
    steps, batch, classes = scores.shape
    inputs, lengths = named["input_lengths"], named["target_lengths"]
    if not isinstance(inputs, tuple) or not isinstance(lengths, tuple):
        raise ProtocolError("lengths are tensors: expected lists of integers")
    _equal("the number of input and target lengths", (len(inputs), len(lengths)), (batch, batch))
    if not batch or not classes or not 0 <= named["blank"] < classes:
        raise ProtocolError(f"blank is {named['blank']} and log_probs {scores.shape}: expected a class, and a batch")
    if min(inputs) < 0 or max(inputs) > steps or min(lengths) < 0:
        raise ProtocolError(f"lengths {inputs} and {lengths}: expected none below 0, and inputs up to {steps}")
    fits = targets.shape[0] == sum(lengths) if len(targets.shape) == 1 else targets.shape[0] == batch
    if not fits or len(targets.shape) > 2 or (len(targets.shape) == 2 and targets.shape[1] < max(lengths)):
        raise ProtocolError(f"targets has shape {targets.shape}: expected room for the lengths {lengths}")
    if "log_alpha" in named:
        _equal("log_alpha", named["log_alpha"].shape, (batch, steps, 2 * max(lengths) + 1))
        _equal("grad", named["grad"].shape, (batch,))
        _equal("neg_log_likelihood", named["neg_log_likelihood"].shape, (batch,))


def _segments(named: Named) -> None:
    """Of a reduction of segments: one list of lengths or offsets for each row of the leading axes."""
    data, axis = named["data"], named["axis"]
    bounds, more = (named["lengths"], 0) if isinstance(named["lengths"], Geometry) else (named["offsets"], 1)
    axis += len(data.shape) if axis < 0 else 0
    if not 0 <= axis < len(data.shape) or named.get("indices") is not None:
        raise ProtocolError(f"axis is {named['axis']}: expected an axis of data {data.shape}, and no indices")
    _equal("lengths or offsets", bounds.shape[:-1], data.shape[:axis])
    if not bounds.shape or bounds.shape[-1] < more:
        raise ProtocolError(f"offsets has shape {bounds.shape}: expected a last axis with an end")
    if "output" in named:
        wanted = (*data.shape[:axis], bounds.shape[-1] - more, *data.shape[axis + 1 :])
        _equal("output and grad", (named["output"].shape, named["grad"].shape), (wanted, wanted))


def _observed(named: Named) -> None:
    """Of an observer: one range, scale and zero point, or one for each channel."""
    x, axis = named["self"], named["ch_axis"]
    ranged = ("running_min", "running_max", "scale", "zero_point")
    if not named["per_row_fake_quant"]:
        one_element(*ranged)(named)
    elif not 0 <= axis < len(x.shape):
        raise ProtocolError(f"ch_axis is {axis}: expected an axis of {x.shape}")
    else:
        shaped(lambda _: (x.shape[axis],), *ranged)(named)


def _packed_heads(named: Named) -> None:
    """Queries, keys and values side by side, in whole heads."""
    width = named["qkv"].shape[-1]
    _equal("qkv_bias", named["qkv_bias"].shape, (width,))
    if named["num_heads"] < 1 or width % (3 * named["num_heads"]):
        raise ProtocolError(
            f"qkv of width {width} in {named['num_heads']} heads: expected a multiple of three times that"
        )


def _as_amsgrad_says(named: Named) -> None:
    if named["amsgrad"]:
        _equal("the length of max_exp_avg_sqs", len(named["max_exp_avg_sqs"]), len(named["self"]))


_BATCH_NORM = (
    shaped(_channels, "weight", "bias", "running_mean", "running_var"),
    like("input", "out"),
    shaped(_channels, "save_mean", "save_invstd"),
    _statistics_given,
)
_BATCH_NORM_BACKWARD = (
    like("input", "grad_out"),
    shaped(_channels, "weight", "running_mean", "running_var"),
    _batch_norm_statistics,
)
_OPTIMIZER = (
    lists_like("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_sums", "momentum_buffer_list"),
    as_long_as("self", "grads"),
    one_element("state_steps", "grad_scale", "found_inf", "lr"),
)
_ADAM = (*_OPTIMIZER, as_long_as("self", "exp_avgs", "exp_avg_sqs", "state_steps"), _as_amsgrad_says)
_CUMULATIVE = (like("self", "values", "indices"), of_dtype_of("self", "values"), _axis_counted)
_POOLS_WITH_INDICES = (
    ("max_pool", "_with_indices_backward"),
    ("adaptive_max_pool", "_backward"),
    ("fractional_max_pool", "_backward"),
)
_PADS = ("reflection", "replication")
_BAG = (dense("indices", "offsets"), _bags)
_MAXIMUM = 2
"""PyTorch's number for bags that are reduced by their maximum."""
_BAG_BACKWARD = (
    _bag_gradient,
    dense("indices", "offsets", "offset2bag", "bag_size"),
    shaped(lambda named: named["indices"].shape, "per_sample_weights"),
)
_SEGMENTS = (_segments, dense("lengths", "offsets"))

RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(
        (
            "native_batch_norm",
            "_native_batch_norm_legit",
            "_native_batch_norm_legit_functional",
            "_native_batch_norm_legit_no_training",
            "_batch_norm_with_update",
            "_batch_norm_with_update_functional",
            "_batch_norm_no_update",
        ),
        _BATCH_NORM,
    ),
    "native_batch_norm_backward": _BATCH_NORM_BACKWARD,
    "batch_norm_backward": _BATCH_NORM_BACKWARD,
    "native_layer_norm": (shaped(_normalized, "weight", "bias"),),
    "native_layer_norm_backward": (
        like("input", "grad_out"),
        shaped(_normalized, "weight", "bias"),
        shaped(_rows, "mean", "rstd"),
        dense("mean", "rstd"),
    ),
    "native_group_norm": (
        _groups,
        shaped(lambda named: (named["C"],), "weight", "bias"),
        unexpanded("input", "weight", "bias"),
    ),
    "native_group_norm_backward": (
        _groups,
        like("input", "grad_out"),
        shaped(lambda named: (named["C"],), "weight"),
        shaped(lambda named: (named["N"], named["group"]), "mean", "rstd"),
        unexpanded("grad_out", "input", "mean", "rstd", "weight"),
    ),
    "_adaptive_avg_pool2d_backward": (shaped(_planes(2), "grad_output"),),
    "_adaptive_avg_pool3d_backward": (shaped(_planes(3), "grad_output"),),
    "adaptive_avg_pool3d_backward": (shaped(_planes(3), "grad_output"), like("self", "grad_input")),
    "avg_pool2d_backward": (shaped(_planes(2), "grad_output"),),
    "avg_pool3d_backward": (shaped(_planes(3), "grad_output"),),
    **{
        f"{kind}{axes}d{suffix}": (shaped(_planes(axes), "grad_output", "indices"), without_gaps("indices"))
        for kind, suffix in _POOLS_WITH_INDICES
        for axes in (2, 3)
    },
    "grid_sampler_2d_backward": (shaped(_sampled, "grad_output"),),
    "grid_sampler_3d_backward": (shaped(_sampled, "grad_output"),),
    "_log_softmax_backward_data": (like("output", "grad_output"),),
    "_softmax_backward_data": (like("output", "grad_output"),),
    "_masked_softmax_backward": (like("output", "grad_output", "mask"),),
    "_pdist_backward": (shaped(_pairs, "grad", "pdist"),),
    "_weight_norm_interface": (shaped(_norms, "g"), unexpanded("v", "g")),
    "_weight_norm_interface_backward": (
        like("saved_v", "grad_w"),
        shaped(_norms, "saved_g", "saved_norms"),
        unexpanded("grad_w", "saved_v", "saved_g", "saved_norms"),
    ),
    "_cholesky_solve_helper": (_square,),
    "_cummax_helper": _CUMULATIVE,
    "_cummin_helper": _CUMULATIVE,
    "_embedding_bag": _BAG,
    "_embedding_bag_forward_only": _BAG,
    "_embedding_bag_backward": _BAG_BACKWARD,
    "_embedding_bag_dense_backward": _BAG_BACKWARD,
    "_embedding_bag_per_sample_weights_backward": _BAG_BACKWARD,
    "_ctc_loss": (_label_lengths, unexpanded("targets")),
    "_ctc_loss_backward": (
        _label_lengths,
        unexpanded("targets"),
        of_dtype_of("log_probs", "grad", "neg_log_likelihood", "log_alpha"),
    ),
    "segment_reduce": _SEGMENTS,
    "_segment_reduce_backward": (*_SEGMENTS, of_dtype_of("data", "grad", "output")),
    "_fused_moving_avg_obs_fq_helper": (
        one_element("observer_on", "fake_quant_on"),
        _observed,
        dense("running_min", "running_max", "scale", "zero_point"),
    ),
    "_scaled_dot_product_flash_attention_for_cpu": (_heads,),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        _heads,
        _heads_alike,
        like("query", "grad_out", "out"),
        shaped(lambda named: named["query"].shape[:3], "logsumexp"),
    ),
    **{f"{kind}_pad{axes}d_backward": (shaped(_padded(axes), "grad_output"),) for kind in _PADS for axes in (1, 2, 3)},
    "rrelu_with_noise": (like("self", "noise"), unexpanded("noise")),
    "lu_unpack": (shaped(_pivots, "LU_pivots"),),
    "nll_loss_backward": (
        shaped(lambda named: named["self"].shape[:-1], "target"),
        shaped(_classes, "weight"),
        one_element("total_weight"),
    ),
    "_transform_bias_rescale_qkv": (_packed_heads, of_dtype_of("qkv", "qkv_bias"), unexpanded("qkv_bias")),
    "_fused_adagrad": (*_OPTIMIZER, as_long_as("self", "state_sums", "state_steps")),
    "_fused_adam": _ADAM,
    "_fused_adamw": _ADAM,
    "_fused_sgd": _OPTIMIZER,
}
"""By the name of the operator, without the underscore of one in place: they hold for all its overloads."""
