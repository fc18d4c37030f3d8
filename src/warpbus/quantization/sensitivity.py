"""Mixed precision: a scheme for each matrix, so that the loss is least within a budget of bytes.

Matrices differ in what a bit is worth to them. Given what each would lose and take in each scheme, choosing one scheme
for each is a multiple-choice knapsack (Dudzinski and Walukiewicz, 1987), solved here by dynamic programming over the
choices that no other beats in both bytes and loss. What is computed as one matrix (queries, keys and values; gate and
up) is one matrix here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.errors import NumericError, UsageError
from warpbus.qtensor import Scheme

# Partial choices that are kept after each matrix. Below that the result is exact. Layers of one shape need few: their
# bytes add up to the same sums in many ways.
KEPT = 2**14


@dataclass(frozen=True)
class Cost:
    """What a matrix loses and takes in a scheme.

    Attributes:
        loss: its share of what is to be kept small; shares are added up, so they have to be in one unit.
        nbytes: of codes, scales and zero points.
    """

    loss: float
    nbytes: int


def choose(matrices: Mapping[str, Mapping[Scheme, Cost]], budget_bytes: int) -> dict[str, Scheme]:
    """The scheme of each matrix with the least sum of losses among those within the budget.

    Args:
        matrices: by name, what each costs in the schemes that it may have.
        budget_bytes: of all matrices together.

    Returns:
        by name; the same for the same arguments. With more than `KEPT` partial choices that none beats, only the best
        of each of so many equal ranges of bytes goes on: within the budget still, but then there may be a better one.

    Raises:
        UsageError: if a matrix has no scheme to choose, or even the smallest ones do not fit the budget.
        NumericError: if a loss is NaN or infinite; the message names the matrix.
    """
    for name, costs in matrices.items():
        if not costs:
            raise UsageError(f"{name}: no scheme to choose from: give at least one")
        for scheme, cost in costs.items():
            if not abs(cost.loss) < float("inf"):
                raise NumericError(f"{name}: its loss in {scheme} is {cost.loss}: expected a finite number")
    smallest = [min(cost.nbytes for cost in costs.values()) for costs in matrices.values()]
    room = budget_bytes - sum(smallest)
    if room < 0:
        raise UsageError(
            f"a budget of {budget_bytes} bytes is too small: the matrices take {sum(smallest)} bytes in the "
            "smallest of the schemes to choose from: allow more, or schemes of fewer bits"
        )
    # Bytes beyond the smallest scheme of each matrix so far, rising, and the losses that go with them, falling.
    extra, loss = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    steps: list[Tensor] = []
    for costs, least in zip(matrices.values(), smallest, strict=True):
        more = torch.tensor([cost.nbytes - least for cost in costs.values()], dtype=torch.int64)
        added = torch.tensor([cost.loss for cost in costs.values()], dtype=torch.float64)
        extra, loss = (extra[:, None] + more).flatten(), (loss[:, None] + added).flatten()
        kept = _unbeaten(extra, loss, room)
        extra, loss = extra[kept], loss[kept]
        steps.append(kept)
    chosen: dict[str, Scheme] = {}
    state = len(extra) - 1
    for (name, costs), kept in zip(reversed(list(matrices.items())), reversed(steps), strict=True):
        state, option = divmod(int(kept[state]), len(costs))
        chosen[name] = list(costs)[option]
    return {name: chosen[name] for name in matrices}


def _unbeaten(nbytes: Tensor, loss: Tensor, room: int) -> Tensor:
    """Indexes of the pairs within `room` that no other beats in both, in order of bytes; at most about `KEPT`."""
    order = torch.argsort(loss, stable=True)
    order = order[torch.argsort(nbytes[order], stable=True)]
    order = order[nbytes[order] <= room]
    least = loss[order].cummin(0).values
    better = torch.ones(len(order), dtype=torch.bool)
    better[1:] = least[1:] < least[:-1]
    order = order[better]
    if len(order) > KEPT:
        reach = nbytes[order]
        ranges = (reach - reach[0]) * KEPT // (reach[-1] - reach[0] + 1)
        last = torch.ones(len(order), dtype=torch.bool)
        last[:-1] = ranges[1:] != ranges[:-1]
        last[0] = True  # whatever follows, the smallest fits
        order = order[last]
    return order
