"""Cross-entropy for a large vocabulary, with the logits of only a chunk of tokens in memory at a time.

The gradient of the logits is known as soon as the logits are. The forward pass computes it per chunk, multiplies it
into the gradients of the hidden states and the head, and discards it. A `[tokens, vocabulary]` tensor never exists
(Wijmans et al., 2024, avoid it in a kernel).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.operators import autocast
from warpbus.kernels.ops.cross_entropy import cross_entropy
from warpbus.models.layers import QuantizedLinear
from warpbus.models.layers.frozen import times_frozen
from warpbus.train.dataset import IGNORED

PIECE_BYTES = 2**28
"""Maximum bytes of the logits of a chunk, in their own dtype: large enough for products at full speed."""


def piece_rows(vocabulary: int, itemsize: int) -> int:
    """Tokens per chunk, for logits of `itemsize` bytes: at least 1, and a multiple of 128 if above 128."""
    rows = PIECE_BYTES // (itemsize * vocabulary)
    return max(1, rows - rows % 128 if rows > 128 else rows)


def summed_cross_entropy(hidden_nd: Tensor, head: nn.Module, targets_n: Tensor, *, rows: int | None = None) -> Tensor:
    """The sum of `-log softmax(head(hidden))[target]` over the tokens that have a target, in nats.

    Tokens whose target is `IGNORED` are skipped. They are found on the device of the targets: targets on the CPU avoid
    a synchronization with the GPU. Logits have the dtype of the hidden states, or of an enclosing `torch.autocast`;
    softmax and sum are computed in float32. The result can be differentiated once.

    Args:
        hidden_nd: floating point `[n, d]`, or `[..., d]`.
        head: `nn.Linear`, frozen or trained, tied to the embedding or not; or a `QuantizedLinear`. With FSDP2 it has to
            belong to the module whose forward calls this, so that it is gathered here.
        targets_n: int64 with the shape of the hidden states without d; token ids or `IGNORED`.
        rows: tokens per chunk; by default as many as `PIECE_BYTES` allow.

    Returns:
        a scalar: float32, or float64 for float64 hidden states.

    Raises:
        TensorError: the shapes of targets and hidden states differ.
        UsageError: another kind of head, or a sharded one.
    """
    loss: Tensor = _eagerly(hidden_nd, head, targets_n, rows)
    return loss


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _eagerly(hidden_nd: Tensor, head: nn.Module, targets_n: Tensor, rows: int | None) -> Tensor:
    if targets_n.shape != hidden_nd.shape[:-1]:
        raise TensorError(
            f"summed_cross_entropy: targets have shape {list(targets_n.shape)}, expected {list(hidden_nd.shape[:-1])}: "
            "one target per hidden state"
        )
    if not isinstance(head, nn.Linear | QuantizedLinear):
        raise UsageError(f"summed_cross_entropy: the head is {type(head).__name__}: give nn.Linear or QuantizedLinear")
    weight, bias, frozen = (None, None, head) if isinstance(head, QuantizedLinear) else (head.weight, head.bias, None)
    if isinstance(weight, DTensor):
        raise UsageError(
            "summed_cross_entropy: the head is sharded here: shard it with the module whose forward calls this"
        )
    flat = targets_n.reshape(-1)
    indices = (flat != IGNORED).nonzero().squeeze(1)
    targets = flat[indices].to(hidden_nd.device, non_blocking=True)
    hidden = hidden_nd.reshape(-1, hidden_nd.shape[-1])
    if len(indices) < len(flat):
        hidden = hidden[indices.to(hidden.device, non_blocking=True)]
    hidden = autocast(hidden)
    rows = rows or piece_rows(head.out_features, hidden.element_size())
    loss: Tensor = _SummedCrossEntropy.apply(hidden, weight, bias, frozen, targets, rows, torch.is_grad_enabled())
    return loss


class _SummedCrossEntropy(torch.autograd.Function):
    """See `summed_cross_entropy`; every row has a target."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        head: QuantizedLinear | None,
        targets: Tensor,
        rows: int,
        differentiable: bool,
    ) -> Tensor:
        wanted = [differentiable and needed for needed in ctx.needs_input_grad[:3]]
        with torch.autocast(hidden.device.type, enabled=False):
            loss, ctx.gradients = _pieces(hidden, weight, bias, head, targets, rows, wanted)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("summed_cross_entropy: differentiated a second time; its gradients are gone")
        # In place: the gradient of the head is as large as the head.
        gradients = [None if each is None else each.mul_(factor) for each in ctx.gradients]
        ctx.gradients = None
        return *gradients, None, None, None, None


def _pieces(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    head: QuantizedLinear | None,
    targets: Tensor,
    rows: int,
    wanted: list[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss, and the gradients of hidden states, weight and bias where `wanted`."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    to_hidden = torch.empty_like(hidden) if wanted[0] else None
    # Summed over the chunks, in float32 even for a 16-bit head.
    to_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] and weight is not None else None
    to_bias = torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None
    multiply, multiply_back = _products(weight, bias, head, hidden.dtype)
    for start in range(0, len(hidden), rows):
        x, own = hidden[start : start + rows], targets[start : start + rows]
        scores = multiply(x).contiguous()
        loss += cross_entropy(scores, own, differentiated=any(wanted)).sum()
        # `cross_entropy` has replaced the scores by their gradients.
        if to_hidden is not None:
            multiply_back(scores, to_hidden[start : start + rows])
        if to_weight is not None:
            to_weight += scores.T @ x
        if to_bias is not None:
            to_bias += scores.sum(0, dtype=wide)
        del scores  # free the memory before the next chunk
    sums = (to_hidden, hidden), (to_weight, weight), (to_bias, bias)
    return loss, [None if each is None or like is None else each.to(like.dtype) for each, like in sums]


def _products(
    weight: Tensor | None, bias: Tensor | None, head: QuantizedLinear | None, dtype: torch.dtype
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """Functions that compute scores from hidden states, and the gradient of hidden states from that of scores."""
    if head is not None:
        form = head.form
        return head, lambda scores, out: out.copy_(times_frozen(scores, form))
    assert weight is not None
    matrix, added = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
    return lambda x: F.linear(x, matrix, added), lambda scores, out: torch.mm(scores, matrix, out=out)
