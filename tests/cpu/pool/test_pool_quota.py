"""Quotas as they are written."""

import pytest

from warpbus.errors import UsageError
from warpbus.pool.quota import Quota


@pytest.mark.parametrize(
    ("memory", "size"), [("8GB", 8 * 10**9), ("8GiB", 8 * 2**30), ("500MB", 500 * 10**6), (123, 123)]
)
def test_quotas_are_read(memory, size):
    assert Quota.parse(memory, 0.25) == Quota(size, 0.25)
    assert Quota.parse(memory).share == 1.0


def test_a_share_of_a_card_needs_the_card():
    assert Quota.parse("50%", card=80 * 10**9).memory == 40 * 10**9
    with pytest.raises(UsageError, match="give a size such as"):
        Quota.parse("50%")
    with pytest.raises(UsageError, match="the card has"):
        Quota.parse("81GB", card=80 * 10**9)


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan"), float("inf")])
def test_no_part_of_a_gpu(share):
    with pytest.raises(UsageError, match="share is"):
        Quota.parse("8GB", share)


def test_no_memory():
    with pytest.raises(UsageError, match="give more than 0"):
        Quota.parse(0)


def test_how_it_reads():
    assert str(Quota(8 * 10**9, 0.25)) == "8.00 GB and 25% of the GPU"
