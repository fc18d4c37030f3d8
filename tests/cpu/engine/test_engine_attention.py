"""Pieces of prompts and single tokens over blocks: as attention over the whole sequences."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from dense_configs import with_traits
from engine_models import SMALL

from warpbus.engine.attention import DecodeAttention, PrefillAttention
from warpbus.engine.blocks import BLOCK
from warpbus.engine.joined_spans import ChunkSpan
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.positions import RopeAngles
from warpbus.models.layers import CausalAttention, Rotary, rotate

CPU = torch.device("cpu")
TABLES = [[3, 7], [5, 1], [2, 8]]  # the blocks of three sequences
LENGTHS = [40, 7, 33]
CONFIG = with_traits(SMALL, num_layers=2, num_heads=4, head_dim=8, rope=replace(SMALL.rope, rotary_dim=8))


@pytest.fixture(params=[1, 2, 4])
def config(request):
    return with_traits(CONFIG, num_kv_heads=request.param)


def drawn(config):
    """Projections of each sequence, not rotated yet, `[tokens, heads + 2 * kv_heads, head_dim]`."""
    generator = torch.Generator().manual_seed(0)
    heads = config.attention.num_heads + 2 * config.attention.num_kv_heads
    return [torch.randn(length, heads, 8, generator=generator) for length in LENGTHS]


def expected_of(config, qkv):
    """Attention of a whole sequence `[tokens, heads * head_dim]`."""
    positions = torch.arange(len(qkv))[None]
    angles = Rotary(config.rope)(positions, torch.float32)
    q, k, v = qkv[None].split(
        (config.attention.num_heads, config.attention.num_kv_heads, config.attention.num_kv_heads), dim=2
    )
    q, k = (rotate(x, angles, config.rope.interleaved) for x in (q, k))
    return CausalAttention().attend(0, q, k, v, positions)[0].flatten(-2)


class Cached:
    """Three sequences in a cache, read in pieces or token by token."""

    def __init__(self, config, kv_dtype="auto"):
        self.config = config
        self.cache = KVCache(config, 9, device=CPU, dtype=torch.float32, kv_dtype=kv_dtype)
        self.cache.commit(9)
        for layer in self.cache.layers:  # what nobody wrote is poison where it is read
            for part in layer:
                if part is not None and part.dtype == torch.float32:
                    part.fill_(100.0)
        self.table = Rotary(config.rope).table(64, CPU)
        self.qkv = drawn(config)

    def slots(self, which, start, end):
        return [TABLES[which][at // BLOCK] * BLOCK + at % BLOCK for at in range(start, end)]

    def pieces(self, *pieces):
        """`(which, start, end)`, those from 0 on first; what each of their tokens attends to."""
        spans, flat, positions, slots = [], [], [], []
        for which, start, end in pieces:
            begin = len(positions)
            flat.append(self.qkv[which][start:end])
            positions += range(start, end)
            slots += self.slots(which, start, end)
            blocks = torch.tensor(TABLES[which][: -(-end // BLOCK)], dtype=torch.int32) if start else None
            spans.append(ChunkSpan(begin, len(positions), start, blocks))
        row_positions = torch.tensor(positions, dtype=torch.int32)
        angles = RopeAngles(self.table, row_positions)
        attention = PrefillAttention(self.config, angles, self.cache, torch.tensor(slots), spans)
        found = attention.attend_fused(1, torch.cat(flat).flatten(-2)[None])[0]
        return [found[span.begin : span.end] for span in spans]

    def tokens(self, *tokens, stored=False):
        """`(which, position)` each; what they attend to."""
        rows = torch.stack([self.qkv[which][at] for which, at in tokens]).flatten(-2)[:, None]
        positions = torch.tensor([at for _, at in tokens], dtype=torch.int32)
        blocks = torch.tensor([TABLES[which] for which, _ in tokens], dtype=torch.int32)
        slots = torch.tensor([self.slots(which, at, at + 1)[0] for which, at in tokens]) if stored else None
        attention = DecodeAttention(self.config, self.table, self.cache, positions, blocks, 2 * BLOCK, slots)
        return attention.attend_fused(1, rows)[:, 0]


def test_whole_prompts_of_different_lengths(config):
    cached = Cached(config)
    found = cached.pieces(*((which, 0, length) for which, length in enumerate(LENGTHS)))
    for which, attended in enumerate(found):
        torch.testing.assert_close(attended, expected_of(config, cached.qkv[which]))


@pytest.mark.parametrize("cuts", [(20,), (32,), (1, 2, 33), (31, 39)])
def test_a_prompt_in_pieces_attends_as_a_whole(config, cuts):
    """Beside another prompt that begins, in each of its steps."""
    cached = Cached(config)
    expected, bounds = expected_of(config, cached.qkv[0]), [0, *cuts, LENGTHS[0]]
    for start, end in pairwise(bounds):
        others = [(1, 0, LENGTHS[1])]
        mine = (0, start, end)
        found = cached.pieces(*([mine, *others] if start == 0 else [*others, mine]))
        torch.testing.assert_close(found[0 if start == 0 else 1], expected[start:end])
        torch.testing.assert_close(found[1 if start == 0 else 0], expected_of(config, cached.qkv[1]))


def test_a_piece_reads_what_another_of_the_same_step_stores(config, monkeypatch):
    """Sequences that share their first block, whose one step computes it and what follows it."""
    monkeypatch.setattr("test_engine_attention.TABLES", [*TABLES[:2], [TABLES[0][0], 8]])
    cached = Cached(config)
    cached.qkv[2][:BLOCK] = cached.qkv[0][:BLOCK]
    found = cached.pieces((0, 0, 40), (2, BLOCK, 33))
    torch.testing.assert_close(found[1], expected_of(config, cached.qkv[2])[BLOCK:])


@pytest.mark.parametrize("stored", [False, True])
def test_steps_attend_to_their_own_sequence(config, stored):
    cached = Cached(config)
    starts = [30, 1, 32]
    cached.pieces(*((which, 0, start) for which, start in enumerate(starts)))
    expected = [expected_of(config, qkv) for qkv in cached.qkv]
    for step in range(10):
        rows = [(which, start + step) for which, start in enumerate(starts) if start + step < LENGTHS[which]]
        for (which, at), attended in zip(rows, cached.tokens(*rows, stored=stored), strict=True):
            torch.testing.assert_close(attended, expected[which][at])


def test_tokens_that_follow_each_other_in_one_step(config):
    """As guesses do, and prompts in a graph."""
    cached = Cached(config)
    cached.pieces((0, 0, 29))
    rows = [(0, at) for at in range(29, 36)] + [(1, at) for at in range(LENGTHS[1])]
    found = cached.tokens(*rows, stored=True)
    torch.testing.assert_close(found[:7], expected_of(config, cached.qkv[0])[29:36])
    torch.testing.assert_close(found[7:], expected_of(config, cached.qkv[1]))


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("int8", 0.02), ("fp8", 0.1), ("int4", 0.3)])
def test_a_cache_of_codes_is_nearly_as_good(config, kv_dtype, tolerance):
    cached = Cached(config, kv_dtype)
    first = cached.pieces((0, 0, 20))[0]
    second = cached.pieces((0, 20, 38))[0]
    third = cached.tokens((0, 38))
    fourth = cached.tokens((0, 39), stored=True)
    found = torch.cat([first, second, third, fourth])
    torch.testing.assert_close(found, expected_of(config, cached.qkv[0]), atol=tolerance, rtol=tolerance)
