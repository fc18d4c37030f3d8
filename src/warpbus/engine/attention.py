"""What the layers attend to while generating: a cache's rows, for a piece of the prompts or for one new token a row."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from warpbus.engine.kv_cache import CacheRows, KVCache
from warpbus.kernels.ops.attention import decode_attention
from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.models import ModelConfig
from warpbus.models.layers import FusedAttention


class PromptAttention:
    """Attention of a piece of the prompt that begins at the same position in every row (`AttentionContext`)."""

    def __init__(self, cache: KVCache, start: int, tokens: int) -> None:
        self._cache = cache
        self._start = start
        self._end = start + tokens

    def attend(self, layer: int, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, positions_bt: Tensor) -> Tensor:
        del positions_bt
        cache, q, k, v = self._cache, q_bthd.transpose(1, 2), k_bthd.transpose(1, 2), v_bthd.transpose(1, 2)
        cache.keys[layer][:, :, self._start : self._end] = k
        cache.values[layer][:, :, self._start : self._end] = v
        if self._start:
            k, v = cache.keys[layer][:, :, : self._end], cache.values[layer][:, :, : self._end]
        return _causal(q, k, v).transpose(1, 2)


class StepAttention:
    """Attention of one new token a row, each at its row's own position (`AttentionContext`).

    All queries of a group see the same keys, so that they stand where a kernel expects the tokens of one sequence:
    keys and values are read once a group, on every backend.
    """

    def __init__(self, cache: KVCache, lengths: Sequence[int]) -> None:
        device = cache.keys[0].device
        self._cache = cache
        self._end = max(lengths) + 1
        self._uniform = min(lengths) + 1 == self._end
        if not self._uniform:
            last = torch.tensor(lengths, device=device)
            self._index = last[:, None, None, None]
            self._mask = (torch.arange(self._end, device=device) <= last[:, None])[:, None, None, :]

    def attend(self, layer: int, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, positions_bt: Tensor) -> Tensor:
        del positions_bt
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        batch, kv_heads, _, head_dim = keys.shape
        k, v = k_bthd.transpose(1, 2), v_bthd.transpose(1, 2)
        if self._uniform:
            keys[:, :, self._end - 1 : self._end] = k
            values[:, :, self._end - 1 : self._end] = v
            mask = None
        else:
            index = self._index.expand(batch, kv_heads, 1, head_dim)
            keys.scatter_(2, index, k)
            values.scatter_(2, index, v)
            mask = self._mask
        q = q_bthd.reshape(batch, kv_heads, -1, head_dim)
        attended = F.scaled_dot_product_attention(q, keys[:, :, : self._end], values[:, :, : self._end], attn_mask=mask)
        return attended.reshape(q_bthd.shape)


class FusedPrompt(FusedAttention):
    """`PromptAttention` over the rows of a pool: one kernel rotates and stores.

    Args:
        config: the model's shape.
        table: the rotary table (`Rotary.table`).
    """

    def __init__(self, config: ModelConfig, table: Tensor, cache: CacheRows, start: int, tokens: int) -> None:
        self._config = config
        self._table = table
        self._cache = cache
        self._start = start
        self._end = start + tokens

    def attend_fused(self, layer: int, qkv_btr: Tensor) -> Tensor:
        config = self._config
        stored = self._cache.layers[layer]
        rotated = rope_and_cache(
            qkv_btr,
            self._table,
            self._start,
            *stored,
            heads=config.num_heads,
            interleaved=config.rope.interleaved,
        )
        q, k, v = (x.transpose(1, 2) for x in rotated)
        if self._start:
            keys, values, key_scales, value_scales = stored
            k = self._read(keys, key_scales, len(q), q.dtype)
            v = self._read(values, value_scales, len(q), q.dtype)
        return _causal(q, k, v).transpose(1, 2).flatten(-2)

    def _read(self, stored: Tensor, scales: Tensor | None, rows: int, dtype: torch.dtype) -> Tensor:
        """What is stored up to the end of this piece, in the dtype of the activations."""
        found = stored[:rows, :, : self._end].to(dtype)
        return found if scales is None else found * scales[:rows, :, : self._end, None].to(dtype)


class FusedStep(FusedAttention):
    """`StepAttention` over the rows of a pool, all of it one kernel.

    Args:
        config: the model's shape.
        table: the rotary table (`Rotary.table`).
        positions: int32 `[batch]`, of the new tokens, on the device.
        limit: more than the largest of them.
    """

    def __init__(self, config: ModelConfig, table: Tensor, cache: CacheRows, positions: Tensor, limit: int) -> None:
        self._config = config
        self._table = table
        self._cache = cache
        self._positions = positions
        self._limit = limit

    def attend_fused(self, layer: int, qkv_btr: Tensor) -> Tensor:
        config = self._config
        attended = decode_attention(
            qkv_btr[:, 0],
            self._table,
            self._positions,
            *self._cache.layers[layer],
            heads=config.num_heads,
            interleaved=config.rope.interleaved,
            limit=self._limit,
        )
        return attended.view(len(qkv_btr), 1, -1)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of `[batch, heads, tokens, head_dim]` whose last query is that of the last key."""
    tokens, end = q.shape[2], k.shape[2]
    mask = None if tokens == end else causal_lower_right(tokens, end)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
