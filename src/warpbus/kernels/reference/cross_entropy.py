"""The cross-entropy of rows of scores in plain PyTorch, and its gradient in their place."""

import torch
from torch import Tensor


def cross_entropy(scores: Tensor, targets: Tensor, differentiated: bool) -> Tensor:
    """`-log softmax(scores)[target]` of each row, and `softmax - onehot` in place of the scores."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    own = targets[:, None]
    likelihoods = torch.log_softmax(scores, -1, dtype=wide)
    chosen = likelihoods.gather(1, own)
    if differentiated:
        # It is rounded to 16 bits after the subtraction: before it, a likelihood near 1 would become 1, and what the
        # model nearly knows would teach it nothing.
        torch.exp(likelihoods, out=scores)
        scores.scatter_(1, own, torch.expm1(chosen).to(scores.dtype))
    return -chosen.squeeze(1)
