"""Kills processes while a lease is copied from one machine to another, and checks that one living copy or none is left.

    python benchmarks/pool_move_kills.py --trials 300

Two machines are processes here, with CPUs in place of GPUs. In each trial a lease holds numbers, its client moves it,
and at a random moment of the copying a signal kills the source's process, the destination's, or both; with `--daemons`
it kills the daemon of one of the machines, which is started again afterwards. Then the client reads all numbers: they
are right, or the error is a `LeaseLostError`. The processes of both machines are counted until only a living lease has
one.

It prints one line for each trial and a JSON object about the kills that came before the end of the move: outcomes by
what was killed, and the seconds that `migrate` took to return after the kill.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import warpbus
from warpbus.errors import LeaseLostError, WarpbusError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from pool_machine import Machine, alive

from warpbus.pool.protocol.address import address
from warpbus.pool.protocol.control_channel import ControlChannel

VICTIMS = ("source", "destination", "both")
DAEMONS = ("source's daemon", "destination's daemon")
OPTIONS = ("--spare", "0", "--grace", "15")
_SECONDS = 90.0


def until(condition: Any, what: str) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + _SECONDS
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come about within {_SECONDS:.0f} s")
        time.sleep(0.01)


def kill(pids: set[int]) -> None:
    """End processes that may have ended already."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def joined(machines: tuple[Machine, Machine]) -> bool:
    """Whether both machines are in one pool, which has no leases."""
    for machine in machines:
        try:
            with ControlChannel(address(machine.address), None) as control:
                status = control.ask("status", timeout=_SECONDS)
        except WarpbusError:
            return False
        if status["leases"] or [gpu["state"] for gpu in status["gpus"]] != ["open"] * 2:
            return False
    return True


def trial(machines: tuple[Machine, Machine], victim: str, delay: float, elements: int) -> dict[str, Any]:
    """Move a lease between machines, and kill `victim` so many seconds after the copying began.

    A daemon that was killed is started again at the end.

    Returns:
        The victim, "outcome" ("moved", "stayed" or "lost"), "phase" when it was killed, and "seconds" from then until
        `migrate` returned, None if it had returned before.

    Raises:
        AssertionError: wrong numbers, another error, or more processes than living leases.
    """
    source, destination = machines
    victims = {"source's daemon": source, "destination's daemon": destination}
    before = [machine.children() for machine in machines]
    orphans: set[int] = set()
    gpu = warpbus.pool.connect(source.address, memory="1GB", share=0.2, on=source.log.stem)
    gpu.patience = 5.0
    phase, killed = "", 0.0
    timer = None

    def strike() -> None:
        nonlocal killed
        leaving, arriving = (machine.children() - old for machine, old in zip(machines, before, strict=True))
        killed = time.monotonic()
        if victim in victims:
            orphans.update(victims[victim].children())
            victims[victim].kill()
            return
        kill((leaving if victim != "destination" else set()) | (arriving if victim != "source" else set()))

    def told(progress: dict[str, Any]) -> None:
        nonlocal phase, timer
        phase = progress["phase"]
        if timer is None and "copying" in phase:
            timer = threading.Timer(delay, strike)
            timer.start()

    parts = [torch.arange(elements // 8, device=gpu.device) for _ in range(8)]
    for part in parts:
        part.add_(1)
    outcome = ""
    try:
        gpu.migrate(destination.log.stem, progress=told)
    except LeaseLostError:
        outcome = "lost"
    except WarpbusError:
        outcome = "stayed"
    returned = time.monotonic()
    if timer is not None:
        timer.join()
    seconds = returned - killed if 0 < killed < returned else None
    try:
        for part in parts:
            part.add_(1)
        right = torch.arange(elements // 8) + 2
        assert all(torch.equal(part.cpu(), right) for part in parts), f"wrong numbers after killing {victim}"
        outcome = outcome if outcome == "stayed" else "moved"
        living = 1
    except LeaseLostError:
        outcome, living = "lost", 0

    def running() -> int:
        return sum(len(m.children() - old) for m, old in zip(machines, before, strict=True))

    until(lambda: running() == living, f"{living} process after killing {victim} ({outcome})")
    until(lambda: not any(map(alive, orphans)), f"the end of the processes of {victim}")
    with contextlib.suppress(WarpbusError):
        gpu.close()
    if killed and victim in victims:
        victims[victim].restart()
    until(lambda: running() == 0, "the end of the lease")
    until(lambda: joined(machines), "a pool of both machines without leases")
    return {"victim": victim, "outcome": outcome, "phase": phase, "seconds": seconds}


def main() -> None:
    """Run trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--daemons", action="store_true", help="kill daemons in place of leases' processes")
    parser.add_argument("--elements", type=int, default=10_000_000, help="of 8 bytes, that the lease holds")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    found = []
    with tempfile.TemporaryDirectory() as directory:
        home = Machine("home", Path(directory), options=OPTIONS)
        away = Machine("away", Path(directory), home.address, options=OPTIONS)
        try:
            for number in range(options.trials):
                kinds = DAEMONS if options.daemons else VICTIMS
                victim, delay = kinds[number // 2 % len(kinds)], draw.uniform(0.0, 0.3)
                machines = (home, away) if number % 2 else (away, home)
                found.append(trial(machines, victim, delay, options.elements))
                print(number, found[-1], file=sys.stderr, flush=True)
        finally:
            away.close()
            home.close()
    within = [each for each in found if each["seconds"] is not None]
    outcomes = Counter(f"{each['victim']} killed: {each['outcome']}" for each in within)
    seconds = sorted(each["seconds"] for each in within) or [0.0]
    figures = {"within": len(within), "median": seconds[len(seconds) // 2], "longest": seconds[-1]}
    print(json.dumps({"outcomes": dict(sorted(outcomes.items())), **figures}, indent=1))


if __name__ == "__main__":
    main()
