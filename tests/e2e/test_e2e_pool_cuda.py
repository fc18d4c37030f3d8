"""`warpbus pool run --remote`: ordinary PyTorch programs, each in a process that has no GPU, on a leased device."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_machine import Machine

from warpbus.pool.client.as_cuda.startup import DIRECTORY
from warpbus.pool.protocol.address import address
from warpbus.pool.protocol.control_channel import ControlChannel

SCRIPTS = Path(__file__).parent / "cuda_scripts"
NAMES = ["mnist_cnn", "vae", "dcgan", "word_language_model", "time_sequence", "super_resolution", "reinforce"]
NAMES += ["graph_networks", "forward_forward", "fast_neural_style"]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def pool() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        machine = Machine("home", Path(directory))
        yield machine.address
        machine.close()


def start(pool: str, *command: str, memory: str = "300MB") -> "subprocess.Popen[str]":
    """A program on a lease of 300 MB that computes with one thread, as this process's CPU does."""
    launcher = [sys.executable, "-m", "warpbus", "pool", "run", "--remote", pool, "--memory", memory, "--share", "0.2"]
    return subprocess.Popen(
        [*launcher, "--", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ONE_THREAD
    )


def run(pool: str, *command: str, memory: str = "300MB") -> "subprocess.CompletedProcess[str]":
    with start(pool, *command, memory=memory) as process:
        out, errors = process.communicate(timeout=500)
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def sections(text: str) -> dict[str, str]:
    """What each script printed, by its name."""
    return {name: rest for name, _, rest in (part.partition("\n") for part in text.split("# ")[1:])}


def test_scripts_print_what_they_print_on_the_cpu(pool: str) -> None:
    command = [sys.executable, *(str(SCRIPTS / f"{name}.py") for name in ("run_all", *NAMES))]
    with start(pool, *command) as process:
        plain = subprocess.run(command, capture_output=True, text=True, env=ONE_THREAD, timeout=500)
        out, errors = process.communicate(timeout=500)
    assert plain.returncode == 0, plain.stderr
    assert process.returncode == 0, errors
    expected, found = sections(plain.stdout), sections(out)
    assert list(found) == NAMES
    for name in NAMES:
        assert found[name] == expected[name], name
        assert found[name].count("\n") >= 3, name


def test_what_a_program_finds_of_cuda(pool: str) -> None:
    done = run(pool, sys.executable, str(SCRIPTS / "device_facts.py"))
    assert (done.returncode, done.stdout) == (0, "all as expected\n"), done.stderr


def test_arguments_and_exit_codes_pass_through(pool: str) -> None:
    done = run(pool, "sh", "-c", f"cd {SCRIPTS} && {sys.executable} -m obedient 5 --share 2 -x")
    assert (done.returncode, done.stdout) == (5, "['5', '--share', '2', '-x'] cuda:0\n"), done.stderr


def leases(pool: str) -> int:
    with ControlChannel(address(pool), None) as control:
        return len(control.ask("status")["leases"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 9), (signal.SIGKILL, 128 + signal.SIGKILL)])
def test_signals_pass_through_and_the_lease_is_released(pool: str, number: signal.Signals, code: int) -> None:
    with start(pool, sys.executable, str(SCRIPTS / "obedient.py"), "0", "wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "['0', 'wait'] cuda:0\n"
        assert leases(pool) == 1
        if number is signal.SIGKILL:  # ends the program, as a kernel that is out of memory would
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]), number)
        else:
            process.send_signal(number)
        assert process.wait(90) == code
    assert leases(pool) == 0  # not only after the grace time


def test_a_quota_that_no_gpu_has_is_refused_before_the_program_starts(pool: str) -> None:
    done = run(pool, sys.executable, "-c", "print('started')", memory="400GB")
    assert (done.returncode, done.stdout) == (2, "")
    assert "400" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("remote", "command", "words"),
    [
        ("localhost:1", ["true"], "localhost:1"),
        ("ftp://mill", ["true"], "no address of a pool"),
        (None, [sys.executable, "-I", "train.py"], "PYTHONPATH"),
        (None, ["no-such-program"], "no-such-program cannot be started"),
    ],
)
def test_mistakes_are_reported_in_a_line(pool: str, remote: str | None, command: list[str], words: str) -> None:
    done = run(remote or pool, *command)
    assert done.returncode not in (0, 128)
    assert words in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


def python(directory: Path, code: str) -> "subprocess.CompletedProcess[str]":
    paths = os.pathsep.join(map(str, (DIRECTORY, directory)))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=90)


def test_a_python_without_warpbus_is_reported_and_does_not_go_on_with_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "warpbus.py").write_text("")
    done = python(tmp_path, "try:\n    import torch\nexcept ImportError:\n    print('on the CPU, then')")
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot import warpbus" in done.stderr.splitlines()[-1]


def test_the_sitecustomize_of_a_python_is_executed_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = True\n")
    done = python(tmp_path, "import sys; print(customized, 'warpbus' in sys.modules, 'torch' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "True False False\n"), done.stderr


def test_a_lease_is_asked_for_at_the_first_use_only(pool: str) -> None:
    before = time.monotonic()
    done = run(pool, sys.executable, "-c", "import torch; print(torch.ones(2).sum().item(), torch.device('cuda'))")
    assert (done.returncode, done.stdout) == (0, "2.0 cuda\n"), done.stderr
    with ControlChannel(address(pool), None) as control:
        status = control.ask("status")
    assert [each for each in status["events"] if each["time"] > status["now"] - (time.monotonic() - before)] == []
