"""Operators whose CPU kernels follow an index tensor wherever it points. Here it is looked at before they run.

They were found by giving operators that take integers such as lie far outside; the others refuse those by themselves.
A GPU's kernel that leaves its tensors meets nothing but the tenant's own process; on a CPU that process is one of the
machine's, and what it would read or write there is more than tensors.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_Named = dict[str, Any]

_MAXIMUM = 2
"""PyTorch's number for bags that are reduced by their maximum."""

# Where gradients of pooling go: places in the last axes of `self`.
_POOLED_AXES = {
    "max_pool2d_with_indices_backward": 2,
    "max_pool3d_with_indices_backward": 3,
    "adaptive_max_pool2d_backward": 2,
    "adaptive_max_pool3d_backward": 3,
}
_BAG_GRADIENTS = frozenset(
    {"_embedding_bag_backward", "_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward"}
)
# Kernels behind `convolution`, which checks what they are called with.
_BEHIND_CONVOLUTION = frozenset(
    {"_slow_conv2d_backward", "_slow_conv2d_forward", "slow_conv3d_forward", "slow_conv_dilated2d"}
    | {"slow_conv_dilated3d", "slow_conv_transpose2d", "slow_conv_transpose3d"}
)


def guarded(call: OpOverload) -> Callable[..., Any]:
    """A function that calls an operator on a CPU.

    It raises IndexError where an index lies outside, and NotImplementedError for an operator that nobody looks after.
    """
    name = call._overloadpacket.__name__
    if name in _BEHIND_CONVOLUTION:
        return _refused(name)
    if name in _POOLED_AXES:
        axes = _POOLED_AXES[name]
        return _checked(call, lambda named: _inside(name, named["indices"], math.prod(named["self"].shape[-axes:])))
    if name in ("nll_loss_backward", "nll_loss2d_backward"):
        return _checked(call, lambda named: _check_classes(name, named))
    if name in ("_embedding_bag", "_embedding_bag_forward_only"):
        return _checked(call, lambda named: _check_bags(name, named))
    if name in _BAG_GRADIENTS:
        return _checked(call, lambda named: _check_bag_gradient(name, named))
    if name in ("_ctc_loss", "_ctc_loss_backward"):
        return _checked(call, lambda named: _check_labels(name, named))
    if name in ("segment_reduce", "_segment_reduce_backward"):
        return _checked(call, lambda named: _check_segments(name, named))
    if name == "linalg_ldl_solve":
        return _checked(call, lambda named: _check_blocks(name, named["pivots"]))
    if name == "linalg_lu_solve":
        return _checked(call, lambda named: _inside(name, named["pivots"] - 1, named["LU"].shape[-1]))
    return call._op


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError(
            f"{name} does not run on a CPU of a pool, because it does not check its sizes: call convolution, which does"
        )

    return refuse


def _checked(call: OpOverload, check: Callable[[_Named], None]) -> Callable[..., Any]:
    names = [argument.name for argument in call._schema.arguments]
    written = [argument.name for argument in call._schema.arguments if argument.is_out]

    def run(*arguments: Any, **keywords: Any) -> Any:
        named = {**dict(zip(names, arguments, strict=False)), **keywords}
        _check_apart(written, named)
        check(named)
        return call._op(*arguments, **keywords)

    return run


def _check_apart(written: list[str], named: _Named) -> None:
    """Raise ValueError if checked indices lie in storages that the operator writes: they must not change afterwards."""
    storages = {named[name].untyped_storage()._cdata for name in written}
    for name, value in named.items():
        if name not in written and isinstance(value, Tensor) and value.untyped_storage()._cdata in storages:
            raise ValueError(f"{name} lies in the storage of {written}, which the operator writes: use another")


def _check_classes(name: str, named: _Named) -> None:
    target, scores = named["target"], named["self"]
    _inside(name, target[target != named["ignore_index"]], scores.shape[min(1, scores.dim() - 1)])


def _check_bags(name: str, named: _Named) -> None:
    indices, offsets = named["indices"], named["offsets"]
    _inside(name, indices, named["weight"].shape[0])
    _inside(name, offsets, indices.numel() + 1)
    if bool((offsets[1:] < offsets[:-1]).any()):
        raise IndexError(f"{name}: offsets that decrease, expected each bag behind the one before")


def _check_bag_gradient(name: str, named: _Named) -> None:
    grad, indices = named["grad"], named["indices"]
    rows = named["weight"].shape[0] if "weight" in named else named["num_weights"]
    _inside(name, indices, rows)
    _inside(name, named["offset2bag"], grad.shape[0])
    if "offsets" in named:
        _inside(name, named["offsets"], indices.numel() + 1)
    if "maximum_indices" in named and named["mode"] == _MAXIMUM:
        _inside(name, named["maximum_indices"], rows)


def _check_labels(name: str, named: _Named) -> None:
    """Labels beyond a target's length are padding, which may be anything."""
    targets, lengths = named["targets"], torch.tensor(named["target_lengths"])
    if targets.dim() == 2:
        targets = targets[torch.arange(targets.shape[1]) < lengths.unsqueeze(1)]
    _inside(name, targets, named["log_probs"].shape[2])


def _check_segments(name: str, named: _Named) -> None:
    lengths, offsets = named.get("lengths"), named.get("offsets")
    size = named["data"].shape[named.get("axis", 0)]
    if lengths is not None:
        _inside(name, lengths, size + 1)
        if bool((lengths.sum(-1) != size).any()):
            raise IndexError(f"{name}: lengths of other sums than {size}, the size of the axis")
    if offsets is not None:
        _inside(name, offsets, size + 1)
        if bool((offsets[..., 1:] < offsets[..., :-1]).any()):
            raise IndexError(f"{name}: offsets that decrease, expected each segment behind the one before")


def _check_blocks(name: str, pivots: Tensor) -> None:
    """Pivots of an LDL factorization are rows, counted from 1; negative ones stand in pairs, for blocks of 2 rows."""
    n = pivots.shape[-1] if pivots.dim() else 0
    if not n:
        return
    _inside(name, pivots.abs() - 1, n)
    for row in pivots.reshape(-1, n).tolist():
        at = 0
        while at < n:
            if row[at] < 0 and (at + 1 == n or row[at + 1] >= 0):
                raise IndexError(f"{name}: a negative pivot in row {at}, expected such in pairs")
            at += 2 if row[at] < 0 else 1


def _inside(name: str, indices: Tensor, end: int) -> None:
    if not indices.numel():
        return
    least, most = (int(each) for each in indices.aminmax())
    if least < 0 or most >= end:
        raise IndexError(f"{name}: indices from {least} to {most}, expected 0 to {end - 1}")
