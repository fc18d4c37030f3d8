"""Timing on the CPU: turns, medians, repeats, and how many buffers there are."""

import time

import pytest
import torch

from warpbus.bench import ceilings, timing
from warpbus.bench.timing import FULL, QUICK, Timing, TimingEffort, measure, number_of_sets

ONCE = TimingEffort(samples=4, sample_seconds=1e-9, seconds=10.0)


def test_medians_of_all_samples():
    assert Timing((3.0, 1.0, 2.0), "clock").median == 2.0
    assert Timing((1.0, 2.0, 100.0, 3.0), "clock").median == 2.5


def test_contenders_take_turns_on_the_same_inputs(monkeypatch):
    monkeypatch.setattr(timing, "cpu_cache_bytes", lambda: 1)
    called = []
    sets = []

    def make():
        sets.append(torch.randn(8))
        return (sets[-1],)

    def contender(name):
        return lambda x: called.append((name, x.data_ptr()))

    first, second = measure([contender("a"), contender("b")], make, ONCE)
    assert len(first.seconds) == len(second.seconds) == ONCE.samples
    assert first.method == second.method == "clock"
    # One warm-up each, two estimates each, then alternating.
    order = [name for name, _ in called]
    assert order[:6] == ["a", "b", "a", "a", "b", "b"]
    assert order[6:] == ["a", "b"] * ONCE.samples
    pointers = [pointer for _, pointer in called[6:]]
    assert pointers[0::2] == pointers[1::2]


def test_calls_rotate_over_the_sets(monkeypatch):
    monkeypatch.setattr(timing, "cpu_cache_bytes", lambda: 64)
    seen = []
    effort = TimingEffort(samples=1, sample_seconds=0.01, seconds=1.0)
    measure([lambda x: seen.append(x.data_ptr()) or time.sleep(1e-3)], lambda: (torch.randn(8),), effort)
    assert len(set(seen)) == 4
    assert len(seen) > 8


def test_what_was_measured_is_the_time_of_one_call():
    (found,) = measure([lambda: time.sleep(2e-3)], tuple, TimingEffort(3, 5e-3, 1.0))
    assert 2e-3 <= found.median < 2e-2


def test_slow_calls_get_fewer_samples():
    assert FULL.repeats(1e-6) == 5000
    assert FULL.repeats(1.0) == 1
    assert FULL.rounds(5e-3) == FULL.samples
    assert FULL.rounds(0.5) == 6
    assert FULL.rounds(60.0) == 3
    assert QUICK.rounds(60.0) == 3
    assert TimingEffort(samples=1, sample_seconds=1.0, seconds=1.0).rounds(60.0) == 1


@pytest.mark.parametrize(
    ("touched", "held", "cache", "free", "sets"),
    [
        (10, 10, 100, 10**6, 20),  # twice the cache
        (10, 15, 100, 10**6, 20),
        (300, 400, 100, 10**6, 2),  # larger than that: still two
        (300, 400, 100, 1000, 1),  # unless half of the memory holds only one
        (10, 20, 100, 200, 5),
        (1, 1, 10**6, 10**9, timing.MAX_SETS),
        (0, 0, 100, 100, 50),
    ],
)
def test_how_many_sets(touched, held, cache, free, sets):
    assert number_of_sets(touched, held, cache, free) == sets


def test_the_cache_is_found_or_assumed():
    assert timing.cpu_cache_bytes() >= 2**16


def test_ceilings_of_the_cpu(monkeypatch):
    monkeypatch.setattr(ceilings, "_CPU_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "FULL", QUICK)
    for ceiling in (ceilings.copy_bandwidth, ceilings.read_bandwidth):
        ceiling.cache_clear()
        assert 1e7 < ceiling(torch.device("cpu")) < 1e13
        ceiling.cache_clear()
    rate = ceilings.matrix_rate(torch.device("cpu"), torch.float32)
    assert 1e8 < rate < 1e15
    assert rate == ceilings.matrix_rate(torch.device("cpu"), torch.float32)
