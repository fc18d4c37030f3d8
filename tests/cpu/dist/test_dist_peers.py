"""Which exchanges go through the GPUs' memory, and why not."""

import gc

import pytest
import torch

from warpbus.dist import Group
from warpbus.dist.peers import Peers, lost_peer
from warpbus.errors import DeviceError, TensorError
from warpbus.kernels.ops.peers import MOST_BYTES, buffer_bytes, fits, new_epochs, peer_gather, peer_sum

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_group_says_how_it_exchanges() -> None:
    assert Group(0, 3, CPU).describe() == "3 CPU processes"
    assert Group(0, 1, GPU).describe() == "1 GPU"
    assert Group(0, 4, GPU).describe() == "4 GPUs: all by NCCL"
    reason = "GPUs that do not reach each other's memory"
    assert Group(0, 4, GPU, reason).describe() == f"4 GPUs: all by NCCL ({reason})"
    linked = Group(0, 4, GPU, Peers(torch.zeros(16), [0], 0))
    assert linked.describe() == "4 GPUs: up to 512 KiB through each other's memory, others by NCCL"


def test_what_needs_no_link_or_has_one_stays_as_it_is() -> None:
    for group in (Group(0, 3, CPU), Group(0, 1, GPU), Group(0, 2, GPU, "processes on several machines")):
        assert group.linked() is group


@pytest.mark.parametrize(
    ("reason", "said"), [(0, ""), (2, "processes on several machines"), (5, "torch could not share the GPUs' memory")]
)
def test_an_obstacle_of_any_process_is_one_of_all(monkeypatch: pytest.MonkeyPatch, reason: int, said: str) -> None:
    monkeypatch.setattr("warpbus.dist.peers._obstacle", lambda rank, world, device: 0)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, operation: tensor.fill_(reason))
    monkeypatch.setattr("torch.distributed._symmetric_memory.empty", lambda *_, **__: 1 / 0 if said else refuse())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert Peers.open(1, 2, CPU) == said


def refuse() -> None:
    raise RuntimeError("no memory")


def test_small_tensors_of_whole_chunks_fit() -> None:
    assert fits(torch.empty(1, 4096, dtype=torch.float16))
    assert fits(torch.empty(MOST_BYTES // 4))
    assert not fits(torch.empty(MOST_BYTES // 4 + 4))
    assert not fits(torch.empty(7))
    assert not fits(torch.empty(0))
    # Flags of 128 blocks, and two places for each of 4 GPUs.
    assert buffer_bytes(4) == 4 * 128 * 4 + 2 * 4 * MOST_BYTES


def test_other_arguments_are_refused() -> None:
    epochs, buffers = new_epochs(CPU), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(TensorError, match=r"^peer_sum: x has 28 bytes on GPU 0 of 2, expected a multiple of 16"):
        peer_sum(torch.zeros(7), None, buffers, epochs, 0)
    with pytest.raises(TensorError, match=r"^peer_gather: x has 32 bytes on GPU 2 of 2"):
        peer_gather(torch.zeros(8), buffers, epochs, 2)
    with pytest.raises(TensorError, match=r"^peer_sum: residual has shape \[4\], expected \[8\]"):
        peer_sum(torch.zeros(8), torch.zeros(4), buffers, epochs, 0)


def test_a_gpu_that_did_not_come_is_named() -> None:
    peers = Peers(torch.zeros(16), [0, 0, 0], 1)
    assert peers.failure() is lost_peer() is None
    peers._missing.fill_(3)  # what the kernel leaves
    said = r"^GPU 1 waited 1800 s for GPU 2 in an exchange: .* start the job again$"
    with pytest.raises(DeviceError, match=said):
        peers.sum(torch.zeros(8), None)
    with pytest.raises(DeviceError, match=said):
        peers.gather(torch.zeros(8))
    assert str(lost_peer()) == str(peers.failure())
    del peers
    gc.collect()
    assert lost_peer() is None
