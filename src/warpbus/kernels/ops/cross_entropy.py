"""`cross_entropy` of a large vocabulary, whose gradient takes the place of the scores.

`ops/network.py` has the tutorial's `softmax_cross_entropy`, which leaves them as they are.
"""

import torch
from torch import Tensor

from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import runs_on
from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import ELEMENTS, blocks, check_alike, check_rank, check_shape, per_dtype
from warpbus.kernels.reference import cross_entropy as reference

_KERNEL = per_dtype(
    "train/cross_entropy.cu",
    "cross_entropy",
    "ELEMENT* scores, const long long* targets, float* losses, int width, int differentiated",
)

_LARGEST_BLOCK = 1024  # kBlock in train/cross_entropy.cu
_WARP = 32


def cross_entropy(scores: Tensor, targets: Tensor, *, differentiated: bool) -> Tensor:
    """`-log softmax(scores)[target]` of each row, in nats.

    Computed in float32, or in float64 for scores of float64; the gradient is rounded once, after the subtraction. As
    torch has it, the loss is NaN where a row holds NaN or +inf, or nothing but -inf.

    Args:
        scores: `[rows, vocabulary]`, contiguous: float32, float16, bfloat16 or float64.
        targets: int64 `[rows]`, from 0 to vocabulary - 1. Where one is not, a GPU gives a loss of NaN and writes the
            softmax alone; on the CPU torch raises an error.
        differentiated: write the gradient of the losses' sum, `softmax(scores) - onehot(targets)`, over the scores.

    Returns:
        `[rows]`, float32 or float64. The same bits at every run. It has no gradient of its own. For float64, and on a
        GPU before Ampere, torch's operators do the work, with a copy of the scores in the dtype of the result.

    Raises:
        TensorError: other shapes, dtypes or devices, or scores that are not contiguous.
    """
    name = "cross_entropy"
    check_alike(name, (*ELEMENTS, torch.float64), scores=scores)
    check_rank(name, 2, scores=scores)
    rows, vocabulary = scores.shape
    check_shape(name, {"targets": (rows,)}, "one target for each row of scores", targets=targets)
    if targets.dtype != torch.int64 or targets.device != scores.device:
        raise TensorError(
            f"{name}: targets are {targets.dtype} on {targets.device}, expected torch.int64 on {scores.device}: "
            "use .to()"
        )
    if not scores.is_contiguous():
        raise TensorError(f"{name}: scores are not contiguous and are overwritten: give a contiguous tensor")
    if rows and not vocabulary:
        raise TensorError(f"{name}: scores have shape {[rows, vocabulary]}, expected at least one column: add some")
    return _cross_entropy(scores, targets, differentiated)


def _launch(scores: Tensor, targets: Tensor, differentiated: bool) -> Tensor:
    if scores.dtype not in _KERNEL or not runs_on(architecture(scores.device), "sm_80"):
        return reference.cross_entropy(scores, targets, differentiated)
    rows, vocabulary = scores.shape
    losses = _fake(scores, targets, differentiated)
    if rows:
        size = 16 // scores.element_size()
        block = min(_LARGEST_BLOCK, _WARP * blocks((vocabulary, _WARP * size)))
        _KERNEL[scores.dtype](
            rows,
            block,
            scores=scores,
            targets=targets.contiguous(),
            losses=losses,
            width=vocabulary,
            differentiated=differentiated,
        )
    return losses


def _fake(scores: Tensor, targets: Tensor, differentiated: bool) -> Tensor:
    return scores.new_empty(len(scores), dtype=torch.promote_types(scores.dtype, torch.float32))


_cross_entropy = operator(
    "cross_entropy(Tensor(a!) scores, Tensor targets, bool differentiated) -> Tensor",
    cuda=_launch,
    reference=reference.cross_entropy,
    fake=_fake,
)
