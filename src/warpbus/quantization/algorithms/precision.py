"""How precisely a GPU multiplies the matrices of a solve.

Factors, corners and what is stored are in float32. What other products decide is to which of two codes a weight is
rounded, and what to aim at. Rounding their operands to bfloat16 moves that by about a hundredth of a step, by a
reckoning, and on glm-poet at 3 bits the divergence by a thousandth of itself. The tensor cores are ten times as fast.
"""

import torch
from torch import Tensor


def narrow(x: Tensor) -> Tensor:
    """An operand as the products of its device take it: bfloat16 on a GPU, itself on the CPU; a narrow one stays."""
    return x.bfloat16() if x.is_cuda else x


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, summed up in float32."""
    return left @ right if left.dtype == torch.float32 else torch.mm(left, right, out_dtype=torch.float32)


def put_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Fill float32 `total` with left @ right, of which `total` may be the right."""
    if left.dtype == torch.float32:
        total.copy_(left @ right)
    else:
        torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=total)


def add_product(total: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> None:
    """Add alpha times left @ right to float32 `total`, in place."""
    if left.dtype == torch.float32:
        total.addmm_(left, right, alpha=alpha)
    else:
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, alpha=alpha, out=total)
