"""A server in a process of its own, for as long as a benchmark asks it."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from warpbus.errors import DeviceError

_SECONDS_TO_STOP = 30.0


@contextmanager
def serving(command: Sequence[str], ready: str, failed: str, *, prefix: Sequence[str] = ()) -> Iterator[str]:
    """Run `warpbus COMMAND`; gives what it says of itself once it is ready, and ends it at last.

    It ends with this process also on Ctrl-C and on SIGTERM, which is a `SystemExit` here meanwhile.

    Args:
        command: the verb and its arguments.
        ready: a regular expression for the line on stderr that says so; its first group is given.
        failed: begins the message where that line never comes.
        prefix: of the command, such as one that brings it into a network namespace.

    Raises:
        DeviceError: it does not start; the message is its own.
    """
    whole = [*prefix, sys.executable, "-m", "warpbus", *command]
    # In a session of its own: Ctrl-C in the terminal is for this process, which ends the other one in order.
    with (
        _terminable(),
        subprocess.Popen(
            whole, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process,
    ):
        assert process.stderr is not None
        try:
            said = ""
            for line in process.stderr:
                found = re.match(ready, line)
                if found:
                    break
                said = line.strip() or said
            else:
                raise DeviceError(f"{failed}: {said or 'it said nothing'}")
            # Else what it says later would fill the pipe, and stop it.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end this process by an exception, once: what is to be undone is, and is not cut short."""
    if threading.current_thread() is not threading.main_thread():  # where Python has no signals
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
