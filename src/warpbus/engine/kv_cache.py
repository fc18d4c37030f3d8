"""Keys and values of a batch of sequences.

Knows nothing of tokens, text, sampling or requests: rows, positions and layers are all it sees.

Rows are right-padded: the key of position p lies at index p of its row, and a query at position p sees the indices
0 to p. What padding wrote beyond a row's end is overwritten by the row's own tokens before any query can see it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from warpbus.errors import UsageError
from warpbus.models import ModelConfig

STEP = 256
KV_DTYPES = ("auto", "int8", "fp8")
"""How a cache may be kept: in the dtype of the activations, or in 8 bits with a scale for each head's vector."""


class KVCache:
    """One tensor of keys and one of values a layer, `[batch, kv_heads, capacity, head_dim]`, which grow.

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


class KVPool:
    """Room for the keys and values of `tokens` tokens, taken once, which the rows of a batch share out evenly.

    Args:
        config: the model's shape.
        dtype: of the activations.
        kv_dtype: one of `KV_DTYPES`.
    """

    def __init__(
        self, config: ModelConfig, tokens: int, *, device: torch.device, dtype: torch.dtype, kv_dtype: str = "auto"
    ) -> None:
        self.tokens = tokens
        self._config = config
        stored = stored_dtype(kv_dtype, dtype)
        vectors = (config.num_layers, 2, tokens * config.num_kv_heads)
        size = config.head_dim * stored.itemsize
        # Zeros: what a row never wrote is a number too, so that nothing can come of it where it counts nothing.
        self._data = torch.zeros(*vectors, size, dtype=torch.uint8, device=device).view(stored).flatten(2)
        self._scales = None if stored == dtype else torch.zeros(vectors, device=device)

    def rows(self, count: int) -> "CacheRows":
        """The pool cut into `count` rows of equal capacity. What was written by rows of another count is lost."""
        config, capacity = self._config, self.tokens // count
        shape = (count, config.num_kv_heads, capacity)
        vectors = count * config.num_kv_heads * capacity
        data = self._data[:, :, : vectors * config.head_dim].unflatten(2, (*shape, config.head_dim))
        scales = None if self._scales is None else self._scales[:, :, :vectors].unflatten(2, shape)
        return CacheRows(data, scales)


class CacheRows:
    """Rows of a `KVPool`.

    Attributes:
        rows, capacity: how many there are, and tokens that each has room for.
        layers: of each layer keys and values `[rows, kv_heads, capacity, head_dim]`, and where they are kept in 8
            bits their float32 scales `[rows, kv_heads, capacity]`, else None twice.
    """

    def __init__(self, data: Tensor, scales: Tensor | None) -> None:
        self._parts = [data] if scales is None else [data, scales]
        self.rows, self.capacity = data.shape[2], data.shape[4]
        self.layers = [
            (*data[layer], *((None, None) if scales is None else scales[layer])) for layer in range(len(data))
        ]

    def keep(self, rows: Sequence[int]) -> None:
        """Move these rows, in ascending order, to the front."""
        for part in self._parts:
            for new, old in enumerate(rows):
                if new != old:
                    part[:, :, new] = part[:, :, old]


def stored_dtype(kv_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """What a `kv_dtype` means beside activations of `dtype`.

    Raises:
        UsageError: not one of `KV_DTYPES`.
    """
    if kv_dtype not in KV_DTYPES:
        raise UsageError(f"kv_dtype is {kv_dtype!r}: give {', '.join(KV_DTYPES)}")
    return {"auto": dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[kv_dtype]


def token_bytes(config: ModelConfig, dtype: torch.dtype, kv_dtype: str) -> int:
    """Bytes that a token takes in a `KVPool`."""
    stored = stored_dtype(kv_dtype, dtype)
    vector = config.head_dim * stored.itemsize + (0 if stored == dtype else 4)
    return config.num_layers * 2 * config.num_kv_heads * vector
