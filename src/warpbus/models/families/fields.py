"""Reading the values of a config.json, each checked, so that a damaged one is refused by name and not by a crash."""

import math
from collections.abc import Mapping
from typing import Any

from warpbus.errors import CheckpointError

MAX_SIZE = 2**20
MAX_LAYERS = 4096
MAX_VOCABULARY = 2**22
MAX_CONTEXT = 2**27


class Fields:
    """A parsed JSON object and the name it goes by in messages.

    A key whose value is null counts as missing, as it does in transformers. Every method raises
    `CheckpointError` for a value of the wrong type or outside its range, and for a missing key without a default.
    """

    def __init__(self, values: Mapping[str, Any], name: str = "config.json") -> None:
        self.values = values
        self.name = name

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """The error that says what `key` should have been."""
        found = f"found {self.values[key]!r}" if key in self else "it is missing"
        return CheckpointError(f"{self.name}: {key}: expected {expected}, but {found}")

    def size(self, key: str, limit: int = MAX_SIZE, default: int | None = None) -> int:
        """An integer from 1 to `limit`."""
        value = default if key not in self else self.values[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            raise self.wrong(key, f"an integer from 1 to {limit}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number from `low` to `high`."""
        value = default if key not in self else self.values[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value is None or not math.isfinite(value) or not low <= value <= high:
            raise self.wrong(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """`true` or `false`."""
        value = self.values[key] if key in self else default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def table(self, key: str) -> "Fields":
        """A nested object; an empty one where the key is missing."""
        value = self.values[key] if key in self else {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Fields(value, f"{self.name}: {key}")

    def insist(self, key: str, only: Any, why: str) -> None:
        """Refuse a model whose `key` is given and is not `only`."""
        if key in self and self.values[key] != only:
            raise CheckpointError(f"{self.name}: {key}: {self.values[key]!r} is not supported, only {only!r}: {why}")

    def divisor(self, key: str, of: str, total: int, default: int | None = None) -> int:
        """A size that divides `total`, which is the value of the key `of`."""
        value = self.size(key, default=default)
        if total % value:
            raise self.wrong(key, f"a divisor of {of} ({total})")
        return value

    def token_ids(self, key: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """One token id or a list of them."""
        if key not in self:
            return default
        value = self.values[key]
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise self.wrong(key, "a token id, or a list of them")
        return tuple(dict.fromkeys(ids))
