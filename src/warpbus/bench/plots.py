"""Records as a picture: ours, the peers, and the limit of the machine."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from warpbus.bench.cases import WHOLE, Plot
from warpbus.bench.records import LESS_IS_BETTER, Parameter, Record
from warpbus.bench.report import number, shared_and_varying, shown
from warpbus.formats.files import replace_file

# Okabe and Ito's colours, which the colour-blind tell apart too.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LIMIT = "#7f7f7f"
LIMIT_STYLES = (":", "-.", (0, (1, 4)), (0, (8, 3)))  # one for each that a panel may show
_PANELS = 4  # so many do not stand in one row
_READABLE = 100_000  # below it a power of two is written out


def draw(records: Sequence[Record], title: str, plot: Plot, path: Path) -> None:
    """Write the picture of `figure` as a PNG.

    Raises:
        StorageError: if it cannot be written.
    """
    replace_file(path, lambda partial: figure(records, title, plot).savefig(partial, dpi=130, format="png"))


def figure(records: Sequence[Record], title: str, plot: Plot) -> Figure:
    """Lines along a parameter, or bars for every case, in a panel for each combination of what `plot.panels` names."""
    if plot.figure is not None:
        return _captioned(plot.figure(records), records, title)
    if plot.stacked:
        records = [record for record in records if plot.stacked in record.case]
    panels: dict[tuple[Parameter | None, ...], list[Record]] = {}
    for record in records:
        panels.setdefault(tuple(record.case.get(name) for name in plot.panels), []).append(record)
    ignored = {*plot.panels, "timed"}
    if plot.x is None:
        heights = [0.9 + 0.19 * _bars_in(each, {*ignored, plot.stacked}) for each in panels.values()]
        drawn = Figure(figsize=(8.5, 1.1 + sum(heights)), layout="constrained")
        axes = drawn.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    else:
        rows = 1 if len(panels) < _PANELS else 2
        columns = math.ceil(len(panels) / rows)
        drawn = Figure(figsize=(1.5 + 5.6 * columns, 5.2 * rows), layout="constrained")
        axes = drawn.subplots(rows, columns, squeeze=False, sharey=True).ravel()
        for spare in axes[len(panels) :]:
            spare.remove()
        axes = axes[: len(panels)]
    for axis, (values, each) in zip(axes, panels.items(), strict=True):
        if plot.stacked:
            _stacked(axis, each, plot.stacked, ignored)
        elif plot.x is None:
            _bars(axis, each, ignored)
        else:
            _lines(axis, each, plot.x, ignored)
            axis.set_xlabel(plot.x_label)
        named = [
            f"{name}: {shown(value)}" for name, value in zip(plot.panels, values, strict=True) if value is not None
        ]
        axis.set_title(", ".join(named), loc="left", fontsize=10)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    if plot.x is not None:
        # The limit of a tiny case is far below what any launch takes: it may leave the picture.
        measured = [value for record in records for value in (record.ours, record.peer.value)]
        axes[0].set_ylim(min(measured) / 2, max(measured) * 2)
    return _captioned(drawn, records, title)


def _captioned(drawn: Figure, records: Sequence[Record], title: str) -> Figure:
    drawn.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    first = records[0]
    versions = ", ".join(
        f"{name} {first.versions[name]}" for name in ("warpbus", "torch", "cuda") if name in first.versions
    )
    drawn.supxlabel(f"{first.device}   {first.date[:10]}   {versions}", x=0.01, ha="left", fontsize=8, color="#555555")
    return drawn


def _label(case: Mapping[str, Parameter], names: Sequence[str]) -> str:
    """What tells a case from others, short: words, then numbers as "4096 x 1024"."""
    words, numbers = [], []
    for name in names:
        value = case.get(name)
        if isinstance(value, bool):
            words += [name] * value
        elif isinstance(value, str):
            words.append(value)
        elif value is not None:
            numbers.append(str(value))
    return " ".join([*words, " x ".join(numbers)]).strip()


def _lines(axis: Axes, records: Sequence[Record], x: str, ignored: set[str]) -> None:
    _, varying = shared_and_varying(records)
    names = [name for name in varying if name != x and name not in ignored]
    ours: dict[str, dict[float, float]] = {}
    peers: dict[str, dict[float, float]] = {}
    limits: dict[str, dict[float, float]] = {}
    # A peer depends on fewer parameters than ours does: one curve for each dtype, not for each of our variants.
    peer_names = [name for name in names if name == "dtype"]
    limit_names = peer_names if _alike(records, x, peer_names) else names
    for record in records:
        at = float(record.case[x])
        ours.setdefault(" ".join(["warpbus", _label(record.case, names)]).strip(), {})[at] = record.ours
        # The CPU computes in float32 whatever ours does.
        label = (
            record.peer.name if "CPU" in record.peer.name else f"{record.peer.name} {_label(record.case, peer_names)}"
        )
        peers.setdefault(label.strip(), {})[at] = record.peer.value
        if record.floor is not None:
            limits.setdefault(" ".join(["limit", _label(record.case, limit_names)]).strip(), {})[at] = record.floor
    colors = cycle(COLORS)
    for curves, style, width in ((ours, "o-", 2.0), (peers, "s--", 1.5)):
        for label, points in curves.items():
            axis.plot(list(points), list(points.values()), style, label=label, color=next(colors), lw=width, ms=4)
    for (label, points), dashes in zip(limits.items(), cycle(LIMIT_STYLES), strict=False):
        axis.plot(list(points), list(points.values()), linestyle=dashes, label=label, color=LIMIT, lw=1.2)
    powers_of_two = all(math.log2(float(record.case[x])).is_integer() for record in records)
    axis.set_xscale("log", base=2 if powers_of_two else 10)
    if powers_of_two and max(float(record.case[x]) for record in records) < _READABLE:
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_yscale("log")
    axis.set_ylabel(_axis_label(records[0]))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, frameon=False)


def _alike(records: Sequence[Record], x: str, names: Sequence[str]) -> bool:
    """Whether cases that have these parameters in common also have the limit in common."""
    limits: dict[tuple[Parameter | None, ...], set[float | None]] = {}
    for record in records:
        limits.setdefault(tuple(record.case.get(name) for name in (x, *names)), set()).add(record.floor)
    return all(len(each) == 1 for each in limits.values())


def _bars_in(records: Sequence[Record], ignored: set[str]) -> int:
    _, varying = shared_and_varying(records)
    names = [name for name in varying if name not in ignored]
    cases = {_label(record.case, names) for record in records}
    return len(cases) * (1 + len({record.peer.name for record in records}))


def _bars(axis: Axes, records: Sequence[Record], ignored: set[str]) -> None:
    _, varying = shared_and_varying(records)
    names = [name for name in varying if name not in ignored]
    cases: dict[str, list[Record]] = {}
    for record in records:
        cases.setdefault(_label(record.case, names), []).append(record)
    peers = list(dict.fromkeys(record.peer.name for record in records))
    height = 0.8 / (1 + len(peers))
    largest = max(max(record.ours, record.peer.value) for record in records)
    for row, of_case in enumerate(cases.values()):
        bars = [(0, "warpbus", of_case[0].ours)]
        bars += [(1 + peers.index(record.peer.name), record.peer.name, record.peer.value) for record in of_case]
        for at, name, value in bars:
            y = row - 0.4 + (at + 0.5) * height
            axis.barh(
                y,
                value,
                0.92 * height,
                color=COLORS[at],
                alpha=1.0 if at == 0 else 0.55,
                label=name if row == 0 else None,
            )
            axis.text(value + 0.008 * largest, y, number(value), va="center", fontsize=7)
        floor = of_case[0].floor
        if floor is not None and floor <= 2 * largest:
            axis.plot(
                [floor, floor], [row - 0.42, row + 0.42], ":", color=LIMIT, lw=1.5, label="limit" if row == 0 else None
            )
    axis.set_yticks(range(len(cases)), list(cases), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(_axis_label(records[0]))
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _stacked(axis: Axes, records: Sequence[Record], of: str, ignored: set[str]) -> None:
    """A bar for each case, made of the values of one parameter; peers have the whole alone."""
    _, varying = shared_and_varying(records)
    names = [name for name in varying if name not in ignored and name != of]
    pieces = list(dict.fromkeys(str(record.case[of]) for record in records if record.case[of] != WHOLE))
    styles = {piece: (COLORS[at % len(COLORS)], "//" * (at // len(COLORS))) for at, piece in enumerate(pieces)}
    cases: dict[str, dict[str, Record]] = {}
    others: dict[str, float] = {}
    first = records[0].peer.name  # what all are held against is a bar itself
    for record in records:
        name = ", ".join(f"{each} {shown(record.case[each])}" for each in names)
        cases.setdefault(name, {})[str(record.case[of])] = record
        if record.peer.name != first:
            others[record.peer.name] = record.peer.value
    largest = max([record.ours for record in records] + list(others.values()))
    for row, case in enumerate(cases.values()):
        left = 0.0
        for piece in (piece for piece in pieces if piece in case):
            color, hatch = styles[piece]
            width = case[piece].ours
            axis.barh(row, width, 0.7, left, color=color, hatch=hatch, edgecolor="white", linewidth=0.5, label=piece)
            left += width
        axis.text(left + 0.008 * largest, row, number(left), va="center", fontsize=8)
        floor = case[WHOLE].floor if WHOLE in case else None
        if floor is not None:
            axis.plot([floor, floor], [row - 0.42, row + 0.42], ":", color=LIMIT, lw=1.5, label="limit")
    for row, value in enumerate(others.values(), len(cases)):
        axis.barh(row, value, 0.7, color=LIMIT, alpha=0.55)
        axis.text(value + 0.008 * largest, row, number(value), va="center", fontsize=8)
    axis.set_yticks(range(len(cases) + len(others)), [*cases, *others], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(_axis_label(records[0]))
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    handles, labels = axis.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    axis.legend(named.values(), named, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _axis_label(record: Record) -> str:
    better = "less" if LESS_IS_BETTER[record.metric] else "more"
    return f"{record.metric} ({record.unit}), {better} is better"
