"""`argmax` and `sample`: from scores to tokens, without a sort and without leaving the GPU."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import Kernel
from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import aligned, check_alike, check_rank, check_shape, per_dtype
from warpbus.kernels.reference import sampling as reference

_ARGMAX = per_dtype(
    "step/sampling.cu",
    "argmax",
    "const ELEMENT* logits, long long* tokens, float* best, int width, int blocks, int vectorised",
)
_SAMPLE = per_dtype(
    "step/sampling.cu",
    "sample",
    "const ELEMENT* logits, const float* temperature, const int* top_k, const float* top_p, const float* min_p, "
    "const float* uniform, long long* tokens, float* best, int width, int blocks, int vectorised",
)

_BLOCK = 1024  # kBlock in step/sampling.cu
_BLOCKS_OF_A_ROW = 8  # the largest cluster that every GPU with clusters has
_MOST_COLUMNS = 2**19  # whose sums are certain to fit 32 bits


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best token of each row.

    Args:
        logits: `[b, v]`, float32, float16 or bfloat16, v from 1 to 2^19; copied where not contiguous.

    Returns:
        tokens, int64 `[b]`: the lowest index among equals; and the best scores, float32 `[b]`: NaN or infinite where
        a row holds NaN or its best score is infinite, and the token then means nothing.

    Raises:
        TensorError: another shape or dtype.
    """
    _check("argmax", logits)
    return _argmax(logits)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row: the inverse of the cumulated probabilities `softmax(logits / temperature)`, likeliest
    first and the lower index first among equals, cut to the `top_k` first, of these to those at least `min_p` times as
    likely as the first (Nguyen et al., 2024), and of these to the fewest first that together reach `top_p` of what is
    left (nucleus sampling; Holtzman et al., 2020).

    A row's token depends on its own arguments alone, and is the same at every run. On a GPU the probabilities are
    summed exactly, as multiples of 2^-31 of the largest; on the CPU in float32.

    Args:
        logits: `[b, v]`, float32, float16 or bfloat16, v from 1 to 2^19; copied where not contiguous.
        temperature: float32 `[b]`, above 0; infinity or NaN makes all tokens but those of score -inf equally likely.
        top_k: int32 `[b]`; 0 allows all tokens, 1 is greedy.
        top_p: float32 `[b]`, above 0; 1 allows all tokens.
        min_p: float32 `[b]`, from 0 to 1, above counts as 1; 0 allows all tokens.
        uniform: float32 `[b]`, random numbers from 0 to 1.

    Returns:
        tokens, int64 `[b]`, and the best scores, float32 `[b]`: NaN or infinite where a row holds NaN or its best score
        is infinite, and the token then means nothing.

    Raises:
        TensorError: other shapes, dtypes or devices.
    """
    _check("sample", logits)
    floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "uniform": uniform}
    check_alike("sample", (torch.float32,), **floats)
    check_alike("sample", (torch.int32,), top_k=top_k)
    rows = (logits.shape[0],)
    for name, column in {**floats, "top_k": top_k}.items():
        check_shape("sample", {name: rows}, "one for each row of logits", **{name: column})
        if column.device != logits.device:
            raise TensorError(
                f"sample: {name} is on {column.device} and logits on {logits.device}: move one with .to()"
            )
    return _sample(logits, temperature, top_k, top_p, min_p, uniform)


def _check(operator: str, logits: Tensor) -> None:
    check_rank(operator, 2, logits=logits)
    check_alike(operator, logits=logits)
    if not 1 <= logits.shape[1] <= _MOST_COLUMNS:
        raise TensorError(f"{operator}: logits have shape {list(logits.shape)}, expected 1 to {_MOST_COLUMNS} columns")


def _launch_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    return _launch(_ARGMAX, logits)


def _launch_sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    return _launch(_SAMPLE, logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=uniform)


def _launch(kernels: Mapping[torch.dtype, Kernel], logits: Tensor, **controls: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.contiguous()
    tokens, best = _fake(logits)
    if logits.shape[0]:
        blocks = blocks_of_row(logits.device)
        parameters: dict[str, Any] = {name: control.contiguous() for name, control in controls.items()}
        kernels[logits.dtype](
            logits.shape[0] * blocks,
            _BLOCK,
            logits=logits,
            **parameters,
            tokens=tokens,
            best=best,
            width=logits.shape[1],
            blocks=blocks,
            vectorised=aligned(logits),
            cluster=blocks,
            dependent=True,
        )
    return tokens, best


def blocks_of_row(device: torch.device) -> int:
    """The blocks that share a row: they have to form a cluster to hear of each other."""
    return _BLOCKS_OF_A_ROW if capabilities(architecture(device)).clusters else 1


def _fake(logits: Tensor, *controls: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)


_argmax = operator(
    "argmax(Tensor logits) -> (Tensor, Tensor)",
    cuda=_launch_argmax,
    reference=reference.argmax,
    fake=_fake,
)
_sample = operator(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform) "
    "-> (Tensor, Tensor)",
    cuda=_launch_sample,
    reference=reference.sample,
    fake=_fake,
)
