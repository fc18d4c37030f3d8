"""`wna16`: a linear layer whose weights have 2 to 8 bits and whose activations are floating point."""

from torch import Tensor

from warpbus.errors import TensorError
from warpbus.kernels.reference.wna16 import wna16_linear as reference_linear
from warpbus.qtensor import QTensor


def wna16_linear(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: floating `[..., in]`.
        weight: `[out, in]`, on the same device.
        bias: `[out]` in the dtype of `x`.

    Returns:
        `[..., out]` in the dtype of `x`.

    Raises:
        TensorError: if the widths of `x` and `weight` differ.
    """
    if x.shape[-1] != weight.shape[1]:
        raise TensorError(f"wna16_linear: x has {x.shape[-1]} features, the weight expects {weight.shape[1]}")
    return reference_linear(x, weight, bias)
