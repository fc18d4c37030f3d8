"""What processes a test has started: a Ray cluster that other tests share may run beside them."""

import psutil

_others: set[int] = set()


def look() -> None:
    """Those that there are now are not the test's."""
    _others.clear()
    _others.update(child.pid for child in psutil.Process().children())


def children() -> set[int]:
    """The process ids of those that were started since."""
    return {child.pid for child in psutil.Process().children()} - _others
