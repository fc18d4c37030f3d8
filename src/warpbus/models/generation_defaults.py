"""The sampling parameters that a checkpoint recommends, in `generation_config.json`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from warpbus.errors import CheckpointError
from warpbus.formats.checkpoint import read_object

_VALID: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("a number from 0 to 100", lambda value: 0 <= value <= 100),
    "top_p": ("a number above 0 and at most 1", lambda value: 0 < value <= 1),
    "top_k": ("a whole number", lambda value: value == int(value)),
    "min_p": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("a number from 0.01 to 100", lambda value: 0.01 <= value <= 100),
}


def read_generation_defaults(directory: Path) -> dict[str, float]:
    """`temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` of a model directory, those that it has.

    A negative `top_k` becomes 0, which allows every token.

    Raises:
        CheckpointError: the file is damaged, or a value is out of range.
    """
    path = Path(directory) / "generation_config.json"
    advice = "correct it, or give --generation-config none"
    found = read_object(path)
    defaults: dict[str, float] = {}
    for name, (wanted, is_valid) in _VALID.items():
        value = found.get(name)
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not is_valid(value):
            raise CheckpointError(f"{path}: {name} is {value!r}: expected {wanted}; {advice}")
        defaults[name] = max(0, int(value)) if name == "top_k" else value
    return defaults
