"""Autocast on the remote device has PyTorch's rule for GPUs: its dispatcher knows what is cast there, on a CPU too."""

from collections.abc import Callable

import pytest
import torch
from pool_direct import connected
from torch import Tensor
from torch.nn import functional as F

from warpbus.pool.client import autocast

# Of libraries that only a GPU has, recurrent cells that the device does not have, and forms with named axes.
NOT_HERE = ("cudnn", "_cell", "_scaled_dot_product_flash_attention", ".deprecated", "name")
# On a GPU PyTorch refuses the first, rounds within the second, and has the rule for the third only after torch 2.11.
HERE_ALONE = {"aten::binary_cross_entropy", "aten::cross_entropy_loss", "aten::rms_norm"}


def test_what_is_cast_is_what_is_cast_on_a_gpu() -> None:
    ours = [
        f"aten::{name}"
        for names in (autocast._IN_16_BITS, autocast._IN_32_BITS, autocast._IN_THE_WIDEST)
        for name in names.split()
    ]
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    on_gpu = {name for name in torch._C._dispatch_get_all_op_names() if registered(name, "AutocastCUDA")}
    expected = {
        name for name in on_gpu if name.startswith("aten::") and not any(part in name.casefold() for part in NOT_HERE)
    }
    assert len(ours) == len(set(ours))
    assert {*ours} - HERE_ALONE == expected - HERE_ALONE


@pytest.mark.parametrize(
    ("compute", "dtype"),
    [
        (lambda half, single: half @ half, torch.bfloat16),
        (lambda half, single: F.linear(single, single), torch.bfloat16),
        (lambda half, single: F.gelu(half), torch.bfloat16),
        (lambda half, single: F.gelu(single), torch.float32),
        (lambda half, single: half.softmax(-1), torch.float32),
        (lambda half, single: F.layer_norm(half, (4,)), torch.float32),
        (
            lambda half, single: F.cross_entropy(half, torch.zeros(4, dtype=torch.int64, device="warpbus")),
            torch.float32,
        ),
        (lambda half, single: torch.addcmul(half, half, half), torch.bfloat16),
        (lambda half, single: torch.addcmul(half, half, single), torch.float32),
        (lambda half, single: torch.einsum("ij,jk->ik", single, single), torch.bfloat16),
    ],
)
def test_dtypes_are_those_of_a_gpu(compute: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    with connected(), torch.autocast("warpbus", dtype=torch.bfloat16):
        single = torch.arange(16.0).view(4, 4).to("warpbus")
        found = compute(single.bfloat16(), single)
        assert found.dtype is dtype
        assert found.isfinite().all().item()
