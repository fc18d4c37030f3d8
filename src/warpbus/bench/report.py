"""Records as a table for the terminal, and the lines that come before there are any."""

import sys
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from warpbus.bench.records import Parameter, Record

# How a case was timed, and of how many requests a load was, is for the file.
_FOR_THE_FILE = {"timed", "requests"}
_ABOVE = 1.005  # what is printed as 101 %
_EXCEEDED = (
    "Above 100 % of the limit: the limit is a rate that was measured in this run with a large copy or product, and "
    "small cases can stay in the cache."
)


def say(what: str) -> None:
    """A line on stderr, at once: who waits sees what there is already."""
    print(what, file=sys.stderr, flush=True)


def shared_and_varying(records: Sequence[Record]) -> tuple[dict[str, Parameter], list[str]]:
    """The parameters that all cases have in common, and the names of those in which they differ."""
    names = list(dict.fromkeys(name for record in records for name in record.case))
    values = {name: {record.case.get(name) for record in records} for name in names}
    shared = {name: records[0].case[name] for name in names if len(values[name]) == 1}
    return shared, [name for name in names if name not in shared]


def table(records: Sequence[Record], title: str, means: dict[str, float], notes: Sequence[str]) -> RenderableType:
    """A row for each case and peer, green where ours is at least as good, yellow within 5 %; then means and notes.

    Args:
        records: of one benchmark, at least one.
        title: of the benchmark.
        means: the geometric mean of the ratios, by group.
        notes: further remarks.
    """
    shared, _ = shared_and_varying(records)
    heading = Text(f"{title}, {records[0].device}", style="bold", overflow="fold")
    # Each unit gets a table of its own: numbers of different units cannot be compared. So does each of our variants,
    # each kind of load and each part, lest the rows get too wide.
    tables: list[RenderableType] = []
    for kind in dict.fromkeys(_kind(record) for record in records):
        rows = [record for record in records if _kind(record) == kind]
        common, varying = shared_and_varying(rows)
        given = _parameters_of_shape(rows, varying)
        tables.append(_rows(rows, [name for name in varying if name not in {*given, *_FOR_THE_FILE}]))
        tables += _shapes(rows, given)
        tables += _listed({name: value for name, value in common.items() if name not in shared})
    below = _listed(shared)
    below += [
        Text.assemble(f"geometric mean, {group}: ", (f"{mean:.3f}x", _style(mean))) for group, mean in means.items()
    ]
    below += [Text(note, style="dim") for note in notes]
    if any((record.share_of_floor or 0) >= _ABOVE for record in records):
        below.append(Text(_EXCEEDED, style="dim"))
    return Group(heading, *tables, *below)


def _kind(record: Record) -> tuple[Parameter | None, ...]:
    return record.unit, *(record.case.get(name) for name in ("variant", "load", "part"))


def _listed(parameters: dict[str, Parameter]) -> list[Text]:
    """A line of what the rows above it have in common."""
    lines = [f"{name}: {shown(value)}" for name, value in parameters.items() if name not in _FOR_THE_FILE]
    return [Text(", ".join(lines), style="dim")] if lines else []


def _parameters_of_shape(records: Sequence[Record], varying: Sequence[str]) -> list[str]:
    """The parameters that follow from the shape, where shapes recur: said once, they need no column."""
    shapes = {record.case.get("shape") for record in records}
    if len({tuple(record.case.get(name) for name in varying) for record in records}) == len(shapes):
        return []
    pairs = {name: {(record.case.get("shape"), record.case.get(name)) for record in records} for name in varying}
    return [name for name in varying if name != "shape" and len(pairs[name]) == len(shapes)]


def _shapes(records: Sequence[Record], given: Sequence[str]) -> list[Text]:
    """A line of what each shape stands for."""
    shapes = {str(record.case.get("shape")): record.case for record in records}
    lines = [
        f"{shape}: " + ", ".join(f"{name} {shown(case.get(name))}" for name in given) for shape, case in shapes.items()
    ]
    return [Text("; ".join(lines), style="dim")] if given else []


def _rows(records: Sequence[Record], varying: Sequence[str]) -> Table:
    """Records of one kind, with a column for each parameter that varies. Where the terminal is narrow, words wrap."""
    peers = list(dict.fromkeys(record.peer.name for record in records))
    unit = records[0].unit
    drawn = Table()
    for name in varying:
        words = isinstance(records[0].case.get(name), str)
        drawn.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    drawn.add_column(f"ours\n{unit}", justify="right", no_wrap=True)
    if len(peers) > 1:
        drawn.add_column("peer", overflow="fold")
    drawn.add_column(f"{peers[0] if len(peers) == 1 else 'its'}\n{unit}", justify="right", no_wrap=True)
    drawn.add_column("ratio", justify="right", no_wrap=True)
    floors = any(record.floor is not None for record in records)
    if floors:
        drawn.add_column("of\nlimit", justify="right", no_wrap=True)
    last: object = None
    for record in records:
        repeated = record.case == last
        cells = [Text("" if repeated else shown(record.case.get(name))) for name in varying]
        cells.append(Text("" if repeated else number(record.ours)))
        cells += [Text(record.peer.name)] * (len(peers) > 1)
        cells += [Text(number(record.peer.value)), Text(f"{number(record.ratio)}x", style=_style(record.ratio))]
        if floors and not repeated:
            share = record.share_of_floor
            cells.append(Text("" if share is None else f"{100 * share:.0f} %"))
        drawn.add_row(*cells)
        last = record.case
    return drawn


def number(value: float) -> str:
    """Three significant digits, and no exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def shown(value: Parameter | None) -> str:
    """A parameter of a case, for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _style(ratio: float) -> str:
    # A ratio that is printed as 1.00 is no loss.
    rounded = round(ratio, 2)
    return "green" if rounded >= 1 else "yellow" if rounded >= 0.95 else "red"
