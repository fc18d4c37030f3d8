"""What the layers attend to while generating: blocks of the cache, for pieces of prompts or for single new tokens."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from warpbus.engine.kv_cache import KVCache
from warpbus.kernels.ops.arguments import HALVES
from warpbus.kernels.ops.attention import decode_attention
from warpbus.kernels.ops.cache import gather_cache
from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.models import ModelConfig
from warpbus.models.layers import FusedAttention

_LARGEST_FLASH = 256  # dimensions of a head that flash attention takes


@dataclass(frozen=True)
class Stretch:
    """A piece of a prompt in a flat list of tokens.

    Attributes:
        begin, end: its tokens in the list.
        start: the position of the first in its sequence.
        blocks: int32 `[n]`, the blocks of the sequence, on the device; None where the piece begins the sequence.
    """

    begin: int
    end: int
    start: int
    blocks: Tensor | None


@dataclass(frozen=True)
class _Lengths:
    """Where sequences begin and end in a list of their queries and in one of their keys."""

    bounds_q: Tensor
    bounds_k: Tensor
    longest_q: int
    longest_k: int
    counts: list[int]

    @classmethod
    def of(cls, bounds_q: list[int], bounds_k: list[int], device: torch.device) -> "_Lengths":
        counts = [end - begin for begin, end in itertools.pairwise(bounds_q)]
        longest_k = max((end - begin for begin, end in itertools.pairwise(bounds_k)), default=0)
        on_device = [torch.tensor(bounds, dtype=torch.int32).to(device) for bounds in (bounds_q, bounds_k)]
        return cls(on_device[0], on_device[1], max(counts, default=0), longest_k, counts)


class PieceAttention(FusedAttention):
    """Attention of pieces of several prompts, all stored before any attends.

    Args:
        config: the model's shape.
        table: the rotary table (`Rotary.table`).
        cache: has memory for the blocks.
        positions: int32 `[tokens]`, on the device.
        slots: int64 `[tokens]`: block * BLOCK + offset within the block, on the device.
        stretches: the pieces, in the order of their tokens, without gaps; those that begin their sequences come first.
    """

    def __init__(
        self,
        config: ModelConfig,
        table: Tensor,
        cache: KVCache,
        positions: Tensor,
        slots: Tensor,
        stretches: Sequence[Stretch],
    ) -> None:
        self._config = config
        self._table = table
        self._cache = cache
        self._positions = positions
        self._slots = slots
        self._flash = table.is_cuda and config.head_dim <= _LARGEST_FLASH
        fresh = [stretch for stretch in stretches if stretch.blocks is None]
        self._going_on = [stretch for stretch in stretches if stretch.blocks is not None]
        self._begun = fresh[-1].end if fresh else 0
        bounds = [0, *(stretch.end for stretch in fresh)]
        # On the device, and once for all layers.
        self._fresh = _Lengths.of(bounds, bounds, table.device)
        self._later = [
            _Lengths.of([0, each.end - each.begin], [0, each.start + each.end - each.begin], table.device)
            for each in self._going_on
        ]

    def attend_fused(self, layer: int, qkv_btr: Tensor) -> Tensor:
        config = self._config
        stored = self._cache.layers[layer]
        q, k, v = rope_and_cache(
            qkv_btr[0],
            self._table,
            self._positions,
            self._slots,
            *stored,
            heads=config.num_heads,
            interleaved=config.rope.interleaved,
        )
        attended = torch.empty_like(q)
        begun = slice(self._begun)
        if self._begun:
            attended[begun] = self._attend(q[begun], k[begun], v[begun], self._fresh)
        for stretch, lengths in zip(self._going_on, self._later, strict=True):
            part = slice(stretch.begin, stretch.end)
            keys, values = self._read(stored, stretch.blocks, lengths.longest_k, q.dtype)
            attended[part] = self._attend(q[part], keys, values, lengths)
        return attended.flatten(-2)[None]

    def _attend(self, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, lengths: "_Lengths") -> Tensor:
        """Causal attention of sequences one after another; the last query of each is that of its last key."""
        if self._flash and q_thd.dtype in HALVES:
            # What torch.nn.attention.varlen calls: its own arguments change from one release to the next.
            attended: Tensor = torch.ops.aten._flash_attention_forward(
                *(q_thd, k_thd, v_thd, lengths.bounds_q, lengths.bounds_k, lengths.longest_q, lengths.longest_k),
                0.0,
                is_causal=True,
                return_debug_mask=False,
            )[0]
            return attended
        if len(lengths.counts) == 1:
            return _causal(q_thd, k_thd, v_thd)
        split = (x.split(lengths.counts) for x in (q_thd, k_thd, v_thd))
        return torch.cat([_causal(q, k, v) for q, k, v in zip(*split, strict=True)])

    def _read(
        self,
        stored: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        blocks: Tensor | None,
        tokens: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        assert blocks is not None
        keys, values, key_scales, value_scales = stored
        return (
            gather_cache(keys, key_scales, blocks, tokens, dtype),
            gather_cache(values, value_scales, blocks, tokens, dtype),
        )


class StepAttention(FusedAttention):
    """Attention of single new tokens, all of it one kernel.

    Args:
        config: the model's shape.
        table: the rotary table (`Rotary.table`).
        cache: has memory for the blocks.
        positions: int32 `[batch]`, of the new tokens, on the device.
        blocks: int32 `[batch, n]`, of each token's sequence, on the device.
        limit: more than the largest position, and no more than `n` blocks hold.
        slots: where several of the tokens may be of one sequence, that is where they are stored: int64 `[batch]`,
            block * BLOCK + offset. They are all stored first.
    """

    def __init__(
        self,
        config: ModelConfig,
        table: Tensor,
        cache: KVCache,
        positions: Tensor,
        blocks: Tensor,
        limit: int,
        slots: Tensor | None = None,
    ) -> None:
        self._config = config
        self._table = table
        self._cache = cache
        self._positions = positions
        self._blocks = blocks
        self._limit = limit
        self._slots = slots

    def attend_fused(self, layer: int, qkv_btr: Tensor) -> Tensor:
        config = self._config
        stored, qkv = self._cache.layers[layer], qkv_btr[:, 0]
        heads, interleaved = config.num_heads, config.rope.interleaved
        if self._slots is not None:
            rope_and_cache(
                qkv, self._table, self._positions, self._slots, *stored, heads=heads, interleaved=interleaved
            )
        attended = decode_attention(
            qkv,
            self._table,
            self._positions,
            self._blocks,
            *stored,
            heads=heads,
            interleaved=interleaved,
            limit=self._limit,
            stored=self._slots is not None,
        )
        return attended.view(len(qkv_btr), 1, -1)


def _causal(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> Tensor:
    """Causal attention of `[tokens, heads, head_dim]` whose last query is that of the last key."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_thd, k_thd, v_thd))
    tokens, end = q.shape[2], k.shape[2]
    mask = None if tokens == end else causal_lower_right(tokens, end)
    grouped = q.shape[1] != k.shape[1]
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return attended[0].transpose(0, 1)
