"""Programs on a pool in processes of its own: what a CPU computes, bit for bit, also with forks and lost leases."""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_machine import Machine
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu" / "pool"))
from pool_tied_gpt import TiedGpt, train
from pool_training import assert_equal_weights

import warpbus
from warpbus.errors import LeaseLostError, PoolError
from warpbus.pool import Gpu


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with tempfile.TemporaryDirectory() as directory:
        home = Machine("home", Path(directory))
        away = Machine("away", Path(directory), home.address)
        yield home, away
        away.close()
        home.close()


@pytest.fixture
def gpu(machines: tuple[Machine, Machine]) -> Iterator[Gpu]:
    with warpbus.pool.connect(machines[0].address, memory="500MB", share=0.2, on="home") as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the leases here have by their share: sums over several threads are others in their last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("recompute", [None, {"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_a_tied_gpt_with_dropout_trains_as_on_the_cpu(gpu: Gpu, recompute: dict[str, Any] | None) -> None:
    expected_losses, expected = train(lambda: TiedGpt(0.2, recompute), "cpu", optimizer_first=True)
    losses, weights = train(lambda: TiedGpt(0.2, recompute), gpu.device, optimizer_first=True)
    assert losses == expected_losses
    assert_equal_weights(weights, expected)


class Listener(nn.Module):
    """Convolutions with batch norm, a recurrent network, and bags of labels: layers with kernels of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.ear = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU())
        self.memory = nn.LSTM(8, 6, bidirectional=True)
        self.scores = nn.Linear(12, 5)
        self.speakers = nn.EmbeddingBag(7, 12, mode="mean")

    def forward(self, sound: Tensor, speakers: Tensor) -> Tensor:
        heard, _ = self.memory(self.ear(sound).permute(2, 0, 1))
        return self.scores(heard + self.speakers(speakers)).log_softmax(-1)


def listened(device: torch.device | str) -> tuple[list[float], Tensor]:
    """Losses of a training with CTC, and scores in evaluation."""
    torch.manual_seed(0)
    model = Listener().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    data = [(torch.randn(3, 4, 10), torch.randint(0, 7, (3, 2)), torch.randint(1, 5, (3, 4))) for _ in range(4)]
    losses = []
    for sound, speakers, labels in DataLoader(data, batch_size=None, pin_memory=True):
        optimizer.zero_grad()
        scores = model(sound.to(device), speakers.to(device))
        loss = F.ctc_loss(scores, labels.to(device), torch.tensor([10, 9, 10]), torch.tensor([4, 3, 2]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, model.eval()(data[0][0].to(device), data[0][1].to(device)).cpu()


def test_a_listener_learns_as_on_the_cpu(gpu: Gpu) -> None:
    expected_losses, expected = listened("cpu")
    losses, scores = listened(gpu.device)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)


def test_the_random_state_moves_with_the_lease(gpu: Gpu) -> None:
    torch.manual_seed(2)
    torch.rand(5, device=gpu.device)
    state = torch.warpbus.get_rng_state()  # type: ignore[attr-defined]
    expected = torch.rand(5, device=gpu.device).cpu()
    torch.warpbus.set_rng_state(state)  # type: ignore[attr-defined]
    gpu.migrate("away")
    assert torch.equal(torch.rand(5, device=gpu.device).cpu(), expected)


def in_child(work: Callable[[], str]) -> str:
    """What `work` says in a child that is forked with the connection open."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = work()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return said


def test_a_forked_child_does_not_disturb_its_parent(gpu: Gpu) -> None:
    x = torch.ones(4, device=gpu.device)
    total = (x + 0).sum()

    def disturb() -> str:
        errors = []
        for use in (lambda: (x + 1).sum().item(), gpu.synchronize, gpu.usage, lambda: gpu.migrate("away")):
            try:
                use()
            except PoolError as error:
                errors.append(str(error))
        gpu.close()  # as at the end of a `with`: the lease is the parent's
        return "\n".join(errors)

    assert in_child(disturb).count("is a forked child of one with a remote GPU") == 4
    assert total.item() == 4.0
    assert (x * 3).tolist() == [3.0] * 4
    assert gpu.reconnections == 0


def test_a_forked_child_connects_for_itself(gpu: Gpu, machines: tuple[Machine, Machine]) -> None:
    x = torch.ones(4, device=gpu.device)

    def compute() -> str:
        with warpbus.pool.connect(machines[0].address, memory="100MB", share=0.2) as own:
            return f"{own.lease != gpu.lease} {(torch.arange(4.0).to(own.device) * 2).tolist()}"

    assert in_child(compute) == "True [0.0, 2.0, 4.0, 6.0]"
    assert x.tolist() == [1.0] * 4
    assert gpu.reconnections == 0


def children(pid: int) -> list[int]:
    """The processes that a process has started, the oldest first."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(map(int, found))


def test_a_lost_lease_ends_a_move_at_once_and_says_why(machines: tuple[Machine, Machine]) -> None:
    """The pool gives the client a minute to claim the lease at the destination; this client knows that it is gone."""
    home = machines[0]
    before = {pid: resident(pid) for pid in children(home.process.pid)}
    with warpbus.pool.connect(home.address, memory="500MB", share=0.2, on="home") as gpu:
        x = torch.randn(50_000_000, device=gpu.device)  # 200 MB to copy
        gpu.synchronize()
        # The lease took the spare process, which waited for it: it has grown by what it holds.
        leased = max(before, key=lambda pid: resident(pid) - before[pid])

        def kill(progress: dict[str, object]) -> None:
            if progress["phase"] == "copying ahead":
                os.kill(leased, signal.SIGKILL)

        # From the daemon, or from the broker, which may hear of it first.
        reported = r"was killed by signal 9 \(SIGKILL\)|its process on home died while it moved"
        with pytest.raises(LeaseLostError, match=reported):
            gpu.migrate("away", progress=kill)
        with pytest.raises(LeaseLostError):
            x.sum().item()


def resident(pid: int) -> int:
    """Bytes of memory of its own that a process has; 0 when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])
