"""Copies the results of a step to the host: small tensors, joined to one asynchronous copy."""

from collections import abc
from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor

from warpbus.cuda.remote import remote_backend
from warpbus.errors import DeviceError


class Readback:
    """Tensors on their way from the device; the constructor does not wait for it.

    A remote device gets one request for all tensors, sent here and not when they are read: it handles messages in
    order, so that a later request would wait for the next step.

    Args:
        tensors: at least one, all on one device, of elements of 4 or 8 bytes.
    """

    def __init__(self, tensors: abc.Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._wait: Callable[[], Tensor] | None = None
        device = tensors[0].device
        if device.type == "cpu":
            return
        if device.type == "cuda":
            joined = self._joined()
            host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
            host.copy_(joined, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            self._wait = partial(_after, arrived, host)
            return
        remote = remote_backend(device)
        if remote is not None:
            self._wait = remote.fetch(self._joined())

    def read(self) -> list[Tensor]:
        """The tensors on the host. Waits for the device.

        Raises:
            DeviceError: a remote device had no memory for the step.
        """
        if self._wait is None:
            return self._tensors
        try:
            host = self._wait()
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{self._tensors[0].device}: {error}: lower max_num_seqs or max_model_len, quantize the model, or "
                "lease more"
            ) from error
        parts, begin = [], 0
        for tensor in self._tensors:
            words = prod(tensor.shape) * tensor.element_size() // host.element_size()
            part = host[begin : begin + words].clone()  # elements of 8 bytes may lie between two words
            parts.append(part.view(tensor.dtype).view(tensor.shape))
            begin += words
        return parts

    def _joined(self) -> Tensor:
        return torch.cat([tensor.contiguous().view(-1).view(torch.int32) for tensor in self._tensors])


def _after(event: torch.cuda.Event, host: Tensor) -> Tensor:
    event.synchronize()
    return host
