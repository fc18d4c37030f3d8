"""`wna8` in plain PyTorch: activations rounded to e4m3 per token, weights dequantized in float32."""

import torch
from torch import Tensor

from warpbus.kernels.operators import converted
from warpbus.kernels.reference.w8a8 import quantize
from warpbus.qtensor import QTensor


def wna8_linear(x: Tensor, weight: QTensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` for x `[m, k]`, summed in float32, in the dtype of x."""
    codes, scales = quantize(x, torch.float8_e4m3fn)
    product = codes.float() @ weight.dequantize(torch.float32).T * scales[:, None]
    return converted(product if bias is None else product + bias.float(), x.dtype)
