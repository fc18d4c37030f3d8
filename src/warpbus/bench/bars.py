"""Records as bars: one for each contender of a case, relative to Warpbus, or made of stages."""

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from warpbus.bench.cases import WHOLE
from warpbus.bench.naming import axis_label, case_label, described, limit_label
from warpbus.bench.records import Record
from warpbus.bench.report import number, shared_and_varying
from warpbus.figures.theme import LIMIT, QUIET, SERIES, color_of, said, time_text

_OWN = {"rung", "variant"}  # parameters on which what a peer does cannot depend


def bar_count(records: Sequence[Record], ignored: set[str]) -> int:
    """Bars and gaps of a panel, to make it high enough."""
    names = _varying(records, ignored)
    cases = {case_label(record.case, names) for record in records}
    peers = _others(records)
    if _alike(names, peers):
        return len(cases) + 1
    return len(cases) * (1 + len(peers))


def bars(axis: Axes, records: Sequence[Record], ignored: set[str], *, relative: bool = False) -> None:
    """A group of bars for each case; where only our own parameter varies, the peer has one bar below all.

    Args:
        axis: the panel.
        records: of one metric.
        ignored: parameters that are no part of the names of the cases.
        relative: bars are as long as the value divided by ours, and labelled with the value.
    """
    names = _varying(records, ignored)
    cases: dict[str, list[Record]] = {}
    for record in records:
        cases.setdefault(case_label(record.case, names), []).append(record)
    peers = _others(records)
    largest = max(max(record.ours, record.peer.value) / (record.ours if relative else 1.0) for record in records)
    once = _alike(names, peers)
    height = 0.72 if once else 0.84 / (1 + len(peers))
    rows = list(cases)
    for row, of_case in enumerate(cases.values()):
        first = of_case[0]
        scale = first.ours if relative else 1.0
        drawn = [(0, "Warpbus", first.ours)]
        if not once:
            drawn += [
                (1 + peers.index(record.peer.name), record.peer.name.replace("warpbus", "Warpbus"), record.peer.value)
                for record in of_case
                if record.peer.name in peers
            ]
        for at, name, value in drawn:
            y = row if once else row - 0.42 + (at + 0.5) * height
            axis.barh(y, value / scale, 0.92 * height, color=color_of(name), label=said(name) if row == 0 else None)
            text = time_text(value) if first.unit == "us" else number(value)
            value_label(axis, text, value / scale, y)
    if once:
        values = [record.peer.value for record in records]
        rows.append(peers[0])
        axis.barh(len(cases), statistics.median(values), height, color=color_of(peers[0]), label=said(peers[0]))
        low, high = number(min(values)), number(max(values))
        text = low if low == high else f"{number(statistics.median(values))}  ({low} – {high})"
        value_label(axis, text, max(values), len(cases))
        if low != high:
            axis.plot([min(values), max(values)], [len(cases)] * 2, color=QUIET, lw=1.2)
    if not relative:
        _limits(axis, [(row, of_case[0]) for row, of_case in enumerate(cases.values())], largest)
    axis.set_yticks(range(len(rows)), [said(row) for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(0, 1.13 * largest)
    axis.set_xlabel(said("time relative to Warpbus, less is better" if relative else axis_label(records[0])))
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.grid(axis="x")
    legend(axis, above=True)


def _others(records: Sequence[Record]) -> list[str]:
    """The peers, without those that are a case of ours, such as "warpbus, 1 GPU"."""
    names = dict.fromkeys(record.peer.name for record in records)
    own = {record.peer.name for record in records if record.peer.name.startswith("warpbus") and record.ratio == 1}
    return [name for name in names if name not in own]


def _alike(names: Sequence[str], peers: Sequence[str]) -> bool:
    return bool(names) and set(names) <= _OWN and len(peers) == 1


def _varying(records: Sequence[Record], ignored: set[str]) -> list[str]:
    return [name for name in shared_and_varying(records)[1] if name not in ignored]


def _limits(axis: Axes, rows: Sequence[tuple[int, Record]], largest: float) -> None:
    """A mark for the limit of each row, where it is within reach; what may exceed it is said."""
    shown = [(row, record) for row, record in rows if record.floor is not None and record.floor <= 1.1 * largest]
    label = limit_label([record for _, record in shown])
    for index, (row, record) in enumerate(shown):
        place = [record.floor or 0.0] * 2
        axis.plot(
            place, [row - 0.44, row + 0.44], color=LIMIT, ls=(0, (2, 1.5)), lw=1.3, zorder=2,
            label=None if index else said(label),
        )  # fmt: skip


def stacked(axis: Axes, records: Sequence[Record], of: str, ignored: set[str]) -> None:
    """A bar for each case, made of the values of the parameter `of`; peers have the whole alone."""
    names = [name for name in _varying(records, ignored) if name != of]
    pieces = list(dict.fromkeys(str(record.case[of]) for record in records if record.case[of] != WHOLE))
    styles = {piece: (SERIES[at % len(SERIES)], "//" * (at // len(SERIES))) for at, piece in enumerate(pieces)}
    cases: dict[str, dict[str, Record]] = {}
    others: dict[str, float] = {}
    first = records[0].peer.name  # the peer of all others is a bar itself
    for record in records:
        name = ", ".join(filter(None, (described(each, record.case.get(each)) for each in names)))
        cases.setdefault(name, {})[str(record.case[of])] = record
        if record.peer.name != first:
            others[record.peer.name] = record.peer.value
    for row, case in enumerate(cases.values()):
        left = 0.0
        for piece in (piece for piece in pieces if piece in case):
            color, hatch = styles[piece]
            width = case[piece].ours
            axis.barh(row, width, 0.7, left, color=color, hatch=hatch, edgecolor="white", lw=0.5, label=said(piece))
            left += width
        value_label(axis, number(left), left, row)
        floor = case[WHOLE].floor if WHOLE in case else None
        if floor is not None:
            axis.plot([floor, floor], [row - 0.42, row + 0.42], ":", color=LIMIT, lw=1.5, label=said("limit"))
    for row, (name, value) in enumerate(others.items(), len(cases)):
        axis.barh(row, value, 0.7, color=color_of(name))
        value_label(axis, number(value), value, row)
    axis.set_yticks(range(len(cases) + len(others)), [said(name) for name in (*cases, *others)])
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_xlabel(said(axis_label(records[0])))
    axis.grid(axis="x")
    legend(axis)


def value_label(axis: Axes, text: str, x: float, y: float) -> None:
    """A value beside the end of its bar, on paper that hides the marks behind it."""
    behind = {"facecolor": axis.figure.get_facecolor(), "edgecolor": "none", "pad": 0.6}
    axis.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=8, bbox=behind, zorder=3)


def legend(axis: Axes, *, above: bool = False) -> None:
    """Beside the panel or above its right end, where it hides nothing; each name once."""
    handles, labels = axis.get_legend_handles_labels()
    named = dict(zip(reversed(labels), reversed(handles), strict=True))
    ordered = {label: named[label] for label in dict.fromkeys(labels)}
    place: Any = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    if above:
        place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": len(ordered), "borderaxespad": 0.1}
    axis.legend(ordered.values(), ordered, **place)
