"""`decode_attention` on a CPU: the C++ kernel for float32 queries and caches, and the reference for others."""

import ctypes

import torch
from torch import Tensor

from warpbus.kernels.ops.cpu_library import Task, is_available, pointer
from warpbus.kernels.reference import attention as reference


class _AttentionTask(Task):
    """`Attention` of csrc/cpu/attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "table", "positions", "blocks", "keys", "values", "out")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("blocks_stride", "key_block", "key_head", "key_token", "value_block", "value_head", "value_token"),
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
    if {qkv.dtype, keys.dtype, values.dtype} != {torch.float32} or not is_available():
        return reference.decode_attention(
            qkv, table, positions, blocks, keys, values, key_scales, value_scales, heads, interleaved, limit, stored
        )
    _, kv_heads, block, dim = keys.shape
    out = qkv.new_empty(len(qkv), heads, dim)
    qkv, table, positions = qkv.contiguous(), table.contiguous(), positions.contiguous()
    _AttentionTask(
        *map(pointer, (qkv, table, positions, blocks, keys, values, out)),
        *(blocks.stride(0), *keys.stride()[:3], *values.stride()[:3]),
        *(len(qkv), heads, kv_heads, block, dim, table.shape[1], interleaved, stored, torch.get_num_threads()),
    ).run("attention")
    return out
