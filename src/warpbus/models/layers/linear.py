"""Linear layers: over a quantized weight, and the one function through which every projection of a layer goes.

Knows nothing of files: see `warpbus.models.loading`.
"""

import dataclasses
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from warpbus.kernels import ops
from warpbus.kernels.ops.arguments import HALVES
from warpbus.kernels.ops.packed import PackedWeight, pack, unpack
from warpbus.qtensor import QTensor


class QuantizedLinear(nn.Module):
    """`x @ weight.T + bias` with a quantized weight; takes the place of `torch.nn.Linear`.

    On a GPU the weight is held in the order of the kernels alone. `.to()` another device or dtype arranges it anew,
    exactly but for the rounding of the scales; the buffers are those of the form that is held, so that a state dict
    fits the device it was taken on.

    Args:
        weight: `[out, in]`, or what was packed from it.
        bias: `[out]`.
        dtype: of the activations that it will meet, which it is arranged for. None leaves the `QTensor` as it is.
    """

    bias: Tensor | None

    def __init__(
        self, weight: QTensor | PackedWeight, bias: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.scheme = weight.scheme
        self.out_features, self.in_features = weight.shape
        self.register_buffer("bias", bias)
        self._dtype = weight.dtype if isinstance(weight, PackedWeight) else dtype
        self._hold(_arranged(weight, self._dtype) if isinstance(weight, QTensor) else weight)

    @property
    def form(self) -> QTensor | PackedWeight:
        """What the operator takes."""
        return self._form

    @property
    def weight(self) -> QTensor:
        """The quantized matrix `[out, in]`; unpacked at every call where it is held packed."""
        return unpack(self._form) if isinstance(self._form, PackedWeight) else self._form

    def forward(self, x: Tensor) -> Tensor:
        return ops.wna16_linear(x, self._form, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.scheme}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        weight = self.weight
        for name in _tensors(self._form):
            delattr(self, name)
        del self._form
        super()._apply(fn, recurse)
        zeros = None if weight.zeros is None else fn(weight.zeros)
        moved = QTensor(self.scheme, fn(weight.qweight), fn(weight.scales), zeros, weight.shape)
        if self._dtype is not None:
            self._dtype = fn(torch.empty(0, dtype=self._dtype)).dtype
        self._hold(_arranged(moved, self._dtype))
        return self

    def _hold(self, form: QTensor | PackedWeight) -> None:
        self._form = form
        for name, tensor in _tensors(form).items():
            self.register_buffer(name, tensor)


def _arranged(weight: QTensor, dtype: torch.dtype | None) -> QTensor | PackedWeight:
    """The weight as the operator of its device takes it best."""
    if weight.device.type == "cuda" and dtype in HALVES:
        return pack(weight, dtype)
    return weight


def _tensors(form: QTensor | PackedWeight) -> dict[str, Tensor | None]:
    named = {field.name: getattr(form, field.name) for field in dataclasses.fields(form)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor) or name == "zeros"}
