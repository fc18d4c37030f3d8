"""merge_attention on a GPU: against float64; outputs are poisoned, inputs are views."""

import pytest
import torch

from warpbus.errors import TensorError
from warpbus.kernels.ops.attention_merge import merge_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(autouse=True)
def _seed(seed):
    """Each test has random numbers of its own."""


def poison(like):
    """Make what the next output gets from torch's pool NaN."""
    held = [torch.full_like(like, float("nan")) for _ in range(4)]
    del held


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 8), (7, 3, 40), (129, 20, 256), (1000, 32, 128), (3, 2, 64)])
def test_merge(shape, dtype):
    tokens, heads, _ = shape
    a, b = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    # As cuDNN gives them for more tokens, and with infinite exponents.
    lse_a = (torch.randn(heads, tokens + 9, device="cuda") * 40)[:, :tokens]
    lse_b = torch.randn(heads, tokens, device="cuda") * 40
    lse_b[0, 0] = lse_a[0, 0] - 500
    share = torch.sigmoid(lse_b.double() - lse_a.double()).T[..., None]
    expected = a.double() + (b.double() - a.double()) * share
    poison(a)
    found = merge_attention(a, b, lse_a, lse_b)
    eps = torch.finfo(dtype).eps
    assert ((found.double() - expected).abs() <= eps * expected.abs() + 1e-5).all()
    assert torch.equal(found[0, 0], a[0, 0])


def test_merge_of_unaligned_parts():
    room = torch.randn(2 * 3 * 4 * 8 + 1, device="cuda").half()
    a, b = room[1 : 1 + 96].view(3, 4, 8), room[96:192].view(3, 4, 8)
    sums = torch.zeros(4, 3, device="cuda")
    expected = (a.float() + b.float()) / 2
    torch.testing.assert_close(merge_attention(a, b, sums, sums).float(), expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(TensorError, match="multiple of 8"):
        merge_attention(a[..., :4], b[..., :4], sums, sums)
