"""The second moments of a layer's inputs."""

import torch
from torch import Tensor

from warpbus.errors import NumericError


class Hessian:
    """Means over the tokens that enter a linear layer, float32 `[columns, columns]`.

    The moments are the mean of x x^T. The drift is the mean of (o - x) x^T, where o is what enters the same layer of
    the unquantized model for the same token. Means rather than sums: their size does not depend on how much is
    calibrated with, so nothing overflows. Layers that share an input share a Hessian.

    Args:
        columns: features of the input.
        device: where it is kept.
        name: the layer, for messages.
    """

    def __init__(self, columns: int, *, device: torch.device | str = "cpu", name: str = "layer") -> None:
        self.tokens = 0
        self._name = name
        self._moments = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self._drift = torch.zeros_like(self._moments)

    def add(self, x: Tensor, original: Tensor) -> None:
        """Take tokens in; padding must not be among them.

        On a GPU 16-bit inputs are multiplied as they are and summed in float32; all else is done in float32.

        Args:
            x: floating `[tokens, columns]`, what enters the layer.
            original: the same in the unquantized model.
        """
        count = len(x)
        if count == 0:
            return
        self.tokens += count
        _average(self._moments, x, x, count / self.tokens)
        _average(self._drift, original - x, x, count / self.tokens)

    def moments(self) -> Tensor:
        """The mean of x x^T so far.

        Raises:
            NumericError: if there was no token, or one had NaN or infinity; the message names the layer.
        """
        return self._checked(self._moments)

    def drift(self) -> Tensor:
        """The mean of (o - x) x^T so far. Raises NumericError as `moments` does."""
        return self._checked(self._drift)

    def _checked(self, mean: Tensor) -> Tensor:
        if self.tokens == 0:
            raise NumericError(f"{self._name}: no token entered it: give calibration data")
        if not torch.isfinite(mean).all():
            raise NumericError(
                f"{self._name}: NaN or infinity entered it during calibration: the checkpoint overflows "
                "in this dtype or is damaged: try --device cpu, which computes in float32"
            )
        return mean


def _average(mean: Tensor, left: Tensor, right: Tensor, share: float) -> None:
    """Move a mean of outer products towards that of new rows, which make up `share` of all."""
    if left.device.type == "cuda" and left.dtype in (torch.float16, torch.bfloat16):
        mean.mul_(1 - share).add_(torch.mm(left.T, right, out_dtype=torch.float32), alpha=share / len(left))
    else:
        mean.addmm_(left.float().T, right.float(), beta=1 - share, alpha=share / len(left))
