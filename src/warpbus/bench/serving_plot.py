"""The picture of `serving`: throughput against concurrency, and latency against the rate of arrivals."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from warpbus.bench.records import Record
from warpbus.bench.serving_rows import BETWEEN, FIRST, OUTPUT

_COLORS = {FIRST: "#D55E00", BETWEEN: "#0072B2"}
_PEER, _LIMIT = "#009E73", "#7f7f7f"
_STYLES = {"p50": "o-", "p90": "^-.", "p99": "s--"}


def serving_figure(records: Sequence[Record]) -> Figure:
    """A panel for the closed loops and one for the open ones, where there are any."""
    drawn = Figure(figsize=(12.5, 5.2), layout="constrained")
    rates, latencies = drawn.subplots(1, 2)
    _throughput(rates, [record for record in records if record.case.get("of") == OUTPUT])
    _latency(
        latencies, [record for record in records if record.case.get("load") == "open" and "quantile" in record.case]
    )
    for axis in (rates, latencies):
        axis.grid(alpha=0.3)
        if axis.lines:
            # Above the panel: within it, it would lie over the curves.
            axis.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return drawn


def _throughput(axis: Axes, records: Sequence[Record]) -> None:
    ours = {_number(record, "concurrency"): record.ours for record in records}
    axis.plot(list(ours), list(ours.values()), "o-", label="warpbus", color=_COLORS[BETWEEN], lw=2.0)
    others = {
        _number(record, "concurrency"): record.peer.value for record in records if record.peer.name == "transformers"
    }
    if others:
        axis.plot(list(others), list(others.values()), "s", label="transformers", color=_PEER)
    limits = {_number(record, "concurrency"): record.floor for record in records if record.floor is not None}
    if limits:
        axis.plot(list(limits), list(limits.values()), ":", label="limit", color=_LIMIT)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.set_xlabel("requests at once")
    axis.set_ylabel("output tokens/s, more is better")


def _latency(axis: Axes, records: Sequence[Record]) -> None:
    for of, color in _COLORS.items():
        for quantile, style in _STYLES.items():
            found = {
                _number(record, "rate"): record.ours
                for record in records
                if (record.case["of"], record.case["quantile"]) == (of, quantile)
            }
            if found:
                axis.plot(list(found), list(found.values()), style, label=f"{of}, {quantile}", color=color, ms=4)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("arrivals, as a share of what the largest closed loop answered")
    axis.set_ylabel("latency (ms), less is better")


def _number(record: Record, name: str) -> float:
    return float(record.case[name])
