"""The cache of latents of multi-head latent attention, as the operators take it, and `gather_latents`, which reads it.

It holds elements of the activations' dtype, or the FP8 layout of `reference.latent_cache`.
"""

from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.jit import architecture
from warpbus.cuda.remote import is_gpu
from warpbus.errors import TensorError, UsageError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import ELEMENTS, HALVES, aligned, check_rank, per_dtype
from warpbus.kernels.ops.cache import check_blocks, check_stored, gather_cache
from warpbus.kernels.reference import latent_cache as reference
from warpbus.kernels.reference.latent_cache import LATENT_CODES, token_bytes

ROPE, RANK = 64, 512
"""Features of rotary keys and latents that kernels are compiled for: csrc/mla/shape.cuh."""

_GATHER = per_dtype(
    "mla/gather.cu",
    "mla_gather",
    "const unsigned char* latents, const int* table, ELEMENT* out, long long block_stride, long long token_stride, "
    "long long entry_stride, int tokens, int shift",
    HALVES,
)
_THREADS, _TOKENS = 256, 32  # of a block of mla_gather


def gather_latents(
    latents: Tensor, blocks: Tensor, tokens: int, rank: int, rope_dim: int, dtype: torch.dtype
) -> Tensor:
    """The latents and rotary keys of the first `tokens` tokens of a sequence, one after another.

    Args:
        latents: the cache, as of `mla_attention`.
        blocks: int32 or int64 `[n]`: the sequence's blocks in order; those past the last token are not read.
        tokens: up to n * B.
        rank, rope_dim: features of a latent and of a rotary key.
        dtype: that of the activations: float32, float16 or bfloat16.

    Returns:
        `[tokens, 1, rank + rope_dim]` in `dtype`, contiguous; codes times their scales, rounded once. Where there is no
        kernel, torch's operators do the work, and never wait for the GPU.

    Raises:
        TensorError: other shapes, dtypes, strides or devices.
        UsageError: more tokens than the blocks hold.
    """
    name = "gather_latents"
    if dtype not in ELEMENTS:
        raise TensorError(f"{name}: dtype is {dtype}, expected float32, float16 or bfloat16: give one of them")
    check_latents(name, latents, dtype, rank, rope_dim)
    if latents.dtype != LATENT_CODES:
        return gather_cache(latents, None, blocks, tokens, dtype)
    check_rank(name, 1, blocks=blocks)
    if blocks.dtype not in (torch.int32, torch.int64) or blocks.device != latents.device:
        raise TensorError(
            f"{name}: blocks are {blocks.dtype} on {blocks.device}: give torch.int32 or torch.int64 on {latents.device}"
        )
    held = len(blocks) * latents.shape[2]
    if not 0 <= tokens <= held:
        raise UsageError(f"{name}: tokens is {tokens}, and the blocks hold {held}: give 0 to {held}")
    return _gather_latents(latents, blocks, tokens, rank, rope_dim, dtype)[:, None]


def check_latents(operator: str, latents: Tensor, dtype: torch.dtype, rank: int, rope_dim: int) -> None:
    """Check that a cache holds latents and rotary keys in `dtype`, or in FP8.

    Raises:
        TensorError: it does not.
    """
    coded = latents.dtype == LATENT_CODES
    if coded:
        check_blocks(operator, "latents", latents)
    else:
        check_stored(operator, "latents", latents, dtype, None, "scales")
    sizes = {dtype: rank + rope_dim, LATENT_CODES: token_bytes(rank, rope_dim, dtype)}
    if latents.shape[1] != 1 or latents.shape[3] != sizes.get(latents.dtype) or latents.stride(3) != 1:
        raise TensorError(
            f"{operator}: latents have shape {list(latents.shape)} {latents.dtype} and strides {latents.stride()}: "
            f"give [blocks, 1, tokens of a block, {sizes[dtype]}] {dtype} or [..., {sizes[LATENT_CODES]}] "
            f"{LATENT_CODES}, with 1 as the last stride"
        )


def check_even(operator: str, latents: Tensor) -> None:
    """Check that all tokens of a cache begin at multiples of 16 bytes, as kernels read and write them.

    Raises:
        TensorError: they do not.
    """
    if not even(latents):
        raise TensorError(
            f"{operator}: latents begin at {latents.data_ptr():#x} and have strides {latents.stride()}: give a cache "
            "whose tokens begin at multiples of 16 bytes"
        )


def even(tensor: Tensor) -> bool:
    """Whether all rows begin at multiples of 16 bytes."""
    return aligned(tensor) and all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])


def _launch(latents: Tensor, blocks: Tensor, tokens: int, rank: int, rope_dim: int, dtype: torch.dtype) -> Tensor:
    if (
        not is_gpu(latents.device)
        or dtype not in HALVES
        or (rank, rope_dim) != (RANK, ROPE)
        or not even(latents)
        or not capabilities(architecture(latents.device)).mma
    ):
        return reference.gather_latents(latents, blocks, tokens, rank, rope_dim, dtype)
    out = latents.new_empty(tokens, rank + rope_dim, dtype=dtype)
    if tokens == 0:
        return out
    arguments: dict[str, Any] = {
        "latents": latents,
        "table": blocks,
        "out": out,
        "block_stride": latents.stride(0),
        "token_stride": latents.stride(2),
        # The lower half of a 64-bit entry is the block's number.
        "entry_stride": blocks.stride(0) * (blocks.element_size() // 4),
        "tokens": tokens,
        "shift": latents.shape[2].bit_length() - 1,
    }
    _GATHER[dtype](-(-tokens // _TOKENS), _THREADS, **arguments)
    return out


_gather_latents = operator(
    "gather_latents(Tensor latents, Tensor blocks, int tokens, int rank, int rope_dim, ScalarType dtype) -> Tensor",
    cuda=_launch,
    reference=reference.gather_latents,
    fake=lambda latents, blocks, tokens, rank, rope_dim, dtype: latents.new_empty(tokens, rank + rope_dim, dtype=dtype),
)
