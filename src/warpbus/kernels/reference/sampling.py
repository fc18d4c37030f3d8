"""Choosing tokens from scores, in plain PyTorch: by sorting."""

import torch
from torch import Tensor


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The index of each row's best score, the lowest among equals, and that score in float32."""
    tokens = logits.argmax(dim=-1)
    return tokens, logits.gather(-1, tokens[:, None])[:, 0].float()


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Each row's drawn token and its best score: the inverse of the cumulated probabilities, likeliest first."""
    ordered, tokens = logits.float().sort(dim=-1, descending=True, stable=True)
    vocabulary = ordered.shape[-1]
    kept = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary)
    outside = torch.arange(vocabulary, device=logits.device) >= kept[:, None]
    # At an infinite temperature all scores are 0 but those of -inf.
    scaled = ordered / temperature.nan_to_num(nan=torch.inf, posinf=torch.inf)[:, None]
    scaled.masked_fill_(outside | (ordered == -torch.inf), -torch.inf)
    # The first has the largest, which makes them weights of 1 and less.
    scaled.masked_fill_((scaled - scaled[:, :1]).exp() < min_p[:, None].clamp(max=1), -torch.inf)
    probabilities = scaled.softmax(-1)
    cumulated = probabilities.cumsum(-1)
    # A token stays while those before it have not yet reached top_p: the first always does.
    allowed = (cumulated - probabilities < top_p[:, None]) & (probabilities > 0)
    allowed[:, 0] = True
    last = allowed.sum(-1, keepdim=True) - 1
    chosen = (cumulated <= uniform[:, None] * cumulated.gather(-1, last)).sum(-1, keepdim=True)
    return tokens.gather(-1, torch.minimum(chosen, last))[:, 0], ordered[:, 0].contiguous()
