"""`GroupedExperts`: experts in 16 bits, or with weights and activations of 8 bits, as one tensor of each kind."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpbus.kernels.ops.arguments import HALVES, gpu_has_kernels
from warpbus.kernels.ops.expert_rows import MOST_EXPERTS
from warpbus.kernels.ops.grouped_mlp import grouped_mlp
from warpbus.models.layers.frozen import frozen_linear
from warpbus.models.layers.linear import QuantizedLinear
from warpbus.qtensor import QTensor, Scheme

_NAMES = ("gate_up", "down")


@dataclass(frozen=True)
class _ExpertMatrix:
    """The weight of a linear layer that the kernels take.

    Attributes:
        values: `[n, k]`, in 16 bits or 8.
        scales: of 8 bits, float32 `[n, 1]`.
        scheme: of 8 bits.
        dtype: of the activations.
    """

    values: Tensor
    scales: Tensor | None
    scheme: Scheme | None
    dtype: torch.dtype

    @classmethod
    def of(cls, linear: nn.Module) -> "_ExpertMatrix | None":
        """None if there is a bias, or the weight is of another kind."""
        if isinstance(linear, nn.Linear) and linear.bias is None and not linear.weight.requires_grad:
            return cls(linear.weight.data, None, None, linear.weight.dtype)
        if isinstance(linear, QuantizedLinear) and linear.bias is None and linear.dtype is not None:
            form = linear.form
            if isinstance(form, QTensor) and form.holds_values:
                return cls(form.qweight, form.scales, form.scheme, linear.dtype)
        return None

    @property
    def kind(self) -> tuple[object, ...]:
        """The common properties of stacked matrices; empty if the kernels do not take them."""
        step = 8 if self.scales is None else 16
        device = self.values.device
        if self.dtype not in HALVES or any(size % step for size in self.values.shape) or not gpu_has_kernels(device):
            return ()
        return self.values.shape, self.values.dtype, self.dtype, device


class GroupedExperts(nn.Module):
    """The experts of a layer on a GPU, for `grouped_mlp`. They get no gradient.

    Args:
        gate_up, down: `[slots, 2 * ffn, hidden]` and `[slots, hidden, ffn]`: the routed experts `numbers` in order, and
            if there is one more slot, the shared expert.
        scales: of their rows, float32 `[slots, 2 * ffn]` and `[slots, hidden]`, if they have 8 bits.
        scheme: of 8 bits.
        routed: how many experts are routed.
        numbers: of those that are here.

    Attributes:
        slots: int32 `[experts]`, the slot of each expert, a shared one last, -1 of an expert that is not here; None if
            all are here, where a slot is the expert's number.
        counts: None: nothing counts the tokens of these experts.
    """

    slots: Tensor | None
    counts: None = None
    gate_up: Tensor
    down: Tensor
    gate_up_scales: Tensor | None
    down_scales: Tensor | None

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        scales: tuple[Tensor, Tensor] | None,
        scheme: Scheme | None,
        *,
        routed: int,
        numbers: range,
    ) -> None:
        super().__init__()
        for at, (name, values) in enumerate(zip(_NAMES, (gate_up, down), strict=True)):
            if scales is None:
                self.register_parameter(name, nn.Parameter(values, requires_grad=False))
            else:
                self.register_buffer(name, values)
            self.register_buffer(f"{name}_scales", None if scales is None else scales[at])
        self.numbers = numbers
        self._scheme = scheme
        self._absent = routed - len(numbers)
        table = None
        if self._absent:
            order = [numbers.index(number) if number in numbers else -1 for number in range(routed)]
            order += [len(numbers)] * self.has_shared
            table = torch.tensor(order, dtype=torch.int32, device=gate_up.device)
        self.register_buffer("slots", table)

    @classmethod
    def of(
        cls, experts: Sequence[nn.Module], shared: nn.Module | None, *, routed: int, numbers: range
    ) -> "GroupedExperts | None":
        """Copy the matrices of the experts `numbers` behind each other. Those of a shared expert of the same kind
        follow, and it gets views of them.

        Returns:
            None if the kernels do not take the experts: packed, on a CPU, not for 16-bit activations, or not alike.
        """
        pairs = [pair for pair in map(_pair, experts) if pair is not None]
        kind = _kind(pairs[0]) if len(pairs) == len(experts) else ()
        if not kind or any(_kind(pair) != kind for pair in pairs):
            return None
        own = None if shared is None else _pair(shared)
        if own is not None and _kind(own) == kind:
            pairs.append(own)
        if len(pairs) > MOST_EXPERTS:
            return None
        gate_up, down = (torch.stack([pair[at].values for pair in pairs]) for at in range(2))
        scheme, scales = pairs[0][0].scheme, None
        if scheme is not None:
            scales = _stacked_scales([pair[0] for pair in pairs]), _stacked_scales([pair[1] for pair in pairs])
        made = cls(gate_up, down, scales, scheme, routed=routed, numbers=numbers)
        if made.has_shared and shared is not None and own is not None:
            for name, matrix in zip(_NAMES, own, strict=True):
                view = made._weight(name, len(experts))
                if isinstance(view, QTensor):
                    shared.add_module(name, QuantizedLinear(view, dtype=matrix.dtype))
                else:
                    shared.get_submodule(name).weight = nn.Parameter(view, requires_grad=False)
        return made

    @property
    def has_shared(self) -> bool:
        """Whether the shared expert has the last slot."""
        return len(self.gate_up) > len(self.numbers)

    def expert(self, number: int, x: Tensor) -> Tensor:
        """The output `[n, hidden]` of one expert for x `[n, hidden]`; it can be differentiated by x."""
        slot = self.numbers.index(number)
        gate, up = _linear(x, self._weight("gate_up", slot)).chunk(2, dim=-1)
        return _linear(F.silu(gate) * up, self._weight("down", slot))

    def forward(self, x: Tensor, slots: Tensor, weights: Tensor, *, residual: Tensor | None, shared: bool) -> Tensor:
        """`residual` plus the sum of each token's experts that are here; see `grouped_mlp`.

        Args:
            shared: the first slot of each token is the shared expert. Not used: it is computed as any other.
        """
        both = self.gate_up_scales, self.down_scales
        scales = None if both[0] is None or both[1] is None else (both[0], both[1])
        return grouped_mlp(
            x, slots, weights, self.gate_up, self.down, scales=scales, residual=residual, absent=self._absent
        )

    def _weight(self, name: str, slot: int) -> Tensor | QTensor:
        values, scales = getattr(self, name)[slot], getattr(self, f"{name}_scales")
        if scales is None or self._scheme is None:
            return values
        return QTensor(self._scheme, values, scales[slot].view(-1, 1), None, (values.shape[0], values.shape[1]))


def is_groupable(expert: nn.Module) -> bool:
    """Whether the matrices of an expert are of a kind that `GroupedExperts` holds, and nothing is added to them."""
    return _pair(expert) is not None


def _pair(expert: nn.Module) -> tuple[_ExpertMatrix, _ExpertMatrix] | None:
    gate_up, down = (_ExpertMatrix.of(expert.get_submodule(name)) for name in _NAMES)
    return None if gate_up is None or down is None else (gate_up, down)


def _stacked_scales(matrices: Sequence[_ExpertMatrix]) -> Tensor:
    return torch.stack([each.scales.view(-1).float() for each in matrices if each.scales is not None])


def _kind(pair: tuple[_ExpertMatrix, _ExpertMatrix]) -> tuple[object, ...]:
    """The common properties of stacked experts; empty if the kernels do not take them."""
    if not all(each.kind for each in pair) or pair[0].values.dtype != pair[1].values.dtype:
        return ()
    return pair[0].kind + pair[1].kind


def _linear(x: Tensor, weight: Tensor | QTensor) -> Tensor:
    return frozen_linear(x, weight, None) if isinstance(weight, QTensor) else F.linear(x, weight)
