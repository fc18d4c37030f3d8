"""Kills processes of a lease while it is copied to another machine, and checks that one living copy or none is left.

    python benchmarks/pool_move_kills.py --trials 300

Two machines are processes here, with CPUs in place of GPUs. In each trial a lease holds numbers, its client moves it,
and at a random moment of the copying a signal kills the source's process, the destination's, or both. Then the client
reads all numbers: they are right, or the error is a `LeaseLostError`. The processes of both machines are counted until
only a living lease has one.

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
from pool_machine import Machine

VICTIMS = ("source", "destination", "both")
OPTIONS = ("--spare", "0", "--grace", "5")
_SECONDS = 90.0


def children(machine: Machine) -> set[int]:
    """The processes of a machine's leases."""
    listed = Path(f"/proc/{machine.process.pid}/task").glob("*/children")
    return {int(pid) for each in listed for pid in each.read_text().split()}


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


def trial(machines: tuple[Machine, Machine], victim: str, delay: float, elements: int) -> dict[str, Any]:
    """Move a lease between machines, and kill `victim` so many seconds after the copying began.

    Returns:
        The victim, "outcome" ("moved", "stayed" or "lost"), "phase" when it was killed, and "seconds" from then until
        `migrate` returned, None if it had returned before.

    Raises:
        AssertionError: wrong numbers, another error, or more processes than living leases.
    """
    source, destination = machines
    before = [children(machine) for machine in machines]
    gpu = warpbus.pool.connect(source.address, memory="1GB", share=0.2, on=source.log.stem)
    gpu.patience = 5.0
    phase, killed = "", 0.0
    timer = None

    def strike() -> None:
        nonlocal killed
        leaving, arriving = (children(machine) - old for machine, old in zip(machines, before, strict=True))
        killed = time.monotonic()
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
    until(
        lambda: sum(len(children(m) - old) for m, old in zip(machines, before, strict=True)) == living,
        f"{living} process after killing {victim} ({outcome})",
    )
    with contextlib.suppress(WarpbusError):
        gpu.close()
    until(lambda: not any(children(m) - old for m, old in zip(machines, before, strict=True)), "the end of the lease")
    return {"victim": victim, "outcome": outcome, "phase": phase, "seconds": seconds}


def main() -> None:
    """Run trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elements", type=int, default=10_000_000, help="of 8 bytes, that the lease holds")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    found = []
    with tempfile.TemporaryDirectory() as directory:
        home = Machine("home", Path(directory), options=OPTIONS)
        away = Machine("away", Path(directory), home.address, options=OPTIONS)
        try:
            for number in range(options.trials):
                victim, delay = VICTIMS[number % 3], draw.uniform(0.0, 0.3)
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
