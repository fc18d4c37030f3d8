"""Which leases of an oversubscribed GPU are in its memory: priorities, idle ones, time slices, and host memory."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpbus.pool.daemon.residency import FULL, IDLE_SECONDS, SLICE_OF_SWAPS, Residence, Residency, SwapPlan

SLICE = 5.0
_ids = itertools.count()


def residency(memory: int = 10, limit: int = 100, gpus: int = 1) -> Residency:
    return Residency({f"mill/{index}": memory for index in range(gpus)}, limit, SLICE)


def lease(
    memory: int, priority: int = 0, share: float = 0.1, gpu: str = "mill/0", *, movable: bool = True
) -> Residence:
    return Residence(f"{next(_ids):032x}", gpu, memory, share, priority, movable, used=memory)


def added(pool: Residency, *leases: Residence, now: float = 0.0) -> list[str]:
    for each in leases:
        pool.add(each, now)
    return [each.state for each in leases]


def carried_out(pool: Residency, plan: SwapPlan, now: float, seconds: float = 0.0) -> None:
    for each, why in plan.out:
        pool.swapped_out(each, why, each.used, seconds, now)
    for each in plan.back:
        pool.swapped_in(each, seconds, now)


def swapped(pool: Residency, now: float, seconds: float = 0.0) -> list[Residence]:
    """Carry out plans until there is nothing more to do; the leases that went out."""
    out = []
    while (plan := pool.plan(now)).out or plan.back:
        out += [each for each, _ in plan.out]
        carried_out(pool, plan, now, seconds)
    return out


def test_what_has_no_room_begins_outside_and_takes_the_room_of_an_idle_lease() -> None:
    pool = residency()
    first, second = lease(6), lease(6)
    assert added(pool, first, second) == ["resident", "swapped out"]
    assert not pool.pending
    pool.want(second, 1.0)
    assert pool.pending
    assert swapped(pool, 1.0) == []  # the first one may have work any moment
    assert "1 whose time slice is not over" in second.why
    plan = pool.plan(IDLE_SECONDS)
    assert [each for each, _ in plan.out] == [first]
    assert "it was idle" in plan.out[0][1]
    assert (first.state, second.state, plan.back) == ("swapping out", "swapped out", [])
    assert pool.plan(IDLE_SECONDS) == SwapPlan()  # the room is on its way
    carried_out(pool, plan, IDLE_SECONDS, 0.5)
    assert (first.state, first.nbytes, first.swaps, first.seconds) == ("swapped out", 6, 1, 0.5)
    plan = pool.plan(IDLE_SECONDS)
    assert plan.back == [second]
    carried_out(pool, plan, IDLE_SECONDS + 1)
    assert (second.state, second.last_wait, second.waiting) == ("resident", IDLE_SECONDS, None)


def test_a_higher_priority_preempts_work_at_once_and_a_lower_one_waits_for_idleness() -> None:
    pool = residency()
    low, high = lease(6, -1), lease(6, 1)
    added(pool, low, high)
    low.worked = 0.1
    pool.want(high, 0.1)
    assert swapped(pool, 0.1) == [low]
    assert (high.resident, low.why) == (True, "a lease of priority 1 has work on mill/0")
    pool.want(low, 0.2)
    for second in range(1, 100):
        high.worked = float(second)
        assert swapped(pool, float(second)) == []
    assert "1 with work and a higher priority" in low.why
    assert swapped(pool, high.worked + IDLE_SECONDS) == [high]
    assert low.resident


def test_of_equals_the_least_recently_used_goes_and_of_unequals_the_lowest() -> None:
    pool = residency()
    old, recent, low, new = lease(3), lease(3), lease(3, -1), lease(3)
    added(pool, old, recent, low, new)
    old.worked, recent.worked, low.worked = 1.0, 2.0, 3.0
    pool.want(new, 10.0)
    assert swapped(pool, 10.0) == [low]
    old.worked = recent.worked - 1
    pool.want(low, 11.0)
    new.worked = 11.0
    assert swapped(pool, 11.0) == [old]


def test_no_more_leases_go_than_have_to() -> None:
    pool = residency()
    small, large, wants = lease(2), lease(7), lease(9)
    added(pool, small, large, wants)
    small.worked, large.worked = 1.0, 2.0
    pool.want(wants, 10.0)
    assert swapped(pool, 10.0) == [small, large]
    pool = residency()
    small, large, wants = lease(2), lease(7), lease(8)
    added(pool, small, large, wants)
    small.worked, large.worked = 1.0, 2.0
    pool.want(wants, 10.0)
    assert swapped(pool, 10.0) == [large]  # the least recently used one is not enough, and then not needed


def test_busy_leases_of_one_priority_take_turns_of_a_slice() -> None:
    pool = residency()
    both = lease(6), lease(6)
    added(pool, *both)
    now, turns = 0.0, []
    while now < 10 * SLICE:
        for each in both:
            pool.want(each, now)
            if each.resident:
                each.worked = now
        turns += [now for _ in swapped(pool, now)]
        now += 0.25
    gaps = [after - before for before, after in itertools.pairwise(turns)]
    assert len(turns) >= 8
    assert all(SLICE <= gap <= SLICE + 0.5 for gap in gaps)


def test_a_slice_is_long_beside_what_the_exchange_takes() -> None:
    pool = residency(memory=10 << 30, limit=100 << 30)
    both = lease(6 << 30), lease(6 << 30)
    added(pool, *both)
    pool.want(both[1], 0.0)
    both[0].worked = SLICE
    assert swapped(pool, SLICE, seconds=3.0) == [both[0]]
    both[1].worked = 100.0
    pool.want(both[0], 100.0)
    exchange = 2 * 3.0
    since = both[1].since = 90.0
    both[1].worked = since + SLICE_OF_SWAPS * exchange - 0.1
    assert swapped(pool, both[1].worked) == []
    both[1].worked += 0.2
    assert swapped(pool, both[1].worked) == [both[1]]


def test_compute_is_promised_like_memory() -> None:
    pool = residency()
    first, second, third = lease(1, share=0.7), lease(1, share=0.7), lease(1, share=0.3)
    assert added(pool, first, second, third) == ["resident", "swapped out", "resident"]
    pool.want(second, 10.0)
    assert swapped(pool, 10.0) == [first]


def test_what_is_held_or_cannot_move_stays() -> None:
    pool = residency()
    held, fixed, wants = lease(5), lease(5, movable=False), lease(5, 9)
    added(pool, held, fixed, wants)
    held.held = 1
    pool.want(wants, 50.0)
    assert swapped(pool, 50.0) == []
    assert "1 that cannot be swapped out" in wants.why
    held.held = 0
    assert swapped(pool, 51.0) == [held]


def test_host_memory_has_a_limit_which_is_looked_at_before_a_lease_goes() -> None:
    pool = residency(limit=8)
    first, second = lease(6), lease(6)
    added(pool, first, second)
    pool.want(second, 10.0)
    assert swapped(pool, 10.0) == [first]
    pool.want(first, 20.0)
    assert swapped(pool, 20.0) == []  # both would be there for a moment
    assert first.why.startswith(FULL)
    assert "0.0 MB of 0.0 MB is used" in first.why
    pool.remove(second)
    assert swapped(pool, 21.0) == []
    assert first.resident
    pool = residency()
    first, second = lease(6), lease(6)
    added(pool, first, second)
    pool.want(second, 10.0)
    assert not pool.plan(10.0, available=5).out
    assert "of the machine's memory is free" in second.why
    assert pool.plan(10.0, available=6).out


def test_a_failure_leaves_a_lease_where_it_was_and_is_not_repeated_at_once() -> None:
    pool = residency()
    first, second = lease(6), lease(6)
    added(pool, first, second)
    pool.want(second, 10.0)
    assert pool.plan(10.0).out
    pool.failed(first, "it does not want to", 10.0)
    assert first.resident
    assert not pool.plan(11.0).out
    assert swapped(pool, 16.0) == [first]
    pool.want(first, 30.0)
    carried_out(pool, pool.plan(30.0), 30.0)
    assert pool.plan(30.0).back == [first]
    pool.failed(first, "the GPU has no room", 30.0)
    assert (first.state, first.waiting) == ("swapped out", 30.0)
    assert first.why == "another try, because the last one failed: the GPU has no room"
    assert not pool.plan(31.0).back
    assert pool.plan(36.0).back == [first]


def test_a_small_lease_passes_a_large_one_that_has_to_wait() -> None:
    pool = residency()
    busy, large, small = lease(6, 1), lease(8), lease(4)
    added(pool, busy, large, small)
    small.state = "swapped out"
    busy.worked = 10.0
    pool.want(large, 9.0)
    pool.want(small, 10.0)
    assert swapped(pool, 10.0) == []
    assert (small.resident, large.resident) == (True, False)
    assert set(swapped(pool, 20.0)) == {busy, small}
    assert large.resident


def test_a_new_lease_does_not_take_the_room_that_another_waits_for() -> None:
    pool = residency()
    first, large = lease(6), lease(8)
    added(pool, first, large)
    pool.want(large, 0.0)
    small, urgent = lease(2), lease(2, 1)
    assert added(pool, small, urgent) == ["swapped out", "resident"]


def test_a_lease_whose_client_is_gone_waits_no_more_unless_it_is_held() -> None:
    pool = residency()
    first, second = lease(6), lease(6)
    added(pool, first, second)
    pool.want(second, 1.0)
    pool.unwant(second)
    assert not pool.pending
    pool.want(second, 1.0)
    second.held = 1
    pool.unwant(second)
    assert pool.pending


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 10), st.integers(-1, 1), st.sampled_from([0.1, 0.5, 1.0])), min_size=1, max_size=7
    ),
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["want", "work", "leave", "swap", "fail"])), max_size=60),
    st.integers(10, 40),
)
def test_whatever_happens_a_gpu_is_never_too_full_and_each_lease_gets_its_turn(
    kinds: list[tuple[int, int, float]], steps: list[tuple[int, str]], limit: int
) -> None:
    pool, now = residency(limit=limit), 0.0
    leases = [lease(memory, priority, share) for memory, priority, share in kinds]
    for each in leases:
        pool.add(each, now)
    for index, step in steps:
        now += 0.5
        each = leases[index % len(leases)]
        if step == "want":
            pool.want(each, now)
        elif step == "work" and each.resident:
            each.worked = now
        elif step == "leave":
            pool.remove(each)
        else:
            before = {other: (other.state, other.worked) for other in pool.leases}
            plan = pool.plan(now)
            assert all(before[other][0] == "resident" for other, _ in plan.out)
            wanting = [other.priority for other in pool.leases if other.waiting is not None]
            for other, _ in plan.out:
                idle = now - before[other][1] >= IDLE_SECONDS
                assert idle or other.priority <= max(wanting)
            if step == "swap":
                carried_out(pool, plan, now)
            for other in pool.leases:
                if other.state.startswith("swapping"):
                    pool.failed(other, "a fault", now)
        there = [other for other in pool.leases if other.state != "swapped out"]
        assert sum(other.memory for other in there) <= 10
        assert sum(other.share for other in there) <= 1 + 1e-6
        assert pool.swapped <= limit
        assert all((other.nbytes > 0) <= (other.state in ("swapped out", "swapping in")) for other in pool.leases)
    for each in pool.leases:  # alone with its work, each of them gets in, if host memory has room for all others
        now += 100.0
        pool.limit = 1000
        for other in pool.leases:
            other.waiting = None
        pool.want(each, now)
        swapped(pool, now)
        assert each.resident


@pytest.mark.parametrize("gpus", [1, 2])
def test_gpus_are_apart(gpus: int) -> None:
    pool = residency(gpus=gpus)
    first, second = lease(6), lease(6, gpu=f"mill/{gpus - 1}")
    assert added(pool, first, second) == ["resident", "resident" if gpus == 2 else "swapped out"]
