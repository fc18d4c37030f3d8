"""A daemon is killed while a lease of it is swapped: its clients get an error, and the next daemon begins anew."""

import contextlib
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from pool_machine import Machine, alive

import warpbus
from warpbus.errors import LeaseLostError
from warpbus.pool.protocol.address import address
from warpbus.pool.protocol.control_channel import ControlChannel

# Two leases that do not fit together. A slice of time longer than the test: only priority and idleness displace one.
OPTIONS = ("--cpu-memory", "500MB", "--oversubscribe", "2", "--swap-memory", "2GB", "--swap-time-slice", "600")
MEMORY = "400MB"
ELEMENTS = 48_000_000  # of 8 bytes
_SECONDS = 60.0


@pytest.fixture(scope="module")
def machine():
    with tempfile.TemporaryDirectory() as directory:
        found = Machine("mill", Path(directory), options=(*OPTIONS, "--spare", "0"))
        yield found
        found.close()


class Striker(threading.Thread):
    """Kills a machine's daemon at a moment of the swaps of a lease that has `ELEMENTS` numbers."""

    def __init__(self, machine: Machine, lease: str, moment: str) -> None:
        super().__init__(daemon=True)
        self.children: set[int] = set()
        self._machine, self._lease, self._moment = machine, lease, moment

    def swaps(self) -> list[str]:
        """What the audit log says."""
        lines = (self._machine.directory / "audit.jsonl").read_text().splitlines()
        own = [line for line in lines if self._lease in line]
        return [word for line in own for word in ("swapped out", "swapped in") if f'"{word}"' in line]

    def run(self) -> None:
        end = time.monotonic() + _SECONDS
        before, moment = 0, self._moment
        while time.monotonic() < end:
            pid, size = self._copy()
            if moment == "moving out" and 0 < size < 8 * ELEMENTS:
                break
            if moment != "moving out" and self.swaps() == ["swapped out"]:
                before = before or _anonymous(pid)
                if moment == "moving in" and _anonymous(pid) > before + ELEMENTS:
                    break
                if moment == "out":
                    time.sleep(0.5)  # its client has come to wait for it
                    break
            time.sleep(0.001)
        self.children = self._machine.children()
        self._machine.kill()

    def _copy(self) -> tuple[int, int]:
        """The process that has the largest copy in host memory, and the bytes of it; zeros if there is none."""
        found = [(0, 0)]
        for pid in self._machine.children():
            with contextlib.suppress(OSError):
                for each in Path(f"/proc/{pid}/fd").iterdir():
                    if "memfd:warpbus-lease" in str(each.readlink()):
                        found.append((each.stat().st_size, pid))
        size, pid = max(found)
        return pid, size


def _anonymous(pid: int) -> int:
    """Bytes of a process's memory that belong to no file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize(
    ("moment", "swaps"), [("moving out", []), ("out", ["swapped out"]), ("moving in", ["swapped out"])]
)
def test_a_daemon_that_is_killed_while_a_lease_is_swapped(machine, moment, swaps):
    low = warpbus.pool.connect(machine.address, memory=MEMORY, share=0.5)
    high = warpbus.pool.connect(machine.address, memory=MEMORY, share=0.5, priority=1)
    low.patience = high.patience = 3600.0  # longer than this test may take
    kept = torch.arange(ELEMENTS, device=low.device)
    low.synchronize()
    strike = Striker(machine, low.lease, moment)
    strike.start()
    x = torch.ones(4, device=high.device)
    if moment == "moving out":
        with pytest.raises(LeaseLostError, match="nothing listens at"):  # it waits for room
            x.sum().item()
    else:
        assert x.sum().item() == 4
        with pytest.raises(LeaseLostError, match="nothing listens at"):  # it waits until the other one is idle
            kept.sum().item()
    strike.join()
    assert strike.swaps() == swaps
    assert len(strike.children) >= 2
    end = time.monotonic() + _SECONDS
    while any(map(alive, strike.children)):  # with them goes what they had in host memory
        assert time.monotonic() < end
        time.sleep(0.05)
    machine.restart()
    with ControlChannel(address(machine.address), None) as control:
        status = control.ask("status")
    assert (status["leases"], sum(each["swapped"] for each in status["host_memory"])) == ([], 0)
    assert not list((machine.directory / "processes").iterdir())
    with pytest.raises(LeaseLostError, match="with the daemon that had it"):
        (low if moment == "moving out" else high).synchronize()
    for gpu in (low, high):
        gpu.close()
    with warpbus.pool.connect(machine.address, memory=MEMORY, share=0.5) as gpu:
        assert (torch.ones(4, device=gpu.device) + 1).sum().item() == 8
