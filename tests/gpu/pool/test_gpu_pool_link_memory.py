"""Memory that the processes of two leases share, pinned on a GPU."""

import os
from types import SimpleNamespace

import pytest
import torch

from warpbus.errors import DeviceError
from warpbus.pool.protocol import link_memory
from warpbus.pool.protocol.link_memory import LinkMemory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def test_slots_are_pinned_and_given_back():
    descriptors, watch = link_memory.create()
    memory = LinkMemory(descriptors, torch.device("cuda"), connects=True)
    slot = memory.to_fill(0)
    assert slot.is_pinned()
    x = torch.randint(256, (len(slot),), dtype=torch.uint8, device="cuda")
    slot.copy_(x, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(slot, x.cpu())
    del memory, slot
    assert not link_memory.in_use(watch)
    os.close(watch)


def test_memory_that_cannot_be_pinned_leaves_no_error_to_the_next_kernel(monkeypatch):
    register = torch.cuda.cudart().cudaHostRegister
    refused = SimpleNamespace(cudaHostRegister=lambda address, nbytes, _: register(address, nbytes, 0xFFFF))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refused)
    descriptors, watch = link_memory.create()
    with pytest.raises(DeviceError, match="cannot be pinned: CUDA error"):
        LinkMemory(descriptors, torch.device("cuda"), connects=True)
    assert torch.ones(1000, device="cuda").add(1).sum().item() == 2000
    os.close(watch)
