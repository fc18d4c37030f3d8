"""A machine of a pool: a process here, with a CPU in place of a GPU."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


class Machine:
    """`warpbus pool serve` with a directory of its own."""

    def __init__(self, name: str, directory: Path, *peers: str, options: Sequence[str] = ()) -> None:
        self.log = directory / f"{name}.log"
        command = [sys.executable, "-m", "warpbus", "pool", "serve", "--port", "0", "--name", name, "--grace", "5"]
        for peer in peers:
            command += ["--peer", peer]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--directory", str(directory / name), "--cpu-memory", "4GB", *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.address = self._ready()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(90)

    def _ready(self) -> str:
        until = time.monotonic() + 90
        while time.monotonic() < until:
            for line in self.log.read_text().splitlines():
                if line.startswith("ready: "):
                    return line.split()[-1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())
