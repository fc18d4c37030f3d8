"""Weights that a machine of the pool has on its disk: loaded into leases, trained, moved, and refused."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pool_machine import Machine
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import warpbus
from warpbus.errors import CheckpointError, UsageError


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 8192), nn.ReLU(), nn.Linear(8192, 64))


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: tensor.clone() for name, tensor in model().state_dict().items()}


@pytest.fixture(scope="module")
def machines(weights: dict[str, torch.Tensor]) -> Iterator[tuple[Machine, Machine]]:
    """Two machines; the first has the checkpoints `two-layers` and `broken`."""
    with tempfile.TemporaryDirectory() as directory:
        offered = Path(directory) / "offered"
        for name in ("two-layers", "broken"):
            (offered / name).mkdir(parents=True)
        for layer in "02":
            part = {name: tensor for name, tensor in weights.items() if name.startswith(layer)}
            save_file(part, offered / "two-layers" / f"layer-{layer}.safetensors")
        (offered / "broken" / "model.safetensors").write_bytes(b"not weights at all")
        home = Machine("home", Path(directory), options=["--checkpoints", str(offered)])
        away = Machine("away", Path(directory), home.address)
        yield home, away
        away.close()
        home.close()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(network: nn.Module, device: torch.device | str, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x = torch.randn(8, 64, generator=generator).to(device)
        optimizer.zero_grad()
        loss = F.mse_loss(network(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_model_trains_on_weights_that_were_never_sent(
    machines: tuple[Machine, Machine], weights: dict[str, torch.Tensor]
) -> None:
    home, _ = machines
    reference = model()
    reference.load_state_dict(weights)
    expected = trained(reference, "cpu", 3) + trained(reference, "cpu", 3)
    with warpbus.pool.connect(home.address, memory="300MB", share=0.2, on="home") as gpu:
        names = [each["name"] for each in gpu.checkpoints()]
        assert names == ["broken", "two-layers"]
        before = gpu.statistics.bytes_sent
        tensors = gpu.load_checkpoint("two-layers")
        assert gpu.statistics.bytes_sent - before < 1000
        assert gpu.usage()["used"] == sum(tensor.nbytes for tensor in weights.values())
        with torch.device("meta"):
            network = model()
        network.load_state_dict(tensors, assign=True)
        del tensors
        losses = trained(network, gpu.device, 3)
        gpu.migrate("away")  # where the checkpoint is not
        assert gpu.name == "away/0"
        with pytest.raises(UsageError, match="away offers no checkpoint"):
            gpu.load_checkpoint("two-layers")
        losses += trained(network, gpu.device, 3)
        assert losses == expected
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor.cpu(), reference.state_dict()[name]), name


def test_one_lease_s_writes_are_not_another_s(
    machines: tuple[Machine, Machine], weights: dict[str, torch.Tensor]
) -> None:
    home, _ = machines
    with warpbus.pool.connect(home.address, memory="100MB", share=0.2, on="home") as gpu:
        first = gpu.load_checkpoint("two-layers", "0.*")
        assert sorted(first) == ["0.bias", "0.weight"]
        first["0.weight"].zero_()
        again = gpu.load_checkpoint("two-layers", "0.weight")["0.weight"]
        assert torch.equal(again.cpu(), weights["0.weight"])
        assert not first["0.weight"].any().item()


def test_what_is_refused(machines: tuple[Machine, Machine]) -> None:
    home, _ = machines
    with warpbus.pool.connect(home.address, memory="3MB", share=0.2, on="home") as gpu:
        with pytest.raises(UsageError, match="it offers broken, two-layers"):
            gpu.load_checkpoint("../offered/two-layers")
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            gpu.load_checkpoint("broken")
        with pytest.raises(UsageError, match="no tensor 'head'"):
            gpu.load_checkpoint("two-layers", "head")
        with pytest.raises(torch.OutOfMemoryError, match="4 tensors of two-layers"):
            gpu.load_checkpoint("two-layers")
        assert gpu.usage()["used"] == 0
        gpu._connection._channel.close()  # a lost connection changes nothing
        assert list(gpu.load_checkpoint("two-layers", "2.bias")) == ["2.bias"]


def test_descriptors_do_not_add_up(machines: tuple[Machine, Machine]) -> None:
    home, _ = machines
    before = len(os.listdir(f"/proc/{home.process.pid}/fd"))
    with warpbus.pool.connect(home.address, memory="100MB", share=0.2, on="home") as gpu:
        held = len(os.listdir(f"/proc/{home.process.pid}/fd"))
        for _ in range(4):
            gpu.load_checkpoint("two-layers", "0.bias")
            assert len(os.listdir(f"/proc/{home.process.pid}/fd")) <= held
    assert before <= held
