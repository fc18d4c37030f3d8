"""What a small network needs, on the CPU: against autograd in float64, and what it refuses."""

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional as F

from warpbus.errors import TensorError
from warpbus.kernels.ops.network import bias_add, column_sums, sgd_momentum, sigmoid_gradient, softmax_cross_entropy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(out, expected):
    eps = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=2 * eps, atol=2 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias(dtype):
    x, bias = random(33, 10, dtype=dtype), random(10, dtype=dtype, seed=1)
    assert torch.equal(bias_add(x, bias), (x.double() + bias.double()).to(dtype))
    expected = x.double().sum(0)
    error = (column_sums(x).double() - expected).norm() / expected.norm()
    assert error < torch.finfo(dtype).eps / 2 + 2 * 33**0.5 * 2**-24


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_gradient(dtype):
    x = random(33, 10).double().requires_grad_()
    gradient = random(33, 10, dtype=dtype, seed=1)
    y = torch.sigmoid(x)
    y.backward(gradient.double())
    close(sigmoid_gradient(y.detach().to(dtype), gradient), x.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 10, 1000])
def test_softmax_cross_entropy(dtype, columns):
    logits = random(33, columns, dtype=dtype) * 20
    labels = torch.randint(columns, (33,), generator=torch.Generator().manual_seed(1))
    losses, gradient = softmax_cross_entropy(logits, labels)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    expected.mean().backward()
    assert losses.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    close(gradient, exact.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_are_those_of_torch(dtype):
    parameter, gradients = random(7, 5, dtype=dtype), [random(7, 5, dtype=dtype, seed=seed) for seed in (1, 2, 3)]
    exact = parameter.double().requires_grad_()
    optimizer = torch.optim.SGD([exact], lr=0.1, momentum=0.9)
    velocity = torch.zeros_like(parameter)
    for gradient in gradients:
        sgd_momentum(parameter, velocity, gradient, rate=0.1, momentum=0.9)
        exact.grad = gradient.double()
        optimizer.step()
    torch.testing.assert_close(parameter.double(), exact.detach(), rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_empty():
    assert bias_add(torch.empty(0, 3), torch.ones(3)).shape == (0, 3)
    assert torch.equal(column_sums(torch.empty(0, 3)), torch.zeros(3))
    losses, gradient = softmax_cross_entropy(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    assert losses.shape == (0,)
    assert gradient.shape == (0, 3)


def test_what_it_refuses():
    x = random(3, 4)
    with pytest.raises(TensorError, match=r"bias_add: bias has shape \[3\], expected \[4\]: one element for each"):
        bias_add(x, x[:, 0])
    with pytest.raises(TensorError, match=r"column_sums: x has shape \[4\], expected a matrix"):
        column_sums(x[0])
    with pytest.raises(TensorError, match=r"sigmoid_gradient: gradient has shape \[4, 3\], expected \[3, 4\]"):
        sigmoid_gradient(x, x.t())
    with pytest.raises(TensorError, match=r"labels\[1\] is 4, logits have 4 columns: labels count from 0 to 3"):
        softmax_cross_entropy(x, torch.tensor([0, 4, -1]))
    with pytest.raises(TensorError, match=r"labels are torch\.int32 on cpu, expected torch\.int64 on cpu"):
        softmax_cross_entropy(x, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(TensorError, match=r"labels has shape \[2\], expected \[3\]: one label for each row"):
        softmax_cross_entropy(x, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TensorError, match=r"expected at least one column"):
        softmax_cross_entropy(x[:, :0], torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TensorError, match=r"sgd_momentum: velocity has shape \[3\], expected \[3, 4\]"):
        sgd_momentum(x, x[:, 0], x, rate=0.1, momentum=0.9)
    with pytest.raises(TensorError, match=r"sgd_momentum: parameter is not contiguous and is updated in place"):
        sgd_momentum(x.t(), x.t().contiguous(), x.t(), rate=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bias_add", (random(3, 4), random(4))),
        ("column_sums", (random(4, 3).t(),)),
        ("sigmoid_gradient", (random(3, 4), random(3, 4))),
        ("softmax_cross_entropy", (random(3, 4), torch.tensor([0, 3, 1]))),
        ("sgd_momentum", (random(3, 4), random(3, 4), random(3, 4), 0.1, 0.9)),
    ],
)
def test_registered_as_torch_wants(name, arguments):
    checked = opcheck(getattr(torch.ops.warpbus, name).default, arguments)
    assert set(checked.values()) == {"SUCCESS"}
