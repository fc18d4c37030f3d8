"""Memory that the processes of two leases share, and the steps of a group through it."""

import os
import socket
import threading
from types import SimpleNamespace

import pytest
import torch

from warpbus.errors import DeviceError, StateError
from warpbus.pool.broker.status import LinkMemoryUsage
from warpbus.pool.daemon.lease_links import LinkMemories
from warpbus.pool.daemon.tenancies import Order
from warpbus.pool.protocol import link_memory
from warpbus.pool.protocol.channel import Channel
from warpbus.pool.protocol.group_steps import ExchangeStep, GroupPlace, ReduceStep, Region
from warpbus.pool.protocol.link_memory import SLOT, SLOTS, LinkMemory
from warpbus.pool.tenant.groups import LeaseGroups
from warpbus.pool.tenant.storages import Storages

CPU = torch.device("cpu")
GROUP = bytes(16)
NBYTES = 2 * SLOTS * SLOT + 4096  # goes round the ring twice


def copies(descriptors):
    return [os.dup(each) for each in descriptors]


@pytest.fixture
def memories():
    descriptors, watch = link_memory.create()
    os.close(watch)
    return [
        LinkMemory(given, CPU, connects=first) for given, first in ((copies(descriptors), True), (descriptors, False))
    ]


def test_a_slot_is_filled_again_when_it_has_been_emptied(memories):
    for sender, receiver in (memories, memories[::-1]):
        for number in range(SLOTS):
            sender.to_fill(0).fill_(number)
        assert sender.to_fill(0) is None
        assert receiver.filled().eq(0).all()
        receiver.empty()
        sender.to_fill(0).fill_(SLOTS)
        assert sender.to_fill(0) is None
        assert [int(receiver.filled()[-1]) for _ in range(SLOTS)] == [1, 2, 3, SLOTS]


def test_neither_process_can_shrink_it():
    descriptors, watch = link_memory.create()
    with pytest.raises(PermissionError):
        os.ftruncate(descriptors[0], 0)
    link_memory.close([*descriptors, watch])


def test_memory_is_in_use_until_neither_process_has_it():
    descriptors, watch = link_memory.create()
    others = copies(descriptors)
    first = LinkMemory(descriptors, CPU, connects=True)
    link_memory.close(others)  # the other process could not use it
    assert link_memory.in_use(watch)
    first.to_fill(0).fill_(1)
    del first
    assert not link_memory.in_use(watch)
    os.close(watch)


def test_memory_that_the_system_does_not_provide_is_an_error(monkeypatch):
    open_before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "eventfd", unavailable)
    with pytest.raises(DeviceError, match=r"cannot be created: .*too many"):
        link_memory.create()
    assert len(os.listdir("/proc/self/fd")) == open_before


def unavailable(*_):
    raise OSError(24, "too many open files")


def test_memory_that_cannot_be_pinned_is_an_error_of_no_kernel(monkeypatch):
    threads = []

    def register(address, nbytes, flags):
        threads.append(threading.current_thread())
        assert (address > 0, nbytes, flags) == (True, link_memory.SIZE, 0)
        return 2

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    descriptors, watch = link_memory.create()
    with pytest.raises(DeviceError, match="cannot be pinned: CUDA error 2"):
        LinkMemory(descriptors, torch.device("cuda"), connects=True)
    assert threads != [threading.current_thread()]  # CUDA keeps the error for the thread that meets it
    assert not link_memory.in_use(watch)
    os.close(watch)


class Watched(Channel):
    """Counts the bytes that it sends."""

    sent = 0

    def send(self, kind, number=0, *payload, more=False):
        self.sent += sum(map(len, payload))
        super().send(kind, number, *payload, more=more)


@pytest.fixture
def ranks(memories):
    """The groups of two leases, and their channels. Each has a storage 1 of NBYTES random bytes, and 2 of as many."""
    channels = [Watched(end) for end in socket.socketpair()]
    groups = []
    for rank, (channel, memory) in enumerate(zip(channels, memories, strict=True)):
        storages = Storages(CPU, 4 * NBYTES)
        for handle in (1, 2):
            storages.create(handle, NBYTES)
        storages.slice(1, 0, NBYTES).random_(0, 100)
        leases = LeaseGroups(storages)
        leases.join(GroupPlace(GROUP, rank, 2, 60.0))
        leases.get(GROUP).link(1 - rank, channel, memory)
        groups.append((leases.get(GROUP), storages))
    yield groups, channels
    for group, _ in groups:
        group.close("the test has ended")


def both(groups, steps):
    failed = []

    def run(group, step):
        try:
            group.run(step)
        except StateError as error:
            failed.append(str(error))

    threads = [threading.Thread(target=run, args=(group, step)) for (group, _), step in zip(groups, steps, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def test_bytes_go_through_it_and_not_through_the_socket(ranks):
    groups, channels = ranks
    whole, target = Region(1, 0, NBYTES), Region(2, 0, NBYTES)
    steps = [ExchangeStep(GROUP, "all_gather", ((1 - rank, whole),), ((1 - rank, target),)) for rank in range(2)]
    assert not both(groups, steps)
    for (_, storages), (_, others) in (groups, groups[::-1]):
        assert torch.equal(storages.slice(2, 0, NBYTES), others.slice(1, 0, NBYTES))
    assert all(0 < channel.sent < 1000 for channel in channels)


def test_shares_are_combined(ranks):
    groups, _ = ranks
    expected = sum(storages.slice(1, 0, NBYTES).clone() for _, storages in groups)
    half = NBYTES // 2
    shares = (Region(1, 0, half), Region(1, half, half))
    steps = [ReduceStep(GROUP, "reduce_scatter", "sum", torch.uint8, shares, Region(2, 0, half)) for _ in range(2)]
    assert not both(groups, steps)
    for rank, (_, storages) in enumerate(groups):
        assert torch.equal(storages.slice(2, 0, half), expected[rank * half : (rank + 1) * half])


def test_messages_of_different_sizes_end_the_group(ranks):
    groups, _ = ranks
    steps = [
        ExchangeStep(GROUP, "all_gather", ((1 - rank, Region(1, 0, nbytes)),), ((1 - rank, Region(2, 0, nbytes)),))
        for rank, nbytes in enumerate((NBYTES, NBYTES - 8))
    ]
    failed = both(groups, steps)
    assert any("all ranks have to call the same operations" in each for each in failed)


def test_a_rank_that_is_gone_is_noticed_while_no_slot_is_empty(ranks):
    groups, channels = ranks
    step = ExchangeStep(GROUP, "send", ((1, Region(1, 0, NBYTES)),), ((1, Region(2, 0, 8)),))
    threading.Timer(0.2, channels[1].close).start()
    assert both(groups[:1], [step])


def test_a_lease_shares_memory_with_a_limited_number_of_others():
    leases, memories = LeaseGroups(Storages(CPU, 1000)), LinkMemories(18 * link_memory.SIZE)
    made = [leases.memory(memories.create(), connects=True) for _ in range(16)]
    assert all(each is not None for each in made)
    with pytest.raises(DeviceError, match="shares memory with 16 other leases"):
        leases.memory(memories.create(), connects=True)
    del made[0]
    made.append(leases.memory(memories.create(), connects=True))
    assert made[-1] is not None
    assert leases.memory([], connects=False) is None
    memories.close()


def test_leases_of_a_machine_share_no_more_than_its_limit(caplog):
    memories = LinkMemories(2 * link_memory.SIZE + 1)
    first, second = memories.create(), memories.create()
    assert memories.usage() == LinkMemoryUsage(2 * link_memory.SIZE, memories.limit, 0)
    with pytest.raises(DeviceError, match=r"share 67\.1 MB of host memory already, of 67\.1 MB at most"):
        memories.create()
    link_memory.close(first)
    assert memories.usage().used == link_memory.SIZE
    link_memory.close(memories.create())
    link_memory.close(second)
    assert memories.usage().used == 0
    order = Order("ab" * 16, bytes(32), "ann", "mill/0", 1000, 0.5)
    for group in (GROUP, GROUP, bytes(15) + b"x", GROUP):
        memories.unshared(order, group, "it cannot be pinned")
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(logged) == memories.usage().unshared == 2
    assert all(f"lease {order.lease} of tenant ann on mill/0" in line for line in logged)
    assert all("through sockets" in line and "172 ms" in line and "cannot be pinned" in line for line in logged)
    memories.close()
