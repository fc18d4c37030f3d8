"""Rate limits: bursts, what refills them, and whom they concern."""

import pytest

from warpbus.errors import UnavailableError
from warpbus.pool.daemon.rates import RateLimit


def test_a_burst_and_then_as_often_as_it_refills():
    now = 100.0
    limit = RateLimit(6.0, "leases", lambda: now)
    for _ in range(6):
        limit.check("tenant ann")
    with pytest.raises(UnavailableError, match=r"tenant ann asks for leases too often.*10\.0 s") as caught:
        limit.check("tenant ann")
    assert caught.value.retry_after == pytest.approx(10.0)
    limit.check("tenant bob")  # another one is not concerned
    now += 9.0
    with pytest.raises(UnavailableError, match=r"in 1\.0 s"):  # those that were refused did not count
        limit.check("tenant ann")
    now += 1.001
    limit.check("tenant ann")
    now += 1e6  # rest saves up no more than one burst
    for _ in range(6):
        limit.check("tenant ann")
    with pytest.raises(UnavailableError):
        limit.check("tenant ann")


def test_it_remembers_a_bounded_number():
    limit = RateLimit(1.0, "leases", lambda: 0.0)
    for number in range(20_000):
        limit.check(str(number))
    assert len(limit._buckets) <= 10_000
