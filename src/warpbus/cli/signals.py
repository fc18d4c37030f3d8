"""SIGTERM ends a long run as Ctrl-C does: with a message, and without losing what is finished."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM."""


@contextmanager
def interruptible() -> Iterator[None]:
    """A block that ends with KeyboardInterrupt after Ctrl-C, also where a library replaces that by an error of its own.

    torch does: a KeyboardInterrupt that is raised while it asks an object for its shape becomes a ValueError.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        del number, frame
        arrived = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    except Exception as error:
        if arrived:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def terminated() -> Iterator[None]:
    """A block in which the first SIGTERM raises `Terminated`; later ones are ignored while the run ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
