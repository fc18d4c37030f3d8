"""Keys and values, in blocks of tokens, in memory that grows.

Knows nothing of tokens, text, sampling or requests: layers, blocks and bytes are all it sees. Which block holds what is
the business of `blocks` and `scheduler`.
"""

from collections import abc

import torch
from torch import Tensor

from warpbus.cuda.vmm import Arena
from warpbus.engine.blocks import BLOCK
from warpbus.engine.logits import to_device
from warpbus.errors import DeviceError, UsageError
from warpbus.models import ModelConfig

KV_DTYPES = ("auto", "int8", "fp8")
"""How a cache may be kept: in the dtype of the activations, or in 8 bits with a scale for each head's vector."""

_GROWTH = 128 * 2**20  # bytes at once: mapping costs by the piece, and each is zeroed


class KVCache:
    """Room for the keys and values of `count` blocks, of which the first ones have memory.

    A block holds all layers of its tokens: `[layers, 2, kv_heads, BLOCK, head_dim]`. So the cache grows and shrinks at
    one end, and addresses stay: captured graphs go on working.

    Args:
        config: the model's shape, or of one process's part of it.
        count: blocks for which addresses are reserved.
        dtype: of the activations.
        kv_dtype: one of `KV_DTYPES`.

    Attributes:
        count: blocks for which addresses are reserved.
        backed: blocks that have memory.
        layers: of each layer keys and values `[count, kv_heads, BLOCK, head_dim]`, and where they are kept in 8 bits
            their float32 scales `[count, kv_heads, BLOCK]`, else None twice. Only backed blocks may be touched.
    """

    def __init__(
        self, config: ModelConfig, count: int, *, device: torch.device, dtype: torch.dtype, kv_dtype: str = "auto"
    ) -> None:
        self.count = count
        self.backed = 0
        stored = stored_dtype(kv_dtype, dtype)
        shape = (count, config.num_layers, 2, config.attention.num_kv_heads, BLOCK)
        self._parts = [_Part((*shape, config.attention.head_dim), stored, device)]
        if stored != dtype:
            self._parts.append(_Part(shape, torch.float32, device))
        self.layers: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []
        for layer in range(config.num_layers):
            keys, values, *scales = (part.data[:, layer, which] for part in self._parts for which in (0, 1))
            key_scales, value_scales = scales or (None, None)
            self.layers.append((keys, values, key_scales, value_scales))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it has now."""
        return sum(part.arena.mapped for part in self._parts)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return sum(part.block_bytes for part in self._parts)

    def back(self, blocks: int) -> int:
        """Give the first `blocks` blocks memory, and some more, or as many as there is memory for; how many have it."""
        if blocks > self.backed:
            more = max(blocks - self.backed, _GROWTH // self.block_bytes)
            for wanted in (min(self.backed + more, self.count), blocks):
                try:
                    self._resize(wanted)
                    break
                except DeviceError:  # it is all there is: whoever asks goes without
                    self._resize(self.backed)
        return self.backed

    def shrink(self, blocks: int) -> None:
        """Return the memory of all but the first `blocks` blocks, as far as it can be returned."""
        self._resize(min(blocks, self.backed))

    def fetch(self, blocks: abc.Sequence[int]) -> list[Tensor]:
        """The content of some blocks, for `store`, in memory of torch's, from which it can go to any device."""
        return [part.rows().index_select(0, to_device(blocks, torch.int64, part.data.device)) for part in self._parts]

    def store(self, blocks: abc.Sequence[int], contents: abc.Sequence[Tensor]) -> None:
        """Fill blocks, which have memory, with what another cache of the same kind held in as many."""
        for part, content in zip(self._parts, contents, strict=True):
            device = part.data.device
            part.rows().index_copy_(0, to_device(blocks, torch.int64, device), content.to(device, non_blocking=True))

    def copy(self, source: int, target: int) -> None:
        """Copy what one block holds into another."""
        for part in self._parts:
            part.rows()[target].copy_(part.rows()[source])

    def close(self) -> None:
        """Return all memory and addresses."""
        self.layers = []
        for part in self._parts:
            part.data = part.data.new_empty(0)
            part.arena.close()

    def _resize(self, blocks: int) -> None:
        for part in self._parts:
            part.arena.resize(blocks * part.block_bytes)
        backed = min(self.count, *(part.arena.mapped // part.block_bytes for part in self._parts))
        if backed > self.backed:
            # Zeros: what a block's tail never held is a number too: nothing comes of it where it counts nothing.
            for part in self._parts:
                part.data[self.backed : backed].view(torch.uint8).zero_()
        self.backed = backed


class _Part:
    """What is kept of all blocks in one element type."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.block_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
        self.arena = Arena(shape[0] * self.block_bytes, device)
        self.data = self.arena.tensor(shape, dtype)

    def rows(self) -> Tensor:
        """The same as int64 `[blocks, elements]`, in which copies are quick whatever the elements are."""
        return self.data.view(len(self.data), -1).view(torch.int64)


def stored_dtype(kv_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """What a `kv_dtype` means beside activations of `dtype`.

    Raises:
        UsageError: not one of `KV_DTYPES`.
    """
    if kv_dtype not in KV_DTYPES:
        raise UsageError(f"kv_dtype is {kv_dtype!r}: give {', '.join(KV_DTYPES)}")
    return {"auto": dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[kv_dtype]


def token_bytes(config: ModelConfig, dtype: torch.dtype, kv_dtype: str) -> int:
    """Bytes that a token takes in a `KVCache`."""
    stored = stored_dtype(kv_dtype, dtype)
    vector = config.attention.head_dim * stored.itemsize + (0 if stored == dtype else 4)
    return config.num_layers * 2 * config.attention.num_kv_heads * vector
