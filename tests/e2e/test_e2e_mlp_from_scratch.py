"""The network from scratch, as a reader of the tutorial runs it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "mlp_from_scratch.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("mlp_from_scratch", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_it_learns_the_digits():
    command = [sys.executable, str(EXAMPLE), "--device", "cpu", "--json", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    (run,) = json.loads(done.stdout)
    assert run["device"] == "CPU"
    assert len(run["accuracies"]) == 20
    assert run["accuracies"][-1] >= 0.95
    assert run["losses"][-1] < 0.05 < run["losses"][0]
    assert run["seconds"] > 0


def test_a_table_by_epoch_with_the_time(example, capsys):
    assert example.main(["--device", "cpu", "--epochs", "2"]) == 0
    printed = capsys.readouterr().out
    assert "CPU: loss" in printed
    assert "accuracy" in printed
    assert "seconds" in printed
    assert len([line for line in printed.splitlines() if "%" in line]) == 2


def test_a_seed_repeats_everything(example):
    cpu = example.torch.device("cpu")
    first, again, other = (example.train(cpu, 2, seed) for seed in (7, 7, 8))
    assert first.losses == again.losses
    assert first.losses != other.losses


def test_gradients_are_those_of_autograd(example):
    """One step of the network, without momentum yet, against autograd in float64."""
    torch = example.torch
    generator = torch.Generator().manual_seed(3)
    network = example.Network(generator, torch.device("cpu"))
    x, labels = torch.rand(16, 64, generator=generator), torch.arange(16) % 10
    exact = [parameter.double().requires_grad_() for parameter in network.parameters]
    weight1, bias1, weight2, bias2 = exact
    logits = torch.sigmoid(x.double() @ weight1.T + bias1) @ weight2.T + bias2
    torch.nn.functional.cross_entropy(logits, labels).backward()
    network.train(x, labels)
    for velocity, parameter in zip(network.velocities, exact, strict=True):
        torch.testing.assert_close(velocity.double(), parameter.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--epochs", "0"], 2, "error: --epochs is 0: give at least 1"),
        (["--device", "tpu"], 2, "error: device is 'tpu': give auto, cpu, cuda or cuda:N"),
        (["--device", "cuda:77"], 1, "error: device cuda:77: "),
    ],
)
def test_wrong_flags(example, capsys, flags, code, message):
    assert example.main(flags) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert captured.out == ""
