"""merge_attention: the reference against float64, and what is refused."""

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import TensorError
from warpbus.kernels.ops.attention_merge import merge_attention


def parts(tokens=7, heads=3, width=16, dtype=torch.bfloat16, seed=0):
    draw = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(tokens, heads, width, generator=draw).to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(heads, tokens, generator=draw) * 20 for _ in range(2))
    return {"a": a, "b": b, "lse_a": lse_a, "lse_b": lse_b}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_parts_of_attention_are_attention_to_all_keys(dtype):
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, 2, 16, generator=draw, dtype=torch.float64) for n in (5, 40, 40))
    scores = torch.einsum("qhd,khd->hqk", q, k)

    def attended(of):
        return torch.einsum("hqk,khd->qhd", scores[..., of].softmax(-1), v[of]).to(dtype)

    first, rest = slice(0, 23), slice(23, 40)
    sums = [scores[..., of].logsumexp(-1).float() for of in (first, rest)]
    found = merge_attention(attended(first), attended(rest), *sums)
    torch.testing.assert_close(found, attended(slice(0, 40)), rtol=0.02, atol=0.02)


def test_a_part_whose_sum_is_far_smaller_adds_nothing():
    given = parts()
    given["lse_a"] = given["lse_b"] + 200
    assert torch.equal(merge_attention(**given), given["a"])
    given["lse_a"] = given["lse_b"] - 200
    assert torch.equal(merge_attention(**given), given["b"])


def test_operator():
    opcheck(torch.ops.warpbus.merge_attention.default, tuple(parts().values()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": torch.zeros(7, 3, 8).bfloat16()}, "b has shape"),
        ({"b": torch.zeros(7, 3, 16)}, "b is float32"),
        ({"lse_a": torch.zeros(7, 3)}, "lse_a has shape"),
        ({"lse_b": torch.zeros(3, 7).half()}, "lse_b is float16"),
        ({"a": torch.zeros(21, 16).bfloat16()}, "a has shape"),
    ],
)
def test_merge_attention_refuses(changes, message):
    with pytest.raises(TensorError, match=rf"^merge_attention: {message}"):
        merge_attention(**{**parts(), **changes})
