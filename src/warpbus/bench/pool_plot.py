"""The picture of `pool`: what is slower over a pool, by how much, and how long migrations stop a client."""

from collections.abc import Callable, Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from warpbus.bench.records import Record
from warpbus.bench.report import number
from warpbus.figures.theme import LIMIT, SERIES, UNQUANTIZED, WARPBUS, color_of, log_axis, paper, said

_CLIENTS = {"writes 4 KB": SERIES[0], "writes all": SERIES[1]}

_NEAR = "loopback"
WAIT = "client's longest wait"
"""The `step` of the row with the longest time for which a moving lease stopped its client."""


def pool_figure(records: Sequence[Record]) -> Figure:
    """A panel for each kind of thing that was measured."""
    panels: list[tuple[Callable[[Axes, Sequence[Record]], None], list[Record]]] = [
        (_operators, [record for record in records if record.case["of"] == "operator"]),
        (_slower, [record for record in records if record.case["of"] in ("training step", "decode step")]),
        (_transfers, [record for record in records if record.metric == "bandwidth"]),
        (_shares, [record for record in records if record.case["of"] == "share"]),
        (_pauses, [record for record in records if record.case["of"] in ("pause", WAIT)]),
    ]
    shown = [(draw, each) for draw, each in panels if each]
    columns = max(1, 2 if len(shown) == 4 else min(3, len(shown)))
    rows = max(1, -(-len(shown) // columns))
    drawn = paper(1.0 + 5.4 * columns, 4.0 * rows)
    axes = drawn.subplots(rows, columns, squeeze=False).ravel()
    for spare in axes[len(shown) :]:
        spare.remove()
    for axis, (draw, each) in zip(axes, shown, strict=False):
        draw(axis, each)
        axis.grid()
    return drawn


def pool_finding(records: Sequence[Record]) -> str:
    """How long steps take over the pool, and how long a migration lets its client wait."""
    sentences = []
    for of, name in (("training step", "A training step"), ("decode step", "A decode step")):
        ratios = [1 / record.ratio for record in records if record.case["of"] == of and record.case["link"] == _NEAR]
        if ratios:
            sentences.append(f"{name} takes {number(min(ratios))} times as long over the pool")
    waits = [record.ours for record in records if record.case["of"] == WAIT]
    if waits:
        sentences.append(f"A migration lets its client wait for at most {number(max(waits))} ms")
    return "\n".join(sentences) or "The pool compared with this machine"


def _operators(axis: Axes, records: Sequence[Record]) -> None:
    """The client's time, and that of torch on this machine beside it."""
    ours = {str(record.case["operator"]): record.ours for record in records}
    local = {str(each.case["operator"]): each.peer.value for each in records if each.peer.name != "the target"}
    _pairs(
        axis,
        list(ours),
        list(ours.values()),
        [local[name] for name in ours],
        ("over the pool", "torch here"),
        color_of("torch"),
    )
    for target in {record.peer.value for record in records if record.peer.name == "the target"}:
        axis.axvline(target, ls=":", color=LIMIT, label=said("target"))
    axis.set_xlabel(said("CPU time of the client (µs), less is better"))
    _legend(axis)


def _slower(axis: Axes, records: Sequence[Record]) -> None:
    """How many times as long a step takes over each link."""
    names = ["\n".join([f"{record.case['of']}, {record.case['link']}", *_how(record)]) for record in records]
    axis.barh(range(len(records)), [1 / record.ratio for record in records], 0.6, color=WARPBUS)
    axis.axvline(1.0, color=UNQUANTIZED, lw=1.5)
    axis.set_yticks(range(len(records)), [said(name) for name in names])
    axis.invert_yaxis()
    axis.set_xlabel(said("time relative to this machine's own device, less is better"))


def _how(record: Record) -> Iterator[str]:
    """Further remarks on a step."""
    if "tokens" in record.case:
        yield f"{record.case['tokens']} tokens, {record.case['sent']}"
    if "graph" in record.peer.name:
        yield f"beside {record.peer.name}"


def _transfers(axis: Axes, records: Sequence[Record]) -> None:
    names = [f"{record.case['of']}, {record.case['link']}" for record in records]
    others = [record.peer.value for record in records]
    _pairs(
        axis,
        names,
        [record.ours for record in records],
        others,
        ("over the pool", "the network alone"),
        color_of("network"),
    )
    log_axis(axis, "x")
    axis.set_xlabel(said("bandwidth (GB/s), more is better"))
    _legend(axis)


def _shares(axis: Axes, records: Sequence[Record]) -> None:
    names = [f"share {record.case['granted']}, {record.case['sharing']}" for record in records]
    granted = [record.peer.value for record in records]
    _pairs(axis, names, [record.ours for record in records], granted, ("got", "granted"), UNQUANTIZED)
    axis.set_xlabel(said("share of what both tenants get (%)"))
    _legend(axis)


def _pauses(axis: Axes, records: Sequence[Record]) -> None:
    for client, color in _CLIENTS.items():
        for of, style, label in (("pause", "o-", "pause"), (WAIT, "s--", "longest wait")):
            found = [record for record in records if (record.case["client"], record.case["of"]) == (client, of)]
            sizes = [float(record.case["megabytes"]) for record in found]
            axis.plot(
                sizes,
                [record.ours for record in found],
                style,
                color=color,
                label=said(f"{label}, client {client}"),
                ms=4,
            )
    log_axis(axis, "x", powers_of_two=True)
    log_axis(axis, "y")
    axis.set_xlabel(said("state (MB)"))
    axis.set_ylabel(said("time (ms), less is better"))
    _legend(axis, columns=2)


def _pairs(
    axis: Axes,
    names: Sequence[str],
    ours: Sequence[float],
    others: Sequence[float],
    labels: tuple[str, str],
    color: str,
) -> None:
    """Two bars for each name."""
    places = range(len(names))
    axis.barh([place - 0.2 for place in places], ours, 0.4, color=WARPBUS, label=said(labels[0]))
    axis.barh([place + 0.2 for place in places], others, 0.4, color=color, label=said(labels[1]))
    axis.set_yticks(places, [said(name) for name in names])
    axis.invert_yaxis()


def _legend(axis: Axes, columns: int = 3) -> None:
    # Above the panel: within it, it would lie over what is drawn.
    axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns)
