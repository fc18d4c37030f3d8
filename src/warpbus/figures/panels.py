"""Rows of contenders and a panel per measure: bars from zero, or dots on an axis of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from warpbus.figures.theme import QUIET, said


@dataclass(frozen=True)
class Measure:
    """A panel.

    Attributes:
        title: the measured quantity, with its unit.
        values: one per row; None where it was not measured.
        form: how a value is written: "{:.2f}", or a function that writes it.
        dots: draw dots, on an axis that does not begin at zero and shows small differences from the first row.
    """

    title: str
    values: Sequence[float | None]
    form: str | Callable[[float], str]
    dots: bool = False


def panels_size(measures: int, rows: int) -> tuple[float, float]:
    """Width and height that `draw_measures` wants, in inches."""
    return 2.2 + 2.25 * measures, 0.8 + 0.36 * rows


def draw_measures(
    target: Figure | SubFigure, names: Sequence[str], colors: Sequence[str], measures: Sequence[Measure]
) -> None:
    """Draw panels beside each other, whose rows have the names and colours of contenders."""
    axes = target.subplots(1, len(measures), squeeze=False, sharey=True)[0]
    for axis, measure in zip(axes, measures, strict=True):
        write = measure.form.format if isinstance(measure.form, str) else measure.form
        texts = ["" if value is None else write(value) for value in measure.values]
        if measure.dots:
            _dots(axis, measure.values, texts, colors)
        else:
            values = [value or 0.0 for value in measure.values]
            bars = axis.barh(range(len(names)), values, color=colors, height=0.62)
            axis.bar_label(bars, texts, padding=3, fontsize=9)
            axis.set_xlim(0, 1.45 * max(values) or 1.0)
            axis.set_xticks([])
            axis.spines.bottom.set_visible(False)
        for row, value in enumerate(measure.values):
            if value is None:
                place = axis.get_yaxis_transform()
                axis.text(0.03, row, said("not measured"), transform=place, va="center", fontsize=8, color=QUIET)
        axis.set_title(said(measure.title), loc="left")
        axis.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(names)), [said(name) for name in names])
    axes[0].set_ylim(len(names) - 0.5, -0.5)


def _dots(axis: Axes, values: Sequence[float | None], texts: Sequence[str], colors: Sequence[str]) -> None:
    known = [value for value in values if value is not None]
    first, low, high = known[0], min(known), max(known)
    room = (high - low) or 0.02 * high
    axis.axvline(first, color=QUIET, lw=0.8, ls=":")
    for row, (value, text, color) in enumerate(zip(values, texts, colors, strict=True)):
        if value is not None:
            axis.plot([first, value], [row, row], color=color, lw=2.0)
            axis.plot([value], [row], "o", color=color, ms=7)
            # Away from the first value, so that the line between the two does not cross the text.
            aside, side = (-7, "right") if value < first else (7, "left")
            axis.annotate(text, (value, row), (aside, 0), textcoords="offset points", ha=side, va="center", fontsize=9)
    axis.set_xlim(low - (0.65 if low < first else 0.15) * room, high + 0.65 * room)
    axis.xaxis.set_major_locator(MaxNLocator(3))
    axis.grid(axis="x")
