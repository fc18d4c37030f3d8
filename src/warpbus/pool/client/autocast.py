"""`torch.autocast` on the device `warpbus:0`: products in 16 bits, sums and losses in 32.

PyTorch's own rule for GPUs, whose kernels are compiled for the devices that it knows; but the loss of scores in 16 bits
is not rounded to 16 bits on its way. What is in no list computes in the dtypes it is given.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from warpbus.pool.client.tensors import NAME, is_remote

_KEY = "AutocastPrivateUse1"
_AUTOCAST = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
_EXCLUDED = torch._C.DispatchKeySet(_AUTOCAST)

_IN_16_BITS = """
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution
    _convolution addbmm addmm addmv addr baddbmm bmm chain_matmul einsum linear linalg_multi_dot linalg_vecdot matmul mm
    mv prelu scaled_dot_product_attention
"""

_IN_32_BITS = """
    acos asin binary_cross_entropy binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity
    cross_entropy_loss cumprod cumsum dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss
    huber_loss kl_div l1_loss layer_norm linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log log10
    log1p log2 log_softmax.int logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
    native_layer_norm nll_loss nll_loss2d norm.Scalar norm.ScalarOpt_dim nuclear_norm nuclear_norm.dim pdist
    poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prod prod.dim_int reciprocal renorm rms_norm rsqrt
    sinh smooth_l1_loss soft_margin_loss softmax.int softplus sum sum.dim_IntList tan triplet_margin_loss
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d
"""

_IN_THE_WIDEST = """
    addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
"""


def register(library: torch.library.Library, rest: torch.library.Library) -> None:
    """Add the kernels of these lists to a library of "aten", and to one of fallbacks that all others need none."""
    if not torch._C._dispatch_has_backend_fallback(_AUTOCAST):  # newer versions of PyTorch have it
        rest.fallback(torch.library.fallthrough_kernel, _KEY)
    for names, chosen in ((_IN_16_BITS, _low), (_IN_32_BITS, _high), (_IN_THE_WIDEST, _widest)):
        for name in names.split():
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if isinstance(operator, OpOverload):
                library.impl(name, _Cast(operator, chosen), _KEY)


class _Cast:
    """An operator that casts its arguments first, to the dtype that `chosen` gives for them."""

    def __init__(self, operator: OpOverload, chosen: Callable[[tuple[Any, ...]], torch.dtype]) -> None:
        self._operator = operator
        self._chosen = chosen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = self._chosen((*args, *kwargs.values()))
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            return self._operator(
                *[_cast(each, dtype) for each in args], **{k: _cast(v, dtype) for k, v in kwargs.items()}
            )


def _low(values: tuple[Any, ...]) -> torch.dtype:
    return torch.get_autocast_dtype(NAME)


def _high(values: tuple[Any, ...]) -> torch.dtype:
    return torch.float32


def _widest(values: tuple[Any, ...]) -> torch.dtype:
    flat = (each for value in values for each in (value if isinstance(value, list | tuple) else (value,)))
    wide = any(isinstance(each, Tensor) and each.dtype is torch.float32 for each in flat)
    return torch.float32 if wide else _low(values)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors of this device in the dtype; float64 is what somebody asked for, and stays."""
    if isinstance(value, Tensor):
        if value.dtype is dtype:
            return value
        eligible = value.is_floating_point() and value.dtype is not torch.float64 and is_remote(value)
        return value.to(dtype) if eligible else value
    return [_cast(item, dtype) for item in value] if isinstance(value, list | tuple) else value
