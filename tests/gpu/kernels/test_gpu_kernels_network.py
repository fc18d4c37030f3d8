"""What a small network needs, on a GPU: against autograd in float64; and the network itself, trained from scratch."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from warpbus.kernels.ops.network import bias_add, column_sums, sgd_momentum, sigmoid_gradient, softmax_cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (7, 33), (300, 10), (10, 1003), (100_003, 3)]
EXAMPLE = Path(__file__).parents[3] / "examples" / "mlp_from_scratch.py"


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def poison(*shape, dtype):
    """NaN in the memory that the next output of this shape is given."""
    torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


def bound(dtype, additions=1):
    """Rounding the result once, and the errors of additions in float32, which mostly cancel."""
    return torch.finfo(dtype).eps / 2 + 2 * additions**0.5 * 2**-24


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bias(shape, dtype):
    x, bias = random(*shape, dtype=dtype), random(shape[1], dtype=dtype, seed=1)
    poison(*shape, dtype=dtype)
    assert torch.equal(bias_add(x, bias), (x.double() + bias.double()).to(dtype))
    poison(shape[1], dtype=dtype)
    sums = column_sums(x)
    assert error(sums, x.double().sum(0)) < bound(dtype, shape[0])
    assert torch.equal(sums, column_sums(x))
    transposed = random(*shape[::-1], dtype=dtype, seed=2).t()
    assert error(column_sums(transposed), transposed.double().sum(0)) < bound(dtype, shape[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sigmoid_gradient(shape, dtype):
    y, gradient = torch.rand(shape, device="cuda").to(dtype), random(*shape[::-1], dtype=dtype, seed=1).t()
    poison(*shape, dtype=dtype)
    exact = gradient.double() * y.double() * (1 - y.double())
    out = sigmoid_gradient(y, gradient)
    assert ((out.double() - exact).norm() <= 4 * bound(dtype) * exact.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_cross_entropy(shape, dtype):
    logits = random(*shape, dtype=dtype) * 20
    labels = torch.randint(shape[1], (shape[0],), generator=torch.Generator().manual_seed(1)).cuda()
    poison(*shape, dtype=dtype)
    losses, gradient = softmax_cross_entropy(logits, labels)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    expected.mean().backward()
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=2e-5)
    eps = torch.finfo(dtype).eps
    # Small gradients of float16 are below its normal numbers, whence the absolute part.
    tiny = torch.finfo(dtype).smallest_normal * eps + 2e-6 / shape[0]
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=eps + 2e-5, atol=tiny)


def test_labels_that_are_no_column_give_nan():
    losses, gradient = softmax_cross_entropy(random(4, 3), torch.tensor([0, 3, -1, 2], device="cuda"))
    assert losses.isnan().tolist() == [False, True, True, False]
    assert gradient.isnan().any(1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 1_000_003])
def test_one_step(size, dtype):
    parameter, velocity = random(size, dtype=dtype), random(size, dtype=dtype, seed=1)
    gradient = random(2 * size, dtype=dtype, seed=2)[::2]
    exact_velocity = 0.9 * velocity.double() + gradient.double()
    exact_parameter = parameter.double() - 0.1 * exact_velocity
    sgd_momentum(parameter, velocity, gradient, rate=0.1, momentum=0.9)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(velocity.double(), exact_velocity, rtol=eps, atol=2e-6)
    torch.testing.assert_close(parameter.double(), exact_parameter, rtol=eps, atol=2e-6)


def test_empty():
    empty = torch.empty(0, 3, device="cuda")
    assert bias_add(empty, torch.ones(3, device="cuda")).shape == (0, 3)
    poison(3, dtype=torch.float32)
    assert torch.equal(column_sums(empty), torch.zeros(3, device="cuda"))
    assert sigmoid_gradient(empty, empty).shape == (0, 3)
    losses, gradient = softmax_cross_entropy(empty, torch.empty(0, dtype=torch.int64, device="cuda"))
    assert losses.shape == (0,)
    assert gradient.shape == (0, 3)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("mlp_from_scratch_gpu", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_step_in_a_graph_and_on_a_stream(example):
    """The whole step is captured; replayed on another stream, it trains as the CPU does."""
    cpu, gpu = (example.Network(torch.Generator().manual_seed(1), torch.device(name)) for name in ("cpu", "cuda"))
    x, labels = torch.rand(64, 64, generator=torch.Generator().manual_seed(2)), torch.arange(64) % 10
    x_gpu, labels_gpu = x.cuda(), labels.cuda()
    gpu.train(x_gpu, labels_gpu)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        gpu.train(x_gpu, labels_gpu)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            graph.replay()
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(5):
        cpu.train(x, labels)
    for ours, expected in zip(gpu.parameters, cpu.parameters, strict=True):
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-3, atol=1e-4)


def test_it_learns_the_digits_on_both():
    done = subprocess.run([sys.executable, str(EXAMPLE), "--json"], capture_output=True, text=True, check=True)
    cpu, gpu = json.loads(done.stdout)
    assert cpu["device"] == "CPU"
    assert gpu["device"] == torch.cuda.get_device_name(0)
    for run in (cpu, gpu):
        assert run["accuracies"][-1] >= 0.95


def test_a_seed_repeats_every_bit(example):
    device = torch.device("cuda", 0)
    assert example.train(device, 2, 7).losses == example.train(device, 2, 7).losses
