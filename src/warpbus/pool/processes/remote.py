"""A PyTorch program on a GPU of a pool, from a machine without one: `warpbus pool run --remote`.

The program itself connects, when it first uses `cuda` (`warpbus.pool.client.as_cuda`). Here it gets the variables for
that, after a check that the pool accepts this user and has such a GPU.
"""

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from warpbus.errors import UnavailableError, UsageError, WarpbusError
from warpbus.pool.processes.virtual import TENANT, run_program
from warpbus.pool.protocol.address import Address, address, is_loopback
from warpbus.pool.protocol.control_channel import ControlChannel
from warpbus.pool.quota import Quota

_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_ISOLATED = re.compile(r"-(?!-)[^cmWX]*[IES].*")
"""Options by which Python does not read PYTHONPATH or executes no sitecustomize."""


def pool_address(host: str) -> Address:
    """The address that a host name, `host:port` or an address means.

    Raises:
        UsageError: it is none.
    """
    if "://" in host:
        return address(host)
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:  # `address` says what is wrong
        name = ""
    return address(f"{'warpbus' if is_loopback(name) else 'warpbuss'}://{host}")


def run(
    command: Sequence[str],
    to: Address,
    startup: Path,
    *,
    memory: str | None,
    share: float | None,
    on: str | None,
    token: str | None,
    tenant: str,
    chosen: Callable[[Quota], None] | None = None,
) -> int:
    """Run a program whose `cuda` is a GPU of a pool, to its end.

    Args:
        to: the pool.
        startup: the directory whose sitecustomize.py sets the device up.
        memory, share: its quota. Memory of None: all that is free on the GPU with the most free memory; share of None:
            with memory, 1, else what is left of that GPU. The tenant's limits lower both.
        on: a GPU ("host/1") or a host; None lets the pool choose.
        token: for the pool.
        tenant: the name shown in lists.
        chosen: called with the quota before the program starts.

    Returns:
        its exit code, or 128 and the number of the signal that ended it.

    Raises:
        UsageError: there is no such program, or the quota is wrong.
        UnavailableError: no GPU of the pool has memory free, or the tenant's limits leave nothing.
        WarpbusError: the pool does not answer, or does not accept the token.
    """
    if not command:
        raise UsageError("no program: give one after --, such as: warpbus pool run --remote HOST -- python train.py")
    _check_python(command)
    with ControlChannel(to, token) as control:
        status = control.ask("status")
    quota = _quota(status["gpus"], memory, share, on, status.get("left", {}))
    if chosen is not None:
        chosen(quota)
    with tempfile.TemporaryDirectory(prefix="warpbus-") as directory:
        leases = Path(directory) / "leases"
        paths = [str(startup), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            "WARPBUS_POOL": str(to),
            "WARPBUS_POOL_MEMORY": str(quota.memory),
            "WARPBUS_POOL_SHARE": str(quota.share),
            "WARPBUS_POOL_LEASES": str(leases),
            "PYTHONPATH": os.pathsep.join(paths),
            TENANT: tenant,
        }
        environment |= {} if on is None else {"WARPBUS_POOL_ON": on}
        environment |= {} if token is None else {"WARPBUS_POOL_TOKEN": token}
        try:
            return run_program(command, environment)
        finally:
            _release(leases, to, token)


def _check_python(command: Sequence[str]) -> None:
    if not _PYTHON.fullmatch(Path(command[0]).name):
        return
    for option in command[1:]:
        if not option.startswith("-") or option in ("-m", "-c", "-"):
            return
        if _ISOLATED.fullmatch(option):
            raise UsageError(
                f"{command[0]} {option}: Python then does not read PYTHONPATH, by which cuda becomes the leased GPU: "
                "leave the option out"
            )


def _quota(
    gpus: Sequence[dict[str, Any]],
    memory: str | None,
    share: float | None,
    on: str | None,
    limits: Mapping[str, float | None],
) -> Quota:
    """The program's request; `limits` are what the tenant's limits leave of "memory" and "share"."""
    fitting = [each for each in gpus if each["state"] == "open" and on in (None, each["name"], each["host"])]
    if not fitting:
        if on is None:
            raise UnavailableError("the pool has no open GPU: see warpbus pool status")
        raise UnavailableError(f"the pool has no open GPU or host {on}: see warpbus pool status")
    best = max(fitting, key=lambda each: (each["free"], -each["share_used"]))
    for name, given in (("memory", memory), ("share", share)):
        if given is None and limits.get(name) == 0:
            raise UnavailableError(
                f"the limits of your token leave no {name}: release a lease, see warpbus pool status"
            )
    most_share = 1.0 if (allowed := limits.get("share")) is None else min(1.0, allowed)
    if memory is None:
        left = round(best["oversubscribe"] - best["share_used"], 6)
        if best["free"] <= 0 or left <= 0:
            raise UnavailableError("no GPU of the pool is free: give --memory and --share, and the program waits")
        # An oversubscribed GPU has more free than one lease may have.
        free = min(best["free"], best["memory"])
        if (allowed := limits.get("memory")) is not None:
            free = min(free, int(allowed))
        return Quota(free, min(most_share, left) if share is None else share)
    return Quota.parse(memory, most_share if share is None else share, card=best["memory"])


def _release(leases: Path, to: Address, token: str | None) -> None:
    """Release the lease of a program that was killed; the pool refuses leases that have ended."""
    try:
        listed = leases.read_text().split()
    except OSError:  # it never used the device
        return
    with suppress(WarpbusError), ControlChannel(to, token) as control:
        for lease in listed:
            with suppress(UsageError):
                control.ask("release", {"lease": lease})
