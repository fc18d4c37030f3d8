"""Records as a table for the terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from warpbus.bench.records import Parameter, Record


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
        notes: what else has to be said.
    """
    shared, varying = shared_and_varying(records)
    # How a case was timed is for the file.
    shared.pop("timed", None)
    varying = [name for name in varying if name != "timed"]
    drawn = Table(
        title=Text(f"{title}, {records[0].device}", overflow="fold"), title_justify="left", title_style="bold"
    )
    for name in varying:
        drawn.add_column(name, justify="left" if isinstance(records[0].case.get(name), str) else "right", no_wrap=True)
    units = list(dict.fromkeys(record.unit for record in records))
    peers = list(dict.fromkeys(record.peer.name for record in records))
    # Narrow enough for 80 columns: what all rows share stands in the heading.
    unit = f"\n{units[0]}" if len(units) == 1 else ""
    drawn.add_column(f"ours{unit}", justify="right", no_wrap=True)
    if len(peers) > 1:
        drawn.add_column("peer", overflow="fold")
    drawn.add_column(f"{peers[0] if len(peers) == 1 else 'its value'}{unit}", justify="right", no_wrap=True)
    drawn.add_column("ratio", justify="right", no_wrap=True)
    floors = any(record.floor is not None for record in records)
    if floors:
        drawn.add_column("of\nlimit", justify="right", no_wrap=True)
    last: object = None
    for record in records:
        cells = [Text("" if record.case == last else shown(record.case.get(name))) for name in varying]
        unit = "" if len(units) == 1 else f" {record.unit}"
        cells.append(Text("" if record.case == last else number(record.ours) + unit))
        cells += [Text(record.peer.name)] * (len(peers) > 1)
        cells.append(Text(number(record.peer.value) + unit))
        cells.append(Text(f"{number(record.ratio)}x", style=_style(record.ratio)))
        if floors and record.case != last:
            share = record.share_of_floor
            cells.append(Text("" if share is None else f"{100 * share:.0f} %"))
        drawn.add_row(*cells)
        last = record.case
    lines = [f"{name}: {shown(value)}" for name, value in shared.items()]
    below = [Text(", ".join(lines), style="dim")] if lines else []
    below += [
        Text.assemble(f"geometric mean, {group}: ", (f"{mean:.3f}x", _style(mean))) for group, mean in means.items()
    ]
    below += [Text(note, style="dim") for note in notes]
    return Group(drawn, *below)


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
    # What is printed as 1.00 is no loss.
    rounded = round(ratio, 2)
    return "green" if rounded >= 1 else "yellow" if rounded >= 0.95 else "red"
