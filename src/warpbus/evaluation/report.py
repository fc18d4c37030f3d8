"""Evaluations as a table, a picture and a page."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure, SubFigure
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from warpbus.evaluation import page
from warpbus.evaluation.pictures import paper, plain, style
from warpbus.evaluation.side_by_side import Evaluation
from warpbus.formats.files import replace_file

_ORIGINAL_COLOR = "#7b8496"  # legible on white paper and on a dark page

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
    with style():
        drawn = figure(evaluations)
    replace_file(path, lambda partial: drawn.savefig(partial, dpi=130, format="png"))


def figure(evaluations: Sequence[Evaluation]) -> Figure:
    """What was lost in quality, and what was gained in size and speed, one bar a model."""
    drawn = paper(size(evaluations))
    fill(drawn, evaluations)
    return drawn


def size(evaluations: Sequence[Evaluation]) -> tuple[float, float]:
    """Width and height that `fill` wants, in inches."""
    rows = -(-len(_panels(evaluations)) // 2)
    return 10, 0.9 + rows * (0.9 + 0.34 * len(evaluations))


def fill(target: Figure | SubFigure, evaluations: Sequence[Evaluation]) -> None:
    """Draw `figure` into what may be a part of another."""
    panels = _panels(evaluations)
    axes = target.subplots(-(-len(panels) // 2), 2, squeeze=False)
    names = [plain(evaluation.name) for evaluation in evaluations]
    colors = [_ORIGINAL_COLOR] + [f"C{index}" for index in range(len(names) - 1)]
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


def _panels(evaluations: Sequence[Evaluation]) -> list[tuple[str, list[float], str]]:
    """Title, values and format of each."""
    panels: list[tuple[str, list[float], str]] = [("perplexity", [e.perplexity for e in evaluations], "{:.2f}")]
    if len(evaluations) > 1:
        panels.append(("divergence from the first (nats a token)", [e.divergence for e in evaluations], "{:.4f}"))
    if all(e.accuracy is not None for e in evaluations):
        panels.append(("right choices (%)", [100 * (e.accuracy or 0.0) for e in evaluations], "{:.1f}"))
    panels.append(("size on disk (MB)", [e.disk_bytes / 1e6 for e in evaluations], "{:.1f}"))
    if all(e.tokens_per_second is not None for e in evaluations):
        panels.append(("decoding (tokens/s)", [e.tokens_per_second or 0.0 for e in evaluations], "{:.0f}"))
    return panels


def terms(tokens: int) -> list[tuple[str, str]]:
    """What the words of quality mean, in English and Chinese, where `tokens` tokens were predicted."""
    return [
        (
            "perplexity 困惑度",
            "How many tokens the model hesitates between, on average over "
            f"{tokens:,} predicted tokens. Lower is better. 越低越好。",
        ),
        ("change 变化", "Of the perplexity against the first model. 相对第一个模型。"),
        (
            "KL",
            "Kullback-Leibler divergence of the model's predictions from the first model's, in nats a token. "
            "与第一个模型的预测之差。",
        ),
        ("agrees 一致", "Share of tokens for which both models find the same token likeliest. 首选词相同的比例。"),
        ("choices 选择题", "Share of multiple-choice questions answered rightly. 选择题正确率。"),
        (
            "memory, peak 内存",
            "Weights alone; and the process (on a GPU: the allocations) at most while decoding. 权重；解码时的峰值。",
        ),
    ]


def write_page(evaluations: Sequence[Evaluation], title: str, path: Path) -> None:
    """Write one self-contained HTML page: table, picture, what the columns mean.

    Raises:
        StorageError: if it cannot be written.
    """
    columns = _columns(evaluations)
    rows = [[cell(evaluation, evaluations[0]) for _, cell in columns] for evaluation in evaluations]
    page.write_page(
        path,
        title=title,
        tables=[page.PageTable([heading for heading, _ in columns], [rows], reference=True)],
        pictures=[
            page.Picture("One bar a model for perplexity, divergence, size and speed", lambda: figure(evaluations))
        ],
        terms=terms(evaluations[0].tokens),
        command="warpbus eval",
    )


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
