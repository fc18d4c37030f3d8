"""Gradient checkpointing (Chen et al., 2016): a layer's activations are computed again in the backward pass."""

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from warpbus.errors import UsageError
from warpbus.models.decoder import Decoder


def recompute_layers(model: Decoder, every: int = 1) -> None:
    """Keep of every `every`-th layer, from the first on, its input alone while training.

    Names of parameters and their values stay as they are, and the results too, bit for bit.

    Raises:
        UsageError: if `every` is below 1.
    """
    if every < 1:
        raise UsageError(f"recompute every {every} layers: expected at least 1")
    for layer in list(model.layers)[::every]:
        _recompute(layer)


def _recompute(layer: nn.Module) -> None:
    forward = layer.forward

    def recomputed(*arguments: Any, **named: Any) -> Any:
        if not layer.training:
            return forward(*arguments, **named)
        return checkpoint(forward, *arguments, use_reentrant=False, **named)

    layer.forward = recomputed
