"""`warpbus pool status`, `migrate`, `drain` and what else is done with leases, over a daemon's control connection."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from warpbus.cli.language import Console, translated_object

if TYPE_CHECKING:
    from warpbus.pool.protocol.address import Address as Where
    from warpbus.pool.protocol.control_channel import ControlChannel

Address = Annotated[
    str | None, typer.Option("--address", help="of a daemon: warpbuss://host:7700; also WARPBUS_POOL", metavar="URL")
]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="file with your token; also WARPBUS_POOL_TOKEN, the token itself")
]
_Json = Annotated[bool, typer.Option("--json", help="print JSON")]
_Lease = Annotated[str, typer.Argument(help="id of the lease, or how it begins")]
HERE = "warpbus://localhost:7700"
_EVENTS = 8


def status(
    address: Address = None,
    token_file: TokenFile = None,
    once: Annotated[bool, typer.Option("--once", help="print the table once")] = False,
    as_json: _Json = False,
) -> None:
    """Show the pool: its GPUs, leases, queue and last events, again each second until Ctrl-C."""
    with _control(address, token_file) as control:
        now = control.ask("status")
        if as_json:
            print(json.dumps(now, ensure_ascii=False, indent=2))
            return
        console = Console()
        if not control.welcome["tokens"]:
            warning = "this pool asks for no tokens: every user and program of its machine is an admin"
            Console(stderr=True, soft_wrap=True).print(warning, style="bold yellow")
        if once or not console.is_terminal:
            console.print(pool_table(now))
            return
        with Live(translated_object(pool_table(now)), console=console, screen=True) as live:
            try:
                while True:
                    time.sleep(1.0)
                    live.update(translated_object(pool_table(control.ask("status"))))
            except KeyboardInterrupt:
                return


def migrate(
    lease: _Lease,
    to: Annotated[str, typer.Option("--to", help="GPU, host/1, or a host")],
    address: Address = None,
    token_file: TokenFile = None,
    as_json: _Json = False,
) -> None:
    """Move a lease to another GPU. Its client notices a pause."""
    from warpbus.cuda.memory_size import short_size

    done = _do("migrate", {"to": to}, address, token_file, lease=lease)
    if as_json:
        print(json.dumps(done))
        return
    pause = "" if done["pause"] is None else f", paused for {done['pause'] * 1000:.0f} ms"
    copied = "" if done["bytes"] is None else f", {short_size(done['bytes'])} copied"
    _say(f"now on {done['moved']} ({done['seconds']:.2f} s{pause}{copied})")


def drain(
    host: Annotated[str, typer.Argument(metavar="HOST", help="name of the machine")],
    address: Address = None,
    token_file: TokenFile = None,
    as_json: _Json = False,
) -> None:
    """Move all leases from a machine to others, and let no new ones onto it."""
    done = _do("drain", {"host": host}, address, token_file)
    if as_json:
        print(json.dumps(done))
    else:
        _say(f"{host} takes no leases any more, leases moved: {done['moves']}")
        for lease, why in done["failed"].items():
            _say(f"[bold red]{escape(lease)} stays:[/] {escape(why)}")
    if done["failed"]:
        raise typer.Exit(1)


def undrain(
    host: Annotated[str, typer.Argument(metavar="HOST", help="name of the machine")],
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """Let leases onto a machine again."""
    _do("undrain", {"host": host}, address, token_file)
    _say(f"{host} takes leases again")


def release(lease: _Lease, address: Address = None, token_file: TokenFile = None) -> None:
    """End a lease and give its part of the GPU back. What it holds is gone."""
    done = _do("release", {}, address, token_file, lease=lease)
    _say(f"released {done['released']}")


def suspend_lease(lease: _Lease, address: Address = None, token_file: TokenFile = None, as_json: _Json = False) -> None:
    """Write what a lease holds to its machine's disk and give the GPU back, until it is resumed."""
    from warpbus.cuda.memory_size import short_size

    done = _do("suspend", {}, address, token_file, lease=lease)
    if as_json:
        print(json.dumps(done))
    else:
        _say(f"suspended {done['suspended']} ({done['seconds']:.2f} s, {short_size(done['bytes'])} on the disk)")


def resume_lease(
    lease: _Lease,
    on: Annotated[str | None, typer.Option("--on", help="GPU of the machine that has it on its disk")] = None,
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """Let a suspended lease go on; waits until there is room for it."""
    done = _do("resume", {"on": on}, address, token_file, lease=lease)
    _say(f"resumed {done['lease']} on {done['gpu']}")


def daemon_of(address: str | None, token_file: Path | None) -> tuple[Where, str | None]:
    """The address of the daemon and the token, from the options, the environment, or else `HERE` and none."""
    from warpbus.pool.daemon.tokens import read_token
    from warpbus.pool.protocol.address import address as read_address

    token = read_token(token_file) if token_file is not None else os.environ.get("WARPBUS_POOL_TOKEN")
    return read_address(address or os.environ.get("WARPBUS_POOL") or HERE), token


def _control(address: str | None, token_file: Path | None) -> ControlChannel:
    from warpbus.pool.protocol.control_channel import ControlChannel

    return ControlChannel(*daemon_of(address, token_file))


def _do(
    operation: str,
    arguments: dict[str, Any],
    address: str | None,
    token_file: Path | None,
    *,
    lease: str | None = None,
) -> dict[str, Any]:
    """Ask, and show how far it is on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        _control(address, token_file) as control,
        Progress(*columns, console=Console(stderr=True), transient=True) as bar,
    ):
        if lease is not None:
            arguments["lease"] = _whole(lease, control.ask("status"))
        task = bar.add_task(operation, total=None)

        def tell(answer: dict[str, Any]) -> None:
            if "queued" in answer:
                bar.update(task, description=f"place {answer['queued']} in the queue: {escape(str(answer['why']))}")
            else:
                done, total = answer.get("done"), answer.get("total")
                bar.update(task, description=escape(str(answer["phase"])), completed=done or 0, total=total)

        return control.ask(operation, arguments, tell)


def _whole(beginning: str, pool: dict[str, Any]) -> str:
    """The id that begins so, where there is one; else as it was given, which the pool refuses."""
    found = [lease["id"] for lease in pool["leases"] if lease["id"].startswith(beginning)]
    return found[0] if len(found) == 1 and beginning else beginning


def _say(text: str) -> None:
    Console(highlight=False, soft_wrap=True).print(text)


def pool_table(pool: dict[str, Any]) -> Group:
    """The pool as a terminal shows it: `pool` is what a daemon answers, see `warpbus.pool.broker.status`."""
    now = pool["now"]
    parts: list[Any] = [_gpus(pool), _leases(pool)]
    if pool["queue"]:
        table = _new_table("queue", "tenant", "memory", "share", "waits", "why")
        for each in pool["queue"]:
            quota = (_size(each["memory"]), f"{each['share']:.2f}")
            _row(table, each["id"][:8], each["tenant"], *quota, _age(each["waited"]), each["why"])
        parts.append(table)
    if pool["events"]:
        table = _new_table("events", "", "")
        for each in pool["events"][-_EVENTS:]:
            _row(table, f"{_age(now - each['time'])} ago", (each["lease"] or "")[:8], each["text"])
        parts.append(table)
    return Group(*[each for part in parts for each in (part, Text())][:-1])


def _gpus(pool: dict[str, Any]) -> Table:
    table = _new_table("GPU", "model", "memory", "", "share", "", "leases", "")
    for each in pool["gpus"]:
        _row(
            table,
            each["name"],
            each["model"],
            _bar(each["used"] / each["promised"]),
            f"{_size(each['used'])} of {_size(each['promised'])}",
            _bar(each["share_used"] / each["oversubscribe"]),
            f"{each['share_used']:.2f}",
            str(len(each["leases"])),
            _gpu_state(each),
        )
    return table


def _gpu_state(gpu: dict[str, Any]) -> str:
    words = [] if gpu["state"] == "open" else [gpu["state"]]
    if gpu["oversubscribe"] > 1:
        words.append(f"oversubscribed: {_size(gpu['resident'])} of {_size(gpu['memory'])} resident")
        words.append(f"{_size(gpu['swapped'])} in host memory")
    return ", ".join(words)


def _lease_state(lease: dict[str, Any]) -> str:
    if lease["target"]:
        return f"{lease['state']} to {lease['target']}"
    where = lease["residency"]
    if where is None or lease["state"] != "placed" or where["state"] == "resident":
        return str(lease["state"])
    if where["waits"] is None:
        return str(where["state"])
    return f"{where['state']}, waits {_age(where['waits'])} for {where['why']}"


def _leases(pool: dict[str, Any]) -> Table:
    table = _new_table("lease", "tenant", "on", "memory", "share", "state", "idle")
    for each in pool["leases"]:
        if each["state"] == "queued":
            continue
        used = "" if each["memory_used"] is None else f"{_size(each['memory_used'])} of "
        _row(
            table,
            each["id"][:8],
            each["tenant"],
            each["gpu"] or "",
            used + _size(each["memory"]),
            f"{each['share']:.2f}",
            _lease_state(each),
            _age(each["idle"]),
        )
    if not table.row_count:
        _row(table, "none")
    return table


def _new_table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name)
    return table


def _row(table: Table, *cells: str | Text) -> None:
    table.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in cells))


def _bar(part: float) -> Text:
    full = min(10, max(0, round(10 * part)))
    return Text("█" * full, style="green" if part < 0.9 else "yellow").append("░" * (10 - full), style="dim")


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 10**8 else f"{nbytes / 1e6:.1f} MB"


def _age(seconds: float) -> str:
    whole = int(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if whole >= 2 * size:
            return f"{whole // size} {unit}"
    return f"{whole} s"
