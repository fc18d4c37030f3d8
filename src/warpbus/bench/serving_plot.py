"""The picture of `serving`: throughput against concurrency, and latency against the rate of arrivals."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from warpbus.bench.records import Record
from warpbus.bench.report import number
from warpbus.bench.serving_rows import BETWEEN, FIRST, OUTPUT
from warpbus.figures.theme import LIMIT, SERIES, WARPBUS, color_of, log_axis, paper, said

_PEER = "transformers"
_COLORS = {FIRST: SERIES[1], BETWEEN: SERIES[0]}
_STYLES = {"p50": "o-", "p90": "^-.", "p99": "s--"}


def serving_figure(records: Sequence[Record]) -> Figure:
    """A panel for the closed loops and one for the open ones, where there are any."""
    closed = [record for record in records if record.case.get("of") == OUTPUT]
    opened = [record for record in records if record.case.get("load") == "open" and "quantile" in record.case]
    panels = [(draw, each) for draw, each in ((_throughput, closed), (_latency, opened)) if each]
    drawn = paper(1.0 + 5.6 * len(panels), 4.6)
    for axis, (draw, each) in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axis, each)
        axis.grid()
        # Above the panel: within it, it would lie over the curves.
        axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3)
    return drawn


def serving_finding(records: Sequence[Record]) -> str:
    """The throughput of one client and of the most, and that of transformers."""
    found = {_number(record, "concurrency"): record for record in records if record.case.get("of") == OUTPUT}
    fewest, most = found[min(found)], found[max(found)]
    sentences = [
        f"{int(max(found))} requests at once: {number(most.ours)} tokens/s, "
        f"{number(most.ours / fewest.ours)} times the throughput of {int(min(found))}"
    ]
    for record in records:
        if record.case.get("of") == OUTPUT and record.peer.name == _PEER:
            sentences.append(f"Warpbus runs at {number(record.ratio)} times the speed of {_PEER}")
    return "\n".join(sentences)


def _throughput(axis: Axes, records: Sequence[Record]) -> None:
    ours = {_number(record, "concurrency"): record.ours for record in records}
    axis.plot(list(ours), list(ours.values()), "o-", label="Warpbus", color=WARPBUS, lw=2.0)
    others = {_number(record, "concurrency"): record.peer.value for record in records if record.peer.name == _PEER}
    if others:
        axis.plot(list(others), list(others.values()), "s", label=_PEER, color=color_of(_PEER))
    limits = {_number(record, "concurrency"): record.floor for record in records if record.floor is not None}
    if limits:
        axis.plot(list(limits), list(limits.values()), ":", label=said("limit"), color=LIMIT)
    log_axis(axis, "x", powers_of_two=True)
    log_axis(axis, "y")
    axis.set_xlabel(said("concurrent requests"))
    axis.set_ylabel(said("output tokens/s, more is better"))


def _latency(axis: Axes, records: Sequence[Record]) -> None:
    for of, color in _COLORS.items():
        for quantile, style in _STYLES.items():
            found = {
                _number(record, "rate"): record.ours
                for record in records
                if (record.case["of"], record.case["quantile"]) == (of, quantile)
            }
            if found:
                label = said(f"{of}, {quantile}")
                axis.plot(list(found), list(found.values()), style, label=label, color=color, ms=4)
    log_axis(axis, "y")
    axis.set_xlabel(said("arrival rate, relative to the throughput at the highest concurrency"))
    axis.set_ylabel(said("latency (ms), less is better"))


def _number(record: Record, name: str) -> float:
    return float(record.case[name])
