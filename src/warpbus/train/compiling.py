"""`torch.compile` of a decoder's layers one by one: they share a graph, so that many take no longer than one."""

from collections.abc import Iterable
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from warpbus.models.layers import CausalAttention, MoE


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Have the layers of a `Decoder` compiled at their first step of training. Validations are computed without.

    Call it after `recompute_layers`. Hooks of a layer, such as those of FSDP2, stay outside of its graph, and so do
    experts: how many tokens each of them gets differs from step to step.
    """
    for layer in layers:
        _compile(layer)


def _compile(layer: nn.Module) -> None:
    for module in layer.modules():
        if isinstance(module, MoE):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    # A function, not a method: graphs are kept with its code, and the layer, whose weights are inputs, is an argument.
    function = cast(MethodType, layer.forward).__func__
    compiled = torch.compile(function)

    def forward(
        layer: nn.Module,
        x: Tensor,
        index: int,
        positions_bt: Tensor,
        angles: tuple[Tensor, Tensor],
        context: CausalAttention,
    ) -> Any:
        if not layer.training:
            return function(layer, x, index, positions_bt, angles, context)
        if not index and not x.requires_grad:
            # From a frozen embedding. Like the inputs of the other layers, it does not need a graph of its own.
            x.requires_grad_()
        return compiled(layer, x, 0, positions_bt, angles, context.of_layer(index, positions_bt))

    layer.forward = MethodType(forward, layer)
