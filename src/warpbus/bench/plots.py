"""Records as a picture: Warpbus, the peers, and the limit of the machine."""

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from warpbus.bench.bars import bar_count, bars, stacked
from warpbus.bench.cases import Plot
from warpbus.bench.findings import compared
from warpbus.bench.naming import axis_label, case_label, limit_label, panel_title
from warpbus.bench.records import Parameter, Record
from warpbus.bench.report import shared_and_varying
from warpbus.figures.theme import LIMIT, caption, color_of, footer, log_axis, paper, said, save, shade, style

LIMIT_STYLES = (":", "-.", (0, (1, 4)), (0, (8, 3)))  # one for each that a panel may show
_PEER_STYLES = (("--", "s"), ("-.", "^"), (":", "D"), ((0, (5, 1, 1, 1)), "v"))  # of the curves of one peer
_PANELS = 4  # so many do not stand in one row


def draw(records: Sequence[Record], title: str, plot: Plot, path: Path) -> None:
    """Write the picture of `figure` as a PNG.

    Raises:
        StorageError: if it cannot be written.
    """
    with style():
        save(figure(records, title, plot), path)


def figure(records: Sequence[Record], title: str, plot: Plot) -> Figure:
    """The finding, and below it lines along a parameter, or bars, in a panel for each combination of `plot.panels`."""
    drawn = plot.figure(records) if plot.figure is not None else _panels(records, plot)
    first = records[0]
    versions = [f"{name} {first.versions[name]}" for name in ("warpbus", "torch", "cuda") if name in first.versions]
    device = first.versions.get("processor", "CPU") if first.device == "cpu" else first.device
    what = f"{title}, on the CPU" if first.device == "cpu" else title
    return caption(drawn, (plot.finding or compared)(records), what, footer(device, first.date, versions))


def _panels(records: Sequence[Record], plot: Plot) -> Figure:
    if plot.stacked:
        records = [record for record in records if plot.stacked in record.case]
    panels: dict[tuple[Parameter | None, ...], list[Record]] = {}
    for record in records:
        # Values of different units cannot share an axis.
        key = record.unit if plot.x is None and not plot.stacked else None
        panels.setdefault((key, *(record.case.get(name) for name in plot.panels)), []).append(record)
    ignored = {*plot.panels, "timed"}
    if plot.x is None:
        heights = [0.7 + 0.2 * bar_count(each, {*ignored, plot.stacked}) for each in panels.values()]
        if plot.stacked:  # the legend names all pieces and the limit
            pieces = [len({record.case[plot.stacked] for record in each}) for each in panels.values()]
            heights = [max(height, 0.2 * (count + 1)) for height, count in zip(heights, pieces, strict=True)]
        drawn = paper(8.5, sum(heights))
        axes = drawn.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    else:
        rows = 1 if len(panels) < _PANELS else 2
        columns = math.ceil(len(panels) / rows)
        drawn = paper(1.5 + 5.2 * columns, 4.6 * rows)
        axes = drawn.subplots(rows, columns, squeeze=False, sharey=True).ravel()
        for spare in axes[len(panels) :]:
            spare.remove()
        axes = axes[: len(panels)]
    for axis, (values, each) in zip(axes, panels.items(), strict=True):
        if plot.stacked:
            stacked(axis, each, plot.stacked, ignored)
        elif plot.x is None:
            bars(axis, each, ignored, relative=plot.relative)
        else:
            _lines(axis, each, plot.x, ignored)
            axis.set_xlabel(said(plot.x_label))
        axis.set_title(said(panel_title(plot.panels, values[1:])), loc="left")
    if plot.x is not None:
        # The limit of a tiny case is far below what any launch takes: it may leave the picture.
        measured = [value for record in records for value in (record.ours, record.peer.value)]
        axes[0].set_ylim(min(measured) / 2, max(measured) * 2)
        for axis in axes:
            log_axis(axis, "y", unit=records[0].unit)
        for axis in axes[1:]:
            axis.set_ylabel("")
    return drawn


def _lines(axis: Axes, records: Sequence[Record], x: str, ignored: set[str]) -> None:
    _, varying = shared_and_varying(records)
    names = [name for name in varying if name != x and name not in ignored]
    ours: dict[str, dict[float, float]] = {}
    peers: dict[str, dict[str, dict[float, float]]] = {}
    limits: dict[str, dict[float, float]] = {}
    # A peer depends on fewer parameters than ours does: one curve for each dtype, not for each of our variants.
    peer_names = [name for name in names if name == "dtype"]
    limit = limit_label(records)
    limit_names = peer_names if _alike(records, x, peer_names) else names
    for record in records:
        at = float(record.case[x])
        ours.setdefault(" ".join(["Warpbus", case_label(record.case, names)]).strip(), {})[at] = record.ours
        # The CPU computes in float32 whatever ours does.
        kind = "" if "CPU" in record.peer.name else case_label(record.case, peer_names)
        peers.setdefault(record.peer.name, {}).setdefault(kind, {})[at] = record.peer.value
        if record.floor is not None:
            name = ", ".join(filter(None, (limit, case_label(record.case, limit_names))))
            limits.setdefault(name, {})[at] = record.floor
    handles: list[Line2D] = []
    for index, (label, points) in enumerate(ours.items()):
        handles += axis.plot(
            list(points), list(points.values()), "o-", label=said(label), color=shade(index), lw=2.0, ms=4, zorder=3
        )
    for name, curves in peers.items():
        for (kind, points), (dashes, marker) in zip(curves.items(), cycle(_PEER_STYLES), strict=False):
            label = said(f"{name} {kind}".strip())
            handles += axis.plot(
                list(points), list(points.values()), linestyle=dashes, marker=marker, ms=4, lw=1.5,
                label=label, color=color_of(name), zorder=2.5,
            )  # fmt: skip
    for (label, points), dotted in zip(limits.items(), cycle(LIMIT_STYLES), strict=False):
        handles += axis.plot(
            list(points), list(points.values()), linestyle=dotted, label=said(label), color=LIMIT, lw=1.2
        )
    powers_of_two = all(math.log2(float(record.case[x])).is_integer() for record in records)
    log_axis(axis, "x", powers_of_two=powers_of_two)
    axis.set_ylabel(said("time, less is better" if records[0].unit == "us" else axis_label(records[0])))
    axis.grid()
    axis.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.0, 1.06), ncols=2, borderaxespad=0.1)


def _alike(records: Sequence[Record], x: str, names: Sequence[str]) -> bool:
    """Whether cases that have these parameters in common also have the limit in common."""
    limits: dict[tuple[Parameter | None, ...], set[float | None]] = {}
    for record in records:
        limits.setdefault(tuple(record.case.get(name) for name in (x, *names)), set()).add(record.floor)
    return all(len(each) == 1 for each in limits.values())
