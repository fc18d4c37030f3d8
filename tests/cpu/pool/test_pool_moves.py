"""Moves of leases, and the plans that propose them: to empty a host, and to make room."""

import pytest
from pool_brokers import GB, ask, gpus, pool, why

from warpbus.errors import UsageError
from warpbus.pool.broker.broker import Broker
from warpbus.pool.broker.leases import Lease, LeaseMove
from warpbus.pool.quota import Quota


def test_a_move_keeps_both_sides_until_it_ends():
    broker = pool(a=(80, 80), b=(40,))
    lease = ask(broker, 30, 0.5, on="a/0")
    moving = broker.begin_move(lease.id, "a/1", 1)
    assert (moving.state, moving.gpu, moving.target) == ("moving", "a/0", "a/1")
    used = {gpu["name"]: (gpu["used"], gpu["share_used"], gpu["leases"]) for gpu in broker.status(1)["gpus"]}
    assert used["a/0"] == used["a/1"] == (30 * GB, 0.5, [lease.id])
    for what in (
        lambda: broker.release(lease.id, 1),
        lambda: broker.suspend(lease.id, 1),
        lambda: broker.begin_move(lease.id, "b", 1),
    ):
        with pytest.raises(UsageError, match=r"moves from a/0 to a/1, it cannot be \w+: wait for the end"):
            what()
    assert broker.end_move(lease.id, False, 3).gpu == "a/0"
    broker.begin_move(lease.id, "b", 4)
    moved = broker.end_move(lease.id, True, 4.25, copied=7)
    assert (moved.state, moved.gpu, moved.target, moved.reason) == ("placed", "b/0", None, "moved from a/0")
    events = [event for event in broker.status(5)["events"] if event["kind"] in ("moved", "not moved")]
    assert [(e["kind"], e["source"], e["target"], e["seconds"], e["bytes"]) for e in events] == [
        ("not moved", "a/0", "a/1", 2, None),
        ("moved", "a/0", "b/0", 0.25, 7),
    ]
    with pytest.raises(UsageError, match="is placed, it does not move"):
        broker.end_move(lease.id, True, 5)


def test_moves_that_cannot_be():
    broker = pool(a=(80,), b=(80,))
    lease, fixed = ask(broker, 50, on="a"), ask(broker, 10, on="a", movable=False)
    ask(broker, 40, on="b")
    before = broker.dump()
    for to, message in [
        ("b", r"needs 50.00 GB .* on b is free only: b/0 with 40.00 GB and share 0.90: choose another GPU"),
        ("a", "is on a/0 already"),
        ("a/0", "is on a/0 already"),
        ("c/0", "the pool has no GPU or host c/0"),
    ]:
        with pytest.raises(UsageError, match=message):
            broker.begin_move(lease.id, to, 1)
    with pytest.raises(UsageError, match="not movable: it cannot be moved"):
        broker.begin_move(fixed.id, "b", 1)
    assert broker.dump() == before
    broker.leave("b", 1)
    with pytest.raises(UsageError, match="the pool has no GPU or host b"):
        broker.begin_move(lease.id, "b", 1)
    broker.join("b", gpus("b", 80), 2)
    broker.drain("b", 2)
    with pytest.raises(UsageError, match="cannot move to b: the host is draining"):
        broker.begin_move(lease.id, "b", 2)


def test_defragmenting_copies_the_fewest_bytes():
    broker = pool(a=(80, 80, 80))
    layout = {"a/0": (30, 20), "a/1": (25, 20), "a/2": (50,)}
    where: dict[str, str] = {}
    for gpu, sizes in layout.items():
        for size in sizes:
            lease = ask(broker, size)
            if lease.gpu != gpu:
                broker.begin_move(lease.id, gpu, 0)
                broker.end_move(lease.id, True, 0)
            where[lease.id] = gpu
    assert broker.defragment() == []  # nobody waits
    large = ask(broker, 60, now=1)
    assert large.state == "queued"
    moves = broker.defragment()
    # 30 of a/0 to make 60 there, or 25 of a/1; with both 20s moved nothing would be gained.
    assert [(where[move.lease], move.target, move.bytes) for move in moves] == [("a/1", "a/0", 25 * GB)]
    assert broker.lease(large.id).state == "queued"  # a plan changes nothing
    for move in moves:
        broker.begin_move(move.lease, move.target, 2)
        broker.end_move(move.lease, True, 3)
    assert [(lease.id, lease.gpu) for lease in broker.place(4)] == [(large.id, "a/1")]
    larger = ask(broker, 80, now=5)
    fixed = broker.defragment()
    assert (larger.state, fixed) == ("queued", [])  # no plan


def test_defragmenting_hurts_nobody():
    def crowded(**wishes: object) -> tuple[Broker, Lease]:
        broker = pool(a=(80, 80))
        blocks = [ask(broker, 70), ask(broker, 70)]
        movers = [ask(broker, 10, **wishes), ask(broker, 10, **wishes)]
        assert {lease.gpu for lease in movers} == {"a/0", "a/1"}
        for block in blocks:
            broker.release(block.id, 1)
        ask(broker, 80, now=1)
        return broker, movers[0]

    broker, mover = crowded()
    broker.seen(mover.id, 2, memory_used=5)
    assert broker.defragment() == [LeaseMove(mover.id, mover.gpu or "", "a/1", 5)]
    assert crowded(movable=False)[0].defragment() == []
    assert crowded(priority=1)[0].defragment() == []
    assert crowded(on="a")[0].defragment() != []
    broker, mover = crowded()
    broker.request("ann", Quota(GB, 0.1), near=mover.id, now=2)
    assert all(move.lease != mover.id for move in broker.defragment())


def test_draining_moves_everything_away():
    broker = pool(a=(80, 80), b=(80,), c=(30,))
    broker.join("d", gpus("d", 80, model="L4"), 0)
    leases = [ask(broker, size, on="a") for size in (50, 30, 20)]
    moves = broker.drain("a", 1)
    # 30 GB fill b/0 or c/0, of which b/0 has less share left; d/0 is another model, the last choice.
    assert {(move.lease, move.target) for move in moves} == {
        (leases[0].id, "b/0"),
        (leases[1].id, "b/0"),
        (leases[2].id, "c/0"),
    }
    assert sum(move.bytes for move in moves) == 100 * GB
    assert ask(broker, 10).gpu != "a/0"
    for move in moves:
        broker.begin_move(move.lease, move.target, 2)
    assert broker.drain("a", 2) == []
    for move in moves:
        broker.end_move(move.lease, True, 3)
    assert [gpu["leases"] for gpu in broker.status(3)["gpus"] if gpu["host"] == "a"] == [[], []]
    waits = ask(broker, 5, on="a", now=3)
    assert why(broker, waits) == "a would hold it, but is draining"
    broker.join("a", gpus("a", 80, 80), 4)
    assert broker.place(4) == []  # it drains on
    broker.undrain("a", 5)
    assert [lease.id for lease in broker.place(5)] == [waits.id]


def test_draining_names_what_fits_nowhere():
    broker = pool(a=(80, 80), b=(80,))
    fixed = ask(broker, 10, on="a", movable=False)
    large = ask(broker, 70, on="a")
    ask(broker, 20, on="b")
    coming = ask(broker, 5, on="b")
    broker.begin_move(coming.id, "a", 0)
    before = broker.dump()
    with pytest.raises(UsageError) as caught:
        broker.drain("a", 1)
    assert f"{fixed.id} (ann) cannot be moved; {coming.id} moves to it; {large.id} (ann, 70.00 GB" in str(caught.value)
    assert broker.dump() == before
    broker.release(fixed.id, 2)
    broker.release(large.id, 2)
    broker.end_move(coming.id, False, 2)
    both = [ask(broker, 40, on="a/0"), ask(broker, 40, on="a/1")]
    with pytest.raises(UsageError, match=f"{both[0].id}, {both[1].id} fit elsewhere each, but not all of them"):
        broker.drain("a", 3)


def test_draining_finds_a_packing_that_best_fit_alone_misses():
    broker = pool(a=(80, 80), b=(50, 60))
    # By best fit alone 30 goes to b/0, 30 to b/1, and 26 nowhere beside the 24 that is to come.
    for size in (30, 30, 26, 24):
        ask(broker, size, on="a")
    moves = broker.drain("a", 1)
    held = {"b/0": 0, "b/1": 0}
    for move in moves:
        held[move.target] += move.bytes
    assert held == {"b/0": 50 * GB, "b/1": 60 * GB}
