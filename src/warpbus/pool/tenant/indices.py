"""Operators whose CPU kernels follow an index tensor wherever it points. Here it is looked at before they run.

They were found by giving operators that take integers such as lie far outside; the others refuse those by themselves.
A GPU's kernel that leaves its tensors meets nothing but the tenant's own process; on a CPU that process is one of the
machine's, and what it would read or write there is more than tensors.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

_Named = dict[str, Any]

# Where gradients of pooling go: places in the last axes of `self`.
_POOLED_AXES = {
    "max_pool2d_with_indices_backward": 2,
    "max_pool3d_with_indices_backward": 3,
    "adaptive_max_pool2d_backward": 2,
    "adaptive_max_pool3d_backward": 3,
}
_UNCHECKED = frozenset(
    {"_ctc_loss", "_ctc_loss_backward", "_embedding_bag_backward", "_embedding_bag_dense_backward"}
    | {"_embedding_bag_per_sample_weights_backward", "linalg_ldl_solve", "segment_reduce", "_segment_reduce_backward"}
)
# Kernels behind `convolution`, which checks what they are called with.
_BEHIND_CONVOLUTION = frozenset(
    {"_slow_conv2d_backward", "_slow_conv2d_forward", "slow_conv3d_forward", "slow_conv_dilated2d"}
    | {"slow_conv_dilated3d", "slow_conv_transpose2d", "slow_conv_transpose3d"}
)


def guarded(call: OpOverload) -> Callable[..., Any]:
    """What calls an operator on a CPU.

    It raises IndexError where an index lies outside, and NotImplementedError for an operator that nobody looks after.
    """
    name = call._overloadpacket.__name__
    if name in _UNCHECKED:
        return _refused(f"{name} does not run on a CPU of a pool, because it does not check its indices")
    if name in _BEHIND_CONVOLUTION:
        return _refused(
            f"{name} does not run on a CPU of a pool, because it does not check its sizes as convolution does"
        )
    if name in _POOLED_AXES:
        axes = _POOLED_AXES[name]
        return _checked(call, lambda named: _inside(name, named["indices"], math.prod(named["self"].shape[-axes:])))
    if name in ("nll_loss_backward", "nll_loss2d_backward"):
        return _checked(call, lambda named: _check_classes(name, named))
    if name in ("_embedding_bag", "_embedding_bag_forward_only"):
        return _checked(call, lambda named: _check_bags(name, named))
    if name == "linalg_lu_solve":
        return _checked(call, lambda named: _inside(name, named["pivots"] - 1, named["LU"].shape[-1]))
    return call._op


def _refused(why: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError(f"{why}: use a GPU, or compute it on the client")

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
    """What is written is not what is looked at: indices must not change after that."""
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


def _inside(name: str, indices: Tensor, end: int) -> None:
    if not indices.numel():
        return
    least, most = (int(each) for each in indices.aminmax())
    if least < 0 or most >= end:
        raise IndexError(f"{name}: indices from {least} to {most}, expected 0 to {end - 1}")
