"""The indexer of sparse attention (DSA; DeepSeek-V3.2-Exp, 2025) over its paged cache of keys, in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.kernels.reference.attention import visible
from warpbus.kernels.reference.cache import gather, write
from warpbus.kernels.reference.rope import rotate

SCORE_COLUMNS = 4
"""Scores of a row are a multiple of so many."""


def index_rope_and_cache(
    q: Tensor, k: Tensor, table: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys; the keys are written into the cache. See `ops.dsa`."""
    angles = table.index_select(0, positions)
    turned = rotate(k[:, None], angles, interleaved)
    write(turned, slots, keys, None)
    return rotate(q, angles, interleaved).contiguous(), turned[:, 0].contiguous()


def index_scores(q: Tensor, weights: Tensor, positions: Tensor, blocks: Tensor, keys: Tensor, limit: int) -> Tensor:
    """The scores of each row's keys up to its position; -infinity past it. See `ops.dsa`."""
    columns = score_columns(limit)
    if len(q) == 0:
        return weights.new_empty(0, columns)
    named, seen, _ = visible(positions, blocks, keys.shape[2], limit)
    wide = gather(keys, None, named, q.dtype)[:, 0].float()
    products = torch.einsum("bhd,bsd->bhs", q.float(), wide).relu_()
    scores = torch.einsum("bhs,bh->bs", products, weights)
    return scores.masked_fill_(~seen, -torch.inf)[:, :columns].contiguous()


def index_select(scores: Tensor, positions: Tensor, blocks: Tensor, top_k: int, size: int) -> Tensor:
    """The slots of the best scored tokens, in the order of the tokens. See `ops.dsa`."""
    columns = torch.arange(scores.shape[1], device=scores.device)
    last = positions.long()[:, None]
    # A stable sort leaves equal scores in the order of their tokens; those past the position come last.
    order = scores.masked_fill(columns > last, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    places = torch.arange(top_k, device=scores.device)
    there = places <= last
    tokens = F.pad(order[:, :top_k], (0, max(0, top_k - order.shape[1])))
    tokens = torch.where(there, tokens, scores.shape[1]).sort(dim=1).values
    tokens = torch.where(there, tokens, 0)
    slots = blocks.gather(1, tokens // size).long() * size + tokens % size
    return torch.where(there, slots, 0).int()


def score_columns(limit: int) -> int:
    """Columns of the scores of rows of up to `limit` tokens."""
    return -(-limit // SCORE_COLUMNS) * SCORE_COLUMNS
