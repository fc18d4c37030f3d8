"""Experts on a CPU, arranged for the kernel that computes a layer's experts in one call."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpbus.kernels.ops.cpu_codes import CpuCodes, fuses_gates
from warpbus.kernels.ops.cpu_experts import CpuExperts, cpu_moe_mlp
from warpbus.models.layers.frozen import frozen_linear
from warpbus.models.layers.linear import QuantizedLinear


class CpuStackedExperts(nn.Module):
    """The routed experts of a layer as one tensor of each kind: quantized, with activations in 8 bits.

    Args:
        gate_up, down: of all experts.
    """

    def __init__(self, gate_up: CpuExperts, down: CpuExperts) -> None:
        super().__init__()
        self._stacked = {"gate_up": gate_up, "down": down}
        for name, stacked in self._stacked.items():
            for part in ("codes", "scales", "zeros"):
                self.register_buffer(f"{name}_{part}", getattr(stacked.weights, part))

    @classmethod
    def of(cls, experts: Iterable[nn.Module]) -> "CpuStackedExperts | None":
        """Copy the matrices of experts behind each other; None if they are not packed for the kernel, or not alike."""
        pairs = [_packed(each) for each in experts]
        packed = [pair for pair in pairs if pair is not None]
        if len(packed) < len(pairs) or len({_kind(pair) for pair in packed}) != 1 or not fuses_gates(packed[0][0]):
            return None
        return cls(*(CpuExperts.stack([pair[at] for pair in packed]) for at in range(2)))

    def matrices(self, name: str) -> CpuExperts:
        """The matrices "gate_up" or "down" of all experts."""
        stacked = self._stacked[name]
        codes, scales, zeros = (getattr(self, f"{name}_{part}") for part in ("codes", "scales", "zeros"))
        weights = stacked.weights
        return CpuExperts(CpuCodes(codes, scales, zeros, weights.scheme, weights.shape), stacked.count)

    def expert(self, number: int, x: Tensor) -> Tensor:
        """The output `[n, hidden]` of one expert for x `[n, hidden]`; it can be differentiated by x."""
        gate, up = frozen_linear(x, self.matrices("gate_up").expert(number), None).chunk(2, dim=-1)
        return frozen_linear(F.silu(gate) * up, self.matrices("down").expert(number), None)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """The sum of each token's experts and of `residual`; see `cpu_moe_mlp`."""
        return cpu_moe_mlp(x, experts, weights, self.matrices("gate_up"), self.matrices("down"), residual=residual)


def _packed(expert: nn.Module) -> tuple[CpuCodes, CpuCodes] | None:
    """The matrices gate_up and down of an expert, if both are packed for the kernel and nothing is added to them."""
    forms = [
        linear.form if isinstance(linear, QuantizedLinear) and linear.bias is None else None
        for linear in (expert.get_submodule("gate_up"), expert.get_submodule("down"))
    ]
    gate_up, down = forms
    return (gate_up, down) if isinstance(gate_up, CpuCodes) and isinstance(down, CpuCodes) else None


def _kind(pair: tuple[CpuCodes, CpuCodes]) -> tuple[tuple[tuple[int, int], str, torch.dtype], ...]:
    """What experts that are stacked have in common."""
    return tuple((each.shape, str(each.scheme), each.scales.dtype) for each in pair)
