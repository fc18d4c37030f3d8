"""What a step chose, on its way to the host: small tensors, all in one copy."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from warpbus.cuda.lent import lent


class Readback:
    """Tensors on their way from the device; on a GPU of this machine without waiting for it.

    On a lent device the way is a question and its answer: one for all, asked when they are read.

    Args:
        tensors: at least one, all on one device, of elements of 4 or 8 bytes.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._arrived: torch.cuda.Event | None = None
        device = tensors[0].device
        if device.type == "cuda":
            joined = self._joined()
            self._host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
            self._host.copy_(joined, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        elif lent(device) is not None:
            self._host = self._joined()

    def read(self) -> list[Tensor]:
        """The tensors on the host. Waits for the device."""
        if self._tensors[0].device.type == "cpu":
            return self._tensors
        if self._arrived is not None:
            self._arrived.synchronize()
        parts, begin = [], 0
        host = self._host.cpu()
        for tensor in self._tensors:
            words = prod(tensor.shape) * tensor.element_size() // host.element_size()
            part = host[begin : begin + words].clone()  # elements of 8 bytes may lie between two words
            parts.append(part.view(tensor.dtype).view(tensor.shape))
            begin += words
        return parts

    def _joined(self) -> Tensor:
        return torch.cat([tensor.contiguous().view(-1).view(torch.int32) for tensor in self._tensors])
