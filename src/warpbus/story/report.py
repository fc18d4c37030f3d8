"""A story as tables for the terminal and the page, as a picture, and as records."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import warpbus
from warpbus.bench.cases import versions
from warpbus.bench.records import Parameter, Peer, Record, ratio
from warpbus.bench.report import number
from warpbus.evaluation.report import terms
from warpbus.figures import page
from warpbus.figures.panels import Measure, draw_measures, panels_size
from warpbus.figures.theme import UNQUANTIZED, WARPBUS, caption, footer, paper, save, shade, style
from warpbus.language import translated
from warpbus.story.rows import (
    GENERATE,
    GPTQ4,
    GPU,
    ORIGINAL,
    QUANTIZE,
    RTN4,
    RTN8,
    TRAIN,
    Story,
    StoryRow,
    joined,
)

_TITLES = {GENERATE: "generation", TRAIN: "training", QUANTIZE: "quantization"}
_FORM = {GENERATE: "weights", TRAIN: "method", QUANTIZE: "weights"}
_DETAIL = {TRAIN: "trained parameters", QUANTIZE: "mean error"}
_COLORS = {
    ORIGINAL: UNQUANTIZED,
    RTN8: shade(3),
    RTN4: shade(2),
    GPTQ4: WARPBUS,
    "full": UNQUANTIZED,
    "lora": WARPBUS,
}
_SENTENCES = 4  # above the picture

Column = tuple[str, Callable[[StoryRow], str]]


def _columns(story: Story, task: str) -> list[Column]:
    """Headings and cells of the table of a task."""

    def rate(row: StoryRow) -> str:
        return number(row.seconds if task == QUANTIZE else row.rate)

    columns: list[Column] = [
        ("device", lambda row: row.where),
        (_FORM[task], lambda row: story.label(row.form)),
        ("seconds" if task == QUANTIZE else "tokens/s", rate),
    ]
    if task != QUANTIZE or any(row.count > 1 for row in story.of(task)):
        columns.append(("ratio", lambda row: f"{number(row.rate / story.base(row).rate)}x"))
    if any(row.joules is not None for row in story.of(task)):
        scale = 1 if task == QUANTIZE else 1000
        columns.append(
            (
                "J" if task == QUANTIZE else "J/1,000 tokens",
                lambda row: "not measured" if row.joules is None else number(scale * row.joules),
            )
        )
    return [
        *columns,
        ("$" if task == QUANTIZE else "$/1M tokens", lambda row: _money(row.cost(story.prices))),
        ("memory MB", lambda row: "not measured" if row.memory is None else f"{row.memory / 1e6:,.0f}"),
        *([] if task == GENERATE else [(_DETAIL[task], lambda row: row.detail)]),
    ]


def _money(dollars: float) -> str:
    """Two significant digits, and no exponent."""
    return f"{dollars:,.{max(2, 1 - math.floor(math.log10(dollars)))}f}" if dollars > 0 else "0"


_QUALITY_HEADINGS = ("weights", "scheme", "size on disk", "perplexity", "change", "KL", "agrees")


def _quality_rows(story: Story) -> list[list[str]]:
    first = story.quality[ORIGINAL]
    return [
        [
            story.label(form),
            found.scheme,
            f"{found.disk_bytes / 1e6:,.1f} MB",
            f"{found.perplexity:.3f}",
            "" if found is first else f"{found.perplexity / first.perplexity - 1:+.2%}",
            "" if found is first else f"{found.divergence:.4f}",
            "" if found is first else f"{found.agreement:.1%}",
        ]
        for form, found in story.quality.items()
    ]


def _tables(story: Story) -> list[page.PageTable]:
    """Everything as texts."""
    found = []
    for task in (GENERATE, TRAIN, QUANTIZE):
        if rows := story.of(task):
            columns = _columns(story, task)
            cells = [[cell(row) for _, cell in columns] for row in rows]
            found.append(page.PageTable([heading for heading, _ in columns], [cells], _TITLES[task]))
    if ORIGINAL in story.quality:
        found.insert(min(1, len(found)), page.PageTable(_QUALITY_HEADINGS, [_quality_rows(story)], "quality"))
    return found


def notes(story: Story) -> list[str]:
    """What the figures rest on, and what is missing."""
    prices = (
        f"Cost: {story.prices[GPU]:g} dollars per GPU-hour and {story.prices['CPU']:g} per hour of this machine "
        "without a GPU; --price and --cpu-price change them."
    )
    method = (
        "Generation: one sequence, greedy, without the prompt. Training: random weights of the model's shape, random "
        "tokens. On a CPU, weights of 16 bits are computed in float32."
    )
    algorithms = (
        "Quantization: RTN rounds each weight to the nearest value; GPTQ also corrects weights that are not yet "
        "rounded, with calibration data. The algorithm does not change the speed of generation."
    )
    return [*story.missing, prices, method, *([algorithms] if story.of(QUANTIZE) else [])]


def table(story: Story) -> RenderableType:
    """For the terminal."""
    parts: list[RenderableType] = [Text(f"{story.model}, {story.machine}", style="bold")]
    parts += [Text(sentence) for sentence in story.findings()]
    for each in _tables(story):
        drawn = Table(title=each.caption, title_justify="left", title_style="bold")
        for index, heading in enumerate(each.headings):
            # A word per line: columns as narrow as their numbers, so that no word is broken on 80 columns.
            lines = translated(heading).replace(" ", "\n")
            drawn.add_column(lines, justify="left" if index < 2 else "right", overflow="fold")
        for row in each.sections[0]:
            drawn.add_row(*map(Text, row))
        parts.append(drawn)
    return Group(*parts, *(Text(note, style="dim") for note in notes(story)))


def figure(story: Story) -> Figure:
    """A block for generation with the quality of each form, one for training, one for quantization."""
    blocks = [(task, story.of(task)) for task in (GENERATE, TRAIN, QUANTIZE) if story.of(task)]
    sizes = [panels_size(len(_measures(story, task, rows)), len(rows)) for task, rows in blocks]
    drawn = paper(max(width for width, _ in sizes), sum(height for _, height in sizes))
    grid = drawn.add_gridspec(len(blocks), 1, height_ratios=[height for _, height in sizes])
    for index, (task, rows) in enumerate(blocks):
        names = [f"{row.where}, {story.label(row.form)}" for row in rows]
        colors = [_COLORS[row.form] for row in rows]
        draw_measures(drawn.add_subfigure(grid[index]), names, colors, _measures(story, task, rows))
    what = f"{story.model}: generation, training and quantization"
    made = [f"warpbus {warpbus.__version__}"]
    return caption(drawn, joined(story.findings(), _SENTENCES), what, footer(story.machine, story.date, made))


def _measures(story: Story, task: str, rows: Sequence[StoryRow]) -> list[Measure]:
    if task == QUANTIZE:
        measures = [Measure("quantization (s)", [row.seconds for row in rows], "{:,.1f}")]
    else:
        measures = [Measure(f"{_TITLES[task]} (tokens/s)", [row.rate for row in rows], "{:,.0f}")]
    unit, scale = ("J", 1.0) if task == QUANTIZE else ("J/1,000 tokens", 1000.0)
    joules = [None if row.joules is None else scale * row.joules for row in rows]
    if any(each is not None for each in joules):
        measures.append(Measure(f"energy ({unit})", joules, "{:,.3g}"))
    unit = "$" if task == QUANTIZE else "$/1M tokens"
    measures.append(Measure(f"cost ({unit})", [row.cost(story.prices) for row in rows], _money))
    if task == GENERATE and ORIGINAL in story.quality:
        found = [story.quality.get(row.form) for row in rows]
        disk = [None if each is None else each.disk_bytes / 1e6 for each in found]
        measures.append(Measure("size on disk (MB)", disk, "{:,.1f}"))
        measures.append(
            Measure("perplexity", [None if each is None else each.perplexity for each in found], "{:.2f}", dots=True)
        )
    else:
        memory = [None if row.memory is None else row.memory / 1e6 for row in rows]
        measures.append(Measure("memory (MB)", memory, "{:,.0f}"))
    return measures


def draw(story: Story, path: Path) -> None:
    """Write the picture of `figure` as a PNG.

    Raises:
        StorageError: if it cannot be written.
    """
    with style():
        save(figure(story), path)


def write_page(story: Story, path: Path) -> None:
    """Write one self-contained HTML page: findings, tables, picture, meaning of the words; in English and Chinese.

    Raises:
        StorageError: if it cannot be written.
    """
    names, original = ("perplexity", "change", "KL", "agrees"), story.quality.get(ORIGINAL)
    page.write_page(
        path,
        title=f"{story.model}, {story.machine}",
        lead=story.findings(),
        tables=_tables(story),
        notes=notes(story),
        pictures=[
            page.Picture("Speed, energy, cost and quality on each device and in each form", lambda: figure(story))
        ],
        terms=[term for term in terms(original.tokens) if term[0] in names] if original else [],
        command=story.command,
    )


def records(story: Story) -> list[Record]:
    """Every figure in the schema of all benchmarks; the peer of a row is its `Story.base`."""
    found = []
    on_gpu = story.best_place == GPU
    device = story.machine.partition(",")[0].rpartition(" x ")[2] if on_gpu else "cpu"
    installed = versions()

    def add(case: dict[str, Parameter], metric: str, unit: str, ours: float, peer: str, theirs: float) -> None:
        found.append(
            Record(
                bench="story",
                case={"model": story.model, **case},
                metric=metric,
                unit=unit,
                ours=ours,
                peer=Peer(peer, warpbus.__version__, theirs),
                ratio=ratio(metric, ours, theirs),
                floor=None,
                samples={"ours": [ours], "peer": [theirs]},
                device=device,
                versions=installed,
                date=story.date,
                command=story.command,
            )
        )

    for task in (GENERATE, TRAIN, QUANTIZE):
        for row in story.of(task):
            base = story.base(row)
            case: dict[str, Parameter] = {"task": task, "place": row.place, "count": row.count, "form": row.form}
            peer = f"warpbus, {base.where}, {base.form}"
            if task == QUANTIZE:
                add(case, "time", "s", row.seconds, peer, base.seconds)
            else:
                add(case, "speed", "tokens/s", row.rate, peer, base.rate)
            unit = "dollars" if task == QUANTIZE else "dollars/M tokens"
            add(case, "cost", unit, row.cost(story.prices), peer, base.cost(story.prices))
            if row.joules and base.joules:
                unit, scale = ("J", 1.0) if task == QUANTIZE else ("J/1000 tokens", 1000.0)
                add(case, "energy", unit, scale * row.joules, peer, scale * base.joules)
            if row.memory and base.memory:
                add(case, "memory", "GB", row.memory / 1e9, peer, base.memory / 1e9)
    original = story.quality.get(ORIGINAL)
    for form, each in story.quality.items():
        if original is not None:
            quality: dict[str, Parameter] = {"task": "perplexity", "form": form, "scheme": each.scheme}
            quality |= {"data": story.data, "tokens": each.tokens, "bytes": each.disk_bytes}
            quality |= {"kl": each.divergence, "agreement": each.agreement}
            add(quality, "perplexity", "perplexity", each.perplexity, "the original", original.perplexity)
    return found
