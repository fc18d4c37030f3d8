"""Evaluations as a table, a picture and a page."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from matplotlib import font_manager, rc_context
from matplotlib.figure import Figure
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from warpbus.evaluation.side_by_side import Evaluation
from warpbus.formats.files import replace_file

_PAGE = Path(__file__).with_name("page.html")

# For names: the first that is installed draws what DejaVu, which comes with matplotlib, has no glyphs for.
_CHINESE_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Micro Hei", "SimHei")

Column = tuple[str, Callable[[Evaluation, Evaluation], str]]

_NAME: Column = ("model", lambda e, first: e.name)


def to_json(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Plain dictionaries."""
    return [asdict(evaluation) for evaluation in evaluations]


def table(evaluations: Sequence[Evaluation], title: str) -> RenderableType:
    """A table for the terminal; the first row is the reference. Where it is too wide, two below each other."""
    quality, cost = _quality_columns(evaluations), _cost_columns(evaluations)
    return _Fitting(
        _table([_NAME, *quality, *cost], evaluations, title),
        Group(_table([_NAME, *quality], evaluations, title), _table([_NAME, *cost], evaluations, None)),
    )


@dataclass(frozen=True)
class _Fitting:
    """The one of two renderables that fits."""

    wide: Table
    narrow: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wanted = Measurement.get(console, options.update(max_width=10_000), self.wide).maximum
        yield self.wide if wanted <= options.max_width else self.narrow


def _table(columns: Sequence[Column], evaluations: Sequence[Evaluation], title: str | None) -> Table:
    drawn = Table(title=title and Text(title, overflow="fold"), title_justify="left", title_style="bold")
    for heading, _ in columns:
        # A name may be cut into lines, a number may not.
        if heading == "model":
            drawn.add_column(heading, overflow="fold", min_width=6)
        else:
            drawn.add_column(heading, justify="left" if heading == "weights" else "right", no_wrap=True)
    for evaluation in evaluations:
        drawn.add_row(*(Text(cell(evaluation, evaluations[0])) for _, cell in columns))
    return drawn


def draw(evaluations: Sequence[Evaluation], path: Path) -> None:
    """Write the picture of `figure` as a PNG.

    Raises:
        StorageError: if it cannot be written.
    """
    replace_file(path, lambda partial: figure(evaluations).savefig(partial, dpi=130, format="png"))


def figure(evaluations: Sequence[Evaluation]) -> Figure:
    """What was lost in quality, and what was gained in size and speed, one bar a model."""
    # A dollar sign would begin a formula.
    names = [evaluation.name.replace("$", r"\$") for evaluation in evaluations]
    panels: list[tuple[str, list[float], str]] = [("perplexity", [e.perplexity for e in evaluations], "{:.2f}")]
    if len(evaluations) > 1:
        panels.append(("divergence from the first (nats a token)", [e.divergence for e in evaluations], "{:.4f}"))
    if all(e.accuracy is not None for e in evaluations):
        panels.append(("right choices (%)", [100 * (e.accuracy or 0.0) for e in evaluations], "{:.1f}"))
    panels.append(("size on disk (MB)", [e.disk_bytes / 1e6 for e in evaluations], "{:.1f}"))
    if all(e.tokens_per_second is not None for e in evaluations):
        panels.append(("decoding (tokens/s)", [e.tokens_per_second or 0.0 for e in evaluations], "{:.0f}"))
    rows = -(-len(panels) // 2)
    installed = set(font_manager.get_font_names())
    with rc_context({"font.family": ["DejaVu Sans", *[font for font in _CHINESE_FONTS if font in installed][:1]]}):
        return _bars(names, panels, rows)


def _bars(names: list[str], panels: Sequence[tuple[str, list[float], str]], rows: int) -> Figure:
    drawn = Figure(figsize=(10, 0.9 + rows * (0.9 + 0.34 * len(names))))
    axes = drawn.subplots(rows, 2, squeeze=False)
    colors = ["#4c566a"] + [f"C{index}" for index in range(len(names) - 1)]
    for axis, (title, values, form) in zip(axes.flat, panels, strict=False):
        bars = axis.barh(names, values, color=colors, height=0.65)
        axis.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=9)
        axis.set_title(title, fontsize=10, loc="left")
        axis.invert_yaxis()
        axis.margins(x=0.18)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
    for axis in list(axes.flat)[len(panels) :]:
        axis.axis("off")
    drawn.tight_layout()
    return drawn


def write_page(evaluations: Sequence[Evaluation], title: str, path: Path) -> None:
    """Write one self-contained HTML page: table, picture, what the columns mean.

    Raises:
        StorageError: if it cannot be written.
    """
    picture = io.BytesIO()
    figure(evaluations).savefig(picture, format="png", dpi=130)
    columns = _columns(evaluations)
    page = jinja2.Environment(autoescape=True).from_string(_PAGE.read_text(encoding="utf-8"))
    rendered = page.render(
        title=title,
        headings=[heading for heading, _ in columns],
        rows=[[cell(evaluation, evaluations[0]) for _, cell in columns] for evaluation in evaluations],
        picture=base64.b64encode(picture.getvalue()).decode("ascii"),
        tokens=evaluations[0].tokens,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    replace_file(path, lambda partial: partial.write_text(rendered, encoding="utf-8"))


def _columns(evaluations: Sequence[Evaluation]) -> list[Column]:
    return [_NAME, *_quality_columns(evaluations), *_cost_columns(evaluations)]


def _quality_columns(evaluations: Sequence[Evaluation]) -> list[Column]:
    columns: list[Column] = [("perplexity", lambda e, first: f"{e.perplexity:.3f}")]
    if len(evaluations) > 1:
        columns += [
            ("change", lambda e, first: "" if e is first else f"{100 * (e.perplexity / first.perplexity - 1):+.2f} %"),
            ("KL", lambda e, first: "" if e is first else f"{e.divergence:.4f}"),
            ("agrees", lambda e, first: "" if e is first else f"{100 * e.agreement:.1f} %"),
        ]
    if any(e.accuracy is not None for e in evaluations):
        columns.append(("choices", lambda e, first: "" if e.accuracy is None else f"{100 * e.accuracy:.1f} %"))
    return columns


def _cost_columns(evaluations: Sequence[Evaluation]) -> list[Column]:
    columns: list[Column] = [
        ("weights", lambda e, first: e.scheme),
        ("disk MB", lambda e, first: f"{e.disk_bytes / 1e6:,.1f}"),
        ("memory MB", lambda e, first: f"{e.weight_bytes / 1e6:,.1f}"),
    ]
    if any(e.tokens_per_second is not None for e in evaluations):
        columns += [
            ("tokens/s", lambda e, first: "" if e.tokens_per_second is None else f"{e.tokens_per_second:,.0f}"),
            ("peak MB", lambda e, first: "" if e.peak_bytes is None else f"{e.peak_bytes / 1e6:,.0f}"),
        ]
    return columns
