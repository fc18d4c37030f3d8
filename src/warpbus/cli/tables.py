"""Plans, estimates and reports as tables for the terminal."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from warpbus.cuda.memory_size import gigabytes, short_size
from warpbus.language import language_in_use, translated

if TYPE_CHECKING:  # what is shown loads torch, and not every verb needs it
    from warpbus.engine import MemoryPlan
    from warpbus.engine.forecast import Forecast
    from warpbus.models.cost import MemoryNeed
    from warpbus.quantization import QuantizationEstimate, Report
    from warpbus.quantization.recommend import Recommendation
    from warpbus.train.plan import TrainingPlan

_SHOWN_EXPERTS = 12
_WIDE_COLUMNS = 4  # whose whole names fit beside each other
_TRAINING_PARTS = {"weights": "weights", "gradients": "gradients", "optimizer": "moments", "activations": "activations"}


def memory_table(plan: MemoryPlan) -> RenderableType:
    """The parts of a model's memory and, below them, what was chosen."""
    table = Table("memory", "")
    table.columns[1].justify = "right"
    for name, size in plan.rows():
        table.add_row(name, gigabytes(size))
    # As the table's caption they would have to be as narrow as it is.
    return Group(table, *(Text(choice, style="dim") for choice in plan.choices()))


def forecast_table(found: Forecast, model: str) -> RenderableType:
    """Where everything of a model is, in bytes, and below that what was chosen and the speed."""
    plan = found.plan
    title = f"{model} on {found.card.name}, {gigabytes(plan.available)} allowed"
    if found.gpus > 1:
        title = f"{model} on each of {found.gpus} {found.card.name}, {gigabytes(plan.available)} allowed"
    table = Table("", "where", "size", title=Text(title), title_justify="left", title_style="bold")
    table.columns[2].justify = "right"
    for row in found.weights:
        if row.nbytes:
            table.add_row(row.name, row.place, gigabytes(row.nbytes))
    for name, size in plan.parts.items():
        if name not in ("layers", "embedding", "head"):
            table.add_row(name, "GPU", gigabytes(size))
    table.add_section()
    table.add_row("together on the GPU", "", gigabytes(plan.total))
    return Group(table, *(Text(line, style="dim") for line in (*plan.choices(), found.speed())))


def estimate_table(estimate: QuantizationEstimate) -> Table:
    """The needs of a quantization, at most 100 columns wide; GPUs that need the same share a row."""
    table = Table(title="what this run needs", title_justify="left", title_style="bold", header_style="bold")
    table.add_column("", max_width=36, overflow="fold")
    for name in ("needs", "free"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of which", max_width=52)
    for need, last in [*_alike(estimate.gpus), (estimate.memory, None), (estimate.disk, None)]:
        place = need.place if last is None else f"{need.place} to {last}"
        free = "?" if need.available is None else short_size(need.available)
        style = None if need.fits else "bold red"
        table.add_row(Text(place), short_size(need.total), free, _parts(need), style=style)
    if estimate.time is not None:
        table.caption = f"time: {estimate.time}, longer on a busy machine or a slow disk"
        table.caption_justify = "left"
    return table


def _parts(need: MemoryNeed) -> str:
    """The parts and their sizes in the language in use."""
    between = "，" if language_in_use() == "zh" else ", "
    return between.join(f"{translated(name)} {short_size(size)}" for name, size in need.parts.items())


def _alike(gpus: tuple[MemoryNeed, ...]) -> list[tuple[MemoryNeed, str | None]]:
    """Of GPUs in a row that need the same the first, and the name of the last."""
    rows: list[tuple[MemoryNeed, str | None]] = []
    for need in gpus:
        if rows and rows[-1][0].parts == need.parts and rows[-1][0].fits == need.fits:
            rows[-1] = rows[-1][0], need.place
        else:
            rows.append((need, None))
    return rows


def recommendation_table(found: Recommendation) -> Table:
    """The trials, the best first; the chosen one is marked, what does not fit is dim."""
    sampled = ", ".join(map(str, found.layers))
    table = Table(
        title=Text(f"{found.model} on {found.device}: errors of the outputs of layers {sampled}"),
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("", "scheme", "algorithm"):
        table.add_column(heading, no_wrap=True)
    for heading in ("error", "size", "memory", "ms/token", "to make"):
        table.add_column(heading, justify="right", no_wrap=True)
    for trial in sorted(found.trials, key=lambda trial: trial.error):
        chosen = trial == found.chosen
        table.add_row(
            "→" if chosen else "",
            trial.scheme,
            trial.algorithm,
            f"{trial.error:.2%}",
            short_size(trial.nbytes),
            short_size(trial.memory),
            trial.token_range,
            f"{trial.seconds:,.0f} s",
            style="bold green" if chosen else None if trial.fits(found.memory) else "dim",
        )
    table.caption, table.caption_justify = Text(f"{found.chosen.name}: {found.reason}"), "left"
    return table


def report_tables(report: Report) -> RenderableType:
    """The error of each matrix, layer by layer, and where the time went."""
    title = f"{report.scheme}, {report.algorithm}: {report.error_kind}"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    if narrow := len(report.linears) > _WIDE_COLUMNS:
        table.box, table.padding, table.pad_edge = SIMPLE_HEAD, (0, 1, 0, 0), False
    table.add_column("layer", justify="right", no_wrap=True)
    for linear in report.linears:
        table.add_column(linear.replace(".", "\n") if narrow else linear, justify="right", overflow="fold")
    table.add_column("s" if narrow else "seconds", justify="right", no_wrap=True)
    for layer in sorted({row.layer for row in report.rows}):
        rows = {row.linear: row for row in report.rows if row.layer == layer}
        cells = [report.cell(rows[linear]) if linear in rows else "-" for linear in report.linears]
        table.add_row(str(layer), *cells, f"{sum(row.seconds for row in rows.values()):.1f}")
    parts: list[RenderableType] = [table]
    if report.expert_tokens:
        parts.append(_expert_table(report))
    if report.stages:
        parts.append(_stage_table(report))
    return Group(*parts)


def _expert_table(report: Report) -> Table:
    """How many calibration tokens reached the experts, and which of them were calibrated on all tokens."""
    table = Table(title="Calibration tokens per expert", title_justify="left", title_style="bold", header_style="bold")
    for name in ("layer", "fewest", "median", "most"):
        table.add_column(name, justify="right")
    table.add_column("too few: calibrated on all tokens")
    for layer, counts in report.expert_tokens.items():
        few = list(map(str, report.sparse_experts[layer]))
        shown = ", ".join(few[:_SHOWN_EXPERTS]) + (
            f" and {len(few) - _SHOWN_EXPERTS} more" * (len(few) > _SHOWN_EXPERTS)
        )
        figures = min(counts), int(median(counts)), max(counts)
        table.add_row(str(layer), *(f"{figure:,}" for figure in figures), shown or "none")
    return table


def _stage_table(report: Report) -> Table:
    table = Table(title="Where the time went", title_justify="left", title_style="bold", header_style="bold")
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    total = sum(report.stages.values()) or 1.0
    for stage, seconds in report.stages.items():
        table.add_row(stage, f"{seconds:.2f}", f"{seconds / total:.0%}")
    return table


def training_table(plan: TrainingPlan) -> Table:
    """Memory and time of a training run by the number of GPUs."""
    steps = "1 step" if plan.steps == 1 else f"{plan.steps:,} steps"
    title = (
        f"{steps}, {plan.tokens:,} tokens; {plan.trained:,} of {plan.parameters:,} numbers are trained\n"
        "memory of each GPU in GB"
    )
    table = Table(title=title, title_justify="left", caption_justify="left")
    for name in ("GPUs", "in all", *_TRAINING_PARTS.values(), "other", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for need in plan.needs:
        memory = need.memory
        parts = [memory.parts[name] for name in _TRAINING_PARTS]
        table.add_row(
            str(need.gpus),
            f"{memory.total / 1e9:.2f}" + ("" if memory.fits else ", too much"),
            *(f"{part / 1e9:.2f}" for part in parts),
            f"{max(0, memory.total - sum(parts)) / 1e9:.2f}",
            "-" if need.time is None else str(need.time),
        )
    if plan.flops_per_second is None:
        table.caption = "time: estimated only with a GPU, from its rate of matrix products"
    else:
        rate = f"{plan.flops_per_second / 1e12:,.0f} TFLOP/s in products of {plan.device}"
        table.caption = f"time: by {rate}, without validation; longer on a busy machine"
    return table
