"""The second moments of a layer's inputs."""

import torch
from torch import Tensor

from warpbus.errors import NumericError


class Hessian:
    """The mean of x x^T over the tokens x that enter a linear layer, float32 `[columns, columns]`.

    A mean rather than a sum: its size does not depend on how much is calibrated with, so nothing overflows. Layers
    that share an input share a Hessian.

    Args:
        columns: features of the input.
        device: where it is kept.
        name: the layer, for messages.
    """

    def __init__(self, columns: int, *, device: torch.device | str = "cpu", name: str = "layer") -> None:
        self.tokens = 0
        self._name = name
        self._mean = torch.zeros(columns, columns, dtype=torch.float32, device=device)

    def add(self, x: Tensor) -> None:
        """Take floating `[tokens, columns]` in; padding must not be among them.

        On a GPU 16-bit inputs are multiplied as they are and summed in float32; all else is done in float32.
        """
        count = len(x)
        if count == 0:
            return
        self.tokens += count
        old, new = 1 - count / self.tokens, 1 / self.tokens
        if x.device.type == "cuda" and x.dtype in (torch.float16, torch.bfloat16):
            self._mean.mul_(old).add_(torch.mm(x.T, x, out_dtype=torch.float32), alpha=new)
        else:
            wide = x.float()
            self._mean.addmm_(wide.T, wide, beta=old, alpha=new)

    def matrix(self) -> Tensor:
        """The mean so far.

        Raises:
            NumericError: if there was no token, or one had NaN or infinity; the message names the layer.
        """
        if self.tokens == 0:
            raise NumericError(f"{self._name}: no token entered it: give calibration data")
        if not torch.isfinite(self._mean).all():
            raise NumericError(
                f"{self._name}: NaN or infinity entered it during calibration: the checkpoint overflows "
                "in this dtype or is damaged: try --device cpu, which computes in float32"
            )
        return self._mean
