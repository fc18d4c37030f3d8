"""`decode_attention` on a CPU: the C++ kernel for float32 queries over float32 or 4-bit codes, else the reference."""

import ctypes

import torch
from torch import Tensor

from warpbus.kernels.ops.cache import head_size
from warpbus.kernels.ops.cpu_library import Task, is_available, pointer
from warpbus.kernels.reference import attention as reference
from warpbus.kernels.reference.cache import INT4


class _AttentionTask(Task):
    """`Attention` of csrc/cpu/attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "table", "positions", "blocks", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("key_scales", "value_scales", "out")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("blocks_stride", "key_block", "key_head", "key_token", "value_block", "value_head", "value_token"),
                *("key_scale_block", "key_scale_head", "value_scale_block", "value_scale_head"),
                *("rows", "heads", "kv_heads", "block", "dim", "rotary", "interleaved", "stored", "threads"),
            )
        ),
    )


def decode_attention(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    blocks: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    heads: int,
    interleaved: bool,
    limit: int,
    stored: bool,
) -> Tensor:
    """See `ops.attention`. A row has the same bits alone and in any batch."""
    if qkv.dtype != torch.float32 or keys.dtype not in (torch.float32, INT4) or not is_available():
        return reference.decode_attention(
            qkv, table, positions, blocks, keys, values, key_scales, value_scales, heads, interleaved, limit, stored
        )
    (_, kv_heads, block, _), dim = keys.shape, head_size(keys)
    out = qkv.new_empty(len(qkv), heads, dim)
    qkv, table, positions = qkv.contiguous(), table.contiguous(), positions.contiguous()
    _AttentionTask(
        *map(pointer, (qkv, table, positions, blocks, keys, values, key_scales, value_scales, out)),
        *(blocks.stride(0), *keys.stride()[:3], *values.stride()[:3]),
        *((0, 0) if key_scales is None else key_scales.stride()[:2]),
        *((0, 0) if value_scales is None else value_scales.stride()[:2]),
        *(len(qkv), heads, kv_heads, block, dim, table.shape[1], interleaved, stored, torch.get_num_threads()),
    ).run("attention")
    return out
