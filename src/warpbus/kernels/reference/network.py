"""The operators for training a small network besides products and the sigmoid, in plain PyTorch and float32."""

from torch import Tensor
from torch.nn import functional as F

from warpbus.errors import TensorError


def bias_add(x: Tensor, bias: Tensor) -> Tensor:
    """`x + bias` for x `[rows, columns]`, bias `[columns]`."""
    return (x.float() + bias.float()).to(x.dtype).contiguous()


def column_sums(x: Tensor) -> Tensor:
    """The sums over the rows of x `[rows, columns]`."""
    return x.float().sum(0).to(x.dtype)


def sigmoid_gradient(y: Tensor, gradient: Tensor) -> Tensor:
    """`gradient * y * (1 - y)`."""
    value = y.float()
    return (gradient.float() * value * (1 - value)).to(y.dtype).contiguous()


def softmax_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row, float32 `[rows]`, and the gradient of their mean, `[rows, columns]`.

    Raises:
        TensorError: a label that is no column.
    """
    rows, columns = logits.shape
    outside = (labels < 0) | (labels >= columns)
    if outside.any():
        row = int(outside.nonzero()[0])
        raise TensorError(
            f"softmax_cross_entropy: labels[{row}] is {int(labels[row])}, logits have {columns} columns: "
            f"labels count from 0 to {columns - 1}"
        )
    log_probability = F.log_softmax(logits.float(), dim=1)
    losses = -log_probability.gather(1, labels[:, None])[:, 0]
    gradient = (log_probability.exp() - F.one_hot(labels, columns)) / max(rows, 1)
    return losses, gradient.to(logits.dtype).contiguous()


def sgd_momentum(parameter: Tensor, velocity: Tensor, gradient: Tensor, rate: float, momentum: float) -> None:
    """`velocity = momentum * velocity + gradient; parameter -= rate * velocity`, both in place."""
    speed = momentum * velocity.float() + gradient.float()
    velocity.copy_(speed)
    parameter.copy_(parameter.float() - rate * speed)
