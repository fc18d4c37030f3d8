"""Gradient checkpointing (Chen et al., 2016): a layer's activations are computed again in the backward pass."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from warpbus.errors import UsageError
from warpbus.models.decoder import Decoder, DecoderLayer
from warpbus.train.lora import LoraLinear

SMALL = 64
"""Tensors of at most this fraction of a layer's input are kept unchanged."""


def recompute_layers(model: Decoder, every: int = 1) -> None:
    """Keep of every `every`-th layer, from the first on, little more than its input while training.

    Names of parameters and their values stay as they are, and the results too, bit for bit. LoRA is attached before:
    with its dropout the states of the generators of random numbers are kept too.

    Raises:
        UsageError: if `every` is below 1.
    """
    if every < 1:
        raise UsageError(f"recompute every {every} layers: expected at least 1")
    for layer in list(model.layers)[::every]:
        _recompute(layer)


def _recompute(layer: nn.Module) -> None:
    drops = any(isinstance(each, LoraLinear) and each.dropout for each in layer.modules())
    layer.forward = MethodType(_recomputed_dropout if drops else _recomputed, layer)


# Functions of the layer, as its own forward: compiled, they are one graph for all layers.


def _recomputed(layer: DecoderLayer, x: Tensor, *others: Any) -> Tensor:
    if not layer.training:
        return DecoderLayer.forward(layer, x, *others)
    if torch.compiler.is_compiling():
        return _checkpointed(layer, x, *others, preserve_rng_state=False)
    run = _RecomputedForward(lambda: DecoderLayer.forward(layer, x, *others), x)
    with saved_tensors_hooks(run.pack, run.unpack):
        return DecoderLayer.forward(layer, x, *others)


def _recomputed_dropout(layer: DecoderLayer, x: Tensor, *others: Any) -> Tensor:
    if not layer.training:
        return DecoderLayer.forward(layer, x, *others)
    return _checkpointed(layer, x, *others, preserve_rng_state=True)


def _checkpointed(layer: DecoderLayer, *others: Any, preserve_rng_state: bool) -> Tensor:
    y: Tensor = checkpoint(
        DecoderLayer.forward, layer, *others, use_reentrant=False, preserve_rng_state=preserve_rng_state
    )
    return y


class _Enough(Exception):  # noqa: N818 - no error: it ends early
    """The last tensor that the backward pass needs has been computed again."""


class _RecomputedForward:
    """One forward pass of a layer, and what its backward pass asks for.

    torch's `checkpoint` does the same in more general cases, for several times the Python at every tensor: on a fast
    GPU that would take longer than the layer. Small tensors are kept: so what is computed again often ends before the
    layer's last product, whose result nothing needs.

    Args:
        forward: computes the layer.
        x: its input.
    """

    def __init__(self, forward: Callable[[], Any], x: Tensor) -> None:
        self._forward = forward
        self._small = x.nbytes // SMALL
        self._device = x.device.type
        self._dtype = torch.get_autocast_dtype(self._device) if torch.is_autocast_enabled(self._device) else None
        self._packed = 0
        self._again: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor | int:
        """Autograd's replacement of a tensor: a small one itself, of others the number."""
        if self._is_small(tensor):
            return tensor.detach()  # of a result of its own, autograd would keep itself alive
        self._packed += 1
        return self._packed - 1

    def unpack(self, kept: Tensor | int) -> Tensor:
        """The tensor, of which no reference stays here."""
        if isinstance(kept, Tensor):
            return kept
        if kept not in self._again:
            self._compute()
        return self._again.pop(kept)

    def _is_small(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().nbytes() <= self._small

    def _compute(self) -> None:
        found: list[Tensor] = []

        def pack(tensor: Tensor) -> None:
            if self._is_small(tensor):
                return
            found.append(tensor.detach())
            if len(found) == self._packed:
                raise _Enough

        # The backward pass runs without the forward pass's autocast, and without gradients.
        rounded = torch.autocast(self._device, self._dtype, enabled=self._dtype is not None)
        try:
            with saved_tensors_hooks(pack, _never), torch.enable_grad(), rounded:
                self._forward()
        except _Enough:
            pass
        self._again = dict(enumerate(found))


def _never(nothing: None) -> Tensor:
    raise AssertionError("what was computed again is not differentiated itself")
