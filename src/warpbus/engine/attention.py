"""Attention over the paged KV cache: for chunks of prompts (prefill) and for single new tokens (decode)."""

import functools
from collections import abc

import torch
from torch import Tensor

from warpbus.engine.blocks import BLOCK
from warpbus.engine.chunk_attention import attend_chunk, causal_mask, rounded_up
from warpbus.engine.joined_spans import ChunkSpan, JoinedSpans, join_spans
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.positions import RopeAngles, RowPositions
from warpbus.kernels.ops import dsa, mla
from warpbus.kernels.ops.attention import decode_attention
from warpbus.kernels.ops.cache import gather_cache
from warpbus.kernels.ops.dsa import index_rope_and_cache, index_scores, index_select
from warpbus.kernels.ops.latent_cache import gather_latents
from warpbus.kernels.ops.mla import mla_attention, mla_queries, mla_rope_and_cache
from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.kernels.reference.cache import INT4
from warpbus.models import ModelConfig
from warpbus.models.layers import FusedAttention, IndexFeatures, LatentAttention, select_tokens

_Layer = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""A layer's cache: keys, values, and their scales."""

_SCORES_AT_ONCE = 2**24  # of an indexer for a chunk of a prompt, in float32
_LISTED_ROWS = 256  # of a chunk, that attend to lists of slots at a time: their sums of parts take memory


class PrefillAttention(FusedAttention):
    """Attention of chunks of several prompts; the keys and values of all chunks are stored before any attends.

    Args:
        config: the model's shape.
        angles: the rotary angles of the tokens.
        cache: its memory is committed for the blocks.
        slot_mapping: int64 `[tokens]`: block * BLOCK + offset within the block, on the device.
        spans: the chunks, in the order of their tokens, without gaps.

    Attributes:
        results: `[1, tokens, features]`: where the next call may put what it returns; None: in memory of its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        angles: RopeAngles,
        cache: KVCache,
        slot_mapping: Tensor,
        spans: abc.Sequence[ChunkSpan],
    ) -> None:
        self._config = config
        self._angles = angles
        self._cache = cache
        self._slot_mapping = slot_mapping
        self._spans = spans
        # Of each chunk the tokens that the last layer with an indexer has selected, as bool `[tokens, keys]` or, where
        # there are kernels, as slots, int32 `[tokens, top_k]`; None: all.
        self._selected: list[Tensor | None] = [None] * len(spans)
        self._joined_spans: tuple[list[JoinedSpans], list[ChunkSpan]] | None = None
        self.results: Tensor | None = None

    def attend_fused(self, layer: int, qkv_btr: Tensor) -> Tensor:
        config, angles = self._config, self._angles
        stored = self._cache.layers[layer]
        q, k, v = rope_and_cache(
            angles.ordered(qkv_btr[0]),
            angles.table,
            angles.positions,
            self._slot_mapping,
            *stored,
            self._cache.fixed_scales[layer],
            heads=config.attention.num_heads,
            interleaved=config.rope.interleaved,
        )
        joined, alone = self._joined(q, expanded=False)
        attended = torch.empty_like(q) if self.results is None else self.results.view(q.shape)
        for span in alone:
            self._attend_alone(span, q, k, v, stored, attended)
        for group in joined:
            attended = self._attend_joined(group, q, k, v, stored, attended)
        return attended.flatten(-2)[None]

    def _attend_alone(self, span: ChunkSpan, q: Tensor, k: Tensor, v: Tensor, stored: _Layer, attended: Tensor) -> None:
        part = span.part
        keys, values = k[part], v[part]
        if span.blocks is not None:
            keys, values = self._read(stored, span.blocks, span.seen, q.dtype)
        first = min(max(0, span.bidirectional - span.start), span.end - span.begin)
        if first:
            seen = span.prefix_length + span.bidirectional
            attended[part][:first] = attend_chunk(q[part][:first], keys[:seen], values[:seen], causal=False)
        if first < span.end - span.begin:
            attended[part][first:] = attend_chunk(q[part][first:], keys, values, causal=True)

    def _attend_joined(
        self, group: JoinedSpans, q: Tensor, k: Tensor, v: Tensor, stored: _Layer, attended: Tensor
    ) -> Tensor:
        """As `JoinedSpans.attend`. The keys and values are freed before another group's are read."""
        keys, values, key_scales, value_scales = stored
        keys, values = group.keys(k, keys, key_scales), group.keys(v, values, value_scales)
        return group.attend(q, keys, values, attended)

    def attend_latent(
        self,
        layer: int,
        attention: LatentAttention,
        q_bthd: Tensor,
        latent_btd: Tensor,
        index: IndexFeatures | None,
    ) -> Tensor:
        cached, spec, angles = self._cache.layers[layer][0], attention.spec, self._angles
        q = q_bthd[0]
        latent = mla_rope_and_cache(
            q,
            latent_btd[0],
            attention.kv_a_norm.weight,
            angles.table,
            angles.positions,
            self._slot_mapping,
            cached,
            eps=attention.kv_a_norm.eps,
            interleaved=attention.rope.interleaved,
        )
        if index is not None:
            keys = self._cache.index_keys[layer]
            index = _stored_index(attention, index, angles.table, angles.positions, self._slot_mapping, keys)
            self._select(attention, index, keys)
        if any(selected is not None for selected in self._selected) or spec.value_dim != spec.query_dim:
            outputs = [
                self._attend_span(attention, q, latent, cached, span, selected)
                for span, selected in zip(self._spans, self._selected, strict=True)
            ]
            return torch.cat(outputs).flatten(-2)[None]
        joined, alone = self._joined(q, expanded=True)
        attended = torch.empty_like(q) if self.results is None else self.results.view(q.shape)
        for span in alone:
            attended[span.part] = self._attend_span(attention, q, latent, cached, span, None)
        for group in joined:
            expanded = attention.expand(group.latents(latent, cached, spec.kv_rank))
            attended = group.attend(q, *expanded, attended)
            del expanded  # before those of another group are there
        return attended.flatten(-2)[None]

    def _joined(self, q: Tensor, *, expanded: bool) -> tuple[list[JoinedSpans], list[ChunkSpan]]:
        """See `join_spans`: the same chunks in each layer."""
        if self._joined_spans is None:
            self._joined_spans = join_spans(self._spans, q, expanded=expanded)
        return self._joined_spans

    def _attend_span(
        self,
        attention: LatentAttention,
        q: Tensor,
        latent: Tensor,
        cached: Tensor,
        span: ChunkSpan,
        selected: Tensor | None,
    ) -> Tensor:
        """Attention of one chunk, `[tokens, heads, value_dim]`."""
        if selected is not None and selected.dtype == torch.int32:
            return _attend_listed(attention, q[span.part], span, cached, selected)
        if span.blocks is None:
            queries, latents = q[span.part], latent[span.part]
            if selected is None:  # rounded up before they are expanded, which is much more to copy
                queries, latents = rounded_up(queries), rounded_up(latents)
            keys, values = attention.expand(latents)
            attended = attend_chunk(queries, keys, values, causal=True, selected=selected)
            return attended[: span.end - span.begin]
        # Absorbed: keys and values of all heads would take much more memory than the latents.
        spec = attention.spec
        keys = gather_latents(cached, span.blocks, span.seen, spec.kv_rank, spec.rope_dim, q.dtype)
        keys = keys.expand(-1, spec.num_heads, -1)
        queries, values = attention.absorb(q[span.part]), keys[..., : spec.kv_rank]
        scale = spec.query_dim**-0.5
        attended = attend_chunk(queries, keys, values, causal=True, scale=scale, selected=selected)
        return attention.outputs(attended)

    def _select(self, attention: LatentAttention, index: IndexFeatures, cached: Tensor | None) -> None:
        """Select the tokens that the chunks attend to, by the index keys of the chunks and the cached ones."""
        assert cached is not None
        assert attention.spec.indexer is not None
        top_k = attention.spec.indexer.top_k
        for at, span in enumerate(self._spans):
            part, length = span.part, span.seen
            if length <= top_k:
                continue
            if _has_sparse_kernels(attention, index):
                self._selected[at] = _selected_slots(index, span, self._blocks_of(span), cached, top_k)
                continue
            keys = index.k[part]
            if span.blocks is not None:
                keys = gather_cache(cached, None, span.blocks, length, index.k.dtype)[:, 0]
            causal = causal_mask(span.end - span.begin, length, keys.device)
            self._selected[at] = select_tokens(
                index.q[None, part], index.weights[None, part], keys[None], causal, top_k
            )[0]

    def _blocks_of(self, span: ChunkSpan) -> Tensor:
        """The block table of a chunk's sequence, int32 `[n]`."""
        if span.blocks is not None:
            return span.blocks
        return (self._slot_mapping[span.part][::BLOCK] // BLOCK).int()

    def _read(
        self,
        stored: _Layer,
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
    """Attention of single new tokens, in one kernel: rotation, storing and attention.

    Args:
        config: the model's shape.
        table: the rotary table (`Rotary.table`).
        cache: its memory is committed for the blocks.
        positions: int32 `[batch]`, of the new tokens, on the device.
        blocks: int32 `[batch, n]`, the block table of each token's sequence, on the device.
        limit: greater than the largest position, at most n * BLOCK.
        slot_mapping: int64 `[batch]`, block * BLOCK + offset: given if several tokens may belong to one sequence; a
            kernel of its own then stores all of them first, as it does if the cache has fixed scales or 4-bit codes.
    """

    def __init__(
        self,
        config: ModelConfig,
        table: Tensor,
        cache: KVCache,
        positions: Tensor,
        blocks: Tensor,
        limit: int,
        slot_mapping: Tensor | None = None,
    ) -> None:
        self._config = config
        self._table = table
        self._cache = cache
        self._positions = positions
        self._blocks = blocks
        self._limit = limit
        self._slot_mapping = slot_mapping
        # The slots of the tokens that the last layer with an indexer has selected; None: all tokens.
        self._selected: Tensor | None = None
        self._last: Tensor | None = None

    def attend_fused(self, layer: int, qkv_btr: Tensor) -> Tensor:
        config = self._config
        stored, qkv = self._cache.layers[layer], qkv_btr[:, 0]
        heads, interleaved = config.attention.num_heads, config.rope.interleaved
        fixed = self._cache.fixed_scales[layer]
        stores_first = self._slot_mapping is not None or fixed is not None or stored[0].dtype == INT4
        if stores_first:
            of_cache = self._slots, *stored, fixed
            rope_and_cache(qkv, self._table, self._positions, *of_cache, heads=heads, interleaved=interleaved)
        attended = decode_attention(
            qkv,
            self._table,
            self._positions,
            self._blocks,
            *stored,
            heads=heads,
            interleaved=interleaved,
            limit=self._limit,
            stored=stores_first,
            # Positions, block tables and cached tokens are complete before the kernel starts.
            inputs_ready=not stores_first,
        )
        return attended.view(len(qkv_btr), 1, -1)

    def attend_latent(
        self,
        layer: int,
        attention: LatentAttention,
        q_bthd: Tensor,
        latent_btd: Tensor,
        index: IndexFeatures | None,
    ) -> Tensor:
        positions, cached = self._positions, self._cache.layers[layer][0]
        q = _absorbed(attention, q_bthd[:, 0], latent_btd[:, 0], self._table, positions, self._slots, cached)
        if index is not None:
            self._selected = self._select(attention, index, self._cache.index_keys[layer])
        if self._selected is not None:
            limit = self._selected.shape[1]
            last = self._last_selected(limit)
            return _attend_rows(attention, q, last, self._selected, cached, limit, listed=True)
        inputs_ready = self._slot_mapping is None
        return _attend_rows(attention, q, positions, self._blocks, cached, self._limit, inputs_ready=inputs_ready)

    def _select(self, attention: LatentAttention, index: IndexFeatures, keys: Tensor | None) -> Tensor | None:
        """Store the index keys; the slots of the tokens that rows attend to, int32 `[batch, top_k]`; None for all."""
        assert attention.spec.indexer is not None
        positions, top_k = self._positions, attention.spec.indexer.top_k
        index = _stored_index(attention, index, self._table, positions, self._slots, keys)
        if self._limit <= top_k:
            return None
        assert keys is not None
        scores = index_scores(index.q, index.weights, positions, self._blocks, keys, limit=self._limit)
        return index_select(scores, positions, self._blocks, top_k=top_k, block=BLOCK)

    def _last_selected(self, top_k: int) -> Tensor:
        """The index of the last selected token of each row, int32 `[batch]`: the same in all layers."""
        if self._last is None:
            self._last = self._positions.clamp(max=top_k - 1)
        return self._last

    @functools.cached_property
    def _slots(self) -> Tensor:
        """The slots of the new tokens, int64 `[batch]`."""
        if self._slot_mapping is not None:
            return self._slot_mapping
        block = self._blocks.gather(1, (self._positions // BLOCK)[:, None].long())[:, 0]
        return block.long() * BLOCK + self._positions % BLOCK


class PositionedAttention(FusedAttention):
    """As `DecodeAttention`, where rope angles, slot mapping and visible length are not all given by the position.

    Args:
        positions: of the tokens.
        config, cache, blocks, limit: as of `DecodeAttention`.
    """

    def __init__(
        self, config: ModelConfig, positions: RowPositions, cache: KVCache, blocks: Tensor, limit: int
    ) -> None:
        self._config = config
        self._row_positions = positions
        self._cache = cache
        self._blocks = blocks
        self._limit = limit

    def attend_fused(self, layer: int, qkv_btr: Tensor) -> Tensor:
        positions, stored = self._row_positions, self._cache.layers[layer]
        heads, interleaved = self._config.attention.num_heads, self._config.rope.interleaved
        qkv, angles = positions.angles.ordered(qkv_btr[:, 0]), positions.angles
        of_cache = positions.slot_mapping, *stored, self._cache.fixed_scales[layer]
        q, _, _ = rope_and_cache(qkv, angles.table, angles.positions, *of_cache, heads=heads, interleaved=interleaved)
        queries = q.flatten(1)
        attended = decode_attention(
            torch.cat((queries, qkv[:, queries.shape[1] :]), dim=1),
            positions.identity,
            positions.last_visible,
            self._blocks,
            *stored,
            heads=heads,
            interleaved=interleaved,
            limit=self._limit,
            stored=True,
        )
        return attended.view(len(qkv_btr), 1, -1)

    def attend_latent(
        self,
        layer: int,
        attention: LatentAttention,
        q_bthd: Tensor,
        latent_btd: Tensor,
        index: IndexFeatures | None,
    ) -> Tensor:
        assert index is None  # sequences with positions of this kind have prefixes, which indexers do not support
        positions, cached = self._row_positions, self._cache.layers[layer][0]
        q = _absorbed(
            attention,
            q_bthd[:, 0],
            latent_btd[:, 0],
            positions.angles.table,
            positions.angles.positions,
            positions.slot_mapping,
            cached,
        )
        return _attend_rows(attention, q, positions.last_visible, self._blocks, cached, self._limit)


def _stored_index(
    attention: LatentAttention,
    index: IndexFeatures,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor | None,
) -> IndexFeatures:
    """Flatten the features of an indexer to `[tokens, ...]`, apply RoPE to them, and store the keys in the cache."""
    assert keys is not None
    q, k, weights = (each.flatten(0, 1) for each in (index.q, index.k, index.weights))
    q, k = index_rope_and_cache(q, k, table, positions, slots, keys, interleaved=attention.rope.interleaved)
    return IndexFeatures(q, k, weights)


def _has_sparse_kernels(attention: LatentAttention, index: IndexFeatures) -> bool:
    """Whether an indexer and attention to the tokens that it selects have kernels."""
    spec, dtype, device = attention.spec, index.q.dtype, index.q.device
    heads, size = index.q.shape[-2:]
    return dsa.has_kernel(dtype, heads, size, device) and mla.has_kernel(
        dtype, spec.nope_dim, spec.rope_dim, spec.kv_rank, spec.value_dim, device
    )


def _selected_slots(index: IndexFeatures, span: ChunkSpan, blocks: Tensor, keys: Tensor, top_k: int) -> Tensor:
    """The slots of the tokens that a chunk's tokens attend to, int32 `[tokens, top_k]`."""
    found = []
    for rows, positions in _row_pieces(span, _SCORES_AT_ONCE // span.seen, keys.device):
        tables = blocks.expand(len(positions), -1)
        q, weights = (each[span.part][rows] for each in (index.q, index.weights))
        scores = index_scores(q, weights, positions, tables, keys, limit=span.seen)
        found.append(index_select(scores, positions, tables, top_k=top_k, block=BLOCK))
    return torch.cat(found)


def _attend_listed(
    attention: LatentAttention, q_thd: Tensor, span: ChunkSpan, cached: Tensor, selected: Tensor
) -> Tensor:
    """Attention of a chunk's rotated queries to the tokens in selected slots: `[tokens, heads, value_dim]`."""
    limit, found = selected.shape[1], []
    for rows, positions in _row_pieces(span, _LISTED_ROWS, q_thd.device):
        last = positions.clamp(max=limit - 1)
        queries = attention.absorb(q_thd[rows])
        attended = _attend_rows(attention, queries, last, selected[rows], cached, limit, listed=True)
        found.append(attended.unflatten(-1, (attention.spec.num_heads, -1))[:, 0])
    return torch.cat(found)


def _row_pieces(span: ChunkSpan, most: int, device: torch.device) -> abc.Iterator[tuple[slice, Tensor]]:
    """The tokens of a chunk, up to `most` at a time, as rows: their indices in the chunk, and their positions."""
    count, size = span.end - span.begin, max(1, most)
    first = span.prefix_length + span.start
    for begin in range(0, count, size):
        end = min(begin + size, count)
        yield slice(begin, end), torch.arange(first + begin, first + end, dtype=torch.int32, device=device)


def _absorbed(
    attention: LatentAttention,
    q_thd: Tensor,
    latent_td: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    cached: Tensor,
) -> Tensor:
    """Store the latents of single tokens; their queries in the absorbed form, `[tokens, heads, kv_rank + rope_dim]`."""
    return mla_queries(
        q_thd,
        latent_td,
        attention.kv_a_norm.weight,
        attention.by_head,
        table,
        positions,
        slots,
        cached,
        eps=attention.kv_a_norm.eps,
        interleaved=attention.rope.interleaved,
    )


def _attend_rows(
    attention: LatentAttention,
    q_thd: Tensor,
    positions: Tensor,
    blocks: Tensor,
    cached: Tensor,
    limit: int,
    *,
    listed: bool = False,
    inputs_ready: bool = False,
) -> Tensor:
    """Attention of single tokens to the latents up to `positions`, in the absorbed form: `[tokens, 1, features]`.

    Arguments as of `mla_attention`.
    """
    spec = attention.spec
    attended = mla_attention(
        q_thd,
        positions,
        blocks,
        cached,
        attention.by_head,
        value_dim=spec.value_dim,
        scale=spec.query_dim**-0.5,
        limit=limit,
        listed=listed,
        inputs_ready=inputs_ready,
    )
    return attended.flatten(1)[:, None]
