"""A classifier of handwritten digits, trained on our own kernels: no torch.nn, no autograd, no torch.matmul.

    python examples/mlp_from_scratch.py                     # on the CPU and, where there is one, on the GPU
    python examples/mlp_from_scratch.py --device cuda:0 --epochs 40

The network has one hidden layer. Forward, for a batch x of images:

    hidden = sigmoid(x W1ᵀ + b1)                one kernel: ladder.linear_sigmoid
    logits = hidden W2ᵀ + b2                    ladder.matmul and network.bias_add
    loss   = mean of -log softmax(logits)[label]

Backward is the chain rule, read from the last line to the first, one kernel per arrow. The products with transposed
matrices cost no copy: the tiled rung of the ladder follows strides.

Scikit-learn brings the images: 1,797 of 8 x 8 pixels. A third of them is held out and never trained on.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from warpbus.cuda.devices import resolve_device
from warpbus.errors import UsageError, WarpbusError
from warpbus.kernels.ops.ladder import linear_sigmoid, matmul
from warpbus.kernels.ops.network import bias_add, column_sums, sgd_momentum, sigmoid_gradient, softmax_cross_entropy

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("error: scikit-learn, which brings the images, is not installed: pip install scikit-learn")

PIXELS, HIDDEN, DIGITS = 64, 128, 10
BATCH, RATE, MOMENTUM = 64, 0.5, 0.9


@dataclass
class Digits:
    """Images float32 `[count, 64]`, and labels int64 `[count]`: two thirds to train on, one held out."""

    train_images: Tensor
    train_labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor


def read_digits(generator: torch.Generator, device: torch.device) -> Digits:
    """The digits that scikit-learn brings, shuffled; pixels from 0 to 4, where sums reach the bends of the sigmoid."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=generator)
    x = torch.from_numpy(images).float()[order].to(device) / 4
    y = torch.from_numpy(labels).long()[order].to(device)
    third = len(images) // 3
    return Digits(x[third:], y[third:], x[:third], y[:third])


class Network:
    """Two layers. `weight1 [128, 64]`, `bias1 [128]`, `weight2 [10, 128]`, `bias2 [10]`."""

    def __init__(self, generator: torch.Generator, device: torch.device):
        def normal(rows: int, columns: int) -> Tensor:
            # Scaled so that sums of `columns` products keep the spread of what goes in.
            return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(device)

        self.weight1, self.bias1 = normal(HIDDEN, PIXELS), torch.zeros(HIDDEN, device=device)
        self.weight2, self.bias2 = normal(DIGITS, HIDDEN), torch.zeros(DIGITS, device=device)
        self.parameters = (self.weight1, self.bias1, self.weight2, self.bias2)
        self.velocities = [torch.zeros_like(parameter) for parameter in self.parameters]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden layer `[batch, 128]`, which backward needs, and the logits `[batch, 10]`."""
        hidden = linear_sigmoid(x, self.weight1, self.bias1)
        return hidden, bias_add(matmul(hidden, self.weight2.t(), "tiled"), self.bias2)

    def train(self, x: Tensor, labels: Tensor) -> Tensor:
        """One step on a batch; the loss of each image, `[batch]`."""
        hidden, logits = self.forward(x)
        losses, d_logits = softmax_cross_entropy(logits, labels)

        # logits = hidden W2ᵀ + b2
        d_weight2 = matmul(d_logits.t(), hidden, "tiled")
        d_bias2 = column_sums(d_logits)
        d_hidden = matmul(d_logits, self.weight2, "tiled")
        # hidden = sigmoid(sums), sums = x W1ᵀ + b1
        d_sums = sigmoid_gradient(hidden, d_hidden)
        d_weight1 = matmul(d_sums.t(), x, "tiled")
        d_bias1 = column_sums(d_sums)

        gradients = (d_weight1, d_bias1, d_weight2, d_bias2)
        for parameter, velocity, gradient in zip(self.parameters, self.velocities, gradients, strict=True):
            sgd_momentum(parameter, velocity, gradient, rate=RATE, momentum=MOMENTUM)
        return losses

    def accuracy(self, x: Tensor, labels: Tensor) -> float:
        """The share of images whose largest logit is that of their label."""
        _, logits = self.forward(x)
        return (logits.argmax(1) == labels).float().mean().item()


@dataclass
class Run:
    """What training on one device gave; `accuracies` on the held-out third and mean `losses`, one an epoch."""

    device: str
    accuracies: list[float]
    losses: list[float]
    seconds: float


def train(device: torch.device, epochs: int, seed: int) -> Run:
    """Train on a device. The same seed gives the same images, the same start and the same batches everywhere."""
    generator = torch.Generator().manual_seed(seed)
    digits = read_digits(generator, device)
    # A first step with a network that is thrown away: on a GPU it compiles the kernels, which is not training.
    Network(torch.Generator().manual_seed(seed), device).train(digits.train_images[:BATCH], digits.train_labels[:BATCH])
    network = Network(generator, device)

    accuracies, losses = [], []
    began = time.perf_counter()
    for _ in range(epochs):
        order = torch.randperm(len(digits.train_labels), generator=generator).to(device)
        batches = [network.train(digits.train_images[i], digits.train_labels[i]) for i in order.split(BATCH)]
        losses.append(torch.cat(batches).mean().item())
        accuracies.append(network.accuracy(digits.held_out_images, digits.held_out_labels))
    return Run(device_name(device), accuracies, losses, time.perf_counter() - began)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def report(runs: list[Run]) -> Table:
    """A row an epoch, a pair of columns a device, and the time at the foot."""
    table = Table(title="Held-out digits recognised", show_footer=True)
    table.add_column("epoch", "seconds", justify="right")
    for run in runs:
        table.add_column(f"{run.device}: loss", justify="right")
        table.add_column("accuracy", f"{run.seconds:.2f}", justify="right")
    for epoch in range(len(runs[0].accuracies)):
        cells = [(f"{run.losses[epoch]:.4f}", f"{run.accuracies[epoch]:.1%}") for run in runs]
        table.add_row(str(epoch + 1), *(cell for pair in cells for cell in pair))
    return table


def devices(flag: str) -> list[torch.device]:
    """What `--device` means: "auto" is the CPU, and the first GPU where there is one."""
    first = resolve_device(flag)
    return [torch.device("cpu"), first] if flag == "auto" and first.type == "cuda" else [first]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a classifier of handwritten digits on Warpbus' own kernels.")
    parser.add_argument("--device", default="auto", help="auto (CPU, and GPU where there is one), cpu, cuda or cuda:N")
    parser.add_argument("--epochs", type=int, default=20, help="how often each image is seen (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the start and the batches (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Train on each device, print what came out; the exit code."""
    flags = parse(arguments)
    try:
        if flags.epochs < 1:
            raise UsageError(f"--epochs is {flags.epochs}: give at least 1")
        runs = [train(device, flags.epochs, flags.seed) for device in devices(flags.device)]
    except WarpbusError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if flags.json:
        print(json.dumps([vars(run) for run in runs], indent=2))
    else:
        Console().print(report(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
