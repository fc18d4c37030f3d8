"""`warpbus pool serve` and `token`: a machine offers its GPUs."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from warpbus.pool.daemon.options import PoolOptions


def serve(
    host: Annotated[str, typer.Option(help="address to listen at")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 7700,
    name: Annotated[str | None, typer.Option(help="of this machine in the pool; else its host name")] = None,
    advertise: Annotated[str | None, typer.Option(help="how other machines reach it; else --host")] = None,
    unix: Annotated[Path | None, typer.Option(help="a socket in the file system to listen at too")] = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM certificate; the pool then speaks TLS")] = None,
    key: Annotated[Path | None, typer.Option(help="its PEM key")] = None,
    tokens: Annotated[Path | None, typer.Option(help="file with a token and its tenant a line")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="daemon of a pool to join: warpbuss://host:7700")] = None,
    cluster: Annotated[str | None, typer.Option(help="address of Ray, such as auto, that connects the pool")] = None,
    peer_token_file: Annotated[Path | None, typer.Option(help="file with an admin's token for the peers")] = None,
    authority: Annotated[Path | None, typer.Option(help="PEM file to check other daemons' certificates")] = None,
    cpu_memory: Annotated[str, typer.Option(help="what leases may have where there is no GPU: 8GB, 50%")] = "50%",
    gpu_memory_reserve: Annotated[str, typer.Option(help="of each GPU that leases may not have: 4GB, 10%")] = "10%",
    sharing: Annotated[str, typer.Option(help="how GPUs are shared: auto, mps or slices (of time)")] = "auto",
    sandbox: Annotated[
        bool, typer.Option("--sandbox/--no-sandbox", help="confine tenants' processes: files, network, programs")
    ] = True,
    spare: Annotated[int, typer.Option(help="processes that wait, with torch loaded, for a lease")] = 1,
    grace: Annotated[float, typer.Option(help="seconds without its client until a lease is reclaimed")] = 60.0,
    directory: Annotated[
        Path | None, typer.Option(help="for what has to survive a restart; else in ~/.local/state")
    ] = None,
    audit_log: Annotated[Path | None, typer.Option(help="file; else audit.jsonl in --directory")] = None,
    max_connections: Annotated[int, typer.Option(help="open at the same time")] = 1024,
    max_queued: Annotated[int, typer.Option(help="the most leases that wait for a GPU")] = 256,
    max_lease_rate: Annotated[float, typer.Option(help="leases that one tenant may ask for in a minute")] = 60.0,
) -> None:
    """Offer this machine's GPUs, or its CPU, to a pool.

    It answers this machine alone. For others: --host, --certificate, --key and --tokens.

    It ends on Ctrl-C or SIGTERM, and with it all leases that it has: move them away before (warpbus pool drain).
    """
    from warpbus.pool.daemon.options import PoolOptions
    from warpbus.pool.daemon.tokens import read_token

    given: dict[str, Any] = {"name": name}
    options = PoolOptions(
        host=host,
        port=port,
        advertise=advertise,
        unix=unix,
        certificate=certificate,
        key=key,
        tokens=tokens,
        peers=tuple(peer or ()),
        peer_token=None if peer_token_file is None else read_token(peer_token_file),
        authority=authority,
        cluster=cluster,
        cpu_memory=cpu_memory,
        gpu_memory_reserve=gpu_memory_reserve,
        sharing=sharing,  # type: ignore[arg-type]  # it is checked
        sandbox=sandbox,
        spare=spare,
        grace=grace,
        directory=directory,
        audit=audit_log,
        max_connections=max_connections,
        max_queued=max_queued,
        max_lease_rate=max_lease_rate,
        **{option: value for option, value in given.items() if value is not None},
    )
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(_serve(options))


async def _serve(options: PoolOptions) -> None:
    from warpbus.pool.daemon.daemon import Daemon

    daemon = Daemon(options)
    ending = asyncio.Event()
    _listen_to_signals(ending)
    end = asyncio.create_task(ending.wait())
    try:
        start = asyncio.create_task(daemon.start())
        await asyncio.wait((start, end), return_when=asyncio.FIRST_COMPLETED)
        if end.done():
            start.cancel()
            return
        await start
        _listen_to_signals(ending)  # Ray has put itself in their place
        _greet(daemon.address, options)
        await end
    finally:
        await daemon.close()


def _listen_to_signals(ending: asyncio.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)


def _greet(address: str, options: PoolOptions) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold]ready[/]: {escape(options.name)} at {escape(address)}")
    console.print(escape(f'gpu = warpbus.pool.connect("{address}", memory="8GB")'))


def token() -> None:
    """Print a fresh token, for a line of the file that serve --tokens reads."""
    from warpbus.pool.daemon.tokens import new_token

    print(new_token())
