"""A pool of two machines that are processes here: programs train on it, move, lose connections, and lose machines."""

import contextlib
import sys
import tempfile
import threading
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
from warpbus.pool.protocol.steering import Steering

STEPS = 50


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as found:
        yield Path(found)


@pytest.fixture(scope="module")
def home(directory: Path) -> Iterator[Machine]:
    """The machine that has the pool's books, and outlives all others."""
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
    question = {"do": "migrate", "lease": gpu.lease, "to": "away"}
    mover = threading.Thread(target=lambda: Steering(address(home.address), None).ask(question), daemon=True)
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


def test_a_machine_that_dies_takes_its_leases_along_and_says_so(doomed, connect):
    gpu = connect(doomed.log.stem)
    x = torch.ones(4, device=gpu.device)
    gpu.synchronize()
    doomed.kill()
    gpu.patience = 2.0
    with pytest.raises(LeaseLostError, match="the remote GPU is lost"):
        (x + 1).cpu()


def test_a_machine_that_dies_while_its_lease_is_copied(doomed, connect, away):
    gpu = connect(doomed.log.stem)
    x = torch.randn(50_000_000, device=gpu.device)  # 200 MB
    gpu.synchronize()
    gpu.patience = 3.0

    def kill(progress: dict[str, object]) -> None:
        if progress["phase"] == "copying ahead":
            doomed.kill()

    with pytest.raises(warpbus.WarpbusError):
        gpu.migrate("away", progress=kill)
    with pytest.raises(LeaseLostError, match="the remote GPU is lost"):
        x.sum().item()


def test_a_machine_that_dies_after_its_lease_has_moved(doomed, connect, away, undisturbed):
    gpu = connect(doomed.log.stem)
    training = Training("gpt", gpu.device)
    losses = training.run(10)
    gpu.migrate("away")
    doomed.kill()
    losses += training.run(STEPS - 10)
    assert losses == undisturbed["gpt"][0]
