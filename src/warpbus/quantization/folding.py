"""Folds a factor of each input channel of a matrix into the preceding parameters, so that the layer computes the same.

A linear layer computes the same if its columns are multiplied by s and its inputs divided by s. The division has no
cost if it is done once, in the weights that produce the inputs (as in SmoothQuant; Xiao et al., 2022, and AWQ; Lin et
al., 2023). The layer table says where (`MatrixSpec.folds_into`): in a norm's weight, or in the rows of a matrix that
produce the inputs. These are the values for attention's output projection, which rotary positions and the norms of
queries and keys do not change, and `up` for `down`, because silu(gate) * up is linear in it.

Several matrices may read one norm, together with parameters that are never quantized: all experts and the router. They
all get the same factors, which are powers of two, so that nothing is rounded and the router computes bit-identical
scores. So each token keeps its experts, and an indexer selects the same tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpbus.errors import NumericError, TensorError, UsageError
from warpbus.models import DecoderLayer, LayerSpec, MatrixSpec, ModelConfig
from warpbus.models.layers import RMSNorm
from warpbus.qtensor import QTensor


@dataclass(frozen=True)
class Folded:
    """The result of folding.

    Attributes:
        weight: float32 (float64 if the layer is float64) `[out, in]`, the matrix times `scale`, not rounded to its
            dtype.
        scale: `[in]` in the dtype of `weight`: the requested scale; after a norm, the scale of its rounded weight.
        changed: the changed preceding parameters of the layer, by their names in the layer.
    """

    weight: Tensor
    scale: Tensor
    changed: dict[str, Tensor]


def can_fold(config: ModelConfig) -> bool:
    """Whether the factors of all matrices can be folded into preceding parameters."""
    return all(matrix.folds_into is not None for _, matrix in config.matrices)


@torch.no_grad()
def fold(layer: DecoderLayer, linear: str, scale: Tensor, *, stored: torch.dtype | None = None) -> Folded:
    """Multiply the columns of a linear layer by `scale` and divide the parameters that produce its inputs by it, in
    place.

    The layer computes the same, up to the rounding of its parameters to their dtype. The rounding of a norm's weight is
    compensated in the matrix.

    Args:
        layer: its matrices are plain (dequantized ones too: see `divide_rows` for the quantized form).
        linear: the name of one of its matrices.
        scale: positive `[in]`; equal for channels that come from the same row, such as those of query heads that share
            a KV head: see `tie`.
        stored: the dtype of the preceding parameters in the file, if it is narrower than the layer's: they are rounded
            to it immediately, so that the layer computes the same as the stored model.

    Raises:
        UsageError: if there is no such linear layer, the model does not allow it (see `can_fold`), or something else
            reads the same norm (see `fold_shared`).
        TensorError: if `scale` has the wrong shape.
        NumericError: if `scale` is not positive and finite, differs between channels of the same row, or takes a
            parameter out of its dtype's range.
    """
    names = [matrix.name for matrix in layer.spec.matrices]
    if linear not in names:
        raise UsageError(f"{linear}: no such linear layer: expected one of {', '.join(names)}")
    spec = layer.spec.matrix(linear)
    target = spec.folds_into
    if target is None:
        raise UsageError(
            f"{linear}: in this model no factor can be moved into the operation before it: use gptq or rtn"
        )
    if norm := layer.spec.shared_norm(spec):
        raise UsageError(f"{linear}: other parameters read {norm}, too: fold the same factors into all of them")
    module = layer.get_submodule(linear)
    assert isinstance(module, nn.Linear)
    wide = torch.promote_types(module.weight.dtype, torch.float32)
    scale = _checked(scale.to(module.weight.device, wide), module.in_features, linear)
    preceding = layer.get_submodule(target.name)
    if target.part is None:
        assert isinstance(preceding, RMSNorm)
        scale = _divide_norm(preceding.weight, scale, target.name, stored)
        changed: dict[str, Tensor] = {f"{target.name}.weight": preceding.weight}
    else:
        assert isinstance(preceding, nn.Linear)
        shared = _by_row(layer.spec, spec, scale)
        if not torch.equal(shared, shared[:, :1].expand_as(shared)):
            raise NumericError(f"{linear}: its scale differs between heads that share a value: tie it first")
        rows = _rows(layer.spec, spec).to(scale.device)
        changed = _divide_linear(preceding, rows, shared[:, 0].flatten(), target.name, stored)
    weight = module.weight.to(wide) * scale
    module.weight.copy_(weight)
    return Folded(weight, scale, changed)


def powers_of_two(scale: Tensor) -> Tensor:
    """The power of two next to each positive factor, by its logarithm: multiplying by it rounds nothing."""
    mantissa, _ = scale.frexp()  # from 0.5 to 1
    return torch.where(mantissa < 0.5**0.5, 0.5, 1.0) * (scale / mantissa)


@torch.no_grad()
def fold_shared(
    layer: DecoderLayer, norm: str, scale: Tensor, *, stored: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Divide a norm's weight by `scale` and multiply the columns of all matrices that read the norm by it, in place.

    The layer computes the same bits, except that numbers in the subnormal range of float16 are rounded.

    Args:
        layer: its matrices are plain.
        norm: the name of a norm of the layer, such as "mlp_norm".
        scale: powers of two `[features]`: see `powers_of_two`.
        stored: as in `fold`.

    Returns:
        The changed parameters that are not quantized, by their names in the layer: the norm's weight and, for instance,
        the router's.

    Raises:
        TensorError: if `scale` has the wrong shape.
        NumericError: if a factor is no power of two, or takes a parameter out of its dtype's range.
    """
    preceding = layer.get_submodule(norm)
    assert isinstance(preceding, RMSNorm)
    weight = preceding.weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    scale = _checked(scale.to(weight.device, wide), len(weight), norm)
    if not torch.equal(scale, powers_of_two(scale)):
        raise NumericError(f"{norm}: expected powers of two as factors, which several parameters share")
    changed: dict[str, Tensor] = {f"{norm}.weight": weight}
    weight.copy_(_divided(weight, scale, f"{norm}.weight", stored))
    unquantized = layer.spec.unquantized_readers(norm)
    for name in (*unquantized, *(f"{matrix.name}.weight" for matrix in layer.spec.folding_into(norm))):
        parameter = layer.get_parameter(name)
        parameter.copy_(_divided(parameter, 1 / scale, name, stored))
        if name in unquantized:
            changed[name] = parameter
    return changed


def tie(layer: LayerSpec, matrix: MatrixSpec, channels: Tensor) -> Tensor:
    """Values `[in]` of a matrix's input channels, averaged over the channels that come from the same preceding row.

    With grouped-query attention, several heads get their values from the same rows, which can be divided only once.
    """
    shared = _by_row(layer, matrix, channels)
    return shared.mean(1, keepdim=True).expand_as(shared).flatten()


def divide_preceding(layer: LayerSpec, matrix: MatrixSpec, preceding: QTensor, folded: Tensor) -> QTensor:
    """The quantized matrix that a factor of `matrix`'s inputs was folded into, its rows divided: see `divide_rows`."""
    assert matrix.folds_into is not None
    return divide_rows(preceding, _rows(layer, matrix), _by_row(layer, matrix, folded)[:, 0].flatten())


def rescaled(moments: Tensor, scale: Tensor) -> Tensor:
    """The moments E[x y^T] `[in, in]` of inputs after both x and y were divided by `scale` `[in]`."""
    return moments / scale[:, None] / scale


def divide_rows(matrix: QTensor, rows: Tensor, scale: Tensor) -> QTensor:
    """A quantized matrix with some rows divided by `scale` `[n]`: the codes stay, the scales change.

    Args:
        matrix: any.
        rows: their numbers, int64 `[n]`.
        scale: positive.

    Raises:
        TensorError: if `scale` has another length.
        NumericError: if a scale would leave its dtype's range.
    """
    scale = _checked(scale.to(matrix.device, torch.float32), len(rows), "rows of a quantized matrix")
    rows, scales = rows.to(matrix.device), matrix.scales.clone()
    scales[rows] = _divided(scales[rows], scale[:, None], "scales of a quantized matrix")
    return QTensor(matrix.scheme, matrix.qweight, scales, matrix.zeros, matrix.shape)


def _rows(layer: LayerSpec, matrix: MatrixSpec) -> Tensor:
    """The rows of the preceding matrix that make the inputs of `matrix`, int64 `[n]`."""
    target = matrix.folds_into
    assert target is not None
    assert target.part is not None
    preceding = layer.matrix(target.name)
    axis = preceding.rows[target.part]
    units = torch.arange(axis.length).view(axis.count, axis.size)
    return preceding.part_start(target.part) + units[:, target.first :].flatten()


def _by_row(layer: LayerSpec, matrix: MatrixSpec, channels: Tensor) -> Tensor:
    """`[in]` as `[heads, heads that share each, size]` by the rows that make the inputs; after a norm none share."""
    target = matrix.folds_into
    if target is None or target.part is None:
        return channels.view(1, 1, -1)
    axis = layer.matrix(target.name).rows[target.part]
    return channels.view(axis.count, -1, axis.size - target.first)


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
    module: nn.Linear, rows: Tensor, scale: Tensor, name: str, stored: torch.dtype | None
) -> dict[str, Tensor]:
    """Divide some rows of a linear layer and of its bias; gives what was changed."""
    changed: dict[str, Tensor] = {f"{name}.weight": module.weight}
    if module.bias is not None:
        changed[f"{name}.bias"] = module.bias
    for parameter, tensor in changed.items():
        factors = scale if tensor.dim() == 1 else scale[:, None]
        tensor[rows] = _divided(tensor[rows], factors, parameter, stored).to(tensor.dtype)
    return changed


def _divided(tensor: Tensor, scale: Tensor, name: str, stored: torch.dtype | None = None) -> Tensor:
    """The quotient in `stored` or the dtype of `tensor`. Raises NumericError where that has no place for it."""
    dtype = stored or tensor.dtype
    quotient = (tensor.to(scale.dtype) / scale).to(dtype)
    if not torch.isfinite(quotient).all():
        raise NumericError(f"{name}: out of the range of {dtype} after folding: use a wider dtype")
    return quotient
