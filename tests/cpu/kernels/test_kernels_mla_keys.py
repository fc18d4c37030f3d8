"""mla_keys: the reference, and what is refused."""

import pytest
import torch
from torch.library import opcheck

from warpbus.errors import TensorError
from warpbus.kernels.ops.mla_keys import mla_keys


def test_keys_are_the_own_features_and_the_shared_ones():
    expanded, rotary = torch.randn(5, 3, 24), torch.randn(5, 40)[:, 20:28]
    found = mla_keys(expanded, rotary, 16)
    assert found.shape == (5, 3, 24)
    assert found.is_contiguous()
    for head in range(3):
        assert torch.equal(found[:, head, :16], expanded[:, head, :16])
        assert torch.equal(found[:, head, 16:], rotary)


@pytest.mark.parametrize(
    ("expanded", "rotary", "nope"),
    [
        (torch.zeros(5, 24), torch.zeros(5, 8), 16),
        (torch.zeros(5, 3, 24), torch.zeros(4, 8), 16),
        (torch.zeros(5, 3, 24), torch.zeros(5, 8).half(), 16),
        (torch.zeros(5, 3, 24), torch.zeros(5, 8), 25),
    ],
)
def test_mla_keys_refuses(expanded, rotary, nope):
    with pytest.raises(TensorError, match=r"^mla_keys: "):
        mla_keys(expanded, rotary, nope)


def test_operator():
    opcheck(torch.ops.warpbus.mla_keys.default, (torch.randn(5, 3, 24), torch.randn(5, 8), 16))
