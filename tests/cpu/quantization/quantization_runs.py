"""Runs of the command `warpbus quantize` that can be killed, interrupted and limited, each in a process of its own.

Loading torch takes seconds, so one process does it once, without threads, and forks for each run. What it forks is
the command itself: `warpbus.cli.main`.
"""

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

FOUR_LAYERS = 4
"""Layers of the model of `undisturbed` (`conftest`)."""

_SECONDS = 60.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        code: its exit code, or the negative number of the signal that ended it.
        said: its stderr.
        seconds: it took.
    """

    code: int
    said: str
    seconds: float


class Undisturbed(NamedTuple):
    """A run that nothing disturbed: the fingerprint of its model, and the seconds it took."""

    fingerprint: str
    seconds: float


class Runs:
    """Use it in a `with` statement; `start` runs the command."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"},
        )
        return self

    def __exit__(self, *raised: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def start(
        self,
        *arguments: object,
        number: signal.Signals = signal.SIGKILL,
        after: float | None = None,
        when: Path | None = None,
        largest_file: int | None = None,
    ) -> Outcome:
        """Run the command to its end.

        Args:
            arguments: of `warpbus`.
            number: a signal that it is sent if `after` or `when` is given:
            after: so many seconds
            when: after this path exists, or after the start.
            largest_file: no file may grow beyond it, in bytes; as on a full disk, a write fails then.
        """
        request = {
            "arguments": list(map(str, arguments)),
            "number": int(number),
            "after": after,
            "when": None if when is None else str(when),
            "largest_file": largest_file,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))


def command(model: Path, output: Path, texts: Path, *more: object) -> tuple[object, ...]:
    """The arguments of a quantization with calibration."""
    given = ("--calibration", texts, "--scheme", "w3a16-g32-asym", "--device", "cpu")
    return ("quantize", model, output, *given, *more)


def fingerprint(directory: Path) -> str:
    """One hash of all files of a model but the report, which has timings."""
    found = hashlib.sha256()
    for file in sorted(directory.iterdir()):
        if file.name != "warpbus-report.json":
            found.update(f"{file.name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def _run(request: dict[str, Any]) -> Outcome:
    with tempfile.TemporaryFile() as said:
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            _be_the_command(request, said.fileno())
        code, waits = None, request["after"] is not None or request["when"] is not None
        since = started if request["when"] is None else None
        while code is None:
            done, status = os.waitpid(child, os.WNOHANG)
            now = time.monotonic()
            if since is None and os.path.exists(request["when"]):
                since = now
            if done:
                code = os.waitstatus_to_exitcode(status)
            elif now - started > _SECONDS:
                os.kill(child, signal.SIGKILL)
            elif waits and since is not None and now - since >= (request["after"] or 0.0):
                os.kill(child, request["number"])
                waits = False
            else:
                time.sleep(0.001)
        said.seek(0)
        return Outcome(code, said.read().decode(errors="replace"), time.monotonic() - started)


def _be_the_command(request: dict[str, Any], said: int) -> None:
    code = 1
    # As in a terminal: a shell that runs the tests in the background has them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.dup2(said, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if request["largest_file"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["largest_file"],) * 2)
        sys.argv = ["warpbus", *request["arguments"]]
        main()
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    from warpbus.cli import main
    from warpbus.quantization import quantize  # noqa: F401  all that a run loads, once

    for line in sys.stdin:
        outcome = _run(json.loads(line))
        print(json.dumps(outcome.__dict__), flush=True)
