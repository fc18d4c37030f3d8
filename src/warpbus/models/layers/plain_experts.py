"""`PlainStackedExperts`: the unquantized experts of a layer as one tensor of each kind, for the kernels of a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpbus.kernels.ops.arguments import HALVES, gpu_has_kernels
from warpbus.kernels.ops.expert_rows import MOST_EXPERTS
from warpbus.kernels.ops.grouped_mlp import grouped_mlp

_NAMES = ("gate_up", "down")


class PlainStackedExperts(nn.Module):
    """The experts of a layer in 16 bits, on a GPU. They get no gradient.

    Args:
        gate_up, down: `[slots, 2 * ffn, hidden]` and `[slots, hidden, ffn]`: the routed experts `numbers` in order, and
            if there is one more slot, the shared expert.
        routed: how many experts are routed.
        numbers: of those that are here.

    Attributes:
        slots: int32 `[experts]`, the slot of each expert, a shared one last, -1 of an expert that is not here; None if
            all are here, where a slot is the expert's number.
        counts: None: nothing counts the tokens of these experts.
    """

    slots: Tensor | None
    counts: None = None

    def __init__(self, gate_up: Tensor, down: Tensor, routed: int, numbers: range) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)
        self.numbers = numbers
        self._absent = routed - len(numbers)
        table = None
        if self._absent:
            order = [numbers.index(number) if number in numbers else -1 for number in range(routed)]
            order += [len(numbers)] * self.has_shared
            table = torch.tensor(order, dtype=torch.int32, device=gate_up.device)
        self.register_buffer("slots", table)

    @classmethod
    def of(
        cls, experts: Sequence[nn.Module], shared: nn.Module | None, routed: int, numbers: range
    ) -> "PlainStackedExperts | None":
        """Copy the matrices of the experts `numbers` behind each other, and let the experts go.

        The linears of the experts lose their weights, so that at most one matrix of each expert is in memory twice.
        Those of a shared expert of the same kind become views.

        Returns:
            None if the kernels do not take them: they are quantized, not on a GPU, not in 16 bits or not alike.
        """
        kind = _kind(experts[0])
        if not kind or any(_kind(each) != kind for each in experts):
            return None
        every = [*experts, *([shared] if shared is not None and _kind(shared) == kind else [])]
        if len(every) > MOST_EXPERTS:
            return None
        gate_up, down = (_stack([each.get_submodule(name) for each in every]) for name in _NAMES)
        if len(every) > len(experts) and shared is not None:
            for name, stacked in zip(_NAMES, (gate_up, down), strict=True):
                shared.get_submodule(name).weight = nn.Parameter(stacked[-1], requires_grad=False)
        return cls(gate_up, down, routed, numbers)

    @property
    def has_shared(self) -> bool:
        """Whether the shared expert has the last slot."""
        return len(self.gate_up) > len(self.numbers)

    def expert(self, number: int, x: Tensor) -> Tensor:
        """The output `[n, hidden]` of one expert for x `[n, hidden]`; it can be differentiated by x."""
        slot = self.numbers.index(number)
        gate, up = F.linear(x, self.gate_up[slot]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[slot])

    def forward(self, x: Tensor, slots: Tensor, weights: Tensor, *, residual: Tensor | None, shared: bool) -> Tensor:
        """`residual` plus the sum of each token's experts that are here; see `grouped_mlp`.

        Args:
            shared: the first slot of each token is the shared expert. Not used: it is computed as any other.
        """
        return grouped_mlp(x, slots, weights, self.gate_up, self.down, residual=residual, absent=self._absent)


def is_plain(expert: nn.Module) -> bool:
    """Whether an expert's matrices are unquantized, without biases, and nothing is added to them."""
    linears = [expert.get_submodule(name) for name in _NAMES]
    return all(isinstance(linear, nn.Linear) and linear.bias is None for linear in linears)


def _kind(expert: nn.Module) -> tuple[object, ...]:
    """The common properties of stacked experts; empty if the kernels do not take them."""
    if not is_plain(expert):
        return ()
    weights = [expert.get_parameter(f"{name}.weight") for name in _NAMES]
    able = all(
        each.dtype in HALVES
        and not each.requires_grad
        and gpu_has_kernels(each.device)
        and not any(size % 8 for size in each.shape)
        for each in weights
    )
    return tuple((each.shape, each.dtype, each.device) for each in weights) if able else ()


def _stack(linears: Sequence[nn.Module]) -> Tensor:
    """The weights of some linears `[linears, rows, columns]`, which these let go."""
    stacked = torch.stack([linear.get_parameter("weight").data for linear in linears])
    for linear in linears:
        linear.register_parameter("weight", None)
    return stacked
