"""Load balancing of experts without an auxiliary loss (Wang et al., 2024, arXiv:2408.15664), as DeepSeek-V3 trains.

A router chooses experts by their scores plus a correction bias. After each optimizer step, the bias of every expert
that got fewer tokens than the mean rises by a fixed amount, and that of every expert that got more falls by it. Biases
have no gradient and are not part of the experts' weights, so balancing adds nothing to the loss.
"""

import torch
from torch import Tensor, nn

from warpbus.dist import Group
from warpbus.models import Decoder
from warpbus.models.layer_spec import FLOAT32_PARAMETERS
from warpbus.models.layers import CausalAttention, MoE, Routing


def correction_biases(model: nn.Module) -> dict[str, nn.Parameter]:
    """The correction biases of the routers, float32 `[experts]`, by name."""
    return {name: each for name, each in model.named_parameters() if name.endswith(FLOAT32_PARAMETERS)}


class ExpertBalance:
    """Counts the tokens of each expert in training, and balances them by the correction biases.

    Args:
        model: a mixture of experts in training; padding and validation are not counted.
        speed: the change of a bias per step.
        group: the processes, each with its own tokens and the same biases.
    """

    def __init__(self, model: Decoder, speed: float, group: Group) -> None:
        self.biases = correction_biases(model)
        self._speed, self._group = speed, group
        self._loads = [_ExpertLoad(layer, layer.mlp) for layer in model.layers if isinstance(layer.mlp, MoE)]

    @torch.no_grad()
    def update(self) -> float:
        """Change the biases by the tokens counted since the last call; every process calls it.

        Returns:
            the tokens of the busiest expert divided by the mean, of the layer where that is largest.
        """
        counts = self._group.sum(torch.cat([load.counts for load in self._loads]))
        largest = []
        for load, own in zip(self._loads, counts.split([len(load.counts) for load in self._loads]), strict=True):
            mean = own.double().mean()
            largest.append(own.max() / mean)
            if load.bias is not None:
                load.bias.add_((mean - own).sign().to(load.bias.dtype), alpha=self._speed)
            load.counts.zero_()
        return float(torch.stack(largest).max())


class _ExpertLoad:
    """Counts the tokens of a layer's experts.

    Hooks of the layer run once per forward pass; those of the router run again when activations are recomputed.

    Attributes:
        counts: int64 `[experts]`.
        bias: the correction bias; None if the router has none.
    """

    def __init__(self, layer: nn.Module, moe: MoE) -> None:
        self.bias = moe.router.bias
        self.counts = torch.zeros(moe.router.spec.experts, dtype=torch.int64, device=moe.router.weight.device)
        self._experts: Tensor | None = None
        moe.router.register_forward_hook(self._remember)
        layer.register_forward_hook(self._count)

    def _remember(self, router: nn.Module, inputs: object, routing: Routing) -> None:
        self._experts = routing.experts

    def _count(self, layer: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        experts, self._experts = self._experts, None
        if experts is None or not layer.training:
            return
        context = inputs[-1]
        assert isinstance(context, CausalAttention)
        counted = torch.ones_like(experts)
        if context.documents_bt is not None:
            counted *= (context.documents_bt.flatten() >= 0)[:, None]
        self.counts.index_add_(0, experts.flatten(), counted.flatten())  # unlike bincount, it does not wait for a GPU
