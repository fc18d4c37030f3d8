"""Steps of a group from GPU to GPU, whose streams are threads here."""

import dataclasses
import os
import re
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pool_daemons import serving
from pool_streams import HostSlots, ThreadMark, ThreadStream, WaitedStream

import warpbus
from warpbus.errors import DeviceError, StateError
from warpbus.pool.client.process_group import PoolProcessGroup
from warpbus.pool.protocol import link_memory
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.group_steps import ExchangeStep, GroupPlace, ReduceStep, Region
from warpbus.pool.protocol.link_memory import LinkMemory
from warpbus.pool.quota import Quota
from warpbus.pool.tenant import groups, pending_steps
from warpbus.pool.tenant.device_link import DEVICE_SLOT, DEVICE_SLOTS, DeviceLink
from warpbus.pool.tenant.execution import Executor
from warpbus.pool.tenant.groups import LeaseGroups

CPU = torch.device("cpu")
GROUP = bytes(16)
NOTHING = Region(0, 0, 0)
NBYTES = 2 * DEVICE_SLOTS * DEVICE_SLOT + 4096  # goes round the ring twice


def linked(size, direct=lambda low, high: True, seconds=60.0, incoming=WaitedStream):
    """The groups of so many leases, with their storages 1 and 2 of NBYTES bytes, and all slots.

    Args:
        direct: whether two ranks have slots on GPUs.
        seconds: for which a rank waits for others.
        incoming: makes the stream of what comes.
    """
    executors, made = [Executor(CPU, Quota(8 * NBYTES, 1.0)) for _ in range(size)], {}
    for rank, executor in enumerate(executors):
        for handle in (1, 2):
            executor.storages.create(handle, NBYTES)
        executor.storages.slice(1, 0, NBYTES).random_(0, 80)
        executor.groups.join(GroupPlace(GROUP, rank, size, seconds))
    for high in range(size):
        for low in range(high):
            _connect(executors, low, high, made, incoming, direct=direct(low, high))
    return executors, made


def _connect(executors, low, high, made, incoming, *, direct):
    descriptors, watch = link_memory.create()
    os.close(watch)
    given = [os.dup(each) for each in descriptors]
    memories = [LinkMemory(given, CPU, connects=True), LinkMemory(descriptors, CPU, connects=False)]
    links = [DeviceLink(memory, HostSlots(made, rank)) for memory, rank in zip(memories, (high, low), strict=True)]
    ends = socket.socketpair()
    for link, memory, end, rank, other in zip(links, memories, ends, (high, low), (low, high), strict=True):
        if direct:
            assert link.open(ThreadStream())
        group = executors[rank].groups.get(GROUP)
        group.link(other, Channel(end), memory, link if direct else None, lambda: (ThreadStream(), incoming()))


@pytest.fixture(params=[2, 3])
def ranks(request):
    executors, _ = linked(request.param)
    yield executors
    for executor in executors:
        executor.groups.leave_all()


def together(executors, steps):
    """The errors of the steps, each of one rank."""
    failed = []

    def run(executor, step):
        try:
            executor.groups.get(GROUP).run(step)
            executor.storages.written_all(step.written)
        except StateError as error:
            failed.append(str(error))

    threads = [threading.Thread(target=run, args=pair) for pair in zip(executors, steps, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def exchanges(size, nbytes=NBYTES):
    whole, target = Region(1, 0, nbytes), Region(2, 0, nbytes)
    return [
        ExchangeStep(GROUP, "send", (((rank + 1) % size, whole),), (((rank - 1) % size, target),))
        for rank in range(size)
    ]


def test_all_slots_are_used_again_and_again(ranks):
    for _ in range(2):
        assert not together(ranks, exchanges(len(ranks)))
    for rank, executor in enumerate(ranks):
        assert torch.equal(executor.storages.slice(2, 0, NBYTES), ranks[rank - 1].storages.slice(1, 0, NBYTES))


def test_shares_are_combined_where_they_lie(ranks):
    size = len(ranks)
    expected = sum(each.storages.slice(1, 0, NBYTES).clone().float() for each in ranks).to(torch.uint8)
    part = NBYTES // size // 16 * 16
    shares = tuple(Region(1, rank * part, part) for rank in range(size))
    steps = [ReduceStep(GROUP, "all_reduce", "sum", torch.uint8, shares, shares[rank]) for rank in range(size)]
    assert not together(ranks, steps)
    given = [
        ExchangeStep(
            GROUP,
            "all_reduce",
            tuple((other, shares[rank]) for other in range(size) if other != rank),
            tuple((other, shares[other]) for other in range(size) if other != rank),
        )
        for rank in range(size)
    ]
    assert not together(ranks, given)
    for executor in ranks:
        assert torch.equal(executor.storages.slice(1, 0, size * part), expected[: size * part])


def test_a_group_with_two_machines_uses_both_ways():
    executors, _ = linked(3, lambda low, high: high < 2)
    for _ in range(2):
        assert not together(executors, exchanges(3))
    whole = (Region(1, 0, 512),) * 3
    expected = sum(each.storages.slice(1, 0, 512).clone() for each in executors)
    assert not together(executors, [ReduceStep(GROUP, "all_reduce", "sum", torch.uint8, whole, whole[0])] * 3)
    for executor in executors:
        assert torch.equal(executor.storages.slice(1, 0, 512), expected)
        executor.groups.leave_all()


def test_ranks_that_do_not_do_the_same_get_an_error():
    executors, _ = linked(2)
    steps = [exchanges(2)[0], exchanges(2, NBYTES - 8)[1]]
    assert not together(executors, steps)  # they are only launched
    executors[0].storages.create(3, 8)
    failures = [failure for executor in executors for failure in executor.failed_in_flight()]
    assert any("have to call the same operations" in str(failure.exception()) for failure in failures)
    for executor in executors:
        assert "send: the group has ended" in together([executor], exchanges(2)[:1])[0]
        assert executor.storages.live[2].failure is not None
        assert executor.storages.live[1].failure is None
    assert executors[0].storages.live[3].failure is not None


def test_a_group_that_was_left_says_what_has_failed_in_it():
    executors, _ = linked(2)
    assert not together(executors, [exchanges(2)[0], exchanges(2, NBYTES - 8)[1]])
    executors[0].groups.leave(GROUP)
    (failure,) = executors[0].failed_in_flight()
    assert "have to call the same operations" in str(failure.exception())
    assert executors[0].storages.live[2].failure is not None
    assert not executors[0].failed_in_flight()


def test_a_rank_that_is_ahead_launches_a_step_and_waits_later():
    executors, _ = linked(2, incoming=ThreadStream)
    first, second = exchanges(2)
    began = time.monotonic()
    executors[0].groups.get(GROUP).run(first)
    executors[0].groups.keep_pace(60.0)
    other = threading.Timer(1.0, lambda: executors[1].groups.get(GROUP).run(second))
    other.start()
    assert time.monotonic() - began < 0.5
    executors[0].groups.keep_pace(0.0)
    assert time.monotonic() - began > 0.9
    assert not executors[0].failed_in_flight()
    other.join()
    for rank, executor in enumerate(executors):
        assert torch.equal(executor.storages.slice(2, 0, NBYTES), executors[1 - rank].storages.slice(1, 0, NBYTES))


def test_a_rank_that_does_not_come_is_not_waited_for_without_end():
    executors, _ = linked(2, seconds=0.3, incoming=ThreadStream)
    executors[0].groups.get(GROUP).run(exchanges(2)[0])
    executors[0].groups.keep_pace(0.0)
    (failure,) = executors[0].failed_in_flight()
    assert re.search(r"send: (rank 1 does not come to send: waited 0.3 s|another rank's GPU)", str(failure.exception()))


def test_messages_that_were_launched_are_checked_before_the_next_that_is_waited_for():
    executors, _ = linked(2, incoming=ThreadStream)
    barrier = [ExchangeStep(GROUP, "barrier", ((1 - rank, NOTHING),), ((1 - rank, NOTHING),)) for rank in range(2)]
    for steps in (exchanges(2), exchanges(2), barrier, exchanges(2), barrier):
        assert not together(executors, steps)
    assert all(executor.groups.get(GROUP).announcements.behind() is None for executor in executors)
    first, second = exchanges(2)
    assert not together(executors, [first, dataclasses.replace(second, label="all_to_all")])
    failed = together(executors, barrier)
    assert any("send: rank 1 does something else" in each or "barrier: " in each for each in failed)
    assert not any(executor.storages.live[2].failure is None for executor in executors if executor.failed_in_flight())


def test_only_what_uses_the_storages_waits():
    executors, _ = linked(2)
    storages = executors[0].storages
    mark = ThreadMark()
    pending = pending_steps.PendingStep("send", ThreadStream(), mark, storages.clock, time.monotonic() + 60)
    view = storages.raw(2)
    storages.mark_pending([2], pending)
    storages.raw(1)
    assert storages.pending_steps([1, 2]) == [pending]
    threading.Timer(0.2, mark.reach).start()
    assert storages.raw(2).data_ptr() == view.data_ptr()
    assert mark.query()
    assert not storages.pending_steps([1, 2])


def test_steps_that_cannot_be_completed_poison_what_was_written_since(monkeypatch):
    monkeypatch.setattr(pending_steps, "_GRACE", 0.1)
    executors, _ = linked(2)
    first, second = executors
    first.storages.create(3, 8)
    # More than there are slots, and the other rank's process is gone.
    step = ExchangeStep(GROUP, "send", ((1, Region(1, 0, NBYTES)),), ())
    first.groups.get(GROUP).run(step)
    first.storages.create(4, 8)
    second.groups.leave_all()
    until = time.monotonic() + 20
    while not (failed := first.failed_in_flight()):
        assert time.monotonic() < until
        time.sleep(0.01)
    (failure,) = failed
    assert "send: rank 1 of the group has left it" in str(failure.exception())
    assert [handle for handle, each in first.storages.live.items() if each.failure] == [4]
    with pytest.raises(StateError, match="the group has ended"):
        first.groups.get(GROUP).run(step)
    first.groups.leave(GROUP)


def test_slots_are_freed_when_the_other_process_has_closed_them():
    executors, made = linked(2)
    assert not together(executors, exchanges(2))
    one, other = made.values()
    executors[0].groups.leave(GROUP)
    assert not any(slots.freed for slots in made.values())
    executors[1].groups.leave(GROUP)
    assert not one.opened
    assert not other.opened
    assert any(slots.freed for slots in made.values())
    for executor in executors:
        executor.groups.discard(None)
        executor.groups.memory([], connects=True)
    LeaseGroups(executors[0].storages, gpu_links=True).direct(None)


def test_slots_of_one_gpu_are_not_opened():
    descriptors, watch = link_memory.create()
    os.close(watch)
    given = [os.dup(each) for each in descriptors]
    memories = [LinkMemory(given, CPU, connects=True), LinkMemory(descriptors, CPU, connects=False)]
    made = {}
    link = DeviceLink(memories[0], HostSlots(made, 7))
    with pytest.raises(DeviceError, match="has no memory to share"):
        link.open(ThreadStream())
    other = DeviceLink(memories[1], HostSlots(made, 7))
    assert not link.open(ThreadStream())
    assert not other.sends


@pytest.mark.parametrize("option", [{}, {"gpu_links": False}, {"gpu_links": True}])
def test_only_the_option_gives_slots_on_a_gpu(monkeypatch, option):
    descriptors, watch = link_memory.create()
    os.close(watch)
    memory = LinkMemory(descriptors, CPU, connects=True)
    monkeypatch.setattr(groups, "GpuSlots", lambda device: HostSlots({}, 0))
    leases = LeaseGroups(SimpleNamespace(device=torch.device("cuda", 0)), **option)
    assert (leases.direct(memory) is not None) is option.get("gpu_links", False)


def test_leases_of_a_daemon_without_the_option_use_shared_memory(tmp_path):
    with serving(tmp_path, 2, "pool_direct_tenant", spare=0) as mill:
        pair = [warpbus.pool.connect(str(mill.address), memory="100MB", share=0.3, on=f"mill/{gpu}") for gpu in (0, 1)]
        x = torch.randn(1_000_003)
        assert torch.equal(x.to(pair[0].device).to(pair[1].device).cpu(), x)
        done = pair[0].usage()["groups"]
        assert (done["steps"], done["launched"]) == (1, 0)
        for gpu in pair:
            gpu.close()


def test_a_lost_lease_ends_what_waits_for_it(tmp_path):
    with serving(tmp_path, 2, "pool_direct_tenant", spare=0, gpu_links=True) as mill:
        address = str(mill.address)
        pair = [warpbus.pool.connect(address, memory="500MB", share=0.3, on=f"mill/{gpu}") for gpu in range(2)]
        x = [torch.full((NBYTES // 4,), 1.0 + rank, device=gpu.device) for rank, gpu in enumerate(pair)]
        assert torch.equal(x[0].to(pair[1].device).cpu(), x[0].cpu())
        assert pair[0].usage()["groups"]["launched"] == 1
        store, group = dist.HashStore(), {}

        def join(rank):
            torch.warpbus.set_device(pair[rank].device)
            group[rank] = PoolProcessGroup(store, rank, 2, timedelta(seconds=60))

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in range(2):
            group[rank].allreduce([x[rank]])
        assert [float(each.min()) for each in x] == [3.0, 3.0]
        y = x[0] + 1
        group[0].send([x[0]], 1).wait()  # more than there are slots, and nobody receives it
        pair[1].close()
        with pytest.raises(RuntimeError, match="send: rank 1 of the group has left it"):
            x[0].add_(1).sum().item()
        assert float(y.min()) == 4.0
        with pytest.raises(RuntimeError, match="send: rank 1"):
            x[0].cpu()
        pair[0].close()
