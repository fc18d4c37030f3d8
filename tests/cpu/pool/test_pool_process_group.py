"""The operations of a process group of three leases, whose ranks are in this process."""

import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool_daemons import serving

import warpbus
from warpbus.errors import StateError, UsageError
from warpbus.pool.client.process_group import PoolProcessGroup

_PROGRAM = "warpbus.pool.tenant.process"
_RANKS = 3


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    one, two = tmp_path_factory.mktemp("mill"), tmp_path_factory.mktemp("dam")
    with (
        serving(one, 2, _PROGRAM, spare=0) as mill,
        serving(two, 1, _PROGRAM, spare=0, name="dam", peers=(str(mill.address),)) as dam,
    ):
        yield mill, dam


@pytest.fixture(scope="module")
def gpus(pool):
    address = str(pool[0].address)
    found = [warpbus.pool.connect(address, memory="100MB", share=0.3, on=on) for on in ("mill/0", "mill/1", "dam")]
    yield found
    for gpu in reversed(found):
        gpu.close()


def _grouped(gpus, seconds: float = 60.0) -> list[PoolProcessGroup]:
    """A group whose rank r is gpus[r]."""
    store, found = dist.HashStore(), {}

    def join(rank: int) -> None:
        torch.warpbus.set_device(gpus[rank].device)
        found[rank] = PoolProcessGroup(store, rank, len(gpus), timedelta(seconds=seconds))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(gpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(gpus))]


@pytest.fixture(scope="module")
def group(gpus):
    found = _grouped(gpus)
    yield found
    for rank in found:
        rank.shutdown()


def _drawn(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """A tensor of the CPU for each rank."""
    return [torch.randn(shape).mul(8).to(dtype) for _ in range(_RANKS)]


def _placed(tensors):
    return [tensor.to(f"warpbus:{rank}") for rank, tensor in enumerate(tensors)]


def _options(kind, **values):
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return options


@pytest.mark.parametrize("shape", [(), (5,), (300, 301)])  # of which the last goes in parts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_reduce_adds_in_the_order_of_the_ranks(group, shape, dtype):
    tensors = _drawn(*shape, dtype=dtype)
    placed = _placed(tensors)
    for rank, tensor in zip(group, placed, strict=True):
        rank.allreduce([tensor])
    for tensor in placed:
        assert torch.equal(tensor.cpu(), tensors[0] + tensors[1] + tensors[2])


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.AVG, lambda x: (x[0] + x[1] + x[2]) / 3),
        (dist.ReduceOp.PRODUCT, lambda x: x[0] * x[1] * x[2]),
        (dist.ReduceOp.MIN, lambda x: torch.stack(x).amin(0)),
        (dist.ReduceOp.MAX, lambda x: torch.stack(x).amax(0)),
    ],
)
def test_other_reductions_and_layouts(group, op, expected):
    tensors = _drawn(4, 6)
    placed = [tensor.t() for tensor in _placed(tensors)]
    for rank, tensor in zip(group, placed, strict=True):
        rank.allreduce([tensor], _options(dist.AllreduceOptions, reduceOp=op))
    for tensor in placed:
        torch.testing.assert_close(tensor.cpu(), expected(tensors).t(), rtol=0, atol=1e-6)


def test_bits_are_combined(group):
    tensors = [torch.tensor([1 << rank, 7]) for rank in range(_RANKS)]
    placed = _placed(tensors)
    for rank, tensor in zip(group, placed, strict=True):
        rank.allreduce([tensor], _options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.BOR))
    assert [tensor.tolist() for tensor in placed] == [[7, 7]] * 3


@pytest.mark.parametrize("root", range(_RANKS))
def test_operations_with_a_root(group, root):
    tensors = _drawn(3, 50)
    placed = _placed(tensors)
    for rank, tensor in zip(group, placed, strict=True):
        rank.reduce([tensor], _options(dist.ReduceOptions, rootRank=root))
    assert torch.equal(placed[root].cpu(), tensors[0] + tensors[1] + tensors[2])
    assert all(torch.equal(placed[rank].cpu(), tensors[rank]) for rank in range(_RANKS) if rank != root)

    placed = _placed(tensors)
    for rank, tensor in zip(group, placed, strict=True):
        rank.broadcast([tensor], _options(dist.BroadcastOptions, rootRank=root))
    assert all(torch.equal(tensor.cpu(), tensors[root]) for tensor in placed)

    placed = _placed(tensors)
    gathered = [torch.zeros(3, 50, device=f"warpbus:{root}") for _ in range(_RANKS)]
    for number, (rank, tensor) in enumerate(zip(group, placed, strict=True)):
        rank.gather([gathered] if number == root else [], [tensor], _options(dist.GatherOptions, rootRank=root))
    assert all(torch.equal(found.cpu(), tensor) for found, tensor in zip(gathered, tensors, strict=True))

    scattered = _placed(torch.zeros(3, 50) for _ in range(_RANKS))
    for number, (rank, tensor) in enumerate(zip(group, scattered, strict=True)):
        rank.scatter([tensor], [gathered] if number == root else [], _options(dist.ScatterOptions, rootRank=root))
    assert all(torch.equal(found.cpu(), tensor) for found, tensor in zip(scattered, tensors, strict=True))


def test_parts_go_to_all_ranks_and_come_from_all(group):
    tensors = _drawn(6, 40_000)
    placed = _placed(tensors)
    gathered = [torch.zeros(18, 40_000, device=tensor.device) for tensor in placed]
    for rank, found, tensor in zip(group, gathered, placed, strict=True):
        rank.all_gather_single(found, tensor)
    assert all(torch.equal(found.cpu(), torch.cat(tensors)) for found in gathered)

    reduced = [torch.zeros(2, 40_000, device=tensor.device) for tensor in placed]
    for rank, found, tensor in zip(group, reduced, placed, strict=True):
        rank.reduce_scatter_single(found, tensor)
    assert torch.equal(torch.cat([found.cpu() for found in reduced]), tensors[0] + tensors[1] + tensors[2])

    swapped = [torch.zeros_like(tensor) for tensor in placed]
    for rank, found, tensor in zip(group, swapped, placed, strict=True):
        rank.all_to_all_single(found, tensor, [], [])
    for number, found in enumerate(swapped):
        assert torch.equal(found.cpu(), torch.cat([tensor[2 * number : 2 * number + 2] for tensor in tensors]))


def test_ranks_that_send_to_each_other_do_not_wait_for_each_other(group):
    tensors = _drawn(500_000)
    placed, found = _placed(tensors), _placed(torch.zeros(500_000) for _ in range(_RANKS))
    works = []
    for number, rank in enumerate(group):
        works.append(rank.send([placed[number]], (number + 1) % _RANKS))
        works.append(rank.recv([found[number]], (number - 1) % _RANKS))
    for work in works:
        work.wait()
    assert all(torch.equal(found[number].cpu(), tensors[number - 1]) for number in range(_RANKS))
    with pytest.raises(UsageError, match="name the source"):
        group[0].recv_anysource([found[0]])


def test_what_a_group_cannot_do_is_said(group, gpus):
    with pytest.raises(UsageError, match="all_reduce: a tensor on warpbus:1, but this rank of the group is warpbus:0"):
        group[0].allreduce([torch.ones(2, device="warpbus:1")])
    integers = torch.ones(2, dtype=torch.long, device="warpbus:0")
    with pytest.raises(UsageError, match="average of"):
        group[0].allreduce([integers], _options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.AVG))
    with pytest.raises(UsageError, match="divided among 3 ranks"):
        group[0].all_gather_single(torch.ones(4, device="warpbus:0"), torch.ones(1, device="warpbus:0"))
    with pytest.raises(StateError, match="in a group with other leases"):
        gpus[0].migrate("mill/1")


def test_ranks_that_do_not_do_the_same_get_an_error(gpus):
    group = _grouped(gpus)
    tensors = [torch.ones(2 + (number == 1), device=gpu.device) for number, gpu in enumerate(gpus)]
    for rank, tensor in zip(group, tensors, strict=True):
        rank.allreduce([tensor])
    for tensor in tensors:
        with pytest.raises(RuntimeError, match="with tensors of the same size"):
            tensor.cpu()
    later = torch.ones(2, device=gpus[0].device)
    group[0].allreduce([later])
    with pytest.raises(RuntimeError, match="all_reduce: the group has ended"):
        later.cpu()
    for rank in group:
        rank.shutdown()


def test_a_rank_that_does_not_come_is_not_waited_for_without_end(gpus):
    group = _grouped(gpus, seconds=1.0)
    x = torch.ones(2, device=gpus[0].device)
    group[0].allreduce([x])
    with pytest.raises(RuntimeError, match=r"rank \d does not come to all_reduce: waited 1 s"):
        x.cpu()
    for rank in group:
        rank.shutdown()


def test_a_lost_lease_ends_the_operation_of_the_others(pool):
    mill, dam = pool
    address = str(mill.address)
    places = ("mill/0", "mill/1", "dam")
    gpus = [warpbus.pool.connect(address, memory="10MB", share=0.1, on=on) for on in places]
    group = _grouped(gpus, seconds=300.0)
    tensors = [torch.ones(100_000, device=gpu.device) for gpu in gpus]
    for rank in (0, 1):
        group[rank].allreduce([tensors[rank]])
    os.kill(dam.daemon.host.tenancies[gpus[2].lease].process.pid, signal.SIGKILL)
    for tensor in tensors[:2]:
        with pytest.raises(RuntimeError, match=r"all_reduce: .*rank 2 of the group"):
            tensor.cpu()
    for gpu in reversed(gpus):
        gpu.close()
