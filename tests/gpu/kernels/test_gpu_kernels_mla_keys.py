"""mla_keys on a GPU: the same bits as the reference; outputs are poisoned, inputs are views."""

import pytest
import torch

from warpbus.kernels.ops.mla_keys import mla_keys
from warpbus.kernels.reference.mla import mla_keys as reference_keys

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(autouse=True)
def _seed(seed):
    """Each test has random numbers of its own."""


def poison(like):
    """Make what the next output gets from torch's pool NaN."""
    held = [torch.full_like(like, float("nan")) for _ in range(4)]
    del held


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "heads", "nope", "value", "rope"),
    [(1, 20, 192, 256, 64), (333, 20, 192, 256, 64), (50, 64, 192, 128, 64), (9, 3, 24, 8, 16), (9, 3, 10, 12, 6)],
)
def test_keys(tokens, heads, nope, value, rope, dtype):
    expanded = torch.randn(tokens, heads, nope + value, device="cuda", dtype=dtype)
    latent = torch.randn(tokens, 512 + rope, device="cuda", dtype=dtype)
    for rotary in (latent[:, 512:], latent[:, 3 : 3 + rope], latent[:, :rope].contiguous()):
        poison(expanded)
        assert torch.equal(mla_keys(expanded, rotary, nope), reference_keys(expanded, rotary, nope))
