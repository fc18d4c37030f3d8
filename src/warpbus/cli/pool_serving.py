"""`warpbus pool serve` and `token`: a machine offers its GPUs."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from warpbus.cli.language import Console
from warpbus.cli.options import FieldOption, options_of
from warpbus.dist.interpreters import permanent_objects
from warpbus.pool.daemon.options import PoolOptions


@options_of(
    {"given": PoolOptions},
    host="address to listen at",
    port="0 takes a free one",
    name="of this machine in the pool; else its host name",
    advertise="how other machines reach it; else --host",
    unix="a socket in the file system to listen at too",
    certificate="PEM certificate; the pool then speaks TLS",
    key="its PEM key",
    tokens="file with a token and its tenant a line",
    peer=FieldOption("daemon of a pool to join: warpbuss://host:7700", field="peers"),
    cluster="address of Ray, such as auto, that connects the pool",
    peer_token_file=...,
    authority="PEM file to check other daemons' certificates",
    cpu_memory="what leases may have where there is no GPU: 8GB, 50%",
    gpu_memory_reserve="of each GPU that leases may not have: 4GB, 10%",
    oversubscribe="how many times each GPU is promised to leases: 1.5",
    swap_memory="host memory for idle or preempted leases: 64GB, 50%",
    swap_time_slice="seconds of two busy leases' turns in GPU memory",
    sharing="how GPUs are shared: auto, mps or slices (of time)",
    sandbox="confine tenants' processes: files, network, programs",
    gpu_links="let leases on two GPUs of this machine exchange a group's bytes directly; experimental",
    checkpoints="directory of checkpoints that leases may load",
    spare="processes that wait, with torch loaded, for a lease",
    grace="seconds without its client until a lease is reclaimed",
    directory="for what has to survive a restart; else in ~/.local/state",
    audit_log=FieldOption("file; else audit.jsonl in --directory", field="audit"),
    max_connections="open at the same time",
    max_queued="the most leases that wait for a GPU",
    max_lease_rate="leases that one tenant may ask for in a minute",
)
def serve(
    given: dict[str, Any],
    peer_token_file: Annotated[Path | None, typer.Option(help="file with an admin's token for the peers")] = None,
) -> None:
    """Offer this machine's GPUs, or its CPU, to a pool.

    It answers this machine alone. For others: --host, --certificate, --key and --tokens.

    It ends on Ctrl-C or SIGTERM, and with it all leases that it has: move them away before (warpbus pool drain).
    """
    from warpbus.pool.daemon.tokens import read_token

    options = PoolOptions(**given, peer_token=None if peer_token_file is None else read_token(peer_token_file))
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(_serve(options))


async def _serve(options: PoolOptions) -> None:
    with permanent_objects():
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
        _greet(daemon.address, options, daemon.largest_memory)
        await end
    finally:
        await daemon.close()


def _listen_to_signals(ending: asyncio.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)


def _greet(address: str, options: PoolOptions, largest: int) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold]ready[/]: {escape(options.name)} at {escape(address)}")
    size = f"{largest // 10**9}GB" if largest >= 10**9 else f"{largest // 10**6}MB"
    memory = "8GB" if largest >= 8 * 10**9 else size
    console.print(escape(f'gpu = warpbus.pool.connect("{address}", memory="{memory}")'))


def token() -> None:
    """Print a fresh token, for a line of the file that serve --tokens reads."""
    from warpbus.pool.daemon.tokens import new_token

    print(new_token())
