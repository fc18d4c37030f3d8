"""The picture of `train`: speed against what products allow, memory, energy, and what was learnt."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from warpbus.bench.records import Record

_FAR_APART = 20  # of which bars the smaller could not be seen beside the larger
_OURS, _PEER, _LIMIT = "#0072B2", "#009E73", "#7f7f7f"
_PANELS = (
    ("speed", "tokens/s, more is better"),
    ("memory", "GB of a GPU, less is better"),
    ("energy", "J for 1,000 tokens, less is better"),
    ("perplexity", "perplexity after the same steps, less is better"),
)


def train_figure(records: Sequence[Record]) -> Figure:
    """A panel for each thing that was measured, a bar for each way to train."""
    training = [record for record in records if "method" in record.case]
    shown = [(metric, label) for metric, label in _PANELS if any(record.metric == metric for record in training)]
    ways = list(dict.fromkeys(_way(record) for record in training))
    drawn = Figure(figsize=(1.5 + 4.2 * len(shown), 1.8 + 0.42 * len(ways)), layout="constrained")
    for axis, (metric, label) in zip(drawn.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        _bars(axis, [record for record in training if record.metric == metric], ways)
        axis.set_xlabel(label)
        axis.grid(axis="x", alpha=0.3)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return drawn


def _bars(axis: Axes, records: Sequence[Record], ways: Sequence[str]) -> None:
    ours = {_way(record): record.ours for record in records}
    plain = {_way(record): record.peer.value for record in records if record.peer.name.startswith("torch")}
    limits = {_way(record): record.floor for record in records if record.floor is not None}
    places = {way: at for at, way in enumerate(ways)}
    beside = 0.2 if plain else 0.0
    axis.barh([places[way] - beside for way in ours], list(ours.values()), 0.38, color=_OURS, label="warpbus")
    if plain:
        axis.barh([places[way] + beside for way in plain], list(plain.values()), 0.38, color=_PEER, label="torch")
    if limits:
        axis.plot(list(limits.values()), [places[way] for way in limits], "|", color=_LIMIT, ms=16, label="limit")
    axis.set_yticks(range(len(ways)), ways)
    axis.set_ylim(len(ways) - 0.5, -0.5)
    drawn = [*ours.values(), *plain.values()]
    if min(drawn) > 0 and max(drawn) > _FAR_APART * min(drawn):
        axis.set_xscale("log")
    else:
        axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.xaxis.set_major_formatter("{x:,.12g}")
    axis.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3)


def _way(record: Record) -> str:
    """How it was trained."""
    case = record.case
    count = case.get("gpus", case.get("processes"))
    return f"{case['method']} {case['precision']} {case['mode']}" + (f", {count}" if count != 1 else "")
