"""The adapters of an engine: which of them a request names, and what keeps their blocks apart."""

import hashlib
from collections.abc import Collection

from warpbus.errors import UsageError


def check_adapter(name: str | None, names: Collection[str]) -> None:
    """Raises UsageError where a request names an adapter that is not among those that were loaded."""
    if name is not None and name not in names:
        there = f"give one of {', '.join(names)}" if names else "the model was loaded without any"
        raise UsageError(f"there is no adapter {name[:200]!r}: {there}")


def salt_of(name: str | None) -> bytes:
    """What keeps blocks from being shared between adapters (`Request.salt`): keys and values are an adapter's own."""
    return b"" if name is None else hashlib.blake2b(name.encode(), digest_size=16).digest()
