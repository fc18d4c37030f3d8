"""Hosts that join and leave, and the life of a lease. What holds over any sequence: test_pool_broker_stateful.py."""

import pytest
from pool_brokers import GB, ask, gpus, pool

from warpbus.errors import UsageError
from warpbus.pool.broker.broker import Broker

# Hosts


def test_a_host_that_leaves_loses_its_leases():
    broker = pool(a=(80,), b=(80,))
    lost, moving, coming = ask(broker, 10, on="a"), ask(broker, 20, on="a"), ask(broker, 30, on="b")
    broker.begin_move(moving.id, "b", 1)
    broker.begin_move(coming.id, "a", 1)
    ended = broker.leave("a", 2)
    assert {(lease.id, lease.state, lease.gpu, lease.reason) for lease in ended} == {
        (lost.id, "expired", None, "a left the pool"),
        (moving.id, "expired", None, "a left the pool"),
    }
    stays = broker.lease(coming.id)
    assert (stays.state, stays.gpu, stays.target, stays.reason) == (
        "placed",
        "b/0",
        None,
        "stayed on b/0: a left the pool",
    )
    with pytest.raises(UsageError, match=f"lease {lost.id}: it has ended: a left the pool"):
        broker.lease(lost.id)
    assert broker.leave("a", 3) == []
    assert [gpu["state"] for gpu in broker.status(3)["gpus"]] == ["lost", "open"]
    assert [(gpu["free"], gpu["used"]) for gpu in broker.status(3)["gpus"]] == [(0, 0), (50 * GB, 30 * GB)]
    with pytest.raises(UsageError, match=r"host a has left the pool: .* join again"):
        broker.alive("a", 3)
    waits = ask(broker, 60, now=3)
    broker.join("a", gpus("a", 80), 4)
    assert [lease.id for lease in broker.place(4)] == [waits.id]


def test_a_host_that_joins_again_keeps_its_leases():
    broker = pool(a=(80, 40))
    stays, goes = ask(broker, 50), ask(broker, 40)
    before = broker.changes
    assert broker.join("a", gpus("a", 80, 40), 1) == []
    assert broker.changes == before
    with pytest.raises(UsageError, match=r"a/0 joins with 49.00 GB, but its leases have 50.00 GB: free"):
        broker.join("a", gpus("a", 49), 2)
    (lost,) = broker.join("a", gpus("a", 60), 2)
    assert (lost.id, lost.reason) == (goes.id, "a joined without this GPU")
    assert broker.lease(stays.id).gpu == "a/0"
    assert [gpu["free"] for gpu in broker.status(2)["gpus"]] == [10 * GB]


@pytest.mark.parametrize(
    ("host", "offered", "message"),
    [
        ("a b", gpus("a b", 1), "host is 'a b': give a name without spaces and slashes"),
        ("a", gpus("b", 1), "host a offers GPU b/0 of b: expected a/0"),
        ("a", gpus("a", 1) * 2, "host a offers a GPU twice"),
        ("a", gpus("a", 0), "a/0 offers 0 bytes"),
        ("a", gpus("a", 1, links={0: (1,)}), "a/0 has links to a/1: expected GPUs of the same host"),
    ],
)
def test_hosts_that_make_no_sense(host, offered, message):
    broker = Broker()
    with pytest.raises(UsageError, match=message):
        broker.join(host, offered, 0)
    assert broker.status(0)["gpus"] == []


def test_hosts_that_are_silent():
    broker = pool(a=(80,), b=(80,), c=(80,))
    broker.alive("a", 50)
    broker.leave("c", 0)
    assert broker.silent(60) == []
    assert broker.silent(61) == ["b"]
    with pytest.raises(UsageError, match="the pool has no host d"):
        broker.alive("d", 0)


# The life of a lease


def test_clients_that_vanish_are_reclaimed():
    broker = pool(a=(80,), b=(80,))
    quiet, alive, moving = ask(broker, 10), ask(broker, 10), ask(broker, 10)
    asleep = ask(broker, 10)
    broker.suspend(asleep.id, 0)
    broker.begin_move(moving.id, "b", 1)
    broker.seen(alive.id, 50, memory_used=3)
    assert broker.expire(60) == []
    assert [(lease.id, lease.state, lease.reason) for lease in broker.expire(61)] == [
        (quiet.id, "expired", "its client was not seen for 61 s")
    ]
    assert broker.lease(alive.id).memory_used == 3
    broker.end_move(moving.id, True, 100)
    assert [lease.id for lease in broker.expire(160)] == [alive.id]
    assert [lease.id for lease in broker.expire(161)] == [moving.id]
    assert broker.expire(10**6) == []
    assert broker.lease(asleep.id).state == "suspended"


def test_suspended_leases_hold_nothing():
    broker = pool(a=(80,))
    lease = ask(broker, 80)
    with pytest.raises(UsageError, match="is placed, not suspended: there is nothing to resume"):
        broker.resume(lease.id, 1)
    assert (broker.suspend(lease.id, 1).state, broker.lease(lease.id).gpu) == ("suspended", None)
    with pytest.raises(UsageError, match="is suspended, it cannot be suspended: it has no GPU"):
        broker.suspend(lease.id, 1)
    other = ask(broker, 80, now=2)
    assert other.state == "placed"
    assert broker.resume(lease.id, 3).state == "queued"
    broker.release(other.id, 4)
    assert [each.id for each in broker.place(4)] == [lease.id]
    broker.join("b", gpus("b", 80), 5)
    fixed = ask(broker, 10, on="b", movable=False, now=5)
    with pytest.raises(UsageError, match="not movable: it cannot be suspended"):
        broker.suspend(fixed.id, 5)


def test_a_lease_comes_back_where_it_is_wanted_now():
    broker = pool(a=(80,), b=(80,))
    lease = ask(broker, 10, on="a")
    broker.suspend(lease.id, 1)
    with pytest.raises(UsageError, match="the pool has no GPU or host c"):
        broker.resume(lease.id, 2, on="c")
    assert (broker.resume(lease.id, 2, on="b").gpu, broker.lease(lease.id).on) == ("b/0", "b")
    broker.suspend(lease.id, 3)
    assert broker.resume(lease.id, 4).gpu == "b/0"


def test_a_process_that_dies_ends_its_lease():
    broker = pool(a=(80, 80))
    lease = ask(broker, 10)
    broker.begin_move(lease.id, "a/1", 1)
    ended = broker.lose(lease.id, "its process died", 2)
    assert (ended.state, ended.gpu, ended.target, ended.reason) == ("expired", None, None, "its process died")
    assert [gpu["used"] for gpu in broker.status(2)["gpus"]] == [0, 0]
    event = broker.status(2)["events"][-1]
    assert (event["kind"], event["source"], event["target"], event["text"]) == (
        "lost",
        "a/0",
        "a/1",
        "its process died",
    )


def test_unknown_leases():
    broker = pool(a=(80,))
    with pytest.raises(UsageError, match="lease 00: there is none: request one"):
        broker.release("00", 0)
    lease = ask(broker, 1)
    assert broker.release(lease.id, 9).state == "released"
    with pytest.raises(UsageError, match="it has ended: released by its client"):
        broker.seen(lease.id, 10)
