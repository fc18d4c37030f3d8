"""The picture of `pool`: what is slower over a pool, by how much, and how long moves stop a client."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from warpbus.bench.records import Record

_OURS, _PEER, _LIMIT = "#0072B2", "#009E73", "#7f7f7f"
_STYLES = {"writes 4 KB": ("o-", "#0072B2"), "writes all": ("s--", "#D55E00")}


def pool_figure(records: Sequence[Record]) -> Figure:
    """A panel for each kind of thing that was measured."""
    panels: list[tuple[Callable[[Axes, Sequence[Record]], None], list[Record]]] = [
        (_operators, [record for record in records if record.case["of"] in ("operator", "read")]),
        (_slower, [record for record in records if record.case["of"] in ("training step", "decode step")]),
        (_transfers, [record for record in records if record.metric == "bandwidth"]),
        (_shares, [record for record in records if record.case["of"] == "share"]),
        (_pauses, [record for record in records if record.case["of"] == "pause"]),
    ]
    shown = [(draw, each) for draw, each in panels if each] or [(_slower, list(records))]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    drawn = Figure(figsize=(1.0 + 5.0 * columns, 4.4 * rows), layout="constrained")
    axes = drawn.subplots(rows, columns, squeeze=False).ravel()
    for spare in axes[len(shown) :]:
        spare.remove()
    for axis, (draw, each) in zip(axes, shown, strict=False):
        draw(axis, each)
        axis.grid(alpha=0.3)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return drawn


def _operators(axis: Axes, records: Sequence[Record]) -> None:
    """Bars of the client's time, with that of torch on this machine beside them."""
    ours = {str(record.case.get("operator", "read")): record.ours for record in records}
    local = {
        str(record.case["operator"]): record.peer.value
        for record in records
        if "operator" in record.case and record.peer.name != "the target"
    }
    places = range(len(ours))
    axis.barh([place - 0.2 for place in places], list(ours.values()), 0.4, color=_OURS, label="over the pool")
    there = [(place + 0.2, local[name]) for place, name in enumerate(ours) if name in local]
    axis.barh([place for place, _ in there], [value for _, value in there], 0.4, color=_PEER, label="torch here")
    for record in records:
        if record.peer.name == "the target":
            axis.axvline(record.peer.value, ls=":", color=_LIMIT, label="target of an operator")
            break
    axis.set_yticks(list(places), list(ours))
    axis.invert_yaxis()
    axis.set_xlabel("us of the client, less is better")
    axis.legend(fontsize=8, frameon=False)


def _slower(axis: Axes, records: Sequence[Record]) -> None:
    """How many times as long a step takes over each link."""
    names = [f"{record.case['of']}\n{record.case.get('link', '')}" for record in records]
    axis.bar(range(len(records)), [1 / record.ratio for record in records], 0.6, color=_OURS)
    axis.axhline(1.0, color=_PEER, lw=1.5)
    axis.set_xticks(range(len(records)), names, fontsize=8, rotation=20, ha="right")
    axis.set_ylabel("times as long as on this machine's own")


def _transfers(axis: Axes, records: Sequence[Record]) -> None:
    names = [f"{record.case['of']}\n{record.case['link']}" for record in records]
    places = range(len(records))
    axis.bar([place - 0.2 for place in places], [record.ours for record in records], 0.4, color=_OURS, label="pool")
    others = [record.peer.value for record in records]
    axis.bar([place + 0.2 for place in places], others, 0.4, color=_PEER, label="the network alone")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xticks(list(places), names, fontsize=8, rotation=20, ha="right")
    axis.set_ylabel("GB/s, more is better")
    axis.legend(fontsize=8, frameon=False)


def _shares(axis: Axes, records: Sequence[Record]) -> None:
    names = [f"{record.case['granted']}\n{record.case['sharing']}" for record in records]
    places = range(len(records))
    axis.bar([place - 0.2 for place in places], [record.ours for record in records], 0.4, color=_OURS, label="got")
    granted = [record.peer.value for record in records]
    axis.bar([place + 0.2 for place in places], granted, 0.4, color=_PEER, label="granted")
    axis.set_xticks(list(places), names)
    axis.set_ylabel("% of what both tenants get")
    axis.legend(fontsize=8, frameon=False)


def _pauses(axis: Axes, records: Sequence[Record]) -> None:
    for client, (style, color) in _STYLES.items():
        found = [record for record in records if record.case["client"] == client]
        sizes = [float(record.case["megabytes"]) for record in found]
        axis.plot(sizes, [record.ours for record in found], style, color=color, label=f"pause, client {client}")
        axis.plot(sizes, [record.peer.value for record in found], ":", color=color, label="the whole move")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("MB of state")
    axis.set_ylabel("ms, less is better")
    axis.legend(fontsize=8, frameon=False)
