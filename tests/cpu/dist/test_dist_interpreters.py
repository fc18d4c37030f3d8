"""Interpreters that start before the starting process has loaded torch: used where they fit, gone where not."""

import subprocess
import sys
import time

import psutil
import pytest
import torch
from dist_children import children, look

from warpbus.dist import Group, Processes, Send, interpreters

CPU = torch.device("cpu")


def tell(group: Group, send: Send) -> None:
    send((group.rank, psutil.Process().pid, "json.tool" in sys.modules))


@pytest.fixture(autouse=True)
def others() -> None:
    look()


def test_those_that_fit_are_used_and_have_loaded_what_was_asked() -> None:
    interpreters.start_early(["cpu", "cpu"], "json.tool")
    early = children()
    got: list[tuple[int, int, bool]] = []
    with Processes(tell, devices=[CPU, CPU], receive=got.append) as processes:
        processes.run()
    assert {process for _, process, _ in got} == early
    assert sorted((rank, loaded) for rank, _, loaded in got) == [(0, True), (1, True)]
    assert children() == set()


def test_those_that_do_not_fit_end() -> None:
    interpreters.start_early(["cpu", "cpu", "cpu"], "json.tool")
    early = children()
    assert len(early) == 3
    with Processes(tell, devices=[CPU, CPU], receive=print):
        assert len(children()) == 2
        assert not children() & early
    assert children() == set()


def test_one_device_needs_none() -> None:
    interpreters.start_early(["cpu"], "json.tool")
    assert children() == set()


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise SystemExit(3)", "os.kill(os.getpid(), 9)"])
def test_none_outlives_the_starting_process_or_makes_noise(end: str) -> None:
    program = (
        "import os, sys; from warpbus.dist import interpreters; interpreters.start_early(['cpu'] * 2, 'json.tool')\n"
        "assert 'torch' not in sys.modules\n"
        "print(*[each.process.pid for each in interpreters._early[0].members], flush=True)\n"
    )
    found = subprocess.run([sys.executable, "-c", program + end], capture_output=True, text=True, check=False)
    assert found.returncode == (-9 if "kill" in end else 3)
    assert found.stderr == ""
    deadline = time.monotonic() + 90
    while any(psutil.pid_exists(int(pid)) for pid in found.stdout.split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
