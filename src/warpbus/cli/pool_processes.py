"""`warpbus pool run`, `processes`, `move`, `suspend`, `resume`: programs that know nothing of Warpbus."""

from __future__ import annotations

import getpass
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from warpbus.cli.language import Console

if TYPE_CHECKING:
    from warpbus.pool.processes.processes import Carried, ProcessHost
    from warpbus.pool.quota import Quota

_To = typer.Option("--to", help="number of the GPU that it goes to, as nvidia-smi counts")
_From = typer.Option("--from", help="number of the GPU that it is on, where this cannot be seen from outside")
_Json = typer.Option("--json", help="print what was done as JSON")
_Force = typer.Option("--force", help="try it where it is not certain that the process cannot be carried")
_Patience = typer.Option(help="seconds that the process gets to be locked in")


def run(
    command: Annotated[list[str], typer.Argument(help="program and its arguments, after --", metavar="-- PROGRAM...")],
    memory: Annotated[str | None, typer.Option(help="the most it gets of the GPU: 8GB, 5.5GiB, 50%")] = None,
    share: Annotated[float | None, typer.Option(help="of the multiprocessors: above 0 and at most 1")] = None,
    gpu: Annotated[int | None, typer.Option(help="number of the GPU, as nvidia-smi counts; else 0")] = None,
    tenant: Annotated[str | None, typer.Option(help="for whom, as lists show it; else your user name")] = None,
    remote: Annotated[
        str | None, typer.Option(help="a pool's host or address: cuda in the program is a GPU there", metavar="HOST")
    ] = None,
    on: Annotated[str | None, typer.Option(help="with --remote: GPU of the pool, host/1, or a host")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="with --remote: file with your token; also WARPBUS_POOL_TOKEN")
    ] = None,
) -> None:
    """Start any program on a part of a GPU, with --memory or --share, or on a whole one that it alone sees.

    A part needs NVIDIA's MPS, and its program cannot be moved; one on a whole GPU can be.

    With --remote the program is one of PyTorch, here, and its cuda device is a GPU of a pool. This machine needs none.
    """
    from warpbus.errors import UsageError

    if remote is not None:
        if gpu is not None:
            raise UsageError(f"--gpu {gpu} is a GPU of this machine: choose one of the pool by --on host/{gpu}")
        raise typer.Exit(_run_remotely(command, remote, memory, share, on, token_file, tenant or _user()))
    if on is not None or token_file is not None:
        raise UsageError("--on and --token-file are for a pool: give --remote HOST as well")

    from warpbus.cuda.inventory import Inventory
    from warpbus.pool.processes.virtual import run as run_program
    from warpbus.pool.quota import Quota

    card = Inventory().gpu(gpu or 0)
    quota = None
    if memory is not None or share is not None:
        limit, part = card.memory if memory is None else memory, 1.0 if share is None else share
        quota = Quota.parse(limit, part, card=card.memory)
    raise typer.Exit(run_program(command, card, quota, tenant or _user()))


def _run_remotely(
    command: list[str],
    remote: str,
    memory: str | None,
    share: float | None,
    on: str | None,
    token_file: Path | None,
    tenant: str,
) -> int:
    from warpbus.pool.client.as_cuda.startup import DIRECTORY
    from warpbus.pool.daemon.tokens import read_token
    from warpbus.pool.processes.remote import pool_address
    from warpbus.pool.processes.remote import run as run_remotely

    token = read_token(token_file) if token_file is not None else os.environ.get("WARPBUS_POOL_TOKEN")
    to = pool_address(remote)

    def tell(quota: Quota) -> None:
        Console(stderr=True, soft_wrap=True).print(f"cuda is a lease of {quota}", highlight=False)

    # What was given needs no words.
    chosen = tell if memory is None or share is None else None
    return run_remotely(
        command, to, DIRECTORY, memory=memory, share=share, on=on, token=token, tenant=tenant, chosen=chosen
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container, a user without a name
        return str(os.getuid())


def processes(as_json: Annotated[bool, typer.Option("--json", help="print the processes as JSON")] = False) -> None:
    """Show the processes on this machine's GPUs: where, how much memory, for whom, within which limits."""
    from warpbus.cuda.memory_size import gigabytes
    from warpbus.pool.processes.listing import gpu_processes
    from warpbus.pool.processes.machine import ThisMachine
    from warpbus.pool.processes.suspensions import Suspensions

    found = gpu_processes(ThisMachine(), Suspensions())
    if as_json:
        print(json.dumps([asdict(each) for each in found], ensure_ascii=False, indent=2, default=str))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("process", "GPU", "memory", "tenant", "limits", "state", "program"):
        table.add_column(name, justify="right" if name in ("process", "memory") else "left")
    for each in found:
        table.add_row(
            str(each.pid),
            ", ".join(map(str, each.gpus)) or "?",
            "?" if each.memory is None else gigabytes(each.memory),
            escape(each.tenant or ""),
            escape(" ".join(f"{_SHORT[name]} {value}" for name, value in each.limits.items())),
            "runs" if each.suspended is None else f"suspended since {each.suspended.astimezone():%H:%M}",
            escape(each.command),
        )
    Console().print(table if found else "no process uses a GPU here")


_SHORT = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "share %", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "memory"}


def move(
    pid: Annotated[int, typer.Argument(metavar="PID", help="process id")],
    to: Annotated[int, _To],
    source: Annotated[int | None, _From] = None,
    force: Annotated[bool, _Force] = False,
    patience: Annotated[float, _Patience] = 10.0,
    as_json: Annotated[bool, _Json] = False,
) -> None:
    """Move a running process to another GPU of this machine. It only notices a pause."""
    from warpbus.pool.processes.processes import migrate_process

    _show(migrate_process(pid, to, _host(), source=source, force=force, patience=patience), as_json)


def suspend(
    pid: Annotated[int, typer.Argument(metavar="PID", help="process id")],
    source: Annotated[int | None, _From] = None,
    force: Annotated[bool, _Force] = False,
    patience: Annotated[float, _Patience] = 10.0,
    as_json: Annotated[bool, _Json] = False,
) -> None:
    """Take a running process off its GPU, into main memory, until it is resumed."""
    from warpbus.pool.processes.processes import suspend_process

    _show(suspend_process(pid, _host(), source=source, force=force, patience=patience), as_json)


def resume(
    pid: Annotated[int, typer.Argument(metavar="PID", help="process id")],
    to: Annotated[int | None, _To] = None,
    source: Annotated[int | None, _From] = None,
    as_json: Annotated[bool, _Json] = False,
) -> None:
    """Let a suspended process go on, on the GPU that it was on or on another."""
    from warpbus.pool.processes.processes import resume_process

    _show(resume_process(pid, _host(), to=to, source=source), as_json)


def _host() -> ProcessHost:
    from warpbus.cuda.checkpoint import CudaCheckpoint
    from warpbus.pool.processes.machine import ThisMachine
    from warpbus.pool.processes.processes import ProcessHost
    from warpbus.pool.processes.suspensions import Suspensions
    from warpbus.pool.processes.virtual import outside_mps

    os.environ.update(outside_mps())  # a client of MPS could not checkpoint others
    return ProcessHost(ThisMachine(), CudaCheckpoint(), Suspensions())


def _show(carried: Carried, as_json: bool) -> None:
    from warpbus.cuda.memory_size import gigabytes

    source, target = carried.source.index, carried.target and carried.target.index
    if as_json:
        seconds = dict(carried.seconds)
        print(
            json.dumps({"pid": carried.pid, "from": source, "to": target, "seconds": seconds, "freed": carried.freed})
        )
        return
    what = f"is off GPU {source}" if target is None else f"runs on GPU {target}"
    freed = f", which has {gigabytes(carried.freed)} more free" if target is None else ""
    steps = ", ".join(f"{name} {taken:.3f} s" for name, taken in carried.seconds.items())
    Console().print(f"process {carried.pid} {what}{freed} ({steps})", highlight=False, soft_wrap=True)
