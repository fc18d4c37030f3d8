"""A mixture of experts (Shazeer et al., 2017): each token passes through the few experts that a router chooses.

The router is that of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2) for GLM-4.5 and its successors, and a softmax over
all experts for Qwen 3. It computes in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpbus.models.layer_spec import LayerSpec, MoESpec, RouterSpec
from warpbus.models.layers.mlp import MLP
from warpbus.models.layers.norm import Norm
from warpbus.models.layers.parallel import Parallel


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
            logits = F.linear(x.float(), self.weight.float())
        scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(-1)
        chosen = self._allowed(scores if self.bias is None else scores + self.bias.float()).topk(spec.top_k).indices
        weights = scores.gather(1, chosen)
        if spec.normalized:
            # The scores of a softmax cannot all be zero.
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if spec.scoring == "sigmoid" else 0.0))
        return Routing(chosen, weights * spec.scale, scores)

    def _allowed(self, scores: Tensor) -> Tensor:
        """The scores, -inf where an expert's group is not among the best groups."""
        spec = self.spec
        if spec.top_groups == spec.groups:
            return scores
        grouped = scores.unflatten(1, (spec.groups, -1))
        best = grouped.topk(2).values.sum(-1).topk(spec.top_groups).indices
        excluded = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
        return grouped.masked_fill(excluded[..., None], -torch.inf).flatten(1)


class MoE(nn.Module):
    """The sum of a token's experts, each times its weight, and of the shared expert.

    Attributes:
        router: chooses the experts.
        experts: the routed experts.
        shared: the shared expert, or None.
        output: what the sum passes through: the identity, or with tensor parallelism the all-reduce of the processes'
            partial sums.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        assert isinstance(spec.mlp, MoESpec)
        self.router = Router(spec.mlp.router, spec.hidden_size)
        self.experts = nn.ModuleList(
            MLP(*map(spec.matrix, (f"mlp.experts.{index}.gate_up", f"mlp.experts.{index}.down")), gated=True)
            for index in range(spec.mlp.router.experts)
        )
        shared = spec.mlp.shared is not None
        names = ("mlp.shared.gate_up", "mlp.shared.down")
        self.shared = MLP(*map(spec.matrix, names), gated=True) if shared else None
        self.output: nn.Module = nn.Identity()

    def forward(self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        """The output `[..., hidden]`, plus `residual` if there is one."""
        x = x if norm is None else norm(x)
        rows = x.flatten(0, -2)
        total = torch.zeros_like(rows)
        # While experts are trained, all of them get a gradient in every process, which data parallelism relies on.
        trained = torch.is_grad_enabled() and self.router.weight.requires_grad
        for expert, tokens, weights in self.router(rows).by_expert(idle=trained):
            y = self.experts[expert](rows[tokens])
            total.index_add_(0, tokens, (y * weights[:, None]).to(total.dtype))
        if self.shared is not None:
            total = total + self.shared(rows)
        total = total.view_as(x)
        if isinstance(self.output, Parallel):
            return self.output.join(total, residual)
        return total if residual is None else residual + total
