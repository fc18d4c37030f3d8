"""The linear algebra of a solve: fast matrix products, and the factorization H = U D U^T.

Factors, diagonal blocks and stored results are in float32. The other products only affect rounding decisions and
targets. Rounding their operands to bfloat16 changes these by an estimated hundredth of a step, and the KL of glm-poet
at 3 bits by a thousandth. Tensor cores are ten times as fast.

On the CPU, torch computes the factorization. On a GPU, torch's float32 products would not use tensor cores and run at a
fifteenth of their speed. So the matrix is factored by blocks, and the update of later columns is a product of pairs of
16-bit numbers, x = high + low, with an error of 2^-22 of x or 2^-25, whichever is larger: H is scaled to a unit
diagonal, so no element is larger than one. Three of the four products of such pairs are computed and summed in float32.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.cuda.graphs import Call, Replayed, at_once
from warpbus.kernels.ops.factor import LARGEST_CORNER, factor_corner

BLOCK = 4 * LARGEST_CORNER
"""Columns of a diagonal block, whose inverse is found, too."""

PRODUCTS = 3
"""Products of 16-bit matrices on a GPU for one of float32."""

_SPAN = 4 * BLOCK  # columns that all later ones are subtracted from in one product


def narrow(x: Tensor) -> Tensor:
    """An operand in the format of the device's products: bfloat16 on a GPU, unchanged on the CPU."""
    return x.bfloat16() if x.is_cuda else x


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, summed up in float32."""
    return left @ right if left.dtype == torch.float32 else torch.mm(left, right, out_dtype=torch.float32)


def put_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Write left @ right to float32 `total`; `right` may be `total` itself."""
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


def unit_factor(matrix: Tensor, *, run: Replayed | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """U and D of H = U D U^T, U unit upper triangular. Does not wait for the GPU.

    Args:
        matrix: H, float32 `[n, n]`, symmetric.
        run: launches all kernels as one graph, for many matrices of one size.

    Returns:
        U, float32 `[n, n]`, with zeros below its diagonal; D, float32 `[n]`, all positive; the inverses of U's diagonal
        blocks, float32 `[blocks, 512, 512]`; what the last one has beyond U means nothing. And int32 `[1]`: if it is
        not 0, the others mean nothing: the matrix is not positive definite or, on a GPU, the blocks' products were too
        rough, which `unit_factor_by_library` decides.
    """
    if not matrix.is_cuda:
        return unit_factor_by_library(matrix)
    upper, pivots, inverses, failed = (run or at_once)(_by_blocks, matrix)
    return upper, pivots, inverses, failed


def call_for(columns: int, device: torch.device) -> Call:
    """The tensors that `unit_factor` gives its `run` for matrices on a GPU; of any content."""
    return Call(_by_blocks, (torch.empty(columns, columns, device=device),))


def unit_factor_by_library(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`unit_factor` by torch in float32, which is slow on a GPU; the last is not 0 if the matrix is not positive
    definite."""
    # The last column is eliminated first, so the factorization sees rows and columns reversed.
    lower, info = torch.linalg.cholesky_ex(matrix.flip(0, 1))
    upper = lower.flip(0, 1).contiguous()  # the library's factors are stored by columns
    del lower
    roots = upper.diagonal().clone()
    upper /= roots
    corners = torch.eye(BLOCK, device=upper.device).repeat(-(-len(upper) // BLOCK), 1, 1)
    for corner, start in zip(corners, range(0, len(upper), BLOCK), strict=True):
        own = upper[start : start + BLOCK, start : start + BLOCK]
        corner[: len(own), : len(own)] = own
    identity = torch.eye(BLOCK, device=upper.device).expand_as(corners)
    inverses = torch.linalg.solve_triangular(corners, identity, upper=True, unitriangular=True)
    return upper, roots.square(), inverses, info.view(1)


def _by_blocks(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`unit_factor` on a GPU, by blocks."""
    size, device = len(matrix), matrix.device
    scale = matrix.diagonal().rsqrt()
    upper = torch.zeros_like(matrix)
    high, low = (torch.empty(size, size, dtype=torch.float16, device=device) for _ in range(2))
    inverses = upper.new_zeros(-(-size // BLOCK), BLOCK, BLOCK)
    failed = torch.zeros(1, dtype=torch.int32, device=device)

    def subtract(pending: Tensor, own: slice, later: slice) -> None:
        """Take from columns `own` of the matrix, in rows from the first on, what the columns `later` explain."""
        if later.start < later.stop:
            for left, right in ((high, high), (high, low), (low, high)):
                add_product(pending, left[: len(pending), later], right[own, later].T, alpha=-1)

    for start in range((size - 1) // _SPAN * _SPAN, -1, -_SPAN):
        span = slice(start, min(start + _SPAN, size))
        pending = matrix[: span.stop, span] * scale[span]
        pending *= scale[: span.stop, None]
        subtract(pending, span, slice(span.stop, size))
        for first in range((span.stop - 1) // BLOCK * BLOCK, start - 1, -BLOCK):
            block = slice(first, min(first + BLOCK, span.stop))
            own = pending[: block.stop, first - start : block.stop - start]
            subtract(own, block, slice(block.stop, span.stop))
            inverse = inverses[first // BLOCK, : len(own) - first, : len(own) - first]
            _factor_block(own[first:], upper[block, block], inverse, failed)
            if first:
                torch.mm(own[:first], inverse.T, out=upper[:first, block])
            done = upper[: block.stop, block]
            high[: block.stop, block] = done
            torch.sub(done, high[: block.stop, block], out=low[: block.stop, block])
    roots = upper.diagonal() / scale
    upper /= scale[:, None]
    upper /= roots
    before, behind = (F.pad(each, (0, len(inverses) * BLOCK - size)).view(-1, BLOCK) for each in (roots, scale))
    inverses *= before[:, :, None]
    inverses *= behind[:, None]
    return upper, roots.square(), inverses, failed


def _factor_block(pending: Tensor, upper: Tensor, inverse: Tensor, failed: Tensor) -> None:
    """`factor_corner` for up to `BLOCK` columns; `pending` is overwritten, `upper` and `inverse` have been zeros."""
    size = len(pending)
    corners = [slice(start, min(start + LARGEST_CORNER, size)) for start in range(0, size, LARGEST_CORNER)]
    for corner in reversed(corners):
        factor_corner(pending[corner, corner], upper[corner, corner], inverse[corner, corner], failed)
        if corner.start:
            before = slice(0, corner.start)
            torch.mm(pending[before, corner], inverse[corner, corner].T, out=upper[before, corner])
            pending[before, before].addmm_(upper[before, corner], upper[before, corner].T, alpha=-1)
    width = LARGEST_CORNER
    while width < size:  # the inverses of two neighbours make that of both
        for start in range(0, size - width, 2 * width):
            left, right = slice(start, start + width), slice(start + width, min(start + 2 * width, size))
            between = upper[left, right] @ inverse[right, right]
            inverse[left, right].addmm_(inverse[left, left], between, alpha=-1)
        width *= 2
