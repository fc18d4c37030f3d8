"""What people write when they mean an amount of memory."""

import pytest

from warpbus.cuda.memory_size import parse_memory
from warpbus.errors import UsageError

GB = 10**9


@pytest.mark.parametrize(
    ("text", "size"),
    [("6GB", 6 * GB), ("5.5 GiB", 5.5 * 2**30), ("800mb", 800e6), ("50%", 40 * GB), (7 * GB, 7 * GB), ("123", 123)],
)
def test_sizes_are_read(text, size):
    assert parse_memory(text, 80 * GB) == size


@pytest.mark.parametrize("text", ["six", "6 GB more", "-1GB", "", "GB", "6TB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match=r"give a size such as 6GB or 5\.5GiB, or a share of the card"):
        parse_memory(text, 80 * GB)


@pytest.mark.parametrize("text", ["81GB", "101%"])
def test_more_than_the_card_has_is_refused(text):
    with pytest.raises(UsageError, match=r"the card has 80\.00 GB"):
        parse_memory(text, 80 * GB)


def test_without_a_card_there_is_no_share_of_one_and_no_limit():
    assert parse_memory("900GB") == 900 * GB
    with pytest.raises(UsageError, match=r"give a size such as 6GB or 5\.5GiB$"):
        parse_memory("50%")
