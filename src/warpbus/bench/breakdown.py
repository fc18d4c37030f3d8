"""Where the time of one step goes: its kernels, each beside the least time that its bytes take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

_NAME_WIDTH = 40


@dataclass(frozen=True)
class Launch:
    """A kernel on the GPU's clock, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class KernelRow:
    """Launches of one name and role.

    Attributes:
        count: of launches.
        own: microseconds by which they made the step longer, all together: where kernels overlap, the time in which
            one runs alone with those that end after it counts for those.
        least: microseconds that their bytes take at the bandwidth of a copy, or `None` where that is not known.
    """

    name: str
    count: int
    own: float
    least: float | None


def launches(step: Callable[[], object]) -> list[Launch]:
    """The kernels and copies of one call, in the order in which they began. The call ends by waiting for them."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        step()
        torch.cuda.synchronize()
    found = [
        Launch(event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events() or []
        if event.device_type.name == "CUDA"
    ]
    return sorted(found, key=lambda each: each.start)


def breakdown(found: Sequence[Launch], roles: Mapping[str, Sequence[tuple[str, float]]]) -> list[KernelRow]:
    """Sum up the launches of a step.

    Args:
        found: in the order in which they began.
        roles: by a part of a kernel's name what its launches do, in turns, and the microseconds that takes at least.

    Returns:
        The rows, the longest first; their `own` adds up to the whole step, in which the GPU may also have waited.
    """
    counts: dict[str, int] = {}
    rows: dict[str, KernelRow] = {}
    ended = found[0].start if found else 0.0
    for launch in found:
        own, ended = max(launch.end - ended, 0.0), max(ended, launch.end)
        name, least = launch.name.split("(")[0], None
        for part, turns in roles.items():
            if part in launch.name:
                role, least = turns[counts.get(part, 0) % len(turns)]
                counts[part] = counts.get(part, 0) + 1
                name = f"{part} {role}".strip()
        row = rows.get(name, KernelRow(name, 0, 0.0, None if least is None else 0.0))
        total = None if row.least is None or least is None else row.least + least
        rows[name] = KernelRow(name, row.count + 1, row.own + own, total)
    return sorted(rows.values(), key=lambda row: -row.own)


def described(rows: Sequence[KernelRow]) -> str:
    """The rows as lines of text."""
    whole = sum(row.own for row in rows)
    lines = [f"{'kernel':{_NAME_WIDTH}} {'launches':>8} {'us':>8} {'share':>6} {'least us':>9}"]
    for row in rows:
        least = "" if row.least is None else f"{row.least:.1f}"
        name = row.name if len(row.name) <= _NAME_WIDTH else f"{row.name[: _NAME_WIDTH - 3]}..."
        lines.append(f"{name:{_NAME_WIDTH}} {row.count:8} {row.own:8.1f} {row.own / whole:6.1%} {least:>9}")
    known = sum(row.least for row in rows if row.least is not None)
    count = sum(row.count for row in rows)
    lines.append(f"{'the whole step':{_NAME_WIDTH}} {count:8} {whole:8.1f} {1:6.1%} {known:9.1f}")
    return "\n".join(lines)
