"""Describes the differences between the identities of two runs, for error messages."""

import json
from typing import Any

_SHOWN = 40
"""Longer values are not shown."""

_LISTED = 6
"""Maximum number of differences listed."""


def differences(before: Any, after: dict[str, Any]) -> list[str]:
    """Compare the identity of an earlier run with that of this one.

    Args:
        before: parsed JSON; anything, if the file was damaged.
        after: parsed JSON.

    Returns:
        a phrase for each key whose value differs, such as "algorithm was 'rtn' and is 'gptq'"; keys of nested objects
        are named by their path. At least one phrase.
    """
    if not isinstance(before, dict):
        return ["its run.json is damaged"]
    found = _differing("", before, after) or ["its run.json is damaged"]
    rest = len(found) - _LISTED
    return found if rest <= 0 else [*found[:_LISTED], f"and {rest} more"]


def _differing(path: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    found = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        name = f"{path}{key}"
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differing(f"{name}: ", old, new)
        else:
            shown = [json.dumps(value, ensure_ascii=True) for value in (old, new)]
            fits = max(map(len, shown)) <= _SHOWN
            found.append(f"{name} was {shown[0]} and is {shown[1]}" if fits else f"{name} differ")
    return found
