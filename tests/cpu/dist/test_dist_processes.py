"""Processes of a job: what they say arrives, and however they or the one that started them end, none is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from dist_children import children, look

from warpbus.dist import Group, ProcessDiedError, Processes, Send, launch
from warpbus.errors import DeviceError, NumericError, UsageError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def others() -> None:
    look()


def talk(group: Group, send: Send, words: list[str], table: torch.Tensor) -> None:
    for number, word in enumerate(words):
        send((group.rank, number, word))
    send((group.rank, group.world, group.gather(table + group.rank).tolist()))
    send((group.rank, torch.get_num_threads(), [name for name in ("typer", "matplotlib") if name in sys.modules]))


def test_messages_arrive_in_the_order_of_each_process() -> None:
    got: list[tuple[int, object, object]] = []
    words = [str(number) * 1000 for number in range(300)]
    launch(talk, (words, torch.tensor([1, 2])), devices=[CPU, CPU], receive=got.append)
    assert children() == set()
    for rank in range(2):
        said = [message[1:] for message in got if message[0] == rank]
        assert said[:300] == list(enumerate(words))
        assert said[300] == (2, [1, 2, 2, 3])
        assert said[301] == (int(os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // 2))), [])


def test_one_device_is_this_process() -> None:
    got: list[tuple[int, object, object]] = []
    launch(lambda group, send: send((os.getpid(), group)), (), devices=[CPU], receive=got.append)
    assert got == [(os.getpid(), Group(0, 1, CPU))]


def end_in(group: Group, send: Send, how: str) -> None:
    """The second of two processes ends; the first waits for it."""
    if group.rank == 1 and how == "numeric":
        raise NumericError("layer 3, o: NaN: give other data")
    if group.rank == 1 and how == "fault":
        raise IndexError("no such row\nmore")
    if group.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 1 and how == "gone":
        os._exit(3)
    group.gather(torch.zeros(1))
    group.gather(torch.zeros(1))


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("numeric", NumericError, "layer 3, o: NaN: give other data"),
        ("fault", DeviceError, "process 1 on cpu stopped at IndexError: no such row: run it again, and report"),
        ("killed", ProcessDiedError, r"process 1 on cpu was killed by signal 9 \(SIGKILL\): .* run it again"),
        ("gone", ProcessDiedError, "process 1 on cpu ended with exit code 3: see its output, and run it again"),
    ],
)
def test_a_process_that_fails_ends_the_job(how: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}") as caught:
        launch(end_in, (how,), devices=[CPU, CPU], receive=print)
    assert "\n" not in str(caught.value)
    assert type(caught.value) is error
    assert children() == set()
    if how == "fault":
        assert "in end_in" in caught.value.__notes__[0]


def hang(group: Group, send: Send) -> None:
    send(os.getpid())
    time.sleep(600)


def test_an_exception_of_the_receiver_ends_the_job() -> None:
    def full(message: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        launch(hang, (), devices=[CPU, CPU], receive=full)
    assert children() == set()


def test_processes_that_get_no_job_end() -> None:
    with Processes(talk, devices=[CPU, CPU, CPU], receive=print):
        assert len(children()) == 3
    assert children() == set()


def outlast(group: Group, send: Send, leaves: bool) -> None:
    """The first process waits until the second one has left, if it is to leave."""
    others = group.gather(torch.tensor([os.getpid()])).tolist()
    if group.is_first:
        other = psutil.Process(others[1])
        deadline = time.monotonic() + (90 if leaves else 0.5)
        while other.is_running() and other.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.02)
        send(not other.is_running() or other.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("exit_early", [True, False])
def test_a_process_that_is_done_leaves_if_it_may(exit_early: bool) -> None:
    got: list[bool] = []
    with Processes(outlast, devices=[CPU, CPU], receive=got.append, exit_early=exit_early) as processes:
        processes.run(exit_early)
    assert got == [exit_early]
    assert children() == set()


def fail_alone(group: Group, send: Send) -> None:
    """The second process is done, then the first one fails."""
    outlast(group, send, True)
    if group.is_first:
        raise IndexError("no such row")


def test_what_fails_after_others_have_left_is_reported() -> None:
    with (
        pytest.raises(DeviceError, match="process 0 on cpu stopped at IndexError: no such row"),
        Processes(fail_alone, devices=[CPU, CPU], receive=lambda message: None, exit_early=True) as processes,
    ):
        processes.run()
    assert children() == set()


PARENT = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from test_dist_processes import hang
from warpbus.dist import launch
launch(hang, (), devices=[torch.device("cpu")] * 2, receive=lambda process: print(process, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_orphan_is_left_when_the_parent_ends(number: signal.Signals, tmp_path: Path) -> None:
    # No guard in the main program: the processes do not run it again.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # the file where they met stays after kill -9
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        started = [psutil.Process(int(parent.stdout.readline())) for _ in range(2)]
        parent.send_signal(number)
        _, said = parent.communicate(timeout=90)
    assert psutil.wait_procs(started, timeout=90)[1] == []
    assert parent.returncode == -number
    assert said.rstrip().endswith("KeyboardInterrupt") == (number == signal.SIGINT)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "no device: give at least one"),
        ([CPU, torch.device("cuda", 0)], "devices cpu, cuda:0: a job cannot use GPUs and the CPU together"),
        ([torch.device("cuda", 1)] * 2, "devices cuda:1, cuda:1: two processes cannot share one GPU"),
    ],
)
def test_devices_that_cannot_work_together(devices: list[torch.device], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        launch(hang, (), devices=devices, receive=print)
