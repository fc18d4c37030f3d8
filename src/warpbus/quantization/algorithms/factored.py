"""A Hessian that is damped, ordered and factored for rounding column by column; and the target matrix to round.

After the preceding layers are quantized, a layer gets inputs x' instead of x. W is then not the best matrix to round:
the outputs of W* = W E[x x'^T] E[x' x'^T]^-1 are closer to the original outputs W x. (GPTAQ, Li et al., 2025, builds
the same target into GPTQ's loop over the columns; here it is computed before the loop.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from warpbus.cuda.graphs import Replayed
from warpbus.errors import NumericError
from warpbus.quantization.algorithms.linear_algebra import (
    BLOCK,
    add_product,
    narrow,
    product,
    put_product,
    unit_factor,
    unit_factor_by_library,
)

# How far to go from W to W*, which is estimated on few tokens. On glm-poet at 3 bits, 0.5 loses a tenth less perplexity
# than 1, and a third less than 0.
SHARE = 0.5


@dataclass(frozen=True)
class FactoredHessian:
    """H = U D U^T with U unit upper triangular, in the order in which columns are rounded.

    If the columns j are rounded in this order, and each compensates the errors e of the columns before it, the total
    error e^T H e is the sum over j of D_j (e_j + sum over k < j of U_kj e_k)^2 (GPTQ as Babai's nearest plane
    algorithm; Chen et al., 2025). So U gives the error that a column has to compensate, D the cost of its own rounding,
    and no inverse is needed.

    Attributes:
        order: int64 `[in]`: the column that comes first, second, ...
        hessian: float32 `[in, in]`, damped, in this order.
        upper: float32 `[in, in]`, U; what is below its diagonal is zero.
        inverses: the inverses of U's diagonal blocks, `[blocks, 512, 512]`, narrow (see `linear_algebra`), so that
            systems are solved by products alone. The part of the last block beyond U is undefined.
        pivots: float32 `[in]`, D, all positive.
        damped: float32 `[in]`: the damping that was added to the diagonal, in this order.
    """

    order: Tensor
    hessian: Tensor
    upper: Tensor
    inverses: Tensor
    pivots: Tensor
    damped: Tensor

    @classmethod
    def blank(cls, size: int, device: torch.device) -> Self:
        """An uninitialized one for `size` columns, to estimate its memory."""
        square, vector = (torch.empty(shape, device=device) for shape in ((size, size), (size,)))
        order = torch.empty(size, dtype=torch.int64, device=device)
        inverses = narrow(torch.empty(-(-size // BLOCK), BLOCK, BLOCK, device=device))
        return cls(order, square, square.clone(), inverses, vector, vector.clone())

    @classmethod
    def unstack(cls, tensors: Sequence[Tensor]) -> list[Self]:
        """Several from their stacked `tensors`, each `[n, ...]`, as views."""
        return [cls(*each) for each in zip(*tensors, strict=True)]

    @cached_property
    def inverse_order(self) -> Tensor:
        """The position of each column in the order."""
        return torch.argsort(self.order)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All attributes, in their order."""
        return self.order, self.hessian, self.upper, self.inverses, self.pivots, self.damped

    @property
    def importance(self) -> Tensor:
        """The cost of a squared rounding error for each column of the matrix, in the original order: float32 `[in]`."""
        return self.pivots[self.inverse_order]

    def solve(self, right: Tensor) -> Tensor:
        """H^-1 B, in place of B, to the digits of `precision.narrow`: float32 `[in, rows]`, in this order."""
        upper, inverses, count = self.narrow_upper, self.inverses, len(right)
        for start in range((count - 1) // BLOCK * BLOCK, -1, -BLOCK):
            block = slice(start, start + BLOCK)
            put_product(right[block], _corner(inverses, start, count), narrow(right[block]))
            add_product(right[:start], upper[:start, block], narrow(right[block]), alpha=-1)
        right /= self.pivots[:, None]
        for start in range(0, count, BLOCK):
            block, stop = slice(start, start + BLOCK), min(start + BLOCK, count)
            put_product(right[block], _corner(inverses, start, count).T, narrow(right[block]))
            add_product(right[stop:], upper[block, stop:].T, narrow(right[block]), alpha=-1)
        return right

    @cached_property
    def narrow_upper(self) -> Tensor:
        """U in the operand format of the device's products."""
        return narrow(self.upper)

    @cached_property
    def narrow_hessian(self) -> Tensor:
        """H in the operand format of the device's products."""
        return narrow(self.hessian)


def factored(
    hessian: Tensor,
    *,
    damping: float = 0.01,
    activation_order: bool = True,
    name: str,
) -> FactoredHessian:
    """Damp, order and factor one Hessian: see `factored_stack`."""
    stack = factored_stack([hessian], damping=damping, activation_order=activation_order, names=[name])
    return FactoredHessian.unstack(stack)[0]


def factored_stack(
    hessians: Sequence[Tensor],
    *,
    damping: float = 0.01,
    activation_order: bool = True,
    run: Replayed | None = None,
    names: Sequence[str],
) -> tuple[Tensor, ...]:
    """Damp, order and factor Hessians of one size; waits for the GPU once.

    Args:
        hessians: float32 `[in, in]` each, the second moments of a matrix' inputs, in any unit. A column that never had
            an input (diagonal 0) is treated like an average one that is independent of the others.
        damping: the fraction of the mean diagonal that is added to the diagonal.
        activation_order: columns with the largest diagonal first; otherwise the original order.
        run: see `unit_factor`. The result of a single Hessian is overwritten by its next call.
        names: the matrices, for messages.

    Returns:
        the tensors of a `FactoredHessian` for each, stacked `[n, ...]`.

    Raises:
        NumericError: one has NaN or infinity, or is not positive definite.
    """
    stack, sums, flags = FactoredStack(len(hessians)), [], []
    for index, hessian in enumerate(hessians):
        order, ordered, added = _ordered(hessian, damping, activation_order=activation_order)
        upper, pivots, inverses, failed = unit_factor(ordered, run=run)
        stack.put(index, FactoredHessian(order, ordered, upper, narrow(inverses), pivots, added))
        sums.append(hessian.sum())
        flags.append(failed.clone())  # it is overwritten by the next call of `run`
    finite, failures = torch.stack([torch.stack(sums).isfinite().int(), torch.cat(flags)]).tolist()
    for index, name in enumerate(names):
        if not finite[index]:
            raise NumericError(f"{name}: its Hessian has NaN or infinity: look for NaN in the checkpoint's weights")
        if failures[index]:
            order, ordered, *_, added = (tensor[index] for tensor in stack.tensors)
            upper, pivots, inverses, failed = unit_factor_by_library(ordered)
            if int(failed):
                raise NumericError(
                    f"{name}: its Hessian is not positive definite: raise --damping (0.1, say), or give more "
                    "calibration data"
                )
            stack.put(index, FactoredHessian(order, ordered, upper, narrow(inverses), pivots, added))
    return stack.tensors


def _ordered(hessian: Tensor, damping: float, *, activation_order: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The order of the columns, the damped Hessian in it, and what was added to its diagonal, in it."""
    diagonal = hessian.diagonal()
    live = diagonal > 0
    count = live.sum()
    mean = torch.where(count > 0, diagonal.where(live, 0.0).sum() / count.clamp_min(1), 1.0)
    filled = torch.where(diagonal == 0, mean, diagonal)
    if activation_order:
        order = torch.argsort(filled, descending=True, stable=True)
    else:
        order = torch.arange(len(hessian), device=hessian.device)
    added = (filled - diagonal + damping * mean)[order]
    ordered = hessian[order][:, order].float()
    ordered.diagonal().add_(added)
    return order, ordered, added


def factored_loss(errors: Tensor, hessian: FactoredHessian) -> Tensor:
    """tr(E^T H E) of errors `[in, rows]` in the order of the Hessian, without damping: one number of float64."""
    weighted = product(hessian.narrow_hessian, narrow(errors)).sub_(errors * hessian.damped[:, None])
    return weighted.mul_(errors).sum(0).sum(dtype=torch.float64)


def corrected_target(columns: Tensor, hessian: FactoredHessian, drift: Tensor, *, share: float = SHARE) -> Tensor:
    """The target matrix to round: W or a matrix between W and W*, see the module.

    Args:
        columns: float32 `[in, rows]`: rows of the matrix, transposed, in the order of `hessian`.
        hessian: the moments E[x' x'^T] of the inputs x' at inference.
        drift: float32 `[in, in]`, or narrow, E[(x - x') x'^T], with x the inputs in the unquantized model, in the same
            unit and order.
        share: 0 gives `columns`, 1 the least-squares optimum.

    Returns:
        float32 `[in, rows]`.
    """
    missing = product(narrow(drift).T, narrow(columns))
    return columns.add(hessian.solve(missing), alpha=share)


class FactoredStack:
    """The tensors of several `FactoredHessian`s of one size, stacked `[n, ...]` one after the other.

    Args:
        count: n.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.tensors: tuple[Tensor, ...] = ()

    def put(self, index: int, hessian: FactoredHessian) -> None:
        """Copy one to its place; what `run` of `factored` gave is free then. A single one is not copied."""
        if self._count == 1:
            self.tensors = tuple(tensor[None] for tensor in hessian.tensors)
            return
        if not self.tensors:
            self.tensors = tuple(tensor.new_empty(self._count, *tensor.shape) for tensor in hessian.tensors)
        for stack, tensor in zip(self.tensors, hessian.tensors, strict=True):
            stack[index] = tensor


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as one, `[n, ...]`; a single one is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def _corner(inverses: Tensor, start: int, count: int) -> Tensor:
    size = min(BLOCK, count - start)
    return inverses[start // BLOCK, :size, :size]
