"""Moving a factor of each input channel of a matrix into what precedes it, so that the layer computes the same.

A linear layer gives the same when its columns are multiplied by s and its inputs divided by s. The division costs
nothing where it can be done once, in the weights that make the inputs (as in SmoothQuant; Xiao et al., 2022, and AWQ;
Lin et al., 2023):

qkv        attention_norm.weight
o          the rows of qkv that make the values, and their bias
gate_up    mlp_norm.weight
down       the rows of gate_up that make `up`: silu(gate) * up is linear in it

All four can be folded in every family but ChatGLM-6B: rotary positions and the norms of queries and keys do not touch
the values, and norms of outputs come after o and down. ChatGLM-6B carries on what its norms give, which would be
divided too, and its GELU is not linear in what `up` makes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpbus.errors import NumericError, TensorError, UsageError
from warpbus.models import DecoderLayer, ModelConfig
from warpbus.models.layers import RMSNorm
from warpbus.qtensor import QTensor


@dataclass(frozen=True)
class Folded:
    """What came of folding.

    Attributes:
        weight: float32 (float64 where the layer is) `[out, in]`, the matrix times `scale`, not rounded to its dtype.
        scale: `[in]` in the dtype of `weight`: what was asked for, or after a norm what its rounded weight amounts to.
        changed: the parameters of the layer that precede the matrix and are others now, by their names in the layer.
    """

    weight: Tensor
    scale: Tensor
    changed: dict[str, Tensor]


def can_fold(config: ModelConfig) -> bool:
    """Whether factors of all four matrices can be moved into what precedes them."""
    return config.gated and not config.normed_residual


@torch.no_grad()
def fold(layer: DecoderLayer, linear: str, scale: Tensor, *, stored: torch.dtype | None = None) -> Folded:
    """Multiply the columns of a linear layer by `scale` and divide what makes its inputs by it, in place.

    The layer computes what it did, up to the rounding of its parameters to their dtype. That of a norm's weight is
    made up for in the matrix.

    Args:
        layer: its matrices are plain (dequantized ones too: see `divide_rows` for the quantized form).
        linear: one of `ModelConfig.linears`.
        scale: positive `[in]`; for `attention.o` equal for all heads that share a value: see `tie`.
        stored: the dtype that what precedes is written to the disk in, where it is narrower than the layer's: it is
            rounded to that at once, so that the layer computes what the file will.

    Raises:
        UsageError: if there is no such linear layer, or the model does not allow it: see `can_fold`.
        TensorError: if `scale` has the wrong shape.
        NumericError: if `scale` is not positive and finite, differs between heads that share a value, or takes a
            parameter out of its dtype's range.
    """
    config = layer.attention.config
    if linear not in config.linears:
        raise UsageError(f"{linear}: no such linear layer: expected one of {', '.join(config.linears)}")
    if not can_fold(config):
        raise UsageError(f"{linear}: in a {config.family} model no factor can be moved into what precedes a matrix")
    module = layer.get_submodule(linear)
    assert isinstance(module, nn.Linear)
    wide = torch.promote_types(module.weight.dtype, torch.float32)
    scale = _checked(scale.to(module.weight.device, wide), module.in_features, linear)
    if linear in ("attention.qkv", "mlp.gate_up"):
        name = "attention_norm" if linear == "attention.qkv" else "mlp_norm"
        norm = layer.get_submodule(name)
        assert isinstance(norm, RMSNorm)
        scale = _divide_norm(norm.weight, scale, name, stored)
        changed: dict[str, Tensor] = {f"{name}.weight": norm.weight}
    elif linear == "attention.o":
        qkv = layer.attention.qkv
        shared = _by_value(config, scale)
        if not torch.equal(shared, shared[:, :1].expand_as(shared)):
            raise NumericError(f"{linear}: its scale differs between heads that share a value: tie it first")
        rows = slice(sum(config.qkv_rows[:2]), sum(config.qkv_rows))
        changed = _divide_linear(qkv, rows, shared[:, 0].flatten(), "attention.qkv", stored)
    else:
        gate_up = layer.mlp.gate_up
        assert isinstance(gate_up, nn.Linear)
        rows = slice(gate_up.out_features // 2, gate_up.out_features)
        changed = _divide_linear(gate_up, rows, scale, "mlp.gate_up", stored)
    weight = module.weight.to(wide) * scale
    module.weight.copy_(weight)
    return Folded(weight, scale, changed)


def tie(config: ModelConfig, channels: Tensor) -> Tensor:
    """The inputs `[in]` of `attention.o` averaged over the heads that share a value, in their places `[in]`.

    With grouped queries these heads get their inputs from the same rows of qkv, which can be divided only once.
    """
    shared = _by_value(config, channels)
    return shared.mean(1, keepdim=True).expand_as(shared).flatten()


def rescaled(moments: Tensor, scale: Tensor) -> Tensor:
    """The moments E[x y^T] `[in, in]` of inputs after both x and y were divided by `scale` `[in]`."""
    return moments / scale[:, None] / scale


def divide_rows(matrix: QTensor, start: int, scale: Tensor) -> QTensor:
    """A quantized matrix with the rows from `start` on divided by `scale` `[rows]`: the codes stay, the scales change.

    Raises:
        TensorError: if there are not as many rows.
        NumericError: if a scale would leave its dtype's range.
    """
    count = matrix.shape[0] - start
    scale = _checked(scale.to(matrix.device, torch.float32), count, "rows of a quantized matrix")
    scales = matrix.scales.clone()
    scales[start:] = _divided(matrix.scales[start:], scale[:, None], "scales of a quantized matrix")
    return QTensor(matrix.scheme, matrix.qweight, scales, matrix.zeros, matrix.shape)


def _by_value(config: ModelConfig, channels: Tensor) -> Tensor:
    """`[in]` as `[kv_heads, heads that share one, head_dim]`."""
    return channels.view(config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)


def _checked(scale: Tensor, count: int, name: str) -> Tensor:
    if tuple(scale.shape) != (count,):
        raise TensorError(f"{name}: expected a scale of shape {[count]}, found {list(scale.shape)}")
    if not (torch.isfinite(scale) & (scale > 0)).all():
        raise NumericError(f"{name}: a channel's scale is not positive and finite: look for NaN in the checkpoint")
    return scale


def _divide_norm(weight: Tensor, scale: Tensor, name: str, stored: torch.dtype | None) -> Tensor:
    """Divide a norm's weight; gives the scale that the rounded weight stands for."""
    before = weight.to(scale.dtype, copy=True)
    after = _divided(weight, scale, f"{name}.weight", stored).to(scale.dtype)
    weight.copy_(after)
    # Nothing comes through a channel whose weight is, or has become, zero.
    return torch.where(after == 0, scale, before / after)


def _divide_linear(
    module: nn.Linear, rows: slice, scale: Tensor, name: str, stored: torch.dtype | None
) -> dict[str, Tensor]:
    """Divide some rows of a linear layer and of its bias; gives what was changed."""
    changed: dict[str, Tensor] = {f"{name}.weight": module.weight}
    if module.bias is not None:
        changed[f"{name}.bias"] = module.bias
    for parameter, tensor in changed.items():
        part = tensor[rows]
        part.copy_(_divided(part, scale if part.dim() == 1 else scale[:, None], parameter, stored))
    return changed


def _divided(tensor: Tensor, scale: Tensor, name: str, stored: torch.dtype | None = None) -> Tensor:
    """The quotient in `stored` or the dtype of `tensor`. Raises NumericError where that has no place for it."""
    dtype = stored or tensor.dtype
    quotient = (tensor.to(scale.dtype) / scale).to(dtype)
    if not torch.isfinite(quotient).all():
        raise NumericError(f"{name}: out of the range of {dtype} after folding: use a wider dtype")
    return quotient
