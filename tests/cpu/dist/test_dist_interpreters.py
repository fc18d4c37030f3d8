"""Interpreters that start before the starting process has loaded torch: used where they fit, gone where not."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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


def tell_ready(group: Group, send: Send) -> None:
    send(os.environ.get("WARPBUS_TEST_READY"))


def test_a_module_gets_ready_before_there_is_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os\ndef get_ready(device):\n    os.environ['WARPBUS_TEST_READY'] = str(device)\n"
    (tmp_path / "module_of_a_job.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    interpreters.start_early(["cpu", "cpu"], "module_of_a_job")
    got: list[str] = []
    with Processes(tell_ready, devices=[CPU, CPU], receive=got.append) as processes:
        processes.run()
    assert got == ["cpu", "cpu"]


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


def test_one_device_apart_has_a_worker_that_ends_unused() -> None:
    interpreters.start_early(["cpu"], "json.tool", apart=True)
    early = children()
    got: list[tuple[int, int, bool]] = []
    with Processes(tell, devices=[CPU], receive=got.append, apart=True) as processes:
        processes.run()
    assert [{process} for _, process, _ in got] == [early]
    interpreters.start_early(["cpu"], "json.tool", apart=True)
    assert len(children()) == 1
    interpreters.end_early()
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


def tell_environment(group: Group, send: Send) -> None:
    send({name: os.environ.get(name) for name in ("WARPBUS_TEST_GIVEN", "WARPBUS_TEST_OWN")})


@pytest.mark.parametrize("early", [False, True])
def test_variables_are_given_where_there_are_none(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPBUS_TEST_OWN", "kept")
    given = {"WARPBUS_TEST_GIVEN": "new", "WARPBUS_TEST_OWN": "lost"}
    if early:
        interpreters.start_early(["cpu", "cpu"], "json.tool", given)
    got: list[dict[str, str]] = []
    with Processes(tell_environment, devices=[CPU, CPU], receive=got.append, environment=given) as processes:
        processes.run()
    assert got == [{"WARPBUS_TEST_GIVEN": "new", "WARPBUS_TEST_OWN": "kept"}] * 2
    assert "WARPBUS_TEST_GIVEN" not in os.environ


@pytest.mark.parametrize(
    ("files", "visible", "count"),
    [
        (["nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-caps"], None, 4),
        (["nvidia3"], None, 1),
        (["nvidia0", "nvidia1"], "1", 1),
        (["nvidia0", "nvidia1"], "1,0", 2),
        (["nvidia0", "nvidia1"], "", 7),
        (["nvidia0", "nvidia1"], "1,1", 7),
        (["nvidia0", "nvidia1"], "1,2", 7),
        (["nvidia0", "nvidia1"], "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 7),
        ([], None, 7),
    ],
)
def test_gpus_are_counted_without_the_driver_where_that_is_sure(
    files: list[str], visible: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        def cuInit(self, flags: int) -> int:  # noqa: N802
            return flags

        def cuDeviceGetCount(self, found: Any) -> None:  # noqa: N802
            found._obj.value = 7

    for file in files:
        (tmp_path / file).touch()
    monkeypatch.setattr(interpreters, "_DEVICE_FILES", tmp_path)
    monkeypatch.setattr(interpreters.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert interpreters.count_gpus() == count
