"""`rope_and_cache`: rotary positions of a prompt, and its keys and values into the cache, in one pass."""

from torch import Tensor

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.operators import operator
from warpbus.kernels.ops.arguments import aligned, check_alike, check_rank, per_dtype
from warpbus.kernels.ops.cache import CODES, check_cache
from warpbus.kernels.reference import rope as reference

_KERNEL = per_dtype("step/rope_and_cache.cu", "rope_and_cache", "PPPPPPPP" + "q" * 10 + "i" * 10)

_CHUNK = 8  # elements: kChunk in step/chunk.cuh
_BLOCK = 128
_LARGEST_HEAD = 32 * _CHUNK


def rope_and_cache(
    qkv: Tensor,
    table: Tensor,
    start: int,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    *,
    heads: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys (RoPE; Su et al., 2021) and write keys and values at `start` .. `start + t - 1`.

    Args:
        qkv: `[b, t, (heads + 2 kv_heads) d]`, the queries of all heads, then keys, then values, as a fused projection
            gives them; float32, float16 or bfloat16; d up to 256.
        table: float32 `[positions, rotary_dim]`: of each position the cosines in the first half, the sines in the
            second. The first `rotary_dim` dimensions of a head rotate, the others stay.
        start: the position of the first token, the same in every row.
        keys, values: the cache, `[rows >= b, kv_heads, capacity, d]` in the dtype of `qkv`, int8 or float8_e4m3fn; any
            strides, the last one 1. Written in place.
        key_scales, value_scales: for int8 and float8_e4m3fn, float32 `[rows, kv_heads, capacity]`, the last stride 1:
            written with the largest magnitude of each head's vector / 127 or / 448. A vector of zeros gets 0.
        heads: of the queries.
        interleaved: pairs are (2i, 2i+1); otherwise (i, i + rotary_dim / 2).

    Returns:
        q `[b, t, heads, d]`, k and v `[b, t, kv_heads, d]` as they are before the cache's rounding, in the dtype of
        `qkv`; rotated in float32 and rounded once. v is a view of `qkv`.

    Raises:
        TensorError: other shapes, dtypes, strides or devices.
        UsageError: the tokens do not fit the cache or the table.
    """
    kv_heads = _check(qkv, table, start, keys, values, key_scales, value_scales, heads)
    q, k = _rope_and_cache(qkv, table, start, keys, values, key_scales, value_scales, heads, interleaved)
    v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))[:, :, heads + kv_heads :]
    return q, k, v


def _check(
    qkv: Tensor,
    table: Tensor,
    start: int,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    heads: int,
) -> int:
    """The arguments fit each other; gives the number of heads of the keys."""
    name = "rope_and_cache"
    check_rank(name, 3, qkv=qkv)
    check_alike(name, qkv=qkv)
    check_cache(name, qkv, table, keys, values, key_scales, value_scales)
    rows, kv_heads, capacity, size = keys.shape
    batch, tokens, width = qkv.shape
    if rows < batch or width != (heads + 2 * kv_heads) * size or heads < 1:
        raise TensorError(
            f"{name}: qkv has shape {list(qkv.shape)}, keys {list(keys.shape)}, and there are {heads} heads: give qkv "
            f"[b, t, (heads + 2 kv_heads) * head_dim] and a cache of at least b rows"
        )
    rotary = table.shape[1]
    if size > _LARGEST_HEAD or rotary > size or rotary % 2:
        raise TensorError(
            f"{name}: heads have {size} dimensions and table has {rotary} columns: give at most {_LARGEST_HEAD}, "
            "and an even number of columns up to that"
        )
    if not 0 <= start <= start + tokens <= min(capacity, table.shape[0]):
        raise UsageError(
            f"{name}: tokens {start} to {start + tokens - 1} do not fit a cache of {capacity} and a table of "
            f"{table.shape[0]} positions: enlarge them"
        )
    return kv_heads


def _launch(
    qkv: Tensor,
    table: Tensor,
    start: int,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    heads: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    qkv, table = qkv.contiguous(), table.contiguous()
    q, k = _fake(qkv, table, start, keys, values, key_scales, value_scales, heads, interleaved)
    batch, tokens, _ = qkv.shape
    size, rotary = keys.shape[3], table.shape[1]
    if qkv.numel() == 0:
        return q, k
    lanes = 1
    while lanes * _CHUNK < size:
        lanes *= 2
    places = (keys, values)
    vectorised = (
        size % _CHUNK == rotary // 2 % _CHUNK == 0
        and aligned(qkv.flatten(), table)
        and all(
            tensor.data_ptr() % (_CHUNK * min(tensor.element_size(), 2)) == 0
            and all(stride % _CHUNK == 0 for stride in tensor.stride()[:3])
            for tensor in places
        )
    )
    _KERNEL[qkv.dtype](
        batch * tokens,
        _BLOCK,
        qkv,
        table,
        q,
        k,
        keys,
        values,
        key_scales,
        value_scales,
        *keys.stride()[:3],
        *values.stride()[:3],
        *((0, 0) if key_scales is None else key_scales.stride()[:2]),
        *((0, 0) if value_scales is None else value_scales.stride()[:2]),
        tokens,
        start,
        heads,
        keys.shape[1],
        size,
        rotary,
        lanes,
        CODES.get(keys.dtype, 0),
        int(interleaved),
        int(vectorised),
        dependent=True,
    )
    return q, k


def _fake(
    qkv: Tensor,
    table: Tensor,
    start: int,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    heads: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    _, kv_heads, _, size = keys.shape
    shape = qkv.shape[:2]
    return qkv.new_empty(*shape, heads, size), qkv.new_empty(*shape, kv_heads, size)


_rope_and_cache = operator(
    "rope_and_cache(Tensor qkv, Tensor table, int start, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor(c!)? key_scales, Tensor(d!)? value_scales, int heads, bool interleaved) -> (Tensor, Tensor)",
    cuda=_launch,
    reference=reference.rope_and_cache,
    fake=_fake,
)
