"""Random tokens with their experts, and the check of what these compute."""

import torch
from tile_errors import assert_close_everywhere
from torch.nn import functional as F


def normal(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


def check(out, expected):
    error = (out.double() - expected).norm() / expected.norm()
    assert torch.isfinite(out).all()
    assert error.item() <= 2 * torch.finfo(out.dtype).eps
    assert_close_everywhere(out, expected, 2 * torch.finfo(out.dtype).eps)


def slots_of(tokens, experts, top_k, shared):
    """Random experts, without repetition in a token, and weights; the shared one is the last."""
    scores = torch.rand(tokens, experts, device="cuda")
    scores[:, : experts // 3] += 0.5  # some experts get more tokens than others
    weights, chosen = scores.topk(top_k, dim=1)
    if shared:
        chosen, weights = F.pad(chosen, (1, 0), value=experts), F.pad(weights, (1, 0), value=1.0)
    return chosen.int().contiguous(), weights.float().contiguous()
