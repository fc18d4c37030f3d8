"""What the layers attend to while generating: blocks of the cache, for pieces of prompts or for single new tokens."""

from collections import abc
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional as F

from warpbus.engine.kv_cache import KVCache
from warpbus.engine.positions import RopeAngles, RowPositions
from warpbus.kernels.ops.attention import decode_attention
from warpbus.kernels.ops.cache import gather_cache
from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.models import ModelConfig
from warpbus.models.layers import FusedAttention


@dataclass(frozen=True)
class ChunkSpan:
    """A piece of a prompt in a flat list of tokens.

    Attributes:
        begin, end: its tokens in the list.
        start: the position of the first in its sequence.
        blocks: int32 `[n]`, the blocks of the sequence, on the device; None where nothing is stored before the piece.
        prompt: so many of the sequence's first tokens see each other in both directions.
        given: places of the cache before the first token, which all attend to.
    """

    begin: int
    end: int
    start: int
    blocks: Tensor | None
    prompt: int = 0
    given: int = 0


class PrefillAttention(FusedAttention):
    """Attention of pieces of several prompts, all stored before any attends.

    Args:
        config: the model's shape.
        turns: by which angles the tokens turn.
        cache: has memory for the blocks.
        slots: int64 `[tokens]`: block * BLOCK + offset within the block, on the device.
        spans: the pieces, in the order of their tokens, without gaps.
    """

    def __init__(
        self,
        config: ModelConfig,
        turns: RopeAngles,
        cache: KVCache,
        slots: Tensor,
        spans: abc.Sequence[ChunkSpan],
    ) -> None:
        self._config = config
        self._turns = turns
        self._cache = cache
        self._slots = slots
        self._spans = spans

    def attend_fused(self, layer: int, qkv_btr: Tensor) -> Tensor:
        config, turns = self._config, self._turns
        stored = self._cache.layers[layer]
        q, k, v = rope_and_cache(
            turns.ordered(qkv_btr[0]),
            turns.table,
            turns.positions,
            self._slots,
            *stored,
            heads=config.attention.num_heads,
            interleaved=config.rope.interleaved,
        )
        attended = torch.empty_like(q)
        for span in self._spans:
            part = slice(span.begin, span.end)
            keys, values = k[part], v[part]
            if span.blocks is not None:
                places = span.given + span.start + span.end - span.begin
                keys, values = self._read(stored, span.blocks, places, q.dtype)
            first = min(max(0, span.prompt - span.start), span.end - span.begin)
            if first:
                seen = span.given + span.prompt
                attended[part][:first] = _attend(q[part][:first], keys[:seen], values[:seen], causal=False)
            if first < span.end - span.begin:
                attended[part][first:] = _attend(q[part][first:], keys, values, causal=True)
        return attended.flatten(-2)[None]

    def _read(
        self,
        stored: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        blocks: Tensor,
        tokens: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        keys, values, key_scales, value_scales = stored
        return (
            gather_cache(keys, key_scales, blocks, tokens, dtype),
            gather_cache(values, value_scales, blocks, tokens, dtype),
        )


class DecodeAttention(FusedAttention):
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
        heads, interleaved = config.attention.num_heads, config.rope.interleaved
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
            settled=self._slots is None,  # what the step is told and earlier ones have stored
        )
        return attended.view(len(qkv_btr), 1, -1)


class PositionedAttention(FusedAttention):
    """As `DecodeAttention`, where rope angles, slot mapping and visible length are not all given by the position.

    Args:
        places: of the tokens.
        config, cache, blocks, limit: as of `DecodeAttention`.
    """

    def __init__(self, config: ModelConfig, places: RowPositions, cache: KVCache, blocks: Tensor, limit: int) -> None:
        self._config = config
        self._places = places
        self._cache = cache
        self._blocks = blocks
        self._limit = limit

    def attend_fused(self, layer: int, qkv_btr: Tensor) -> Tensor:
        places, stored = self._places, self._cache.layers[layer]
        heads, interleaved = self._config.attention.num_heads, self._config.rope.interleaved
        qkv, turns = places.turns.ordered(qkv_btr[:, 0]), places.turns
        q, _, _ = rope_and_cache(
            qkv, turns.table, turns.positions, places.slots, *stored, heads=heads, interleaved=interleaved
        )
        queries = q.flatten(1)
        attended = decode_attention(
            torch.cat((queries, qkv[:, queries.shape[1] :]), dim=1),
            places.still,
            places.reach,
            self._blocks,
            *stored,
            heads=heads,
            interleaved=interleaved,
            limit=self._limit,
            stored=True,
        )
        return attended.view(len(qkv_btr), 1, -1)


def _attend(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, *, causal: bool) -> Tensor:
    """Attention of `[tokens, heads, head_dim]` to all keys; or causal, where the last query is that of the last key."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_thd, k_thd, v_thd))
    if causal and q.shape[2] != k.shape[2]:
        attended = _attend_to_end(q, k, v)
    else:
        grouped = q.shape[1] != k.shape[1]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return attended[0].transpose(0, 1)


def _attend_to_end(q_bhtd: Tensor, k_bhtd: Tensor, v_bhtd: Tensor) -> Tensor:
    """Causal attention of the last tokens of a sequence, `[batch, heads, tokens, head_dim]`, to all of it.

    What `torch.nn.attention.bias.causal_lower_right` is for, which takes a second or two to load.
    """
    tokens, end, size = q_bhtd.shape[2], k_bhtd.shape[2], q_bhtd.shape[3]
    grouped = q_bhtd.shape[1] != k_bhtd.shape[1]
    if q_bhtd.is_cuda and size % 8 == 0:
        asked = SDPAParams(q_bhtd, k_bhtd, v_bhtd, None, 0.0, False, grouped)
        if can_use_flash_attention(asked):
            # Of different lengths, causal means for this operator that the last query is that of the last key.
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            attended: Tensor = flash(q_bhtd, k_bhtd, v_bhtd, 0.0, True, scale=size**-0.5)[0]
            return attended
    mask = torch.ones(tokens, end, dtype=torch.bool, device=q_bhtd.device).tril(end - tokens)
    return F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, attn_mask=mask, enable_gqa=grouped)
