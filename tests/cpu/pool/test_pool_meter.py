"""Slices of time: over a while a lease gets its share, and what it did not use it cannot save up."""

import random

import pytest
import torch

from warpbus.pool.tenant.meter import Meter, Slices


@pytest.mark.parametrize("share", [0.1, 0.25, 0.75, 1.0])
@pytest.mark.parametrize("batch", [0.001, 0.03, 0.5])
def test_a_saturating_tenant_gets_its_share(share, batch):
    chance = random.Random(0)
    slices, now, busy = Slices(share, 0.0), 0.0, 0.0
    while now < 100:
        now += slices.wait(now)
        assert slices.wait(now) < 1e-9
        took = batch * chance.uniform(0.5, 1.5)
        now += took
        busy += took
        slices.spend(took, now)
    assert busy / now == pytest.approx(share, abs=0.02)


def test_a_tenant_below_its_share_never_waits():
    slices, now = Slices(0.5, 0.0), 0.0
    for _ in range(1000):
        now += 0.01
        assert slices.wait(now) == 0
        slices.spend(0.004, now)


def test_nothing_is_saved_up():
    slices = Slices(0.25, 0.0)
    assert slices.wait(1e6) == 0
    slices.spend(1.0, 1e6)  # a tenth of a second's share was there: 25 ms
    assert slices.wait(1e6) == pytest.approx(4 * 0.975)


def test_what_others_kept_it_from_spending_is_saved_up_until_it_rests():
    slices = Slices(0.5, 0.0)
    slices.stand(0.3)
    slices.spend(0.2, 0.5)  # 50 ms were there, 150 came while it stood, 100 while it was busy
    assert slices.wait(0.5, 0.1) == pytest.approx(0)
    assert slices.wait(0.5, 0.11) == pytest.approx(0.02)
    slices.stand(1000.0)
    assert slices.wait(1000.0, 0.5) == pytest.approx(0)
    assert slices.wait(1000.0, 0.6) == pytest.approx(0.2)
    slices.rest()
    assert slices.wait(1000.0, 0.06) == pytest.approx(0.02)


def test_a_cpu_is_busy_between_begin_and_end():
    meter = Meter(torch.device("cpu"))
    for _ in range(3):
        meter.begin()
        sum(range(10000))
        meter.end()
    busy = meter.busy
    assert busy > 0
    meter.collect(behind=True)
    assert meter.busy == busy
