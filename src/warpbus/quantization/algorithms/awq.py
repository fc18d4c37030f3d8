"""AWQ (Lin et al., 2023): channels with large inputs are scaled up before rounding, so that they lose less.

Rounding W * s instead of W, with the inputs divided by s, moves error from important channels to less important ones.
The candidates are powers of the inputs' mean magnitude, s = mean|x|^alpha; their loss is measured on the layer's
outputs. `warpbus.quantization.folding` folds s into the preceding parameters.
"""

import torch
from torch import Tensor

from warpbus.kernels.ops.gptq import clip_search
from warpbus.kernels.reference.grid import Grid, slices
from warpbus.qtensor import Scheme
from warpbus.quantization.algorithms.linear_algebra import narrow, product

TRIALS = 20

_TOGETHER = {"cpu": 2**18, "cuda": 2**24}
"""Scaled weights that are rounded at once on a device, at most: small matrices, such as those of experts, with many
candidates."""


def candidates(mean_abs: Tensor, trials: int = TRIALS) -> Tensor:
    """The candidate scales.

    Args:
        mean_abs: `[in]`, the mean of |x| over the inputs x of the matrix. A channel without any input (0) is scaled
            like the average one.
        trials: the powers are 0, 1 / trials, 2 / trials, ... below 1.

    Returns:
        float32 `[trials, in]`. In each row, the product of the largest and the smallest value is 1; the first row is
        all ones.
    """
    magnitude = mean_abs.float()
    live = magnitude > 0
    mean = magnitude[live].mean() if bool(live.any()) else torch.ones_like(magnitude[0])
    magnitude = torch.where(live, magnitude, mean)
    alphas = torch.arange(trials, dtype=torch.float32, device=magnitude.device) / trials
    # In logarithms: products of extremes neither overflow nor vanish.
    exponents = alphas[:, None] * magnitude.log()
    return (exponents - (exponents.amax(1, keepdim=True) + exponents.amin(1, keepdim=True)) / 2).exp()


def losses(weight: Tensor, moments: Tensor, trials: Tensor, scheme: Scheme, *, scale_dtype: torch.dtype) -> Tensor:
    """The loss of each candidate: tr(dW H dW^T) of rounding W * s to nearest and dividing by s again.

    Ranges are clipped as in the later rounding, by `rtn` with the importance diag(H) / s^2: on glm-poet, scales chosen
    with full ranges have a KL that is 4 % higher at 3 bits and 2 % higher at 4 bits.

    Rows are independent: the losses of all rows are the sums of the losses of parts of them. The bits of a part's
    losses do not depend on the parts beside it.

    Args:
        weight: floating `[parts, rows, in]`, all rows of a matrix or some.
        moments: float32 `[in, in]`, the mean H of x x^T over its inputs x.
        trials: float32 `[trials, in]`, see `candidates`.
        scheme: bits, groups, symmetric or not.
        scale_dtype: the dtype to which the grids' scales are rounded.

    Returns:
        float32 `[parts, trials]`.

    Raises:
        SchemeError: if the group size does not divide `in`.
    """
    scheme.groups(weight.shape[2])
    total = torch.zeros(len(weight), len(trials), dtype=torch.float32, device=weight.device)
    most, narrowed = _TOGETHER[weight.device.type], narrow(moments)
    for rows in slices(weight[0]):
        count = weight[0, rows].numel()
        # Not by the number of parts: the bits of a product may depend on its rows.
        at_once = min(len(trials), max(1, most // count))
        together = max(1, most // (count * at_once))
        for scales, losses_of_all in zip(trials.split(at_once), total.split(at_once, 1), strict=True):
            importance = moments.diagonal() / scales.square()
            for parts, lost in zip(weight.split(together), losses_of_all.split(together), strict=True):
                changes = _changes(parts[:, rows].float(), scales, importance, scheme, scale_dtype)
                for change, own in zip(changes, lost, strict=True):
                    # Few digits do: only which loss is the least is asked for.
                    own += (product(narrow(change), narrowed) * change).view(len(scales), -1).sum(1)
    return total


def _changes(parts: Tensor, scales: Tensor, importance: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> Tensor:
    """How much rounding changes the weights, with each scale: `[parts, trials * rows, in]` of `[parts, rows, in]`."""
    size = parts.shape[2] // scheme.groups(parts.shape[2])
    # Beside each other, as columns: groups are rounded independently.
    scaled = (parts[:, :, None] * scales).flatten(0, 1).flatten(1)
    grid = Grid(*clip_search(scaled, importance.flatten(), size, scheme.bits, scheme.symmetric, scale_dtype))
    groups = scaled.unflatten(1, (-1, size))
    rounded = grid.codes(groups, scheme).sub_(grid.zeros.unsqueeze(-1)).mul_(grid.scales.unsqueeze(-1))
    change = rounded.view(*parts.shape[:2], *scales.shape).div_(scales).sub_(parts[:, :, None])
    return change.transpose(1, 2).flatten(1, 2)
