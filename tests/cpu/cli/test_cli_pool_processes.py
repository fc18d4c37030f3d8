"""`warpbus pool run`, `processes`, `move`, `suspend` and `resume` on a machine that is not here."""

import json

import pytest
from typer.testing import CliRunner

from warpbus.cli import app, pool_processes
from warpbus.cuda import inventory
from warpbus.cuda.inventory import InstalledGpu
from warpbus.errors import UsageError
from warpbus.pool.processes import listing, machine, processes, remote, suspensions, virtual
from warpbus.pool.processes.processes import Carried
from warpbus.pool.quota import Quota

GB = 10**9
GPUS = [InstalledGpu(index, f"GPU-{index}", "H200", index, 80 * GB, 80 * GB) for index in range(2)]


class FakeInventory:
    def gpu(self, index):
        return GPUS[index]


@pytest.fixture
def started(monkeypatch):
    """What `pool run` starts."""
    calls = []

    def run(command, gpu, quota, tenant):
        calls.append((command, gpu.index, quota, tenant))
        return 7

    monkeypatch.setattr(inventory, "Inventory", FakeInventory)
    monkeypatch.setattr(virtual, "run", run)
    return calls


def invoke(*arguments):
    return CliRunner().invoke(app, ["pool", *arguments])


@pytest.mark.parametrize("separator", [["--"], []])
def test_run_with_limits(started, separator):
    flags = ["--memory", "8GB", "--share", "0.25", "--gpu", "1", "--tenant", "alice"]
    done = invoke("run", *flags, *separator, "python", "train.py", "--share", "2", "-x")
    assert done.exit_code == 7
    assert started == [(["python", "train.py", "--share", "2", "-x"], 1, Quota(8 * GB, 0.25), "alice")]


@pytest.mark.parametrize(
    ("flags", "quota"),
    [([], None), (["--share", "0.5"], Quota(80 * GB, 0.5)), (["--memory", "50%"], Quota(40 * GB, 1.0))],
)
def test_run_with_some_limits(started, flags, quota):
    invoke("run", *flags, "--", "true")
    assert [call[2] for call in started] == [quota]
    assert started[0][3]


def test_run_with_wrong_limits(started):
    for flags in (["--share", "2"], ["--memory", "81GB"], ["--memory", "much"]):
        assert isinstance(invoke("run", *flags, "--", "true").exception, UsageError)
    assert started == []


@pytest.fixture
def asked(monkeypatch):
    """What is asked of the functions that move processes."""
    calls = []

    def done(name, target):
        def function(pid, *values, **settings):
            calls.append((name, pid, [value for value in values if value != "host"], settings))
            seconds = {"lock": 0.001, "checkpoint": 0.73}
            return Carried(pid, GPUS[0], target, seconds, 3 * GB)

        return function

    monkeypatch.setattr(pool_processes, "_host", lambda: "host")
    monkeypatch.setattr(processes, "migrate_process", done("move", GPUS[1]))
    monkeypatch.setattr(processes, "suspend_process", done("suspend", None))
    monkeypatch.setattr(processes, "resume_process", done("resume", GPUS[0]))
    return calls


def test_move(asked):
    done = invoke("move", "12", "--to", "1", "--from", "0", "--force", "--patience", "2.5")
    assert done.stdout == "process 12 runs on GPU 1 (lock 0.001 s, checkpoint 0.730 s)\n"
    assert asked == [("move", 12, [1], {"source": 0, "force": True, "patience": 2.5})]


def test_move_needs_a_target(asked):
    assert invoke("move", "12").exit_code == 2
    assert asked == []


def test_suspend_and_resume(asked):
    done = invoke("suspend", "12")
    assert done.stdout.startswith("process 12 is off GPU 0, which has 3.00 GB more free (")
    assert invoke("resume", "12").stdout.startswith("process 12 runs on GPU 0 (")
    invoke("resume", "12", "--to", "1")
    assert asked[1:] == [
        ("resume", 12, [], {"to": None, "source": None}),
        ("resume", 12, [], {"to": 1, "source": None}),
    ]


def test_as_json(asked):
    found = json.loads(invoke("suspend", "12", "--json").stdout)
    assert found == {"pid": 12, "from": 0, "to": None, "seconds": {"lock": 0.001, "checkpoint": 0.73}, "freed": 3 * GB}
    assert json.loads(invoke("move", "12", "--to", "1", "--json").stdout)["to"] == 1


@pytest.fixture
def listed(monkeypatch):
    """What is on the GPUs."""
    found = []
    monkeypatch.setattr(machine, "ThisMachine", lambda: None)
    monkeypatch.setattr(suspensions, "Suspensions", lambda: None)
    monkeypatch.setattr(listing, "gpu_processes", lambda *_: found)
    return found


def test_processes(listed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    limits = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4096M"}
    listed += [
        listing.GpuProcess(12, "python train.py [bold]", (0,), 3 * GB, "alice", limits),
        listing.GpuProcess(13, "app", (), None, None, {}),
    ]
    text = invoke("processes").stdout
    assert "python train.py [bold]" in text
    assert "alice" in text
    assert "3.00 GB" in text
    assert "share % 25 memory 0=4096M" in text
    assert text.count("runs") == 2
    assert [each["pid"] for each in json.loads(invoke("processes", "--json").stdout)] == [12, 13]


def test_no_processes(listed):
    assert invoke("processes").stdout == "no process uses a GPU here\n"
    assert json.loads(invoke("processes", "--json").stdout) == []


def test_run_on_a_gpu_of_a_pool(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(remote, "run", lambda *arguments, **options: calls.append((arguments, options)) or 3)
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o600)
    flags = ["--remote", "mill", "--memory", "8GB", "--share", "0.5", "--on", "mill/1", "--tenant", "alice"]
    done = invoke("run", *flags, "--token-file", str(tmp_path / "token"), "--", "python", "train.py", "-x")
    assert done.exit_code == 3
    ((command, to, startup), options) = calls[0]
    assert (command, str(to)) == (["python", "train.py", "-x"], "warpbuss://mill:7700")
    assert (startup / "sitecustomize.py").is_file()
    expected = {"memory": "8GB", "share": 0.5, "on": "mill/1", "token": "secret", "tenant": "alice", "chosen": None}
    assert options == expected


@pytest.mark.parametrize("flags", [[], ["--memory", "8GB"], ["--share", "0.5"]])
def test_what_was_not_given_is_said(monkeypatch, flags):
    monkeypatch.setattr(remote, "run", lambda *_, chosen, **options: chosen(Quota(4 * 10**9, 0.5)) or 0)
    done = invoke("run", "--remote", "mill", *flags, "--", "python", "train.py")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "cuda is a lease of 4.00 GB and 50% of the GPU\n"


@pytest.mark.parametrize(
    ("flags", "words"), [(["--remote", "mill", "--gpu", "1"], "--on host/1"), (["--on", "mill/1"], "--remote HOST")]
)
def test_options_of_here_and_there(flags, words):
    done = invoke("run", *flags, "--", "true")
    assert isinstance(done.exception, UsageError)
    assert words in str(done.exception)
