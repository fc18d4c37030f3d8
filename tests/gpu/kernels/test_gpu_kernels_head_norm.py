"""`head_norm` on a GPU: the bits of `rms_norm` of each head, values untouched."""

import pytest
import torch

from warpbus.kernels.ops.head_norm import head_norm
from warpbus.kernels.ops.norm import rms_norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 257])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(32, 4, 128), (96, 8, 128), (4, 4, 64), (5, 1, 256), (2, 1, 512), (3, 2, 72), (3, 1, 20)],
)
def test_bits_of_rms_norm(heads, kv_heads, head_dim, rows, dtype):
    torch.manual_seed(0)
    width = (heads + 2 * kv_heads) * head_dim
    qkv = (8 * torch.randn(rows, width, device="cuda")).to(dtype)
    q_weight, k_weight = torch.randn(2, head_dim, device="cuda").to(dtype)
    q, k, v = qkv.clone().unflatten(-1, (-1, head_dim)).split([heads, kv_heads, kv_heads], dim=1)
    head_norm(qkv, q_weight, k_weight, heads, EPS)
    normed = qkv.unflatten(-1, (-1, head_dim)).split([heads, kv_heads, kv_heads], dim=1)
    for found, x, weight in zip(normed, (q, k), (q_weight, k_weight), strict=False):
        exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * weight.double()
        torch.testing.assert_close(found.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        if head_dim % 8 == 0:
            assert torch.equal(found, rms_norm(x.contiguous(), weight, EPS))
    assert torch.equal(normed[2], v)
