"""Evaluations as a table, a picture and a page."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure, SubFigure
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

import warpbus
from warpbus.evaluation.side_by_side import Evaluation
from warpbus.figures import page
from warpbus.figures.panels import Measure, draw_measures, panels_size
from warpbus.figures.theme import UNQUANTIZED, caption, footer, paper, save, shade, style

Column = tuple[str, Callable[[Evaluation, Evaluation], str]]

INTERVAL = "95 % interval"
"""The term of a page that explains intervals; only a verdict shows them."""

_STEADY = 1.5  # the fastest run over the slowest, at most

_NAME: Column = ("model", lambda e, first: e.name)


def to_json(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Plain dictionaries."""
    return [asdict(evaluation) for evaluation in evaluations]


def table(evaluations: Sequence[Evaluation], title: str) -> RenderableType:
    """A table for the terminal; the first row is the reference. Where it is too wide, two below each other."""
    quality, cost = _quality_columns(evaluations), _cost_columns(evaluations)
    fitting = _Fitting(
        _table([_NAME, *quality, *cost], evaluations, title),
        Group(_table([_NAME, *quality], evaluations, title), _table([_NAME, *cost], evaluations, None)),
    )
    doubt = doubted(evaluations)
    return fitting if doubt is None else Group(fitting, Text(doubt))


def doubted(evaluations: Sequence[Evaluation]) -> str | None:
    """A sentence if the speed of a model differed so much between its runs that speeds cannot be compared."""
    for each in evaluations:
        if each.tokens_per_second and each.slowest and each.tokens_per_second > _STEADY * each.slowest:
            return (
                f"The speeds are uncertain: runs of {each.name} gave from {each.slowest:,.0f} to "
                f"{each.tokens_per_second:,.0f} tokens/s. Other programs use this machine."
            )
    return None


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
        save(figure(evaluations), path)


def figure(evaluations: Sequence[Evaluation]) -> Figure:
    """The loss in quality, and the gain in size and speed: a row per model, a panel per measure."""
    drawn = paper(*size(evaluations))
    fill(drawn, evaluations)
    return caption(drawn, finding(evaluations), described(evaluations[0]), machine(evaluations[0]))


def finding(evaluations: Sequence[Evaluation]) -> str:
    """Of the quantized model that is closest to the original: how much smaller and faster it is, and what it loses."""
    first, *others = evaluations
    if not others:
        return f"{first.name}: perplexity {first.perplexity:.2f}"
    best = min(others, key=lambda each: each.divergence)
    return "\n".join([f"{best.name}: {each}" for each in gains(first, best)])


def gains(before: Evaluation, after: Evaluation) -> list[str]:
    """A sentence: the change of the perplexity, of the size and, unless it is doubted, of the speed."""
    change = f"{before.perplexity:.2f} → {after.perplexity:.2f} ({after.perplexity / before.perplexity - 1:+.2%})"
    smaller = f"{before.disk_bytes / after.disk_bytes:.2f}"
    if before.tokens_per_second and after.tokens_per_second and doubted([before, after]) is None:
        faster = f"{after.tokens_per_second / before.tokens_per_second:.2f}"
        return [f"perplexity {change}, {smaller} times smaller, {faster} times as fast"]
    return [f"perplexity {change}, {smaller} times smaller"]


def described(first: Evaluation) -> str:
    """The data of the measurements."""
    return f"measured on {first.tokens:,} predicted tokens"


def machine(first: Evaluation) -> str:
    """The footer of a picture."""
    return footer(first.device, first.date, [f"warpbus {warpbus.__version__}", f"torch {torch.__version__}"])


def size(evaluations: Sequence[Evaluation]) -> tuple[float, float]:
    """Width and height that `fill` wants, in inches."""
    return panels_size(len(_measures(evaluations)), len(evaluations))


def fill(target: Figure | SubFigure, evaluations: Sequence[Evaluation]) -> None:
    """Draw `figure` into what may be a part of another."""
    colors = [UNQUANTIZED, *(shade(index) for index in range(len(evaluations) - 1))]
    draw_measures(target, [evaluation.name for evaluation in evaluations], colors, _measures(evaluations))


def _measures(evaluations: Sequence[Evaluation]) -> list[Measure]:
    measures = [Measure("perplexity", [e.perplexity for e in evaluations], "{:.2f}", dots=True)]
    if len(evaluations) > 1:
        measures.append(Measure("KL from the first (nats)", [e.divergence for e in evaluations], "{:.4f}"))
    if all(e.accuracy is not None for e in evaluations):
        correct = [100 * (e.accuracy or 0.0) for e in evaluations]
        measures.append(Measure("choices correct (%)", correct, "{:.1f}"))
    unit, size_of = ("GB", 1e9) if max(e.disk_bytes for e in evaluations) >= 1e9 else ("MB", 1e6)
    measures.append(Measure(f"size on disk ({unit})", [e.disk_bytes / size_of for e in evaluations], "{:,.1f}"))
    if all(e.tokens_per_second is not None for e in evaluations):
        measures.append(Measure("decoding (tokens/s)", [e.tokens_per_second for e in evaluations], "{:,.0f}"))
    return measures


def terms(tokens: int) -> list[tuple[str, str]]:
    """The meaning of the names of measures, where `tokens` tokens were predicted."""
    return [
        (
            "perplexity",
            "exp of the mean loss per token: the number of tokens among which the model hesitates on average. "
            f"Lower is better; {tokens:,} tokens were predicted.",
        ),
        ("change", "Change of the perplexity, relative to the first model."),
        ("KL", "Kullback-Leibler divergence of the model's predictions from those of the first, in nats per token."),
        (
            INTERVAL,
            "95 % of 2,000 resamples of the texts, the same for both models, lie in it: texts other than these would "
            "give another value.",
        ),
        ("agrees", "Share of tokens for which both models find the same token most likely."),
        ("choices", "Share of multiple-choice questions that are answered correctly."),
        (
            "memory, peak",
            "Weights alone; and the most that the process (on a GPU: its allocations) takes while decoding.",
        ),
    ]


def write_page(evaluations: Sequence[Evaluation], title: str, path: Path, *, command: str = "warpbus eval") -> None:
    """Write one self-contained HTML page: table, picture, the meaning of the columns; in English and Chinese.

    Args:
        command: that wrote the page, as its footer tells.

    Raises:
        StorageError: if it cannot be written.
    """
    columns = _columns(evaluations)
    rows = [[cell(evaluation, evaluations[0]) for _, cell in columns] for evaluation in evaluations]
    page.write_page(
        path,
        title=title,
        lead=[*finding(evaluations).split("\n"), *filter(None, [doubted(evaluations)])],
        tables=[page.PageTable([heading for heading, _ in columns], [rows], reference=True)],
        pictures=[
            page.Picture("A row per model: perplexity, KL divergence, size and speed", lambda: figure(evaluations))
        ],
        terms=[term for term in terms(evaluations[0].tokens) if term[0] != INTERVAL],
        command=command,
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
