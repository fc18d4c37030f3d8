"""`rope_and_cache`: rotary positions of a list of tokens, and their keys and values into the cache, in one pass."""

import torch
from torch import Tensor

from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import runs_on
from warpbus.errors import TensorError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import aligned, check_alike, check_rank, check_shape, per_dtype
from warpbus.kernels.ops.cache import CODES, check_cache, check_indices, head_size
from warpbus.kernels.reference import rope as reference
from warpbus.kernels.reference.cache import INT4

_KERNEL = per_dtype(
    "step/rope_and_cache.cu",
    "rope_and_cache",
    "const ELEMENT* qkv, const float* table, const int* positions, const long long* slots, ELEMENT* q, "
    "ELEMENT* k, void* keys, void* values, float* key_scales, float* value_scales, const float* fixed_key_scales, "
    "const float* fixed_value_scales, long long key_block_stride, "
    "long long key_head_stride, long long key_token_stride, long long value_block_stride, "
    "long long value_head_stride, long long value_token_stride, long long key_scale_block_stride, "
    "long long key_scale_head_stride, long long value_scale_block_stride, long long value_scale_head_stride, "
    "int shift, int heads, int kv_heads, int size, int rotary, int lanes, int code, int interleaved, "
    "int vectorised",
)

_CHUNK = 8  # elements: kChunk in step/chunk.cuh
_BLOCK = 128
_LARGEST_HEAD = 32 * _CHUNK


def rope_and_cache(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    fixed_scales: tuple[Tensor, Tensor] | None = None,
    *,
    heads: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys (RoPE; Su et al., 2021) of any tokens and write keys and values to the tokens' slots.

    Args:
        qkv: `[t, (heads + 2 kv_heads) d]`, the queries of all heads, then keys, then values, as a fused projection
            gives them; float32, float16 or bfloat16. On a GPU before Ampere, or with d over 256, torch's operators do
            the work, and never wait for the GPU.
        table: float32 `[positions, rotary_dim]`: of each position the cosines in the first half, the sines in the
            second. The first `rotary_dim` dimensions of a head rotate, the others stay.
        positions: int32 `[t]`: where each token stands in its sequence; rows of the table.
        slots: int64 `[t]`: where its key and value go: block * B + the place in the block. Of tokens with the same
            slot any one stays. Neither positions nor slots are checked, since it would take the GPU's answer.
        keys, values: the cache, `[blocks, kv_heads, B, d]` in the dtype of `qkv`, int8 or float8_e4m3fn, or `[blocks,
            kv_heads, B, d / 2]` in `INT4`, B a power of two from 16 to 256; any strides, the last one 1. Written in
            place.
        key_scales, value_scales: for int8, float8_e4m3fn and `INT4`, float32 `[blocks, kv_heads, B]`, the last stride
            1: written with the largest magnitude of each head's vector / 127, / 448, or, after the Hadamard rotation,
            / 8. A vector of zeros gets 0.
        fixed_scales: for int8 and float8_e4m3fn, the positive scales of keys and of values, float32 `[kv_heads]` each,
            contiguous: written in place of those. What exceeds the largest code becomes it.
        heads: of the queries.
        interleaved: pairs are (2i, 2i+1); otherwise (i, i + rotary_dim / 2).

    Returns:
        q `[t, heads, d]`, k and v `[t, kv_heads, d]` as they are before the cache's rounding, in the dtype of `qkv`;
        rotated in float32 and rounded once. v is a view of `qkv`.

    Raises:
        TensorError: other shapes, dtypes, strides or devices.
    """
    kv_heads = _check(qkv, table, positions, slots, keys, values, key_scales, value_scales, fixed_scales, heads)
    of_cache = keys, values, key_scales, value_scales, *(fixed_scales or (None, None))
    q, k = _rope_and_cache(qkv, table, positions, slots, *of_cache, heads, interleaved)
    v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))[:, heads + kv_heads :]
    return q, k, v


def _check(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    fixed_scales: tuple[Tensor, Tensor] | None,
    heads: int,
) -> int:
    """The arguments fit each other; gives the number of heads of the keys."""
    name = "rope_and_cache"
    check_rank(name, 2, qkv=qkv)
    check_alike(name, qkv=qkv)
    check_cache(name, qkv, table, keys, values, key_scales, value_scales)
    kv_heads, size = keys.shape[1], head_size(keys)
    tokens, width = qkv.shape
    if width != (heads + 2 * kv_heads) * size or heads < 1:
        raise TensorError(
            f"{name}: qkv has shape {list(qkv.shape)}, keys {list(keys.shape)}, and there are {heads} heads: give qkv "
            "[t, (heads + 2 kv_heads) * head_dim]"
        )
    for of, indices in (("positions", positions), ("slots", slots)):
        check_shape(name, {of: (tokens,)}, f"one for each of the {tokens} tokens of qkv", **{of: indices})
    check_indices(name, qkv.device, torch.int32, positions=positions)
    check_indices(name, qkv.device, torch.int64, slots=slots)
    if fixed_scales is not None:
        if key_scales is None or keys.dtype == INT4:
            raise TensorError(f"{name}: fixed_scales do not go with a cache of {keys.dtype}: give None")
        for of, fixed in zip(("fixed key scales", "fixed value scales"), fixed_scales, strict=True):
            check_shape(name, {of: (kv_heads,)}, "one for each KV head", **{of: fixed})
            check_alike(name, (torch.float32,), **{of: fixed})
            if fixed.device != qkv.device or not fixed.is_contiguous():
                raise TensorError(f"{name}: {of} are on {fixed.device}: give contiguous ones on {qkv.device}")
    rotary = table.shape[1]
    if rotary > size or rotary % 2:
        raise TensorError(
            f"{name}: heads have {size} dimensions and table has {rotary} columns: give an even number of columns up "
            "to that"
        )
    return kv_heads


def _launch(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    fixed_key_scales: Tensor | None,
    fixed_value_scales: Tensor | None,
    heads: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    (_, kv_heads, block, _), size = keys.shape, head_size(keys)
    if size > _LARGEST_HEAD or not runs_on(architecture(qkv.device), "sm_80"):
        return reference.rope_and_cache(
            *(qkv, table, positions, slots, keys, values, key_scales, value_scales),
            *(fixed_key_scales, fixed_value_scales, heads, interleaved),
        )
    qkv, table, positions, slots = qkv.contiguous(), table.contiguous(), positions.contiguous(), slots.contiguous()
    q, k = _rotated(qkv, keys, heads)
    if qkv.numel() == 0:
        return q, k
    rotary = table.shape[1]
    lanes = 1
    while lanes * _CHUNK < size:
        lanes *= 2
    vectorised = (
        size % _CHUNK == rotary // 2 % _CHUNK == 0
        and aligned(qkv.flatten(), table)
        and all(
            tensor.data_ptr() % (_CHUNK * min(tensor.element_size(), 2)) == 0
            and all(stride % _CHUNK == 0 for stride in tensor.stride()[:3])
            for tensor in (keys, values)
        )
    )
    key_scale_strides = (0, 0) if key_scales is None else key_scales.stride()[:2]
    value_scale_strides = (0, 0) if value_scales is None else value_scales.stride()[:2]
    _KERNEL[qkv.dtype](
        len(qkv),
        _BLOCK,
        qkv=qkv,
        table=table,
        positions=positions,
        slots=slots,
        q=q,
        k=k,
        keys=keys,
        values=values,
        key_scales=key_scales,
        value_scales=value_scales,
        fixed_key_scales=fixed_key_scales,
        fixed_value_scales=fixed_value_scales,
        key_block_stride=keys.stride(0),
        key_head_stride=keys.stride(1),
        key_token_stride=keys.stride(2),
        value_block_stride=values.stride(0),
        value_head_stride=values.stride(1),
        value_token_stride=values.stride(2),
        key_scale_block_stride=key_scale_strides[0],
        key_scale_head_stride=key_scale_strides[1],
        value_scale_block_stride=value_scale_strides[0],
        value_scale_head_stride=value_scale_strides[1],
        shift=block.bit_length() - 1,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        rotary=rotary,
        lanes=lanes,
        code=CODES.get(keys.dtype, 0),
        interleaved=interleaved,
        vectorised=vectorised,
        dependent=True,
    )
    return q, k


def _rotated(qkv: Tensor, keys: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Where rotated queries and keys go."""
    tokens, kv_heads, size = qkv.shape[0], keys.shape[1], head_size(keys)
    return qkv.new_empty(tokens, heads, size), qkv.new_empty(tokens, kv_heads, size)


_rope_and_cache = operator(
    "rope_and_cache(Tensor qkv, Tensor table, Tensor positions, Tensor slots, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor(c!)? key_scales, Tensor(d!)? value_scales, Tensor? fixed_key_scales, "
    "Tensor? fixed_value_scales, int heads, bool interleaved) -> (Tensor, Tensor)",
    cuda=_launch,
    reference=reference.rope_and_cache,
    fake=lambda qkv, table, positions, slots, keys, *others: _rotated(qkv, keys, others[-2]),
)
