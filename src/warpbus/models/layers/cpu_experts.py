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
        gate_up, down: of the experts in `numbers`.
        numbers: of the experts that are here; tokens skip all others.
    """

    def __init__(self, gate_up: CpuExperts, down: CpuExperts, numbers: range) -> None:
        super().__init__()
        self.numbers = numbers
        self._stacked = {"gate_up": gate_up, "down": down}
        for name, stacked in self._stacked.items():
            for part in ("codes", "scales", "zeros"):
                self.register_buffer(f"{name}_{part}", getattr(stacked.weights, part))

    @classmethod
    def of(cls, experts: Iterable[nn.Module], numbers: range) -> "CpuStackedExperts | None":
        """Copy the matrices of the experts `numbers` behind each other.

        None if they are not packed for the kernel, or not alike.
        """
        pairs = [_packed(each) for each in experts]
        packed = [pair for pair in pairs if pair is not None]
        if len(packed) < len(pairs) or len({_kind(pair) for pair in packed}) != 1 or not fuses_gates(packed[0][0]):
            return None
        gate_up, down = (CpuExperts.stack([pair[at] for pair in packed]) for at in range(2))
        return cls(gate_up, down, numbers)

    def matrices(self, name: str) -> CpuExperts:
        """The matrices "gate_up" or "down" of all experts that are here."""
        stacked = self._stacked[name]
        codes, scales, zeros = (getattr(self, f"{name}_{part}") for part in ("codes", "scales", "zeros"))
        weights = stacked.weights
        return CpuExperts(CpuCodes(codes, scales, zeros, weights.scheme, weights.shape), stacked.count)

    def expert(self, number: int, x: Tensor) -> Tensor:
        """The output `[n, hidden]` of one expert for x `[n, hidden]`; it can be differentiated by x."""
        place = self.numbers.index(number)
        gate, up = frozen_linear(x, self.matrices("gate_up").expert(place), None).chunk(2, dim=-1)
        return frozen_linear(F.silu(gate) * up, self.matrices("down").expert(place), None)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """The sum of each token's experts that are here and of `residual`; see `cpu_moe_mlp`."""
        places = experts - self.numbers.start
        places = places.where((places >= 0) & (places < len(self.numbers)), -1)
        return cpu_moe_mlp(x, places, weights, self.matrices("gate_up"), self.matrices("down"), residual=residual)


def _packed(expert: nn.Module) -> tuple[CpuCodes, CpuCodes] | None:
    """The matrices gate_up and down of an expert, if both are packed for the kernel and nothing is added to them."""
    forms = [
        linear.form if isinstance(linear, QuantizedLinear) and linear.bias is None else None
        for linear in (expert.get_submodule("gate_up"), expert.get_submodule("down"))
    ]
    gate_up, down = forms
    return (gate_up, down) if isinstance(gate_up, CpuCodes) and isinstance(down, CpuCodes) else None


def _kind(pair: tuple[CpuCodes, CpuCodes]) -> tuple[tuple[tuple[int, int], str, torch.dtype], ...]:
    """The common properties of stacked experts."""
    return tuple((each.shape, str(each.scheme), each.scales.dtype) for each in pair)
