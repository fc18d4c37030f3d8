"""Random tokens and experts, and the check of what these compute."""

import torch
from tile_errors import assert_close_everywhere
from torch.nn import functional as F

from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.packed_experts import PackedExperts
from warpbus.qtensor import QTensor, Scheme


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


def random_experts(scheme, experts, n, k, dtype):
    """Quantized matrices `[n, k]`, in groups that divide k."""
    scheme = Scheme.parse(scheme).fitting(k)
    shape = n, scheme.groups(k)
    parts = []
    for _ in range(experts):
        codes = torch.randint(0, scheme.max_code + 1, (n, k), dtype=torch.uint8, device="cuda")
        zeros = torch.randint(0, scheme.max_code + 1, shape, dtype=torch.uint8, device="cuda")
        scales = ((torch.rand(shape, device="cuda") + 0.5) / (scheme.max_code * k**0.5)).to(dtype)
        parts.append(pack(QTensor.from_codes(scheme, codes, scales, None if scheme.symmetric else zeros), dtype))
    return PackedExperts.stack(parts)
