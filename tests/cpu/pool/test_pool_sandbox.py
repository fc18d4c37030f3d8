"""What code in a tenant's process cannot do, tried by real system calls in a process that the daemon started."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest
import torch
import typing_extensions
from pool_daemons import lease, say_hello, serving

from warpbus.errors import DeviceError
from warpbus.pool.protocol.frames import Kind
from warpbus.pool.tenant import landlock, process, sandbox, seccomp

needs_landlock = pytest.mark.skipif(landlock.version() < 6, reason="this kernel's Landlock is older than version 6")
needs_seccomp = pytest.mark.skipif(not seccomp.available(), reason="this kernel has no seccomp filters")


@pytest.fixture
def intrusion(tmp_path, monkeypatch):
    """What an intruder into a lease's process achieves, by what it tries."""
    home = tmp_path / "user"
    (home / ".ssh").mkdir(parents=True)
    secrets = [tmp_path / "tokens", tmp_path / "tls.key", home / ".ssh" / "id_ed25519", tmp_path / "pool.json"]
    for path in secrets[:3]:
        path.write_text("secret")
    directories = [home, tmp_path, tmp_path / "processes"]

    def run(**options):
        facts = {"secrets": [*map(str, secrets)], "directories": [*map(str, directories)], "port": 0, "all": False}
        facts |= {"unix": str(tmp_path / "pool.sock")}
        facts |= {"all": options.get("sandbox", True)}
        monkeypatch.setenv("INTRUDER", json.dumps(facts))
        with (
            serving(tmp_path, program="pool_intruder", spare=1, unix=tmp_path / "pool.sock", **options) as served,
            served.control() as control,
        ):
            facts["port"] = served.address.port
            monkeypatch.setenv("INTRUDER", json.dumps(facts))
            lease(control)  # takes the spare one, which was started before the port was known
            _, kind, said = say_hello(served.address, lease(control))
            assert kind is Kind.WELCOME
            return said

    return run


@needs_landlock
@needs_seccomp
def test_an_intruder_reaches_nothing(intrusion):
    said = intrusion()
    assert len(said) >= 16
    assert {name: outcome for name, outcome in said.items() if outcome != "PermissionError"} == {}


def test_without_the_sandbox_it_reaches_all_of_it(intrusion):
    """The attempts themselves work: what stops them above is the sandbox."""
    said = intrusion(sandbox=False)
    # The daemon knows its own processes, and closes the connection, at the latest while something is sent.
    assert said.pop("control the pool").startswith(("ConnectionLostError", "BrokenPipeError"))
    assert {name: outcome for name, outcome in said.items() if outcome != "done"} == {}


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(landlock, "version", lambda: 0)
    monkeypatch.setattr(seccomp, "available", lambda: False)
    files, programs = sandbox.missing()
    assert "files of the daemon's user can be read: this kernel has no Landlock" in files
    assert "programs can be started" in programs
    monkeypatch.setattr(landlock, "version", lambda: 4)
    monkeypatch.setattr(seccomp, "available", lambda: True)
    assert [line.partition(":")[0] for line in sandbox.missing()] == ["signals reach other processes"]


def test_the_daemon_says_what_is_open_at_its_start(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(landlock, "version", lambda: 0)
    with serving(tmp_path, spare=0):
        pass
    assert "there are no --tokens: every user and program of this machine is an admin" in caplog.text
    assert "tenants' processes: files of the daemon's user can be read" in caplog.text


def test_a_confinement_says_what_it_exposes(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    found = sandbox.Confinement.of([], [own], gpu=False)
    assert found.exposes(own / "state")
    assert not found.exposes(tmp_path / "tokens")
    assert not found.exposes(tmp_path / "own" / ".." / "tokens")
    assert sandbox.Confinement.decode(found.encode()) == found
    for secret in ("/etc/shadow", "/etc/ssl/private", os.path.expanduser("~/.ssh"), "/tmp"):
        assert not found.exposes(type(tmp_path)(secret))


@pytest.mark.parametrize("module", [msgpack, typing_extensions])
def test_packages_on_the_python_path_can_be_imported(module, tmp_path):
    """A package, and a module that is one file: torch imports both."""
    origin, site = Path(module.__file__), tmp_path / "site"
    site.mkdir()
    if origin.name == "__init__.py":
        shutil.copytree(origin.parent, site / module.__name__)
        copied = site / module.__name__ / origin.name
    else:
        copied = Path(shutil.copy(origin, site))
    program = "import sys; from pathlib import Path; from warpbus.pool.tenant.sandbox import Confinement; "
    program += "print(Confinement.of([], [], gpu=False).exposes(Path(sys.argv[1])))"
    search = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    said = subprocess.run(
        [sys.executable, "-c", program, str(copied)],
        env=os.environ | {"PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "True\n"


NAMING = """
import sys, threading
from warpbus.pool.tenant.sandbox import Confinement, enter
enter(Confinement.of([], [], gpu=sys.argv[1] == "gpu"))
done = threading.Event()
thread = threading.Thread(target=done.wait)
thread.start()
name = f"/proc/self/task/{thread.native_id}/comm"
try:
    with open(name, "wb") as file:
        file.write(b"driver")
    print(open(name).read().strip())
except PermissionError:
    print("denied")
done.set()
"""


@needs_landlock
@pytest.mark.parametrize(("device", "expected"), [("gpu", "driver"), ("cpu", "denied")])
def test_threads_can_be_named_as_the_driver_of_a_gpu_does(device, expected):
    """As CUDA's driver names them; without it, cuInit returns error 304."""
    said = subprocess.run([sys.executable, "-c", NAMING, device], capture_output=True, text=True, check=True)
    assert said.stdout == f"{expected}\n"


@pytest.mark.parametrize("sandboxed", [True, False])
def test_a_gpu_that_cannot_be_used_is_named(sandboxed, monkeypatch):
    def fail(_device):
        raise RuntimeError("Error 304: OS call failed\nmore")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    with pytest.raises(DeviceError, match=r"cannot use its GPU \(Error 304: OS call failed\)") as caught:
        process._check_gpu(torch.device("cuda:0"), "GPU-1", sandboxed=sandboxed)
    assert ("--no-sandbox" in str(caught.value)) is sandboxed
