"""A quantization report as a picture."""

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from warpbus.cuda.cpu import cpu_model
from warpbus.figures.theme import QUIET, SERIES, WARPBUS, caption, footer, paper, said, save, style
from warpbus.quantization.report import Report

_MARKERS = "osD^vPX*"
_TICKS = 12  # of layers


def draw(report: Report, path: Path) -> None:
    """Write a PNG: the error of every matrix over the layers, and the seconds of the stages.

    Raises:
        StorageError: if it cannot be written.
    """
    with style():
        save(figure(report), path)


def figure(report: Report) -> Figure:
    """The error of every matrix over the layers, and beside it where the time went, if the report knows."""
    drawn = paper(*size(report))
    fill(drawn, report)
    worst = report.worst
    finding = f"The mean error is {report.mean_error:.2%}; the largest is {worst.error:.2%}, of {worst.name}"
    what = f"{Path(report.model).name}: {report.scheme}, {report.algorithm}"
    return caption(drawn, finding, what, machine(report))


def machine(report: Report) -> str:
    """The footer: the devices, today's date, since reports are drawn when they are made, and versions."""
    named = [cpu_model() if device == "cpu" else device for device in report.devices or (report.device,)]
    devices = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in Counter(named).items())
    versions = [f"{name} {report.versions[name]}" for name in ("warpbus", "torch") if name in report.versions]
    return footer(devices, datetime.now(UTC).strftime("%Y-%m-%d"), versions)


def size(report: Report) -> tuple[float, float]:
    """Width and height that `fill` wants, in inches."""
    return 8 + 3.5 * bool(report.stages) + 4 * bool(report.expert_tokens), 4.4


def fill(target: Figure | SubFigure, report: Report) -> None:
    """Draw `figure` into what may be a part of another."""
    widths = [2.0] + [1.1] * bool(report.expert_tokens) + [1.0] * bool(report.stages)
    axes = list(target.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0])
    _errors(axes.pop(0), report)
    if report.expert_tokens:
        _experts(axes.pop(0), report.expert_tokens)
    if report.stages:
        _stages(axes.pop(0), report.stages)


def _errors(axis: Axes, report: Report) -> None:
    """A line for each matrix of a layer; where schemes are mixed, a marker for each scheme."""
    schemes = list(dict.fromkeys(row.scheme for row in report.rows))
    markers = {scheme: _MARKERS[index % len(_MARKERS)] for index, scheme in enumerate(schemes)}
    handles = []
    for index, linear in enumerate(report.linears):
        rows = [row for row in report.rows if row.linear == linear]
        color = SERIES[index % len(SERIES)]
        layers = [row.layer for row in rows]
        handles += axis.plot(layers, [100 * row.error for row in rows], color=color, label=linear)
        for scheme, marker in markers.items():
            picked = [row for row in rows if row.scheme == scheme]
            points = [row.layer for row in picked], [100 * row.error for row in picked]
            axis.plot(*points, color=color, marker=marker, ms=4.5, ls="none", clip_on=False)
    if len(schemes) > 1:
        handles += [
            Line2D([], [], ls="none", marker=marker, color=QUIET, label=scheme) for scheme, marker in markers.items()
        ]
    axis.set_title(said(f"{report.error_kind} (%)"))
    axis.set_xlabel(said("layer"))
    axis.set_ylim(0, 108 * max(row.error for row in report.rows) or 1.0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid()
    # Below the axes, where it hides no point.
    axis.legend(handles=handles, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.13))


def _experts(axis: Axes, tokens: dict[int, tuple[int, ...]]) -> None:
    """The calibration tokens that reached each expert of each layer, on a logarithmic scale."""
    experts = max(map(len, tokens.values()))
    grid = [[*counts, *[0] * (experts - len(counts))] for counts in tokens.values()]
    most = max(map(max, grid))
    drawn = axis.imshow(
        grid, aspect="auto", interpolation="nearest", cmap="viridis", norm=SymLogNorm(1, vmin=0, vmax=most)
    )
    axis.set_yticks(range(len(grid)), [str(layer) for layer in tokens])
    if len(grid) > _TICKS:
        axis.yaxis.set_major_locator(MaxNLocator(_TICKS, integer=True))
    axis.set_title(said("calibration tokens per expert"))
    axis.set_xlabel(said("expert"))
    axis.set_ylabel(said("layer"))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.figure.colorbar(drawn, ax=axis, fraction=0.05, format="{x:,.0f}")


def _stages(axis: Axes, stages: dict[str, float]) -> None:
    seconds = list(stages.values())
    bars = axis.barh([said(stage) for stage in stages], seconds, color=WARPBUS, height=0.65)
    total = sum(seconds) or 1.0
    axis.bar_label(bars, [f"{_short(each)}  ({each / total:.0%})" for each in seconds], padding=3, fontsize=8.5)
    axis.set_title(said("where the time went (s)"))
    axis.invert_yaxis()
    axis.set_xlim(0, 1.5 * max(seconds) or 1.0)


def _short(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"
