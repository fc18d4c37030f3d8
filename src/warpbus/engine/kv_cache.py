"""Keys and values of a batch of sequences, and attention over them.

Knows nothing of tokens, text, sampling or requests: rows, positions and layers are all it sees.

Rows are right-padded: the key of position p lies at index p of its row, and a query at position p sees the indices
0 to p. What padding wrote beyond a row's end is overwritten by the row's own tokens before any query can see it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from warpbus.models import ModelConfig

STEP = 256


class KVCache:
    """One tensor of keys and one of values a layer, `[batch, kv_heads, capacity, head_dim]`.

    Args:
        config: the model's shape.
        batch: rows.
        limit: the longest row there can be, in tokens; the capacity grows up to it, in steps.
    """

    def __init__(
        self, config: ModelConfig, batch: int, limit: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.limit = limit
        shape = (batch, config.num_kv_heads, 0, config.head_dim)
        self.keys = [torch.empty(shape, device=device, dtype=dtype) for _ in range(config.num_layers)]
        self.values = [torch.empty(shape, device=device, dtype=dtype) for _ in range(config.num_layers)]

    @property
    def capacity(self) -> int:
        """Tokens that each row has room for now."""
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take now."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row; grows by a quarter at least, so that copying stays rare."""
        if tokens <= self.capacity:
            return
        wanted = max(tokens, self.capacity + self.capacity // 4)
        capacity = min(-(-wanted // STEP) * STEP, self.limit)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                grown = old.new_zeros((*old.shape[:2], capacity, old.shape[3]))
                grown[:, :, : old.shape[2]] = old
                tensors[layer] = grown

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        index = torch.tensor(rows, device=self.keys[0].device)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = old.index_select(0, index)


class PromptAttention:
    """Attention of a piece of the prompt that begins at the same position in every row (`AttentionContext`)."""

    def __init__(self, cache: KVCache, start: int, tokens: int) -> None:
        self._cache = cache
        self._start = start
        self._end = start + tokens
        self._mask = causal_lower_right(tokens, self._end) if start else None

    def attend(self, layer: int, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, positions_bt: Tensor) -> Tensor:
        del positions_bt
        cache, q, k, v = self._cache, q_bthd.transpose(1, 2), k_bthd.transpose(1, 2), v_bthd.transpose(1, 2)
        cache.keys[layer][:, :, self._start : self._end] = k
        cache.values[layer][:, :, self._start : self._end] = v
        if self._start:
            k, v = cache.keys[layer][:, :, : self._end], cache.values[layer][:, :, : self._end]
        grouped = q.shape[1] != k.shape[1]
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self._mask, is_causal=self._mask is None, enable_gqa=grouped
        )
        return attended.transpose(1, 2)


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
