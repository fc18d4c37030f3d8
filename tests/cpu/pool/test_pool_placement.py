"""Which lease goes onto which GPU, what is refused at once, and the order of those that wait."""

import pytest
from pool_brokers import GB, ask, gpus, pool, why

from warpbus.errors import QueueFullError, UsageError
from warpbus.pool.broker.broker import Broker
from warpbus.pool.broker.leases import Limits
from warpbus.pool.quota import Quota

# Placement


def test_a_lease_goes_where_the_least_is_left():
    broker = pool(a=(80, 40, 80))
    lease = ask(broker, 30, 0.5)
    assert (lease.state, lease.gpu) == ("placed", "a/1")
    assert lease.reason == "best fit of 3 GPUs with room: 10.00 GB and share 0.50 stay free"
    assert ask(broker, 8).gpu == "a/1"
    assert ask(broker, 8).gpu == "a/0"  # the whole GPUs are alike: the lower index
    assert ask(broker, 70).gpu == "a/0"
    assert ask(broker, 80).reason.startswith("the only GPU with room: 0.00 GB")


def test_of_equal_memory_the_lesser_share_is_left():
    broker = pool(a=(80, 80))
    ask(broker, 10, 0.1, on="a/0")
    ask(broker, 10, 0.6, on="a/1")
    assert ask(broker, 10, 0.3).gpu == "a/1"
    assert ask(broker, 10, 0.3).gpu == "a/0"


def test_shares_fill_a_gpu_whatever_their_last_bits_are():
    for shares in ([0.1] * 10, [0.7, 0.2, 0.1], [1 / 3] * 3, [0.29, 0.71], [1 / 7] * 7):
        broker = pool(a=(80,))
        assert [ask(broker, 1, share).state for share in shares] == ["placed"] * len(shares)
        assert ask(broker, 1, 0.001).state == "queued"


def test_on_a_gpu_or_a_host():
    broker = pool(a=(40,), b=(80, 80))
    assert ask(broker, 30, on="b").gpu == "b/0"
    lease = ask(broker, 30, on="b/1")
    assert lease.gpu == "b/1"
    assert lease.reason.startswith("requested on b/1, the only GPU with room")
    with pytest.raises(UsageError, match="the pool has no GPU or host c: its GPUs are a/0, b/0, b/1: choose one"):
        ask(broker, 30, on="c")
    with pytest.raises(UsageError, match=r"no GPU of the pool on a can hold .*the largest, a/0, has 40.00 GB"):
        ask(broker, 50, on="a")


def test_near_prefers_nvlink_then_the_same_gpu():
    broker = Broker()
    broker.join("a", gpus("a", 80, 80, 80, links={0: (2,), 2: (0,)}), 0)
    broker.join("b", gpus("b", 20), 0)
    first = ask(broker, 70, on="a/0")
    second = ask(broker, 10, near=first.id)
    assert second.gpu == "a/2"
    assert second.reason.startswith("near a/0 (with NVLink), best fit of 3 GPUs")
    broker.request("ann", Quota(GB, 0.9), on="a/2", now=0)
    assert ask(broker, 10, near=first.id).gpu == "a/0"
    assert ask(broker, 20, near=first.id).reason.startswith("near a/0 (on the host)")
    with pytest.raises(UsageError, match="near: tenant bob has no lease"):
        broker.request("bob", Quota(GB, 0.1), near=first.id, now=0)
    with pytest.raises(UsageError, match=f"there is no GPU on b near {first.id}"):
        ask(broker, 10, near=first.id, on="b")


def test_near_one_that_waits_waits_for_it():
    broker = pool(a=(80,), b=(80,))
    full = [ask(broker, 80, on="a"), ask(broker, 40, on="b")]
    first = ask(broker, 60)
    second = ask(broker, 10, near=first.id)
    assert why(broker, second) == f"waits for the lease that it is to be near to, {first.id}"
    broker.release(full[0].id, 1)
    assert [(lease.id, lease.gpu) for lease in broker.place(1)] == [(first.id, "a/0"), (second.id, "a/0")]


def test_what_never_fits_is_refused_at_once():
    broker = Broker()
    with pytest.raises(UsageError, match="it has no GPU: let a host join first"):
        ask(broker, 1)
    broker.join("a", gpus("a", 40, 80), 0)
    with pytest.raises(UsageError, match=r"can hold a lease of 81.00 GB.*the largest, a/1, has 80.00 GB: ask for that"):
        ask(broker, 81)
    with pytest.raises(UsageError, match="priority is 101: give -100 to 100"):
        ask(broker, 1, priority=101)
    with pytest.raises(UsageError, match="a lease needs a tenant"):
        broker.request("", Quota(GB, 0.1), now=0)
    assert broker.status(0)["leases"] == []


def test_limits_of_tenants():
    limits = {"ann": Limits(memory=20 * GB, share=0.5, leases=3), "*": Limits(leases=1)}
    broker = Broker(limits=limits)
    broker.join("a", gpus("a", 80), 0)
    first = ask(broker, 15, 0.2)
    with pytest.raises(UsageError, match=r"may have 20.00 GB of memory, of which 5.00 GB is left: ask for less"):
        ask(broker, 6)
    with pytest.raises(UsageError, match=r"may have a share of 0.50, of which 0.30 is left"):
        ask(broker, 1, 0.4)
    second = ask(broker, 1, 0.3)
    broker.request("bob", Quota(GB, 0.1), now=0)
    with pytest.raises(UsageError, match=r"tenant bob asks .* but may have 1 leases, and has 1"):
        broker.request("bob", Quota(GB, 0.1), now=0)
    broker.suspend(first.id, 1)  # holds nothing, but counts as a lease
    third = ask(broker, 15, 0.1)
    with pytest.raises(UsageError, match="may have 3 leases, and has 3"):
        ask(broker, 1)
    with pytest.raises(UsageError, match=r"of which 4.00 GB is left"):
        broker.resume(first.id, 2)
    broker.release(second.id, 2)
    broker.release(third.id, 2)
    assert broker.resume(first.id, 3).state == "placed"


# The queue


def test_the_first_that_waits_has_a_gpu_kept_for_it():
    broker = pool(a=(80, 80))
    small = ask(broker, 20, on="a/0")
    smaller = ask(broker, 10, on="a/1")
    large = ask(broker, 80)
    assert large.state == "queued"
    assert why(broker, large) == (
        "needs 80.00 GB and 10% of the GPU; most is free on a/1 with 70.00 GB and share 0.90; a/1 is kept for it"
    )
    assert ask(broker, 50).gpu == "a/0"  # it passes where that delays nobody
    waits = ask(broker, 30)
    assert why(broker, waits) == f"a/1 has room, but is kept for {large.id}"
    broker.release(smaller.id, 5)
    placed = broker.place(5)
    assert [(lease.id, lease.gpu) for lease in placed] == [(large.id, "a/1")]
    assert broker.lease(large.id) == placed[0]
    broker.release(small.id, 6)
    assert [lease.id for lease in broker.place(6)] == [waits.id]
    assert broker.place(7) == []


def test_a_stream_of_small_leases_does_not_starve_a_large_one():
    broker = pool(a=(80,), b=(80,))
    small = [ask(broker, 20) for _ in range(8)]
    large = ask(broker, 80, now=1)
    for now in range(2, 40):
        small.append(ask(broker, 20, priority=0, now=now))
        oldest = small.pop(0)
        if oldest.state == "queued":
            oldest = broker.lease(oldest.id)
        broker.release(oldest.id, now)
        if large.id in {lease.id for lease in broker.place(now)}:
            return
    pytest.fail("the large lease was not placed")


def test_priority_and_aging_order_the_queue():
    broker = pool(a=(80,))
    block = ask(broker, 80)
    old = ask(broker, 80, now=0)
    urgent = ask(broker, 80, priority=2, now=100)  # 40 units of aging are missing to old's
    late = ask(broker, 80, priority=2, now=130)
    assert [each["id"] for each in broker.status(130)["queue"]] == [urgent.id, old.id, late.id]
    assert [each["priority"] for each in broker.status(130)["queue"]] == [2, 2, 2]
    assert [each["waited"] for each in broker.status(130)["queue"]] == [30, 130, 0]
    for lease in (urgent, old, late):
        broker.release(block.id, 200)
        (block,) = broker.place(200)
        assert block.id == lease.id


def test_a_request_places_nobody_else():
    broker = pool(a=(80,))
    block = ask(broker, 80)
    first, second = ask(broker, 30), ask(broker, 30)
    broker.release(block.id, 1)
    third = ask(broker, 10, now=1)
    assert third.state == "placed"
    assert {broker.lease(lease.id).state for lease in (first, second)} == {"queued"}
    assert why(broker, first) == "has room on a/0 and is placed next"
    assert {lease.id for lease in broker.place(1)} == {first.id, second.id}


def test_too_many_that_wait():
    broker = Broker(max_queued=1)
    broker.join("a", gpus("a", 80), 0)
    saved = ask(broker, 80)
    broker.suspend(saved.id, 0)
    ask(broker, 80)
    ask(broker, 80)
    before = broker.dump()
    with pytest.raises(QueueFullError, match="1 leases wait for a GPU already: try again later"):
        ask(broker, 1)
    with pytest.raises(QueueFullError):
        broker.resume(saved.id, 1)
    assert broker.dump() == before


@pytest.mark.parametrize("wrong", [{"grace": 0}, {"aging": -1}, {"max_queued": 0}, {"aging": float("nan")}])
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} is .*: give more than 0"):
        Broker(**wrong)
