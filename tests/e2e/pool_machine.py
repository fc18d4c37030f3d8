"""A machine of a pool: a process here, with a CPU in place of a GPU."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


class Machine:
    """`warpbus pool serve` with a directory of its own; `program` is what Python runs as `warpbus`."""

    def __init__(
        self,
        name: str,
        directory: Path,
        *peers: str,
        options: Sequence[str] = (),
        program: Sequence[str] = ("-m", "warpbus"),
    ) -> None:
        self.log = directory / f"{name}.log"
        self.directory = directory / name
        self._command = [sys.executable, *program, "pool", "serve", "--name", name, "--grace", "5"]
        for peer in peers:
            self._command += ["--peer", peer]
        self._command += ["--directory", str(self.directory), "--cpu-memory", "4GB", *options]
        self._start(0)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        """Start the daemon again, with the directory and the port of the one that was killed."""
        self._start(int(self.address.rpartition(":")[2]))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(90)

    def children(self) -> set[int]:
        """The processes of the machine's leases, and those that wait for one."""
        found = set()
        for listed in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # of a thread that has just ended
                found |= set(map(int, listed.read_text().split()))
        return found

    def _start(self, port: int) -> None:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*self._command, "--port", str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.address = self._ready()

    def _ready(self) -> str:
        until = time.monotonic() + 90
        while time.monotonic() < until:
            for line in self.log.read_text().splitlines():
                if line.startswith("ready: "):
                    return line.split()[-1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended, and that its parent has not waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
