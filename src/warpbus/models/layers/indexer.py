"""The indexer of sparse attention (DSA; DeepSeek-V3.2-Exp, 2025): which tokens each token attends to.

A few small heads score all earlier tokens, and attention sees only those with the best scores. Up to `top_k` tokens
that is all of them. Nothing here is quantized: an error would exclude tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from warpbus.models.latent_spec import IndexerSpec
from warpbus.models.layers.linear import LayerNorm, project

_SCORES_AT_ONCE = 2**24  # of all heads, in float32
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class IndexFeatures:
    """An indexer's features of tokens; the first features of queries and keys are rotary.

    Attributes:
        q: `[..., tokens, heads, head_dim]`.
        k: `[..., tokens, head_dim]`, shared by the heads.
        weights: of the heads in the sum of scores, float32 `[..., tokens, heads]`.
    """

    q: Tensor
    k: Tensor
    weights: Tensor


class Indexer(nn.Module):
    """The projections of an indexer.

    Args:
        spec: its sizes.
        query_rank: features of the latents of queries.
        hidden_size: features of the hidden states.
    """

    def __init__(self, spec: IndexerSpec, query_rank: int, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        self.q = nn.Linear(query_rank, spec.heads * spec.head_dim, bias=False)
        self.k = nn.Linear(hidden_size, spec.head_dim, bias=False)
        self.k_norm = LayerNorm(spec.head_dim, _NORM_EPS)
        self.weights = nn.Linear(hidden_size, spec.heads, bias=False)

    def forward(self, x: Tensor, query_latent: Tensor) -> IndexFeatures:
        """The features of tokens, not rotated, from normed hidden states and normed latents of queries."""
        q = project(self.q, query_latent).unflatten(-1, (self.spec.heads, -1))
        scale = (self.spec.heads * self.spec.head_dim) ** -0.5
        return IndexFeatures(q, self.k_norm(project(self.k, x)), project(self.weights, x).float() * scale)


def select_tokens(q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """The tokens that each token attends to: the best scored ones of those that it may see.

    The score of a key is the weighted sum of the heads' products, negative ones counting as 0. Of equal scores those of
    the first tokens are selected.

    Args:
        q: rotated queries `[batch, tokens, heads, head_dim]`.
        weights: float32 `[batch, tokens, heads]`.
        keys: rotated keys `[batch, keys, head_dim]`; those that no token may see may be anything, also NaN.
        visible: bool, broadcast to `[batch, tokens, keys]`.
        top_k: how many tokens are selected at most.

    Returns:
        bool `[batch, tokens, keys]`.
    """
    batch, tokens, heads, _ = q.shape
    visible = visible.expand(batch, tokens, keys.shape[1])
    if keys.shape[1] <= top_k:
        return visible
    wide = keys.float()
    selected = []
    at_once = max(1, _SCORES_AT_ONCE // (batch * heads * keys.shape[1]))
    for start in range(0, tokens, at_once):
        rows = slice(start, start + at_once)
        products = torch.einsum("bthd,bsd->bths", q[:, rows].float(), wide).relu_()
        scores = torch.einsum("bths,bth->bts", products, weights[:, rows])
        selected.append(_best(scores.masked_fill_(~visible[:, rows], -torch.inf), top_k))
    return torch.cat(selected, dim=1).logical_and_(visible)


def _best(scores: Tensor, count: int) -> Tensor:
    """The `count` best scores of the last axis; of equal ones the first, wherever the row is computed."""
    last = scores.topk(count, dim=-1).values[..., -1:]
    better, equal = scores > last, scores == last
    left = count - better.sum(-1, keepdim=True)
    return better | (equal & (equal.cumsum(-1, dtype=torch.int32) <= left))
