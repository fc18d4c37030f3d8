"""The server that `soak.py` starts and watches: `warpbus serve`, its processes, and a model of next to no size."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from warpbus.formats import Checkpoint
from warpbus.models import SHAPES, read_config
from warpbus.models.random_checkpoint import write_random_checkpoint

POET = Path(__file__).resolve().parents[1] / "src/warpbus/demo/glm-poet"
_SECONDS_TO_START = 300
_SECONDS_TO_END = 60


def write_model(directory: Path) -> None:
    """A random Llama of 1.1 M parameters that speaks glm-poet's tokens."""
    poet = read_config(Checkpoint(POET))
    shape = SHAPES["llama-3-8b"]
    small = replace(
        shape.resized(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=128),
        vocab_size=poet.vocab_size,
        max_context=512,
        stop_ids=poet.stop_ids,
        rope=replace(shape.rope, theta=1e4, rotary_dim=16),
    )
    write_random_checkpoint(directory, small, torch.float32, device="cpu")
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(POET / name, directory)


@dataclass(frozen=True)
class Process:
    """What a process has: bytes of memory, open file descriptors, threads."""

    rss: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, process: psutil.Process) -> "Process":
        """Now."""
        with process.oneshot():
            return cls(process.memory_info().rss, process.num_fds(), process.num_threads())

    def __str__(self) -> str:
        return f"{self.rss / 2**20:.1f} MiB, {self.descriptors} descriptors, {self.threads} threads"


class Server:
    """`warpbus serve` with some arguments.

    Attributes:
        url: where it listens.
        log: what it has said, a file.
    """

    def __init__(self, arguments: list[str], key: str, log: Path) -> None:
        self.log = log
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "WARPBUS_API_KEY": key}
        command = [sys.executable, "-m", "warpbus", "serve", *arguments, "--port", "0"]
        with log.open("wb") as said:
            self._process = subprocess.Popen(command, stderr=said, env=environment)
        try:
            self.url = self._wait()
        except BaseException:
            self._process.kill()
            raise

    def processes(self) -> dict[str, Process]:
        """The server's, and the engine's while it lives."""
        named = [("server", psutil.Process(self._process.pid)), *(("engine", engine) for engine in self._engines())]
        return {name: Process.of(process) for name, process in named}

    def kill_engine(self) -> None:
        """kill -9."""
        for engine in self._engines():
            engine.kill()

    def end(self) -> int:
        """Tell it to end; its exit status."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(_SECONDS_TO_END)
        finally:
            self._process.kill()

    def complaints(self) -> list[str]:
        """Lines of its log that no request should cause."""
        lines = self.log.read_text(errors="replace").splitlines()
        strange = re.compile(r"Traceback|^\S+ \S+ (ERROR|CRITICAL) |never retrieved|never awaited|was destroyed")
        return [line for line in lines if strange.search(line)]

    def _engines(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children()

    def _wait(self) -> str:
        end = time.monotonic() + _SECONDS_TO_START
        while time.monotonic() < end and self._process.poll() is None:
            if found := re.search(r"ready at (http://[^\s:]+:\d+)", self.log.read_text(errors="replace")):
                return found[1]
            time.sleep(0.05)
        raise SystemExit(f"warpbus serve did not start:\n{self.log.read_text(errors='replace')}")
