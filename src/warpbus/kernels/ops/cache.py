"""The cache of keys and values in blocks of tokens, as the operators take it, and `gather_cache`, which reads it."""

from typing import Any

import torch
from torch import Tensor

from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import runs_on
from warpbus.errors import TensorError, UsageError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import ELEMENTS, check_alike, check_rank, check_shape, per_dtype
from warpbus.kernels.reference import cache as reference
from warpbus.kernels.reference.cache import INT4

CODES = {torch.int8: 1, torch.float8_e4m3fn: 2, INT4: 3}  # as in csrc/common/cache_codes.cuh; 0 is the dtype of qkv

_BLOCKS = (16, 256)  # tokens: the smallest and the largest
_KERNEL = per_dtype(
    "step/gather_cache.cu",
    "gather_cache",
    "const unsigned char* cache, const float* scales, const int* table, ELEMENT* out, long long block_stride, "
    "long long head_stride, long long token_stride, long long scale_block_stride, long long scale_head_stride, "
    "long long entry_stride, int tokens, int shift, int size, int code",
)
_ROTATED = per_dtype(
    "step/gather_cache.cu",
    "gather_rotated",
    "const unsigned char* cache, const float* scales, const int* table, ELEMENT* out, long long block_stride, "
    "long long head_stride, long long token_stride, long long scale_block_stride, long long scale_head_stride, "
    "long long entry_stride, int tokens, int shift, int size",
)
_THREADS = 256
_LARGEST_BLOCK = 1024  # of the Hadamard matrix: 32 lanes of 32 elements
_VECTOR = 16  # bytes


def gather_cache(cache: Tensor, scales: Tensor | None, blocks: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """The stored values of the first `tokens` tokens of a sequence, one after another.

    Args:
        cache: keys or values, `[blocks, kv_heads, B, d]` in `dtype`, int8 or float8_e4m3fn, or `[blocks, kv_heads, B,
            d / 2]` in `INT4`, B a power of two from 16 to 256; any strides, the last one 1.
        scales: for int8, float8_e4m3fn and `INT4`, float32 `[blocks, kv_heads, B]`, the last stride 1.
        blocks: int32 or int64 `[n]`: the sequence's blocks in order; those past the last token are not read.
        tokens: up to n * B.
        dtype: of the result: float32, float16 or bfloat16.

    Returns:
        `[tokens, kv_heads, d]`, contiguous; codes times their scales, those of `INT4` rotated back, rounded once. On a
        GPU before Ampere, or where heads do not begin at multiples of 16 bytes, torch's operators do the work, and
        never wait for the GPU.

    Raises:
        TensorError: other shapes, dtypes, strides or devices.
        UsageError: more tokens than the blocks hold.
    """
    name = "gather_cache"
    if dtype not in ELEMENTS:
        raise TensorError(f"{name}: dtype is {dtype}, expected float32, float16 or bfloat16: give one of them")
    check_stored(name, "cache", cache, dtype, scales, "scales")
    check_rank(name, 1, blocks=blocks)
    if blocks.dtype not in (torch.int32, torch.int64) or blocks.device != cache.device:
        raise TensorError(
            f"{name}: blocks are {blocks.dtype} on {blocks.device}: give torch.int32 or torch.int64 on {cache.device}"
        )
    held = len(blocks) * cache.shape[2]
    if not 0 <= tokens <= held:
        raise UsageError(f"{name}: tokens is {tokens}, and the blocks hold {held}: give 0 to {held}")
    return _gather_cache(cache, scales, blocks, tokens, dtype)


def head_size(cache: Tensor) -> int:
    """The dimensions of the vectors that a cache `[..., d]`, or `[..., d / 2]` in `INT4`, holds."""
    return cache.shape[-1] * (2 if cache.dtype == INT4 else 1)


def check_cache(
    operator: str,
    qkv: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """Keys and values are alike and fit `qkv` in dtype and device, scales are there for codes, and so is the table.

    Raises:
        TensorError: they do not.
    """
    check_rank(operator, 2, table=table)
    check_stored(operator, "keys", keys, qkv.dtype, key_scales, "key_scales")
    check_shape(operator, {"values": tuple(keys.shape)}, "that of keys", values=values)
    if values.dtype != keys.dtype:
        raise TensorError(f"{operator}: values are {values.dtype} and keys {keys.dtype}: give both caches in one dtype")
    check_stored(operator, "values", values, qkv.dtype, value_scales, "value_scales")
    check_alike(operator, (torch.float32,), table=table)
    for of, tensor in (("table", table), ("keys", keys), ("values", values)):
        if tensor.device != qkv.device:
            raise TensorError(f"{operator}: {of} is on {tensor.device} and qkv on {qkv.device}: move one with .to()")


def check_indices(operator: str, device: torch.device, dtype: torch.dtype, **tensors: Tensor) -> None:
    """Positions, slots and block tables have the dtype that kernels read, and are on `device`.

    Raises:
        TensorError: they have not.
    """
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise TensorError(f"{operator}: {name} are {tensor.dtype}, expected {dtype}: convert them with .to()")
        if tensor.device != device:
            raise TensorError(f"{operator}: {name} are on {tensor.device} and qkv on {device}: move one with .to()")


def check_stored(
    operator: str, name: str, cache: Tensor, dtype: torch.dtype, scales: Tensor | None, scales_name: str
) -> None:
    """Check that keys or values are blocks in `dtype` or in codes, and that codes have scales.

    Raises:
        TensorError: they are not.
    """
    check_blocks(operator, name, cache)
    if cache.dtype not in (dtype, *CODES) or cache.stride(-1) != 1:
        raise TensorError(
            f"{operator}: {name} is {cache.dtype} with strides {cache.stride()}: give {dtype}, torch.int8, "
            "torch.float8_e4m3fn or torch.uint8 (4-bit codes), with 1 as the last stride"
        )
    if (scales is None) != (cache.dtype not in CODES):
        wanted = "float32 [blocks, kv_heads, tokens of a block]" if scales is None else "None"
        raise TensorError(f"{operator}: {scales_name} does not go with a cache of {cache.dtype}: give {wanted}")
    if scales is not None:
        check_shape(operator, {scales_name: tuple(cache.shape[:3])}, f"that of {name}", **{scales_name: scales})
        check_alike(operator, (torch.float32,), **{scales_name: scales})
        if scales.stride(-1) != 1 or scales.device != cache.device:
            raise TensorError(
                f"{operator}: {scales_name} has strides {scales.stride()} on {scales.device}: give 1 as the last one, "
                f"on {cache.device}"
            )


def check_blocks(operator: str, name: str, cache: Tensor) -> None:
    """Check that a cache has four axes and blocks of a supported size.

    Raises:
        TensorError: it has not.
    """
    smallest, largest = _BLOCKS
    if cache.dim() != 4:
        raise TensorError(
            f"{operator}: {name} has shape {list(cache.shape)}, expected [blocks, kv_heads, tokens of a block, "
            "head_dim]: reshape it"
        )
    tokens = cache.shape[2]
    if not smallest <= tokens <= largest or tokens & (tokens - 1):
        raise TensorError(
            f"{operator}: {name} has blocks of {tokens} tokens: give a power of two from {smallest} to {largest}"
        )


def _launch(cache: Tensor, scales: Tensor | None, blocks: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    (_, kv_heads, block, columns), size = cache.shape, head_size(cache)
    width = cache.element_size()
    vectors = (cache.data_ptr(), columns * width, *(stride * width for stride in cache.stride()[:3]))
    too_large = cache.dtype == INT4 and size & -size > _LARGEST_BLOCK
    if any(place % _VECTOR for place in vectors) or too_large or not runs_on(architecture(cache.device), "sm_80"):
        return reference.gather_cache(cache, scales, blocks, tokens, dtype)
    out = cache.new_empty(tokens, kv_heads, size, dtype=dtype)
    if out.numel() == 0:
        return out
    scale_block_stride, scale_head_stride = (0, 0) if scales is None else scales.stride()[:2]
    arguments: dict[str, Any] = {
        "cache": cache,
        "scales": scales,
        "table": blocks,
        "out": out,
        "block_stride": cache.stride(0) * width,
        "head_stride": cache.stride(1) * width,
        "token_stride": cache.stride(2) * width,
        "scale_block_stride": scale_block_stride,
        "scale_head_stride": scale_head_stride,
        # The lower half of a 64-bit entry is the block's number.
        "entry_stride": blocks.stride(0) * (blocks.element_size() // 4),
        "tokens": tokens,
        "shift": block.bit_length() - 1,
        "size": size,
    }
    grid = -(-tokens // block), kv_heads
    if cache.dtype == INT4:
        _ROTATED[dtype](grid, _THREADS, **arguments)
    else:
        _KERNEL[dtype](grid, _THREADS, **arguments, code=CODES.get(cache.dtype, 0))
    return out


_gather_cache = operator(
    "gather_cache(Tensor cache, Tensor? scales, Tensor blocks, int tokens, ScalarType dtype) -> Tensor",
    cuda=_launch,
    reference=reference.gather_cache,
    fake=lambda cache, scales, blocks, tokens, dtype: cache.new_empty(
        tokens, cache.shape[1], head_size(cache), dtype=dtype
    ),
)
