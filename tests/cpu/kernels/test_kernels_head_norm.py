"""`head_norm` on the CPU: each head of queries and keys alone, values as they are; what is refused."""

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import TensorError
from warpbus.kernels.ops.head_norm import head_norm
from warpbus.kernels.ops.norm import rms_norm

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 3, 12), (8, 1, 64)])
def test_each_head_is_normed_alone(heads, kv_heads, head_dim, dtype):
    torch.manual_seed(0)
    qkv = torch.randn(2, 3, (heads + 2 * kv_heads) * head_dim).to(dtype)
    q_weight, k_weight = torch.randn(2, head_dim).to(dtype)
    q, k, v = (
        part.unflatten(-1, (-1, head_dim))
        for part in qkv.clone().split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
    )
    head_norm(qkv, q_weight, k_weight, heads, EPS)
    expected = torch.cat([rms_norm(q, q_weight, EPS), rms_norm(k, k_weight, EPS), v], dim=-2)
    assert torch.equal(qkv, expected.flatten(-2))


def test_the_operator_is_one_of_pytorch():
    qkv, weights = torch.randn(3, 8 * 16).half(), torch.randn(2, 16).half()
    opcheck(torch.ops.warpbus.head_norm.default, (qkv, *weights, 4, EPS))


@pytest.mark.parametrize(
    ("shape", "weights", "heads", "expected"),
    [
        ((2, 120), (16, 16), 4, "expected .heads . 2 kv_heads. of 16 features, 4 heads, contiguous"),
        ((2, 64), (16, 16), 4, "expected .heads"),
        ((2, 128), (16, 32), 4, "k_weight has shape .32., expected .16."),
    ],
)
def test_refusals(shape, weights, heads, expected):
    q_weight, k_weight = (torch.ones(size).half() for size in weights)
    with pytest.raises(TensorError, match=expected):
        head_norm(torch.randn(shape).half(), q_weight, k_weight, heads, EPS)


def test_other_dtypes_are_refused():
    with pytest.raises(TensorError, match="float16"):
        head_norm(torch.randn(2, 128), torch.ones(16), torch.ones(16), 4, EPS)
