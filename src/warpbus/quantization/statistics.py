"""What enters a linear layer during calibration, summed up over all tokens of all processes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.dist import Group, TreeSum
from warpbus.errors import NumericError
from warpbus.quantization.algorithms.precision import add_product

# Columns of a product that a GPU computes at a time: of a symmetric one only those panels' parts on and below the
# diagonal, which for inputs of 4096 columns is 5/8 of the whole.
_PANEL = 1024

MOMENTS, DRIFT, MEAN_ABS, MAX_ABS = "moments", "drift", "mean_abs", "max_abs"

ALONE = Group(0, 1, torch.device("cpu"))
"""The group of a process that works by itself on the CPU."""


@dataclass(frozen=True)
class Statistics:
    """Means and maxima over the tokens x that enter a linear layer; `None` what was not asked for.

    Attributes:
        tokens: how many there were.
        moments: the mean of x x^T, float32 `[in, in]`; GPTQ's Hessian up to a factor.
        drift: the mean of (o - x) x^T, float32 `[in, in]`, where o is what enters the same layer of the unquantized
            model for the same token.
        mean_abs, max_abs: of |x|, float32 `[in]`.
    """

    tokens: int
    moments: Tensor | None = None
    drift: Tensor | None = None
    mean_abs: Tensor | None = None
    max_abs: Tensor | None = None


class Collector:
    """Adds up the statistics of a layer's inputs.

    Tokens belong to shares (see `dist.SHARES`). A process adds up its own shares, and the shares are added up in one
    order, so that the result has the same bits whatever the number of processes.

    Args:
        columns: features of the input.
        needed: which statistics, by the names of `Statistics`.
        group: the processes; each makes its own collector and calls `total`.
        name: the layer, for messages.
    """

    def __init__(self, columns: int, needed: frozenset[str], *, group: Group = ALONE, name: str = "layer") -> None:
        self._name = name
        self._group = group
        self._needed = needed
        self._share = -1
        self._tokens = self._compared = 0
        shapes = {MOMENTS: (columns, columns), DRIFT: (columns, columns), MEAN_ABS: (columns,)}
        self._shapes = {key: shape for key, shape in shapes.items() if key in needed}
        self._sums = {key: TreeSum(group, shape) for key, shape in self._shapes.items()}
        self._open: dict[str, Tensor] = {}
        self._largest = torch.zeros(columns, device=group.device)

    def add(self, x: Tensor, original: Tensor | None = None, *, share: int = 0) -> None:
        """Take tokens in; padding must not be among them.

        On a GPU 16-bit inputs are multiplied as they are and summed in float32; all else is done in float32.

        Args:
            x: floating `[tokens, columns]`, what enters the layer.
            original: the same in the unquantized model. The drift is the mean over the tokens that come with it.
            share: what the tokens belong to; shares come in rising order.
        """
        if len(x) == 0:
            return
        if share != self._share:
            self._close()
            self._share = share
            self._open = {key: torch.zeros(shape, device=x.device) for key, shape in self._shapes.items()}
        self._tokens += len(x)
        if MOMENTS in self._open:
            _add_products(self._open[MOMENTS], x, x, symmetric=True)
        if DRIFT in self._open and original is not None:
            self._compared += len(x)
            _add_products(self._open[DRIFT], original - x, x, symmetric=False)
        if MEAN_ABS in self._open:
            self._open[MEAN_ABS] += x.abs().sum(0, dtype=torch.float32)
        if MAX_ABS in self._needed:
            torch.maximum(self._largest, x.abs().amax(0).float(), out=self._largest)

    def total(self) -> Statistics:
        """The statistics of all tokens of all processes.

        Raises:
            NumericError: if there was no token, or one had NaN or infinity; the message names the layer.
        """
        self._close()
        counts = self._group.sum(torch.tensor([self._tokens, self._compared], device=self._group.device))
        tokens, compared = counts.tolist()
        if tokens == 0:
            raise NumericError(f"{self._name}: no token entered it: give calibration data")
        found = {key: total.total().div_(compared if key == DRIFT else tokens) for key, total in self._sums.items()}
        if MOMENTS in found:
            _mirror(found[MOMENTS])
        if MAX_ABS in self._needed:
            found[MAX_ABS] = self._group.gather(self._largest[None]).amax(0)
        for value in found.values():
            if not torch.isfinite(value.sum()):
                raise NumericError(
                    f"{self._name}: NaN or infinity entered it during calibration: the checkpoint overflows "
                    "in this dtype or is damaged: try --device cpu, which computes in float32"
                )
        return Statistics(tokens, **found)

    def _close(self) -> None:
        """Hand the share that is complete over."""
        for key, tensor in self._open.items():
            self._sums[key].add(self._share, tensor)
        self._open = {}


def _add_products(total: Tensor, left: Tensor, right: Tensor, *, symmetric: bool) -> None:
    """Add left^T right; of a symmetric one only some panels on and below the diagonal (see `_mirror`)."""
    if left.device.type == "cpu" or left.dtype not in (torch.float16, torch.bfloat16):
        add_product(total, left.float().T, right.float())
        return
    for start, stop in _panels(len(total)):
        first = start if symmetric else 0
        add_product(total[first:, start:stop], left[:, first:].T, right[:, start:stop])


def _mirror(total: Tensor) -> None:
    """Copy what is below the diagonal panels to above them."""
    for start, stop in _panels(len(total)):
        total[start:stop, stop:] = total[stop:, start:stop].T


def _panels(columns: int) -> list[tuple[int, int]]:
    return [(start, min(start + _PANEL, columns)) for start in range(0, columns, _PANEL)]
