"""Groups of two leases on two GPUs of a machine, which exchange bytes from GPU to GPU in sandboxed processes."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import warpbus
from warpbus.bench.pool_processes import daemon
from warpbus.pool.client.process_group import PoolProcessGroup

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

SIZES = [1, 1000, (4 << 20) // 4 + 3, 10_000_019]  # elements: a slot and a little, and far more than all slots


@pytest.fixture(scope="module")
def gpus():
    with daemon("--gpu-links", "--name", "here") as address:
        found = [warpbus.pool.connect(address, memory="2GB", share=0.3, on=f"here/{rank}") for rank in range(2)]
        yield found
        for gpu in reversed(found):
            gpu.close()


def joined(gpus) -> list[PoolProcessGroup]:
    """A group whose rank r is gpus[r]."""
    store, found = dist.HashStore(), {}

    def join(rank: int) -> None:
        torch.warpbus.set_device(gpus[rank].device)
        found[rank] = PoolProcessGroup(store, rank, len(gpus), timedelta(seconds=30))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(gpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(gpus))]


@pytest.fixture
def group(gpus):
    found = joined(gpus)
    yield found
    for rank in found:
        rank.shutdown()


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_have_the_same_sum(gpus, group, elements, dtype):
    before = gpus[0].usage()["groups"]["launched"]
    tensors = [torch.randn(elements).to(dtype) for _ in range(2)]
    placed = [tensor.to(gpu.device) for tensor, gpu in zip(tensors, gpus, strict=True)]
    for _ in range(3):
        for rank, tensor in zip(group, placed, strict=True):
            rank.allreduce([tensor])
    expected = 4 * (tensors[0] + tensors[1])  # exactly: it is doubled twice
    for tensor in placed:
        assert torch.equal(tensor.cpu(), expected)
    assert gpus[0].usage()["groups"]["launched"] > before


def test_operators_before_and_after_a_step_are_done_in_order(gpus, group):
    for _ in range(5):
        placed = [torch.full((5_000_000,), rank + 1.0, device=gpu.device) for rank, gpu in enumerate(gpus)]
        work = [torch.randn(2048, 2048, device=gpu.device) for gpu in gpus]
        for rank, tensor in enumerate(placed):
            for _ in range(3):
                work[rank] = work[rank] @ work[rank] / 2048
            tensor.mul_(2.0)
            group[rank].allreduce([tensor])
            work[rank] = work[rank] @ work[rank] / 2048  # does not use the tensor
            placed[rank] = tensor + 1
            del tensor
        assert all(bool((tensor == 7.0).all()) for tensor in placed)


def test_a_rank_that_comes_late_is_waited_for(gpus, group):
    x = [torch.full((7_000_001,), rank + 1.0, device=gpu.device) for rank, gpu in enumerate(gpus)]
    for late in (1, 0):
        group[1 - late].allreduce([x[1 - late]])
        time.sleep(0.5)
        group[late].allreduce([x[late]])
        y = [tensor * 2 for tensor in x]
        assert len({float(tensor.min()) for tensor in y} | {float(tensor.max()) for tensor in y}) == 1
    assert all(bool((tensor == 6.0).all()) for tensor in x)


@pytest.mark.parametrize("elements", [(3, 5), (30_000_000, 5)])
def test_ranks_that_do_not_do_the_same_get_an_error(gpus, elements):
    group = joined(gpus)
    before = [torch.ones(3, device=gpu.device) for gpu in gpus]
    x = [torch.ones(count, device=gpu.device) for count, gpu in zip(elements, gpus, strict=True)]
    started = time.monotonic()
    for rank, tensor in zip(group, x, strict=True):
        rank.allreduce([tensor])
    for tensor in x:
        with pytest.raises(RuntimeError, match=r"with tensors of the same size|has left it|the group has ended"):
            float(tensor.sum())
    assert time.monotonic() - started < 20
    assert all(tensor.tolist() == [1.0, 1.0, 1.0] for tensor in before)
    for rank in group:
        rank.shutdown()


def test_copies_between_leases_are_exact(gpus):
    x = torch.randn(9_000_001)
    for source, target in (gpus, gpus[::-1]):
        assert torch.equal(x.to(source.device).to(target.device).cpu(), x)


def test_a_lost_lease_ends_a_step_that_gpus_wait_in(gpus):
    with daemon("--gpu-links", "--name", "there") as address:
        pair = [warpbus.pool.connect(address, memory="1GB", share=0.2, on=f"there/{rank}") for rank in range(2)]
        found = joined(pair)
        x = [torch.ones(30_000_000, device=gpu.device) for gpu in pair]
        for rank, tensor in zip(found, x, strict=True):
            rank.allreduce([tensor])
        assert all(float(tensor[0]) == 2.0 for tensor in x)
        found[0].send([x[0]], 1).wait()  # fills the slots, which nobody reads
        pair[1].close()
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"has left it|process has ended|the group has ended"):
            (x[0] + 1).sum().item()
        assert time.monotonic() - started < 20
        pair[0].close()
