"""A quantization report as a picture, and the style that pictures of models share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import font_manager, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from warpbus.formats.files import replace_file
from warpbus.quantization.report import Report

# For names: the first that is installed draws what DejaVu, which comes with matplotlib, has no glyphs for.
_CHINESE_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Micro Hei", "SimHei")
_INKS = (
    "text.color",
    "axes.labelcolor",
    "axes.edgecolor",
    "axes.titlecolor",
    "xtick.color",
    "ytick.color",
    "grid.color",
)
_DARK, _PALE = "#111318", "#e4e7ee"
_MARKERS = "osD^vPX*"
_TICKS = 12  # of layers


@contextmanager
def style(*, dark: bool = False) -> Iterator[None]:
    """Fonts that have Chinese, and ink for white paper or for a dark page; for what is made in the `with` block."""
    installed = set(font_manager.get_font_names())
    settings: Any = dict.fromkeys(_INKS, _PALE if dark else _DARK)
    settings["figure.facecolor"] = "none" if dark else "white"
    settings["axes.facecolor"] = "none"
    settings["font.family"] = ["DejaVu Sans", *[font for font in _CHINESE_FONTS if font in installed][:1]]
    with rc_context(settings):
        yield


def plain(text: str) -> str:
    """Text that matplotlib draws as it is: a dollar sign would begin a formula."""
    return text.replace("$", r"\$")


def paper(size: tuple[float, float], title: str | None = None) -> Figure:
    """An empty picture of so many inches, whose parts keep their distance from each other and from the edge."""
    drawn = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    if title is not None:
        drawn.suptitle(plain(title), x=0.01, ha="left", fontsize=12, fontweight="bold")
    return drawn


def draw(report: Report, path: Path) -> None:
    """Write a PNG: the error of every matrix over the layers, and the seconds of the stages.

    Raises:
        StorageError: if it cannot be written.
    """
    with style():
        drawn = figure(report)
    replace_file(path, lambda partial: drawn.savefig(partial, dpi=130, format="png"))


def figure(report: Report) -> Figure:
    """The error of every matrix over the layers, and beside it where the time went, if the report knows."""
    drawn = paper(size(report), f"{Path(report.model).name}: {report.scheme}, {report.algorithm}")
    fill(drawn, report)
    return drawn


def size(report: Report) -> tuple[float, float]:
    """Width and height that `fill` wants, in inches."""
    return 8 + 3.5 * bool(report.stages) + 4 * bool(report.expert_tokens), 4.6


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
        handles += axis.plot([row.layer for row in rows], [100 * row.error for row in rows], f"C{index}", label=linear)
        for scheme, marker in markers.items():
            picked = [row for row in rows if row.scheme == scheme]
            points = [row.layer for row in picked], [100 * row.error for row in picked]
            axis.plot(*points, f"C{index}", marker=marker, ms=4.5, ls="none")
    if len(schemes) > 1:
        handles += [
            Line2D([], [], ls="none", marker=marker, color="#8a90a0", label=scheme)
            for scheme, marker in markers.items()
        ]
    axis.set_title(f"{report.error_kind} (%)", fontsize=10, loc="left")
    axis.set_xlabel("layer")
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.2)
    axis.spines[["top", "right"]].set_visible(False)
    # Below the axes, where it hides no point.
    axis.legend(handles=handles, frameon=False, fontsize=9, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.13))


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
    axis.set_title("calibration tokens per expert", fontsize=10, loc="left")
    axis.set_xlabel("expert")
    axis.set_ylabel("layer")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.figure.colorbar(drawn, ax=axis, fraction=0.05)


def _stages(axis: Axes, stages: dict[str, float]) -> None:
    bars = axis.barh(list(stages), list(stages.values()), color="C0", height=0.65)
    total = sum(stages.values()) or 1.0
    axis.bar_label(bars, [f"{s:.1f}  ({s / total:.0%})" for s in stages.values()], padding=3, fontsize=9)
    axis.set_title("where the time went (s)", fontsize=10, loc="left")
    axis.invert_yaxis()
    axis.margins(x=0.35)
    axis.spines[["top", "right"]].set_visible(False)
