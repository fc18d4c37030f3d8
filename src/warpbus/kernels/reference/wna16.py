"""`wna16` in plain PyTorch: dequantize, then multiply."""

from torch import Tensor
from torch.nn import functional as F

from warpbus.qtensor import QTensor


def wna16_linear(x: Tensor, weight: QTensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` with the weights dequantized to the dtype of `x` first."""
    return F.linear(x, weight.dequantize(x.dtype), bias)
