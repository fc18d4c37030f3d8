"""The operators for training a small network besides products and the sigmoid: bias, gradients, loss, update.

With `ladder.matmul`, `ladder.linear_sigmoid` and these, `examples/mlp_from_scratch.py` trains without autograd.
"""

import torch
from torch import Tensor

from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import blocks, blocks_in_stride, check_alike, check_rank, check_shape, per_dtype
from warpbus.kernels.reference import network as reference

_SOURCE = "ladder/network.cu"
_BLOCK = 256
_WARPS_OF_A_BLOCK = _BLOCK // 32

_BIAS_ADD = per_dtype(
    _SOURCE, "bias_add", "const ELEMENT* x, const ELEMENT* bias, ELEMENT* out, long long size, long long columns"
)
_COLUMN_SUMS = per_dtype(_SOURCE, "column_sums", "const ELEMENT* x, ELEMENT* out, long long rows, long long columns")
_SIGMOID_GRADIENT = per_dtype(
    _SOURCE, "sigmoid_gradient", "const ELEMENT* y, const ELEMENT* gradient, ELEMENT* out, long long size"
)
_SOFTMAX_CROSS_ENTROPY = per_dtype(
    _SOURCE,
    "softmax_cross_entropy",
    "const ELEMENT* logits, const long long* labels, float* losses, ELEMENT* gradient, long long rows, "
    "long long columns",
)
_SGD_MOMENTUM = per_dtype(
    _SOURCE,
    "sgd_momentum",
    "ELEMENT* parameter, ELEMENT* velocity, const ELEMENT* gradient, long long size, float rate, float momentum",
)


def bias_add(x: Tensor, bias: Tensor) -> Tensor:
    """`x + bias`, the same bias for every row.

    Args:
        x, bias: `[rows, columns]` and `[columns]`, float32, float16 or bfloat16.

    Returns:
        `[rows, columns]`, contiguous, in the dtype of `x`.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    check_rank("bias_add", 2, x=x)
    check_alike("bias_add", x=x, bias=bias)
    check_shape(
        "bias_add", {"bias": (x.shape[1],)}, f"one element for each of the {x.shape[1]} columns of x", bias=bias
    )
    return _bias_add(x, bias)


def column_sums(x: Tensor) -> Tensor:
    """The sum of each column, which is the gradient of a bias.

    Args:
        x: `[rows, columns]`, float32, float16 or bfloat16.

    Returns:
        `[columns]` in the dtype of `x`; summed in float32 and in a fixed order.

    Raises:
        TensorError: another shape or dtype.
    """
    check_rank("column_sums", 2, x=x)
    check_alike("column_sums", x=x)
    return _column_sums(x)


def sigmoid_gradient(y: Tensor, gradient: Tensor) -> Tensor:
    """`gradient * y * (1 - y)`: the gradient before a sigmoid from the one behind it.

    Args:
        y: the output of the sigmoid, of any shape; float32, float16 or bfloat16.
        gradient: in the shape and dtype of `y`.

    Returns:
        The shape and dtype of `y`, contiguous.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    check_alike("sigmoid_gradient", y=y, gradient=gradient)
    check_shape("sigmoid_gradient", {"gradient": tuple(y.shape)}, "that of y", gradient=gradient)
    return _sigmoid_gradient(y, gradient)


def softmax_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss `-log softmax(logits)[label]` of each row, and the gradient of the mean loss.

    Args:
        logits: `[rows, columns]`, float32, float16 or bfloat16.
        labels: int64 `[rows]`, the right column of each row. One that is no column gives NaN on a GPU, where a kernel
            cannot raise.

    Returns:
        The losses, float32 `[rows]`, and the gradient by the logits, `[rows, columns]` in their dtype.

    Raises:
        TensorError: other shapes, dtypes or devices, no column, or, on the CPU, a label that is no column.
    """
    name = "softmax_cross_entropy"
    check_rank(name, 2, logits=logits)
    check_alike(name, logits=logits)
    rows, columns = logits.shape
    if columns == 0:
        raise TensorError(f"{name}: logits have shape {list(logits.shape)}, expected at least one column")
    check_shape(name, {"labels": (rows,)}, "one label for each row of logits", labels=labels)
    if labels.dtype != torch.int64 or labels.device != logits.device:
        raise TensorError(
            f"{name}: labels are {labels.dtype} on {labels.device}, expected torch.int64 on {logits.device}: use .to()"
        )
    return _softmax_cross_entropy(logits, labels)


def sgd_momentum(parameter: Tensor, velocity: Tensor, gradient: Tensor, *, rate: float, momentum: float) -> None:
    """`velocity = momentum * velocity + gradient`, then `parameter -= rate * velocity`, both in place.

    Args:
        parameter, velocity: of one shape, contiguous; float32, float16 or bfloat16.
        gradient: in their shape and dtype.
        rate, momentum: the step size, and how much of the last step goes on (0 to 1).

    Raises:
        TensorError: other shapes, dtypes or devices, or a parameter or velocity that is not contiguous.
    """
    name = "sgd_momentum"
    check_alike(name, parameter=parameter, velocity=velocity, gradient=gradient)
    shape = tuple(parameter.shape)
    check_shape(name, {"velocity": shape, "gradient": shape}, "that of parameter", velocity=velocity, gradient=gradient)
    for tensor, of in ((parameter, "parameter"), (velocity, "velocity")):
        if not tensor.is_contiguous():
            raise TensorError(f"{name}: {of} is not contiguous and is updated in place: give a contiguous tensor")
    _sgd_momentum(parameter, velocity, gradient, rate, momentum)


def _launch_bias_add(x: Tensor, bias: Tensor) -> Tensor:
    x, bias = x.contiguous(), bias.contiguous()
    out = torch.empty_like(x)
    size = x.numel()
    if size:
        grid = blocks_in_stride(size, _BLOCK, x.device)
        _BIAS_ADD[x.dtype](grid, _BLOCK, x=x, bias=bias, out=out, size=size, columns=x.shape[1])
    return out


def _launch_column_sums(x: Tensor) -> Tensor:
    x = x.contiguous()
    rows, columns = x.shape
    out = x.new_empty(columns)
    if columns:
        _COLUMN_SUMS[x.dtype](blocks((columns, 32)), (32, 8), x=x, out=out, rows=rows, columns=columns)
    return out


def _launch_sigmoid_gradient(y: Tensor, gradient: Tensor) -> Tensor:
    y, gradient = y.contiguous(), gradient.contiguous()
    out = torch.empty_like(y)
    size = y.numel()
    if size:
        grid = blocks_in_stride(size, _BLOCK, y.device)
        _SIGMOID_GRADIENT[y.dtype](grid, _BLOCK, y=y, gradient=gradient, out=out, size=size)
    return out


def _launch_softmax_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits, labels = logits.contiguous(), labels.contiguous()
    rows, columns = logits.shape
    losses, gradient = _fake_softmax_cross_entropy(logits, labels)
    if rows:
        grid = blocks((rows, _WARPS_OF_A_BLOCK))
        _SOFTMAX_CROSS_ENTROPY[logits.dtype](
            grid, _BLOCK, logits=logits, labels=labels, losses=losses, gradient=gradient, rows=rows, columns=columns
        )
    return losses, gradient


def _launch_sgd_momentum(parameter: Tensor, velocity: Tensor, gradient: Tensor, rate: float, momentum: float) -> None:
    size = parameter.numel()
    if size:
        grid = blocks_in_stride(size, _BLOCK, parameter.device)
        _SGD_MOMENTUM[parameter.dtype](
            grid,
            _BLOCK,
            parameter=parameter,
            velocity=velocity,
            gradient=gradient.contiguous(),
            size=size,
            rate=rate,
            momentum=momentum,
        )


def _fake_softmax_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape[0], dtype=torch.float32), logits.new_empty(logits.shape)


_bias_add = operator(
    "bias_add(Tensor x, Tensor bias) -> Tensor",
    cuda=_launch_bias_add,
    reference=reference.bias_add,
    fake=lambda x, bias: x.new_empty(x.shape),
)
_column_sums = operator(
    "column_sums(Tensor x) -> Tensor",
    cuda=_launch_column_sums,
    reference=reference.column_sums,
    fake=lambda x: x.new_empty(x.shape[1]),
)
_sigmoid_gradient = operator(
    "sigmoid_gradient(Tensor y, Tensor gradient) -> Tensor",
    cuda=_launch_sigmoid_gradient,
    reference=reference.sigmoid_gradient,
    fake=lambda y, gradient: y.new_empty(y.shape),
)
_softmax_cross_entropy = operator(
    "softmax_cross_entropy(Tensor logits, Tensor labels) -> (Tensor, Tensor)",
    cuda=_launch_softmax_cross_entropy,
    reference=reference.softmax_cross_entropy,
    fake=_fake_softmax_cross_entropy,
)
_sgd_momentum = operator(
    "sgd_momentum(Tensor(a!) parameter, Tensor(b!) velocity, Tensor gradient, float rate, float momentum) -> ()",
    cuda=_launch_sgd_momentum,
    reference=reference.sgd_momentum,
    fake=lambda parameter, velocity, gradient, rate, momentum: None,
)
