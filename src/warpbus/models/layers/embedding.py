"""A quantized embedding: the rows of tokens are looked up in codes and dequantized."""

import dataclasses
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from warpbus.kernels.ops.arguments import HALVES, gpu_has_kernels
from warpbus.kernels.ops.packed import PackedWeight, check_weight_only, pack, unpack
from warpbus.kernels.ops.wna16_embedding import wna16_embedding
from warpbus.qtensor import QTensor


class QuantizedEmbedding(nn.Module):
    """Replaces `torch.nn.Embedding`. A lookup has the bits of the dequantized matrix, on every device.

    On a GPU with kernels the matrix is packed as that of a `QuantizedLinear`: a tied head shares its tensors. `.to()`
    another device or dtype makes a matrix of its own.

    Args:
        weight: `[vocabulary, hidden]`, packed or not; codes, with activations in 16 bits.
        dtype: of what is looked up.

    Raises:
        TensorError: the scheme has no codes, or rounds activations.
    """

    def __init__(self, weight: QTensor | PackedWeight, *, dtype: torch.dtype) -> None:
        super().__init__()
        check_weight_only("QuantizedEmbedding", weight.scheme)
        self.scheme = weight.scheme
        self.num_embeddings, self.embedding_dim = weight.shape
        self._dtype = dtype
        self._hold(weight)

    @property
    def form(self) -> QTensor | PackedWeight:
        """The matrix in the form that is kept."""
        return self._form

    @property
    def weight(self) -> QTensor:
        """The matrix `[vocabulary, hidden]`; a packed one is unpacked at every call."""
        return self._form if isinstance(self._form, QTensor) else unpack(self._form)

    @property
    def device(self) -> torch.device:
        return self._form.device

    def forward(self, tokens: Tensor) -> Tensor:
        return wna16_embedding(tokens.long(), self._form, self._dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.scheme}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        weight = self.weight
        for name in list(self._buffers):
            delattr(self, name)
        super()._apply(fn, recurse)
        zeros = None if weight.zeros is None else fn(weight.zeros)
        self._dtype = fn(torch.empty(0, dtype=self._dtype)).dtype
        self._hold(QTensor(self.scheme, fn(weight.qweight), fn(weight.scales), zeros, weight.shape))
        return self

    def _hold(self, weight: QTensor | PackedWeight) -> None:
        if isinstance(weight, QTensor) and self._dtype in HALVES and gpu_has_kernels(weight.device):
            weight = pack(weight, self._dtype)
        self._form = weight
        for field in dataclasses.fields(weight):
            if isinstance(value := getattr(weight, field.name), Tensor):
                self.register_buffer(field.name, value)
