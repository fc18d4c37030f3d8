"""The picture of `train`: speed compared with what products allow, memory, energy, and perplexity."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from warpbus.bench.records import Record
from warpbus.bench.report import number
from warpbus.figures.theme import LIMIT, WARPBUS, color_of, log_axis, paper, said

_FAR_APART = 20  # of which bars the smaller could not be seen beside the larger
_PANELS = (
    ("speed", "tokens/s, more is better"),
    ("memory", "memory (GB), less is better"),
    ("energy", "J per 1,000 tokens, less is better"),
    ("perplexity", "perplexity after the same steps, less is better"),
)


def train_figure(records: Sequence[Record]) -> Figure:
    """A panel for each metric that was measured, a bar for each way to train."""
    training = [record for record in records if "method" in record.case]
    shown = [(metric, label) for metric, label in _PANELS if any(record.metric == metric for record in training)]
    ways = list(dict.fromkeys(_way(record) for record in training))
    drawn = paper(1.8 + 3.6 * len(shown), 1.9 + 0.42 * len(ways))
    for axis, (metric, label) in zip(drawn.subplots(1, len(shown), squeeze=False, sharey=True)[0], shown, strict=True):
        _bars(axis, [record for record in training if record.metric == metric], ways)
        axis.set_xlabel(said(label))
        axis.grid(axis="x")
    return drawn


def train_finding(records: Sequence[Record]) -> str:
    """The fastest way to train, compared with torch and with the slowest one."""
    speeds = [record for record in records if record.metric == "speed" and "method" in record.case]
    best = max(speeds, key=lambda record: record.ours)
    sentences = [f"{_way(best)}: {number(best.ours)} tokens/s, the fastest of {len({_way(each) for each in speeds})}"]
    torch = [record.ratio for record in speeds if record.peer.name.startswith("torch")]
    if torch:
        low, high = number(min(torch)), number(max(torch))
        span = low if low == high else f"{low} to {high}"
        sentences.append(f"Warpbus trains at {span} times the speed of torch")
    return "\n".join(sentences)


def _bars(axis: Axes, records: Sequence[Record], ways: Sequence[str]) -> None:
    ours = {_way(record): record.ours for record in records}
    plain = {_way(record): record.peer.value for record in records if record.peer.name.startswith("torch")}
    limits = {_way(record): record.floor for record in records if record.floor is not None}
    places = {way: at for at, way in enumerate(ways)}
    beside = 0.2 if plain else 0.0
    axis.barh([places[way] - beside for way in ours], list(ours.values()), 0.38, color=WARPBUS, label="Warpbus")
    if plain:
        rows = [places[way] + beside for way in plain]
        axis.barh(rows, list(plain.values()), 0.38, color=color_of("torch"), label="torch")
    if limits:
        axis.plot(list(limits.values()), [places[way] for way in limits], "|", color=LIMIT, ms=16, label=said("limit"))
    axis.set_yticks(range(len(ways)), ways)
    axis.set_ylim(len(ways) - 0.5, -0.5)
    drawn = [*ours.values(), *plain.values()]
    if min(drawn) > 0 and max(drawn) > _FAR_APART * min(drawn):
        log_axis(axis, "x")
    else:
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.xaxis.set_major_formatter("{x:,.12g}")
    axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3)


def _way(record: Record) -> str:
    """How it was trained."""
    case = record.case
    count = case.get("gpus", case.get("processes"))
    unit = "GPUs" if "gpus" in case else "processes"
    return f"{case['method']} {case['precision']} {case['mode']}" + (f", {count} {unit}" if count != 1 else "")
