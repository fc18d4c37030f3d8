"""Processes that live but stand still: stopped by a signal, hanging in a step, or killed in the middle of a message."""

import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe

import psutil
import pytest
import torch
from dist_children import children, look

from warpbus.dist import (
    Group,
    JobPipe,
    Patience,
    ProcessDiedError,
    Processes,
    ProcessStalledError,
    Send,
    launch,
    worker_pipe,
)
from warpbus.dist import watchdog as module
from warpbus.dist.watchdog import Heartbeat, Pulse, Watchdog, check_limit
from warpbus.dist.worker_pipe import WorkerPipe
from warpbus.errors import DeviceError, UsageError

CPU = torch.device("cpu")
_STALL = 1.0  # seconds: on a busy machine, a process that computes gets some CPU time within them


@pytest.fixture(autouse=True)
def others() -> None:
    look()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_pulse_tells_how_long_a_step_makes_no_progress(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_HEARTBEATS", 0.05)
    sent: list[float] = []
    pulse = Pulse(lambda beat: sent.append(beat.in_step), on_cpu=on_cpu)
    pulse.start()
    until(lambda: len(sent) > 2)
    assert set(sent) == {0.0}
    with pulse.step():  # it hangs
        until(lambda: sent[-1] > _STALL)
    until(lambda: sent[-1] == 0.0)
    with pulse.step():  # it computes
        computed = len(sent)
        end = time.process_time() + 1.5 * _STALL
        while time.process_time() < end:
            pass
    until(lambda: len(sent) > computed + 2)
    pulse.stop()
    assert (max(sent[computed:]) > _STALL) == (not on_cpu)


def test_a_pulse_ends_with_its_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(beat: Heartbeat) -> None:
        raise BrokenPipeError

    before = threading.active_count()
    Pulse(broken, on_cpu=True).start()
    until(lambda: threading.active_count() == before)


class Told:
    """What a watchdog of two processes says, and that it kills."""

    def __init__(self, limit: float, report: float) -> None:
        self.said: list[str] = []
        self.killed = threading.Event()
        patience = Patience(limit, report, self.said.append)
        self.watchdog = Watchdog({0: "process 0", 1: "process 1"}, patience, self.killed.set)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_HEARTBEATS", 0.02)


def test_a_silent_process_is_reported_then_given_up(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    reported = Told(limit=1.5, report=0.5)
    with reported.watchdog as watchdog:
        while not reported.killed.is_set():
            watchdog.heard(0, Heartbeat(5.0 if reported.said else 0.0))  # it waits for the other
            time.sleep(0.01)
    assert [line.partition(" for ")[0] for line in reported.said] == ["process 1 has sent no heartbeat"]
    assert "process 1 has sent no heartbeat for 0 s: it is killed after 1.5 s" in caplog.text.replace(
        " for 1 s", " for 0 s"
    )
    assert isinstance(watchdog.verdict, ProcessStalledError)
    assert watchdog.verdict.what == "process 1 has sent no heartbeat for 2 s, and was killed"


def test_a_step_without_progress_is_reported_and_its_end_too(quick: None) -> None:
    reported = Told(limit=100.0, report=5.0)
    with reported.watchdog as watchdog:

        def beat(in_step: float) -> bool:
            for rank in range(2):
                watchdog.heard(rank, Heartbeat(in_step))
            return bool(reported.said)

        until(lambda: beat(7.0))
        assert reported.said == ["process 0 and process 1 have been in one step without progress for 7 s"]
        until(lambda: beat(0.0) and len(reported.said) == 2)
    assert reported.said[1] == ""
    assert watchdog.verdict is None


def test_a_starting_process_that_is_busy_blames_nobody(quick: None) -> None:
    reported = Told(limit=0.2, report=0.1)
    with reported.watchdog as watchdog:
        with watchdog.busy():
            assert not reported.killed.wait(1.0)
        watchdog.done(0)
        assert reported.killed.wait(60)
    assert "process 1 has" in str(watchdog.verdict)


def test_who_hurries_waits_for_seconds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_HEARTBEATS", 0.02)
    monkeypatch.setattr(module, "SHORTEST_LIMIT", 0.3)
    reported = Told(limit=float("inf"), report=float("inf"))
    with reported.watchdog as watchdog:
        assert not reported.killed.wait(0.6)
        watchdog.hurry()
        assert reported.killed.wait(60)


@pytest.mark.parametrize("limit", [0.0, 9.9, float("nan"), -1.0])
def test_a_limit_that_is_too_short(limit: float) -> None:
    with pytest.raises(UsageError, match=r"^rank_timeout is .* s: give 10 or more"):
        check_limit("rank_timeout", limit)


def stop_second(group: Group, send: Send) -> None:
    """The second process is stopped; the first waits for it."""
    group.barrier()
    if group.rank == 1:
        send(os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
    group.gather(torch.zeros(1))


def test_a_stopped_process_ends_the_job_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SHORTEST_LIMIT", 5.0)
    processes = Processes(
        stop_second, devices=[CPU, CPU], receive=lambda process: processes.hurry(), patience=Patience(float("inf"))
    )
    said = r"process 1 on cpu has sent no heartbeat for \d+ s"
    with pytest.raises(ProcessStalledError, match=rf"^{said}, and was killed: check if"), processes:
        processes.run()
    assert re.search(rf"{said}: it is killed after 5 s", caplog.text)
    assert children() == set()


def hang_in_step(group: Group, line: JobPipe) -> None:
    with line.step():
        time.sleep(600)


def hold_a_large_message(group: Group, send: Send) -> None:
    """The process is killed while it sends more than a pipe holds, to one that does not read yet."""
    send(os.getpid())
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    send("x" * (4 << 20))


def test_a_process_killed_amid_a_message_is_one_that_was_killed() -> None:
    def read_on_when_it_is_dead(process: int) -> None:
        until(lambda: psutil.Process(process).status() == psutil.STATUS_ZOMBIE)

    with (
        pytest.raises(ProcessDiedError, match=r"^process 0 on cpu was killed by signal 9 \(SIGKILL\)"),
        Processes(hold_a_large_message, devices=[CPU], receive=read_on_when_it_is_dead, apart=True) as processes,
    ):
        processes.run()
    assert children() == set()


def test_a_process_ends_where_the_starting_one_was_killed_amid_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave() -> None:
        raise SystemExit(0)

    monkeypatch.setattr(worker_pipe, "_leave", leave)
    mine, other = Pipe()
    os.write(other.fileno(), struct.pack("!i", 1 << 20) + b"the beginning")
    other.close()
    with pytest.raises(SystemExit):
        WorkerPipe(mine, on_cpu=True).received()
    mine.close()


def test_a_system_that_refuses_a_process_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(
        DeviceError, match=r"^a process cannot be started \(.*/nowhere.*\): check that the temporary directory"
    ):
        launch(hang_in_step, (), devices=[CPU, CPU], receive=print)
