"""Attention of chunks of several prompts in one call (FlashAttention-2 with variable lengths; Dao, 2023)."""

from collections import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.engine.chunk_attention import LONGEST_ALONE, attend_chunk, attends_in_parts
from warpbus.engine.logits import to_device
from warpbus.kernels.ops.cache import gather_cache
from warpbus.kernels.ops.latent_cache import gather_latents
from warpbus.models.layers.packed_attention import can_pack

MOST_EXPANDED = 32_768
"""Tokens whose latents are expanded at a time to keys and values of all heads; a chunk that sees more is not joined."""

MOST_GATHERED = 8192
"""Tokens whose keys and values are read out of the cache at a time, if several chunks see them."""


@dataclass(frozen=True)
class ChunkSpan:
    """A chunk of a prompt in a flat list of tokens.

    Attributes:
        begin, end: its tokens in the list are `begin` to `end - 1`.
        start: the position of its first token in the sequence.
        blocks: int32 `[n]`, the block table of the sequence, on the device; None if nothing is cached before the chunk.
        bidirectional: how many leading tokens of the sequence attend to each other in both directions.
        prefix_length: cache positions before the first token; all tokens attend to them.
    """

    begin: int
    end: int
    start: int
    blocks: Tensor | None
    bidirectional: int = 0
    prefix_length: int = 0

    @property
    def part(self) -> slice:
        """Its tokens in the list."""
        return slice(self.begin, self.end)

    @property
    def seen(self) -> int:
        """Cache positions up to its end."""
        return self.prefix_length + self.start + self.end - self.begin


def join_spans(
    spans: abc.Sequence[ChunkSpan], q: Tensor, *, expanded: bool
) -> tuple[list["JoinedSpans"], list[ChunkSpan]]:
    """The chunks of a step that are attended in one call per group, and those that are attended alone.

    A long chunk behind many cached tokens, which attends in parts, is a group by itself.

    Args:
        spans: all chunks of the step.
        q: queries of any layer, `[tokens, heads, head_dim]`.
        expanded: keys and values are made from latents, of up to `MOST_EXPANDED` tokens per group; else those that are
            cached are read, of up to `MOST_GATHERED` tokens per group of several chunks.
    """
    groups: list[list[ChunkSpan]] = []
    in_parts: list[list[ChunkSpan]] = []  # each is a group by itself
    taken, most = 0, MOST_EXPANDED if expanded else MOST_GATHERED
    for span in spans:
        long = span.blocks is None and span.end - span.begin >= LONGEST_ALONE
        if not can_pack(q) or span.bidirectional or long or (expanded and span.seen > most):
            continue
        if attends_in_parts(q, span.end - span.begin, span.seen):
            in_parts.append([span])
            continue
        takes = span.seen if expanded or span.blocks is not None else 0
        if not groups or taken + takes > most:
            groups.append([])
            taken = 0
        groups[-1].append(span)
        taken += takes
    groups = [*in_parts, *(group for group in groups if len(group) > 1 or group[0].blocks is not None)]
    alone = [span for span in spans if not any(span in group for group in groups)]
    whole = len(groups) == 1 and not alone
    return [JoinedSpans(group, q.device, whole=whole) for group in groups], alone


class JoinedSpans:
    """Chunks that are attended in one call.

    Args:
        spans: the chunks.
        device: of the queries.
        whole: the step has no other chunks.
    """

    def __init__(self, spans: list[ChunkSpan], device: torch.device, *, whole: bool) -> None:
        self._spans = spans
        self._whole = whole
        lengths = [span.end - span.begin for span in spans], [span.seen for span in spans]
        self._longest = max(lengths[0]), max(lengths[1])
        ends = [[sum(each[:count]) for count in range(len(each) + 1)] for each in lengths]
        self._bounds = to_device(ends, torch.int32, device)

    def keys(self, new: Tensor, stored: Tensor, scales: Tensor | None) -> Tensor:
        """The keys or values that the chunks attend to, one chunk behind the other: `[keys, kv_heads, features]`.

        Args:
            new: of the tokens of the step, `[tokens, kv_heads, features]`.
            stored, scales: a layer's cache, see `gather_cache`.
        """
        return self._seen(new, lambda blocks, tokens: gather_cache(stored, scales, blocks, tokens, new.dtype))

    def latents(self, new: Tensor, stored: Tensor, rank: int) -> Tensor:
        """The latents and rotary keys that the chunks attend to, as `keys`: `[keys, rank + rope_dim]`.

        Args:
            new: of the tokens of the step, as they are read from the cache, `[tokens, rank + rope_dim]`.
            stored: a layer's cache, see `gather_latents`.
            rank: features of a latent.
        """

        def gathered(blocks: Tensor, tokens: int) -> Tensor:
            return gather_latents(stored, blocks, tokens, rank, new.shape[1] - rank, new.dtype)[:, 0]

        return self._seen(new, gathered)

    def _seen(self, new: Tensor, gathered: abc.Callable[[Tensor, int], Tensor]) -> Tensor:
        """What the chunks attend to: of a sequence with cached blocks, what `gathered` reads of so many tokens."""
        if self._whole and all(span.blocks is None for span in self._spans):
            return new
        parts = [new[span.part] if span.blocks is None else gathered(span.blocks, span.seen) for span in self._spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, attended: Tensor) -> Tensor:
        """Causal attention of the joined chunks' queries.

        Args:
            q: `[tokens, heads, head_dim]` of all tokens of the step.
            keys, values: `[keys, kv_heads, head_dim]`, as of `keys`.
            attended: like q; the results of the joined chunks are written to it.

        Returns:
            the results: `attended`, or, if the step has no other chunks, perhaps another tensor.
        """
        span = self._spans[0]
        if len(self._spans) == 1 and attends_in_parts(q, span.end - span.begin, span.seen):
            attended[span.part] = attend_chunk(q[span.part], keys, values, causal=True)
            return attended
        queries = q if self._whole else torch.cat([q[span.part] for span in self._spans])
        flash = torch.ops.aten._flash_attention_forward
        found = flash(queries, keys, values, *self._bounds, *self._longest, 0.0, True, False)[0]
        if self._whole:
            results: Tensor = found
            return results
        for span, part in zip(self._spans, found.split([each.end - each.begin for each in self._spans]), strict=True):
            attended[span.part] = part
        return attended
