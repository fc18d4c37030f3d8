"""A mixture of experts (Shazeer et al., 2017): each token passes through the few experts that a router chooses.

The router is that of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2) for GLM-4.5 and its successors, and a softmax over
all experts for Qwen 3. It computes in float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpbus.errors import UsageError
from warpbus.kernels.ops.arguments import has_kernels
from warpbus.kernels.ops.moe_router import moe_route
from warpbus.kernels.ops.packed import PackedWeight
from warpbus.kernels.ops.packed_experts import PackedExperts
from warpbus.kernels.ops.wna16_chain import RoutedExperts
from warpbus.kernels.reference.moe import choose_experts, router_logits, router_scores
from warpbus.models.layer_spec import LayerSpec, MoESpec, RouterSpec
from warpbus.models.layers.cpu_experts import CpuStackedExperts
from warpbus.models.layers.grouped_experts import GroupedExperts, is_groupable
from warpbus.models.layers.linear import MLP, LayerNorm, Norm, QuantizedLinear, RMSNorm
from warpbus.models.layers.parallel import Parallel
from warpbus.models.layers.stacked_experts import StackedExperts

ALIKE = "all of a layer in one scheme of w2a16 to w8a16, in 16 bits on a GPU"
"""The requirements of the kernels on experts, in the words of messages."""


@dataclass(frozen=True)
class Routing:
    """The experts of some tokens.

    Attributes:
        experts: int64 `[tokens, top_k]`.
        weights: of the experts' outputs, float32 `[tokens, top_k]`.
        scores: of all experts, float32 `[tokens, experts]`, without the correction of the choice.
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor

    def by_expert(self, *, idle: bool = False) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each expert that has tokens: its number, its tokens, int64 `[n]`, and their weights, float32 `[n]`.

        Waits for the GPU.

        Args:
            idle: also the experts without tokens, with `n = 0`.
        """
        order = self.experts.flatten().argsort(stable=True)
        tokens, weights = order // self.experts.shape[1], self.weights.flatten()[order]
        counts = torch.bincount(self.experts.flatten(), minlength=self.scores.shape[1]).tolist()
        for expert, own in enumerate(zip(tokens.split(counts), weights.split(counts), strict=True)):
            if counts[expert] or idle:
                yield expert, *own


class Router(nn.Module):
    """Chooses each token's experts; see `RouterSpec`."""

    def __init__(self, spec: RouterSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(spec.experts)) if spec.bias else None

    def forward(self, x: Tensor) -> Routing:
        """The routing of x `[tokens, hidden]`."""
        spec = self.spec
        # Training in 16 bits runs under autocast, which would round the logits.
        with torch.autocast(x.device.type, enabled=False):
            scores = router_scores(router_logits(x, self.weight), spec.scoring)
        chosen, weights = choose_experts(
            scores,
            self.bias,
            top_k=spec.top_k,
            scoring=spec.scoring,
            normalized=spec.normalized,
            scale=spec.scale,
            groups=spec.groups,
            top_groups=spec.top_groups,
        )
        return Routing(chosen, weights, scores)

    def slots(
        self, x: Tensor, norm: Norm | None, *, shared: bool, slots: Tensor | None = None, counts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The normed x, the experts and their weights by the kernel; see `moe_route`. Does not wait for the GPU."""
        if isinstance(norm, LayerNorm):
            x, norm = norm(x), None
        spec = self.spec
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return moe_route(
            x,
            self.weight,
            self.bias,
            norm=weight,
            eps=eps,
            top_k=spec.top_k,
            scoring=spec.scoring,
            normalized=spec.normalized,
            scale=spec.scale,
            groups=spec.groups,
            top_groups=spec.top_groups,
            shared=shared,
            slots=slots,
            counts=counts,
        )


class MoE(nn.Module):
    """The sum of a token's experts, each times its weight, and of the shared expert.

    Attributes:
        router: chooses the experts.
        numbers: of the routed experts that this process has: all, or with expert parallelism some. Those of the other
            processes add nothing here.
        experts: these experts by their numbers; where kernels compute them together, and all are quantized alike,
            `StackedExperts` on a GPU and `CpuStackedExperts` on a CPU; in 16 bits or w8a8 `GroupedExperts` on a GPU.
        shared: the shared expert, or None. Its matrices may be views of the stacked ones.
        output: the module that the sum passes through: the identity, or with tensor or expert parallelism the
            all-reduce of the processes' partial sums.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        assert isinstance(spec.mlp, MoESpec)
        self.router = Router(spec.mlp.router, spec.hidden_size)
        self.numbers = spec.mlp.numbers
        self.experts: nn.ModuleDict | StackedExperts | GroupedExperts | CpuStackedExperts = nn.ModuleDict(
            {
                str(index): MLP(
                    *map(spec.matrix, (f"mlp.experts.{index}.gate_up", f"mlp.experts.{index}.down")), gated=True
                )
                for index in self.numbers
            }
        )
        shared = spec.mlp.shared is not None
        names = ("mlp.shared.gate_up", "mlp.shared.down")
        self.shared = MLP(*map(spec.matrix, names), gated=True) if shared else None
        self.output: nn.Module = nn.Identity()

    @property
    def stacked(self) -> bool:
        """Whether the experts are arranged for the kernels."""
        return isinstance(self.experts, StackedExperts | GroupedExperts)

    def forward(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """The output `[..., hidden]`, plus `residual` if there is one."""
        if isinstance(self.experts, StackedExperts | GroupedExperts) and has_kernels(x):
            return self._by_kernels(self.experts, x, norm, residual)
        x = x if norm is None else norm(x)
        rows = x.flatten(0, -2)
        if isinstance(self.experts, CpuStackedExperts) and not torch.is_grad_enabled():
            return self._on_cpu(self.experts, x, residual)
        total = torch.zeros_like(rows)
        # While experts are trained, all of them get a gradient in every process, which data parallelism relies on.
        trained = torch.is_grad_enabled() and self.router.weight.requires_grad
        for expert, tokens, weights in self.router(rows).by_expert(idle=trained):
            if expert not in self.numbers:
                continue
            y = self._expert(expert, rows[tokens])
            total.index_add_(0, tokens, (y * weights[:, None]).to(total.dtype))
        if self.shared is not None:
            total = total + self.shared(rows)
        return self._written(total.view_as(x), residual)

    def as_element(self, norm: Norm) -> RoutedExperts | None:
        """Router, experts and shared expert as an element of a chain; None if it does not compute all of them."""
        experts, spec = self.experts, self.router.spec
        if not isinstance(experts, StackedExperts) or not isinstance(norm, RMSNorm):
            return None
        if self.shared is not None and not (experts.has_shared and _is_bare(self.shared)):
            return None
        if experts.slots is not None or not isinstance(self.output, nn.Identity):
            return None
        return RoutedExperts(
            self.router.weight,
            self.router.bias,
            norm.weight,
            norm.eps,
            experts.matrices("gate_up"),
            experts.matrices("down"),
            top_k=spec.top_k,
            scoring=spec.scoring,
            normalized=spec.normalized,
            scale=spec.scale,
            groups=spec.groups,
            top_groups=spec.top_groups,
            shared=self.shared is not None,
        )

    def stack(self, offloaded: int = 0) -> None:
        """Arrange the experts for the kernels, if they are packed for them and all alike.

        Args:
            offloaded: how many routed experts, the last ones, lie in pinned memory of the host.

        Raises:
            UsageError: experts are to be offloaded that are not packed, or not alike.
            DeviceError: there is not so much memory to pin.
        """
        assert isinstance(self.experts, nn.ModuleDict)
        every = list(self.experts.values())
        on_cpu = CpuStackedExperts.of(every, self.numbers)
        if on_cpu is not None:
            self.experts = on_cpu
            return
        grouped = (
            None
            if offloaded
            else GroupedExperts.of(every, self.shared, routed=self.router.spec.experts, numbers=self.numbers)
        )
        if grouped is not None:
            self.experts = grouped
            return
        packed = [_packed(each) for each in every]
        if not _kind(packed[0]) or any(_kind(pair) != _kind(packed[0]) for pair in packed):
            if offloaded:
                raise UsageError(f"{offloaded} experts of a layer cannot be offloaded: quantize them, {ALIKE}")
            return
        own = None if self.shared is None else _packed(self.shared)
        joined = own is not None and _kind(own) == _kind(packed[0])
        resident = len(every) - offloaded
        pairs = [pair for pair in (*packed[:resident], own if joined else None) if pair is not None]
        far = [pair for pair in packed[resident:] if pair is not None]
        gate_up, down = (
            PackedExperts.stack([pair[at] for pair in pairs], [pair[at] for pair in far]) for at in range(2)
        )
        self.experts = StackedExperts(gate_up, down, self.router.spec.experts, self.numbers)
        if joined and self.shared is not None:
            for name, stacked in (("gate_up", gate_up), ("down", down)):
                view = stacked.expert(resident)
                self.shared.add_module(name, QuantizedLinear(view, dtype=view.dtype))

    def _by_kernels(
        self, experts: StackedExperts | GroupedExperts, x: Tensor, norm: Norm | None, residual: Tensor | None
    ) -> Tensor:
        # An adapter on the shared expert is computed with that expert alone.
        joined = experts.has_shared and self.shared is not None and _is_bare(self.shared)
        table = None if experts.slots is None else experts.slots[: self.router.spec.experts + joined]
        rows, slots, weights = self.router.slots(
            x.flatten(0, -2), norm, shared=joined, slots=table, counts=experts.counts
        )
        # With several processes the residual is added to the sum over the processes.
        later = residual if isinstance(self.output, Parallel) else None
        before = None if residual is None or later is not None else residual.flatten(0, -2)
        if self.shared is not None and not joined:
            before = self.shared(rows, residual=before)
        total: Tensor = experts(rows, slots, weights, residual=before, shared=joined)
        return self._written(total.view_as(x), later)

    def _on_cpu(self, experts: CpuStackedExperts, x: Tensor, residual: Tensor | None) -> Tensor:
        rows = x.flatten(0, -2)
        routing = self.router(rows)
        # With several processes the residual is added to the sum over the processes.
        later = residual if isinstance(self.output, Parallel) else None
        before = None if residual is None or later is not None else residual.flatten(0, -2)
        if self.shared is not None:
            before = self.shared(rows, residual=before)
        return self._written(experts(rows, routing.experts, routing.weights, before).view_as(x), later)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        if isinstance(self.experts, nn.ModuleDict):
            y: Tensor = self.experts[str(number)](x)
            return y
        return self.experts.expert(number, x)

    def _written(self, total: Tensor, residual: Tensor | None) -> Tensor:
        if isinstance(self.output, Parallel):
            return self.output.join(total, residual)
        return total if residual is None else residual + total


_PackedPair = tuple[PackedWeight, PackedWeight]


def _is_bare(expert: nn.Module) -> bool:
    """Whether nothing, such as an adapter, is added to the matrices of an expert that the kernels take."""
    return _packed(expert) is not None or is_groupable(expert)


def _packed(expert: nn.Module) -> _PackedPair | None:
    """The matrices gate_up and down of an expert, if both are packed for the kernels and nothing is added to them."""
    linears = (expert.get_submodule("gate_up"), expert.get_submodule("down"))
    gate_up, down = (linear.form if isinstance(linear, QuantizedLinear) else None for linear in linears)
    return (gate_up, down) if isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight) else None


def _kind(pair: _PackedPair | None) -> Sequence[object]:
    """The common properties of stacked experts; None if the kernels do not take them."""
    if pair is None or any(size % 8 for each in pair for size in each.shape):
        return ()
    return [(each.shape, each.scheme, each.dtype) for each in pair]
