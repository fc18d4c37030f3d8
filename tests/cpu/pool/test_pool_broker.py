"""The broker: each operation by itself. What holds over any sequence of them: test_pool_broker_stateful.py."""

import json

import pytest

from warpbus.errors import DataError, QueueFullError, UsageError
from warpbus.pool.broker import Broker
from warpbus.pool.leases import Gpu, Lease, Limits, Move
from warpbus.pool.quota import Quota

GB = 10**9
NONE: dict[int, tuple[int, ...]] = {}


def gpus(host: str, *memory: int, model: str = "H200", links: dict[int, tuple[int, ...]] = NONE) -> list[Gpu]:
    return [
        Gpu(f"{host}/{index}", host, index, model, size * GB, tuple(f"{host}/{k}" for k in links.get(index, ())))
        for index, size in enumerate(memory)
    ]


def pool(**hosts: tuple[int, ...]) -> Broker:
    broker = Broker(grace=60, aging=60)
    for host, memory in hosts.items():
        broker.join(host, gpus(host, *memory), 0)
    return broker


def ask(broker: Broker, memory: int, share: float = 0.1, now: float = 0, **wishes: object) -> Lease:
    return broker.request("ann", Quota(memory * GB, share), now=now, **wishes)


def why(broker: Broker, lease: Lease, now: float = 0) -> str:
    return next(each["why"] for each in broker.status(now)["queue"] if each["id"] == lease.id)


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


# Hosts


def test_a_host_that_leaves_loses_its_leases():
    broker = pool(a=(80,), b=(80,))
    lost, moving, coming = ask(broker, 10, on="a"), ask(broker, 20, on="a"), ask(broker, 30, on="b")
    broker.begin_move(moving.id, "b", 1)
    broker.begin_move(coming.id, "a", 1)
    ended = broker.leave("a", 2)
    assert {(lease.id, lease.state, lease.gpu, lease.reason) for lease in ended} == {
        (lost.id, "expired", None, "a left"),
        (moving.id, "expired", None, "a left"),
    }
    stays = broker.lease(coming.id)
    assert (stays.state, stays.gpu, stays.target, stays.reason) == ("placed", "b/0", None, "stayed on b/0: a left")
    with pytest.raises(UsageError, match=f"lease {lost.id}: it has ended: a left"):
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


# Moves


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
    assert broker.defragment() == [Move(mover.id, mover.gpu or "", "a/1", 5)]
    assert crowded(movable=False)[0].defragment() == []
    assert crowded(priority=1)[0].defragment() == []
    assert crowded(on="a")[0].defragment() != []
    broker, mover = crowded()
    broker.request("ann", Quota(GB, 0.1), near=mover.id, now=2)
    assert all(move.lease != mover.id for move in broker.defragment())


# What others see


def test_status_is_json_and_has_its_schema():
    broker = pool(a=(80,))
    placed = ask(broker, 60, 0.25, now=1.5)
    waits = ask(broker, 30, 0.5, now=2.5)
    broker.measured("a/0", utilization=0.75, memory=123)
    broker.seen(placed.id, 3.5, memory_used=42)
    status = broker.status(10.0)
    assert json.loads(json.dumps(status)) == status
    assert set(status) == {"now", "gpus", "leases", "queue", "events"}
    assert status["gpus"] == [
        {
            "name": "a/0",
            "host": "a",
            "index": 0,
            "model": "H200",
            "memory": 80 * GB,
            "used": 60 * GB,
            "free": 20 * GB,
            "share_used": 0.25,
            "state": "open",
            "leases": [placed.id],
            "utilization": 0.75,
            "measured_memory": 123,
        }
    ]
    assert status["leases"][0] == {
        "id": placed.id,
        "tenant": "ann",
        "memory": 60 * GB,
        "memory_used": 42,
        "share": 0.25,
        "priority": 0,
        "gpu": "a/0",
        "target": None,
        "state": "placed",
        "since": 1.5,
        "idle": 6.5,
        "reason": placed.reason,
    }
    why = "needs 30.00 GB and 50% of the GPU; most is free on a/0 with 20.00 GB and share 0.75; a/0 is kept for it"
    assert status["leases"][1]["reason"] == f"waits: {why}"
    assert status["queue"] == [
        {
            "id": waits.id,
            "tenant": "ann",
            "memory": 30 * GB,
            "share": 0.5,
            "priority": 0,
            "waited": 7.5,
            "why": why,
        }
    ]
    assert [event["kind"] for event in status["events"]] == ["joined", "placed", "queued"]
    assert set(status["events"][0]) == {
        *("time", "kind", "lease", "tenant", "source", "target", "seconds", "bytes", "text")
    }
    broker.release(placed.id, 11)
    broker.drain("a", 11)
    assert broker.status(11)["gpus"][0]["state"] == "draining"
    with pytest.raises(UsageError, match="the pool has no GPU a/7"):
        broker.measured("a/7", utilization=None, memory=None)


def test_the_history_is_bounded():
    broker = pool(a=(80,))
    for now in range(700):
        broker.release(ask(broker, 1, now=now).id, now)
    events = broker.status(700)["events"]
    assert (len(events), events[-1]["time"], broker.changes) == (1000, 699, 1401)


def test_a_restart_gives_clients_time():
    broker = pool(a=(80,))
    lease = ask(broker, 10)
    again = Broker(grace=60)
    again.load(json.loads(json.dumps(broker.dump())), 1000)
    assert again.dump() == broker.dump()
    assert again.expire(1060) == []
    assert again.silent(1060) == []
    assert again.silent(1061) == ["a"]
    assert [each.id for each in again.expire(1061)] == [lease.id]


def spoil(path: tuple[object, ...], value: object) -> dict[str, object]:
    broker = pool(a=(80, 80))
    ask(broker, 50)
    ask(broker, 50)
    state = json.loads(json.dumps(broker.dump()))
    place = state
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return state


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 2, "the pool's state, version is 2: expected 1"),
        (("more",), 2, "the pool's state has other fields: expected version, changes"),
        (("changes",), True, "changes is True: expected int"),
        (("hosts",), None, "hosts is None: expected list"),
        (("hosts", 0, "seen"), float("nan"), "seen is nan: expected int or float"),
        (("hosts", 0, "gpus", 0, "index"), 1, "offers a GPU twice"),
        (("hosts", 0, "gpus", 0, "links"), [1], r"gpus\[0\], links has something that is no string"),
        (("hosts", 0, "lost"), True, r"leases\[0\] is placed on a/0 with target None: expected GPUs"),
        (("leases", 0, "id"), "../x", r"leases\[0\], id is '../x': expected 32 hexadecimal digits"),
        (("leases", 0, "state"), "expired", "state is 'expired': expected queued, placed"),
        (("leases", 0, "gpu"), None, "is placed on None"),
        (("leases", 0, "target"), "a/1", "is placed on a/0 with target a/1"),
        (("leases", 0, "gpu"), "a/1", "a/1 is leased to more than it has"),
        (("leases", 0, "memory"), -1, "memory is -1 bytes"),
        (("leases", 0, "share"), "1", "share is '1': expected int or float"),
        (("leases", 0), [], r"leases\[0\] has other fields"),
        (("events", 0, "bytes"), 0.5, r"events\[0\], bytes is 0.5: expected int or null"),
    ],
)
def test_a_damaged_state_is_refused(path, value, message):
    broker = pool(b=(80,))
    before = broker.dump()
    with pytest.raises(DataError, match=message):
        broker.load(spoil(path, value))
    assert broker.dump() == before
