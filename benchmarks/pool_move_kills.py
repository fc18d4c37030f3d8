"""Kills processes while a lease is copied from one machine to another, and checks that one living copy or none is left.

    python benchmarks/pool_move_kills.py --trials 400 --daemon-trials 40

Two machines are processes here, with CPUs in place of GPUs. In each trial a lease holds numbers, its client moves it,
and at a random moment of the copying a signal kills the source's process, the destination's, or both; in the last
trials it kills the daemon of one of the machines, which is started again afterwards. Then the client reads all numbers:
they are right, or the error is a `LeaseLostError`. The processes of both machines are counted until only a living lease
has one. The processes of leases are forked (`pool_forking_daemon.py`), so that a trial takes about a second.

It prints one line for each trial. The records in benchmarks/results count the kills that came before `migrate`
returned, by what was killed and the outcome, and have the seconds that `migrate` took to return after the kill.
"""

import argparse
import contextlib
import os
import platform
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import warpbus
from warpbus.bench.records import RESULTS, Peer, Record, now, write
from warpbus.errors import LeaseLostError, WarpbusError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from pool_machine import Machine, alive

from warpbus.pool.protocol.address import address
from warpbus.pool.protocol.control_channel import ControlChannel

VICTIMS = ("source", "destination", "both")
DAEMONS = ("source's daemon", "destination's daemon")
OPTIONS = ("--spare", "0", "--grace", "15")
FORKING = (str(Path(__file__).with_name("pool_forking_daemon.py")),)
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

    def reported(progress: dict[str, Any]) -> None:
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
        gpu.migrate(destination.log.stem, progress=reported)
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


def records(found: list[dict[str, Any]], command: str) -> list[Record]:
    """Of each kind of kill and outcome."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for each in found:
        if each["seconds"] is not None:
            groups.setdefault((each["victim"], each["outcome"], each["phase"]), []).append(each["seconds"])
    return [
        Record(
            bench="pool-kills",
            case={
                "killed": victim,
                "outcome": outcome,
                "phase": phase,
                "kills": len(seconds),
                "wrong_numbers": 0,
                "processes_left": 0,  # else a trial raises
            },
            metric="latency",
            unit="s",
            ours=max(seconds),
            peer=Peer("the pool's wait for a claim", "the limit", 60.0),
            ratio=60.0 / max(seconds),
            floor=None,
            samples={"ours": [round(each, 4) for each in seconds], "peer": [60.0]},
            device="cpu",
            versions={
                "warpbus": warpbus.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
            date=now(),
            command=command,
        )
        for (victim, outcome, phase), seconds in sorted(groups.items())
    ]


def main() -> None:
    """Run trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400, help="that kill the processes of leases")
    parser.add_argument("--daemon-trials", type=int, default=40, help="that kill daemons")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elements", type=int, default=10_000_000, help="of 8 bytes, that the lease holds")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the directory of the records")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    found = []
    with tempfile.TemporaryDirectory() as directory:
        home = Machine("home", Path(directory), options=OPTIONS, program=FORKING)
        away = Machine("away", Path(directory), home.address, options=OPTIONS, program=FORKING)
        try:
            for number in range(options.trials + options.daemon_trials):
                kinds = VICTIMS if number < options.trials else DAEMONS
                victim, delay = kinds[number // 2 % len(kinds)], draw.uniform(0.0, 0.3)
                machines = (home, away) if number % 2 else (away, home)
                found.append(trial(machines, victim, delay, options.elements))
                print(number, found[-1], flush=True)
        except KeyboardInterrupt:
            print(f"stopped after {len(found)} trials")
        finally:
            away.close()
            home.close()
    made = records(found, " ".join(["python", "benchmarks/pool_move_kills.py", *sys.argv[1:]]))
    for each in made:
        print(f"{each.case['kills']:4} {each.case['killed']} killed, {each.case['phase']}: {each.case['outcome']}")
    print(write(made, options.output))


if __name__ == "__main__":
    main()
