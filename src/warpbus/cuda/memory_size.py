"""Amounts of memory: as people write them, as they are shown, and as multiples of a unit."""

import re

from warpbus.errors import UsageError

_SUFFIXES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_memory(memory: str | int, card: int | None = None, *, what: str = "memory") -> int:
    """Bytes that a flag means: `"6GB"`, `"5.5GiB"`, `"50%"` of a card that has `card` bytes, or a number of bytes.

    Without a card there is no share of one, and no limit. `what` is the name of the flag in messages.

    Raises:
        UsageError: no such size, or more than the card has.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|[a-z]*)", str(memory).strip().lower())
    unit = None if found is None else card and card / 100 if found[2] == "%" else _SUFFIXES.get(found[2])
    if found is None or unit is None:
        share = "" if card is None else ", or a share of the card such as 50%"
        raise UsageError(f"{what} is {memory!r}: give a size such as 6GB or 5.5GiB{share}")
    wanted = float(found[1]) * unit
    if card is not None and wanted > card:
        raise UsageError(f"{what} is {memory!r}: the card has {gigabytes(card)}: give that or less")
    return int(wanted)


def gigabytes(size: float) -> str:
    """Bytes as messages and tables show them."""
    return f"{size / 1e9:.2f} GB"


def short_size(size: int) -> str:
    """Bytes in GB with two digits behind the point, or in MB with one."""
    return gigabytes(size) if abs(size) >= 1e9 else f"{size / 1e6:.1f} MB"


def rounded_up(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `size`."""
    return -(-size // unit) * unit
