"""Reference of the kernels for mixtures of experts: in plain PyTorch, on any device."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.kernels.reference.norm import rms_norm
from warpbus.kernels.reference.w8a8 import quantize, scaled_gemm
from warpbus.qtensor import QTensor

Scoring = Literal["sigmoid", "softmax"]
Matrix = QTensor | Tensor | tuple[Tensor, Tensor]
"""The weight of an expert: quantized, in 16 bits, or 8-bit codes with the scales of their rows; then x is rounded."""


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` in float32: `[tokens, experts]`."""
    return F.linear(x.float(), weight.float())


def router_scores(logits: Tensor, scoring: Scoring) -> Tensor:
    """The score of each expert for each token, of the shape of the logits, float32."""
    return logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)


def choose_experts(
    scores: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    scoring: Scoring,
    normalized: bool,
    scale: float,
    groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor]:
    """The experts of each token, the best first, and their weights.

    Args:
        scores: float32 `[tokens, experts]`.
        bias: float32 `[experts]`: added to the scores for the choice, not for the weights.
        top_k, scoring, normalized, scale, groups, top_groups: see `RouterSpec` in models/layer_spec.py.

    Returns:
        int64 and float32 `[tokens, top_k]`.
    """
    keys = _within_groups(scores if bias is None else scores + bias.float(), groups, top_groups)
    chosen = keys.topk(top_k).indices
    weights = scores.gather(1, chosen)
    if normalized:
        # The scores of a softmax cannot all be zero.
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if scoring == "sigmoid" else 0.0))
    return chosen, weights * scale


def _within_groups(keys: Tensor, groups: int, top_groups: int) -> Tensor:
    """The keys, -inf where an expert's group is not among the best groups."""
    if top_groups == groups:
        return keys
    grouped = keys.unflatten(1, (groups, -1))
    best = grouped.topk(2).values.sum(-1).topk(top_groups).indices
    excluded = torch.ones(grouped.shape[:2], dtype=torch.bool, device=keys.device).scatter_(1, best, False)
    return grouped.masked_fill(excluded[..., None], -torch.inf).flatten(1)


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    top_k: int,
    scoring: Scoring,
    normalized: bool,
    scale: float,
    groups: int,
    top_groups: int,
    shared: bool,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.ops.moe_router.moe_route`: normed x, experts and weights."""
    normed = x if norm is None else rms_norm(x, norm, eps)
    scores = router_scores(router_logits(normed, weight), scoring)
    experts, weights = choose_experts(
        scores,
        bias,
        top_k=top_k,
        scoring=scoring,
        normalized=normalized,
        scale=scale,
        groups=groups,
        top_groups=top_groups,
    )
    if counts is not None:
        counts += torch.bincount(experts.flatten(), minlength=len(counts)).to(counts.dtype)
    if shared:
        experts = F.pad(experts, (1, 0), value=weight.shape[0])
        weights = F.pad(weights, (1, 0), value=1.0)
    if slots is not None:
        experts = slots[experts]
    return normed.clone() if norm is None else normed, experts.int(), weights


def moe_mlp(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Sequence[Matrix],
    down: Sequence[Matrix],
    residual: Tensor | None,
) -> Tensor:
    """`moe_mlp` and `grouped_mlp` in `kernels.ops`, expert by expert, in float32 but for the inputs of each product."""
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for number, (widening, back) in enumerate(zip(gate_up, down, strict=True)):
        tokens, slots = (experts == number).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        gate, up = _product(x[tokens], widening).chunk(2, dim=-1)
        inner = (F.silu(gate) * up).to(x.dtype)
        y = _product(inner, back)
        total.index_add_(0, tokens, y * weights[tokens, slots][:, None])
    return (total if residual is None else total + residual).to(x.dtype)


def _product(x: Tensor, weight: Matrix) -> Tensor:
    """`x @ weight.T` in float32."""
    if isinstance(weight, tuple):
        codes, scales = quantize(x, weight[0].dtype)
        return scaled_gemm(codes, scales, *weight, None, torch.float32)
    return F.linear(x.float(), weight.dequantize(torch.float32) if isinstance(weight, QTensor) else weight.float())
