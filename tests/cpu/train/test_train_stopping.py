"""Signals that a run notes."""

import os
import signal
import threading
from pathlib import Path

import pytest

from warpbus.train.stopping import Signals, Stopped


def test_the_first_is_noted_and_reported_and_the_second_ends_at_once() -> None:
    reported: list[int] = []
    before = signal.getsignal(signal.SIGTERM)

    def work() -> None:
        with Signals(reported.append) as found:
            assert found.caught == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert found.caught == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stopped, match="stopped by SIGINT: no step was finished") as raised:
        work()
    assert raised.value.state is None
    assert reported == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_threads_note_nothing() -> None:
    seen: list[int] = []

    def work() -> None:
        with Signals() as found:
            seen.append(found.caught)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0]


def test_what_was_done_is_said() -> None:
    stopped = Stopped(signal.SIGTERM, 1200, Path("out.training/state.pt"))
    assert str(stopped) == "stopped by SIGTERM: 1,200 steps saved in out.training/state.pt"
    assert isinstance(stopped, KeyboardInterrupt)
