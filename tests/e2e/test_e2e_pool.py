"""A pool of two machines that are processes here: programs train on it, move, lose connections, and lose machines."""

import contextlib
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from pool_machine import Machine

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu" / "pool"))
from pool_training import MODELS, Training, assert_equal_weights

import warpbus
from warpbus.errors import LeaseLostError
from warpbus.pool import Gpu
from warpbus.pool.protocol.address import address
from warpbus.pool.protocol.control_channel import ControlChannel
from warpbus.pool.protocol.preamble import MAGIC
from warpbus.pool.tenant.sandbox import missing

STEPS = 50


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as found:
        yield Path(found)


@pytest.fixture(scope="module")
def home(directory: Path) -> Iterator[Machine]:
    """The machine that has the pool's broker, and outlives all others."""
    machine = Machine("home", directory)
    yield machine
    machine.close()


@pytest.fixture(scope="module")
def away(home: Machine, directory: Path) -> Iterator[Machine]:
    machine = Machine("away", directory, home.address)
    yield machine
    machine.close()


@pytest.fixture
def doomed(home: Machine, directory: Path, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A machine for one test to kill."""
    machine = Machine(f"doomed{abs(hash(request.node.name))}", directory, home.address)
    yield machine
    machine.kill()


@pytest.fixture
def connect(home: Machine) -> Iterator[Callable[..., Gpu]]:
    leased: list[Gpu] = []

    def connected(on: str, memory: str = "500MB") -> Gpu:
        leased.append(warpbus.pool.connect(home.address, memory=memory, share=0.2, on=on))
        return leased[-1]

    yield connected
    for gpu in leased:
        with contextlib.suppress(LeaseLostError):
            gpu.close()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the leases here have by their share: sums over several threads are others in their last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def undisturbed(one_thread: None) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    """Losses and weights of the same training on this process's CPU."""
    found = {}
    for name in MODELS:
        training = Training(name, "cpu", foreach=False)
        found[name] = (training.run(STEPS), training.weights())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_training_gives_the_same_bits(name, connect, undisturbed):
    gpu = connect("home")
    training = Training(name, gpu.device)
    losses = [training.step() for _ in range(STEPS)]
    before = gpu.statistics.round_trips
    assert before <= len(list(training.model.buffers())) + 4  # counters of batches are read; no step waits
    assert [loss.item() for loss in losses] == undisturbed[name][0]
    assert_equal_weights(training.weights(), undisturbed[name][1])


@pytest.mark.parametrize("name", MODELS)
def test_a_program_moves_and_comes_back(name, connect, away, undisturbed):
    gpu = connect("home")
    training = Training(name, gpu.device)
    losses = training.run(20)
    moved = gpu.migrate("away")
    assert (gpu.name, moved["moved"]) == ("away/0", "away/0")
    losses += training.run(15)
    gpu.migrate("home/0")
    assert gpu.name == "home/0"
    losses += training.run(15)
    assert losses == undisturbed[name][0]
    assert_equal_weights(training.weights(), undisturbed[name][1])


def test_a_program_moves_while_it_computes(connect, home, away, undisturbed):
    gpu = connect("home")
    training = Training("gpt", gpu.device)
    arguments = {"lease": gpu.lease, "to": "away"}
    mover = threading.Thread(
        target=lambda: ControlChannel(address(home.address), None).ask("migrate", arguments), daemon=True
    )
    losses = training.run(5)
    mover.start()
    losses += training.run(STEPS - 5)
    mover.join(60)
    assert losses == undisturbed["gpt"][0]
    assert gpu.name == "away/0"


def test_a_broken_connection_is_made_again(connect, undisturbed):
    gpu = connect("home")
    training = Training("gpt", gpu.device)
    losses: list[torch.Tensor] = []
    for step in range(STEPS):
        if step % 10 == 5:
            gpu._connection._channel.close()
        losses.append(training.step())
    assert [loss.item() for loss in losses] == undisturbed["gpt"][0]
    assert gpu.reconnections == 5


def test_memory_is_the_quota_to_the_byte(connect):
    gpu = connect("home", memory="1MB")
    kept = torch.zeros(600_000, dtype=torch.uint8, device=gpu.device)
    with pytest.raises(torch.OutOfMemoryError, match="600000 of the lease's 1000000 bytes are in use"):
        torch.zeros(400_001, dtype=torch.uint8, device=gpu.device)
    rest = torch.zeros(400_000, dtype=torch.uint8, device=gpu.device)
    assert gpu.usage()["used"] == 1_000_000
    del rest
    assert kept[:100].sum().item() == 0  # what was let go of is free at once


def test_idle_connections_of_others_do_not_end_a_lease(home, connect):
    """Whoever knows a lease's id holds no place that its client needs to come back."""
    gpu = connect("home")
    gpu.patience = 5.0  # less than idle connections are kept
    x = torch.arange(4.0, device=gpu.device)
    gpu.synchronize()
    where = address(home.address)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            idle = stack.enter_context(socket.create_connection((where.host, where.port)))
            idle.sendall(MAGIC + bytes.fromhex(gpu.lease))
        gpu._connection._channel.close()
        assert (x + 1).cpu().tolist() == [1.0, 2.0, 3.0, 4.0]
    assert gpu.reconnections == 1


@pytest.mark.skipif(bool(missing()), reason="; ".join(missing()))
def test_a_leases_process_is_confined(home, connect):
    gpu = connect("home")
    (torch.ones(4, device=gpu.device) + 1).cpu()
    until = time.monotonic() + 90
    found = _rights(home.process.pid)
    assert ("2", "1", 0) in found  # of the process that has the lease
    while {each[1:] for each in found} != {("1", 0)}:  # those that wait for a lease have begun by now, or soon will
        assert time.monotonic() < until, found
        time.sleep(0.5)
        found = _rights(home.process.pid)


def _rights(parent: int) -> list[tuple[str, str, int]]:
    """Of each child of a process how its system calls are filtered, no_new_privs, and its capabilities."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            if lines["PPid"] == str(parent):
                found.append((lines["Seccomp"], lines["NoNewPrivs"], int(lines["CapEff"], 16)))
    return found


def test_a_machine_that_dies_takes_its_leases_along_and_says_so(doomed, connect):
    gpu = connect(doomed.log.stem)
    x = torch.ones(4, device=gpu.device)
    gpu.synchronize()
    doomed.kill()
    gpu.patience = 3600.0  # longer than this test may take
    with pytest.raises(LeaseLostError, match=rf"{doomed.log.stem}/0 is lost: nothing listens at {doomed.address}"):
        (x + 1).cpu()


def test_a_machine_that_dies_while_its_lease_is_copied(doomed, connect, away):
    gpu = connect(doomed.log.stem)
    x = torch.randn(50_000_000, device=gpu.device)  # 200 MB
    gpu.synchronize()
    gpu.patience = 3600.0

    def kill(progress: dict[str, object]) -> None:
        if progress["phase"] == "copying ahead":
            doomed.kill()

    with pytest.raises(warpbus.WarpbusError):
        gpu.migrate("away", progress=kill)
    with pytest.raises(LeaseLostError, match="nothing listens at"):
        x.sum().item()


def test_a_machine_that_dies_after_its_lease_has_moved(doomed, connect, away, undisturbed):
    gpu = connect(doomed.log.stem)
    training = Training("gpt", gpu.device)
    losses = training.run(10)
    gpu.migrate("away")
    doomed.kill()
    losses += training.run(STEPS - 10)
    assert losses == undisturbed["gpt"][0]
