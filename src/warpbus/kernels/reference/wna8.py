"""`wna8` in plain PyTorch: activations rounded to 8 bits per token, times the codes of the weight."""

import torch
from torch import Tensor

from warpbus.kernels.operators import converted
from warpbus.kernels.reference.w8a8 import quantize
from warpbus.qtensor import QTensor

_COLUMNS = 128  # of int8 that are summed exactly before a scale is applied


def wna8_linear(x: Tensor, weight: QTensor, bias: Tensor | None, codes: torch.dtype) -> Tensor:
    """`x @ weight.T + bias` for x `[m, k]`, rounded to `codes` with a scale per row; in the dtype of x.

    With float8_e4m3fn, products are summed in float32. With int8 they are summed exactly, as integers, over 128 columns
    or a group, if it is smaller; these sums times the scales of the group are added in the order of the columns, each
    rounded once to float32. So is the last step, the scale of the row and the bias.
    """
    rounded, scales = quantize(x, codes)
    by_sums = codes == torch.int8
    product = integer_product(rounded, weight) if by_sums else rounded.float() @ weight.dequantize(torch.float32).T
    return converted(scaled(product, scales, bias), x.dtype)


def scaled(product: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """`product * scales[:, None] + bias` in float32, rounded once, as by `fma`."""
    exact = product.double() * scales.double()[:, None]
    return (exact if bias is None else exact + bias.double()).float()


def integer_product(x: Tensor, weight: QTensor) -> Tensor:
    """`x @ weight.T` in float32 for int8 x `[m, k]`; see `wna8_linear`."""
    (n, k), size = weight.shape, weight.scheme.group_size
    total = torch.zeros(len(x), n, device=x.device)
    integers = weight.codes().float()
    for first in range(0, k, min(size or _COLUMNS, _COLUMNS)):
        columns = slice(first, first + min(size or _COLUMNS, _COLUMNS))
        group = 0 if size is None else first // size
        zeros = weight.scheme.middle_code if weight.zeros is None else weight.zeros[:, group, None].float()
        exact = x[:, columns].float() @ (integers[:, columns] - zeros).T  # less than 2^24
        total = (total.double() + exact.double() * weight.scales[:, group].double()).float()
    return total
