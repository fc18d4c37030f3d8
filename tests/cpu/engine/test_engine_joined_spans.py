"""Chunks of several prompts that are attended together: their groups, and the memory that they take.

FlashAttention runs on a GPU only: its place is taken by PyTorch's attention of each chunk, or by nothing.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from engine_models import LATENT, PROMPTS, SMALL, finish
from live_bytes import LiveBytes
from torch.nn import functional as F

from warpbus.engine import joined_spans, step_memory
from warpbus.engine.attention import PrefillAttention
from warpbus.engine.blocks import BLOCK
from warpbus.engine.engine import Engine, request
from warpbus.engine.joined_spans import ChunkSpan, join_spans
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.positions import RopeAngles
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.step_memory import activation_bytes, expanded_bytes, joined_bytes, read_bytes
from warpbus.models import random_model
from warpbus.models.layers import Rotary

CPU = torch.device("cpu")
SQUARE = replace(
    LATENT,
    layers=tuple(replace(layer, attention=replace(layer.attention, nope_dim=8)) for layer in LATENT.layers),
)
"""Latent attention whose queries are as wide as its values: FlashAttention needs that."""


def flash(q, k, v, q_bounds, k_bounds, *options):
    """FlashAttention of documents, by PyTorch's attention of each."""
    found = []
    for (first, last), (begin, end) in zip(pairwise(q_bounds.tolist()), pairwise(k_bounds.tolist()), strict=True):
        mask = torch.ones(last - first, end - begin, dtype=torch.bool).tril(end - begin - last + first)
        own = (x.transpose(0, 1)[None] for x in (q[first:last], k[begin:end], v[begin:end]))
        attended = F.scaled_dot_product_attention(*own, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        found.append(attended[0].transpose(0, 1))
    return (torch.cat(found),)


@pytest.fixture
def joins(monkeypatch):
    """Has chunks joined on the CPU."""
    monkeypatch.setattr(joined_spans, "can_pack", lambda q: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash, raising=False)


def spans_of(*lengths):
    """Chunks of `(cached, new)` tokens, whose blocks follow each other."""
    spans, begin, block = [], 0, 1
    for cached, new in lengths:
        count = -(-(cached + new) // BLOCK)
        table = torch.arange(block, block + count, dtype=torch.int32) if cached else None
        spans.append(ChunkSpan(begin, begin + new, cached, table))
        begin, block = begin + new, block + count
    return spans, block


def test_long_chunks_that_attend_in_parts_are_groups_by_themselves(joins, monkeypatch):
    monkeypatch.setattr(joined_spans, "attends_in_parts", lambda _, tokens, keys: min(tokens, keys - tokens) >= 200)
    spans, *_ = spans_of((256, 200), (64, 20), (320, 210), (0, 30), (320, 199))
    groups, alone = join_spans(spans, torch.zeros(1, 4, 16), expanded=False)
    assert [group._spans for group in groups] == [[spans[0]], [spans[2]], [spans[1], spans[3], spans[4]]]
    assert alone == []


@pytest.mark.parametrize(
    ("expanded", "lengths", "groups", "alone"),
    [
        (False, [(60, 10), (20, 10), (60, 1)], [[0, 1], [2]], []),
        (False, [(0, 60), (0, 60), (90, 10)], [[0, 1, 2]], []),
        (False, [(600, 10), (20, 10)], [[0], [1]], []),
        (False, [(90, 10), (90, 10), (0, 40)], [[0], [1, 2]], []),
        (False, [(0, 40)], [], [0]),
        (True, [(0, 60), (0, 60), (30, 10)], [[1, 2]], [0]),
        (True, [(0, 50), (0, 50), (600, 10), (30, 10)], [[0, 1], [3]], [2]),
    ],
)
def test_a_group_is_no_larger_than_its_limit(joins, monkeypatch, expanded, lengths, groups, alone):
    for limit in ("MOST_EXPANDED", "MOST_GATHERED"):
        monkeypatch.setattr(joined_spans, limit, 100)
    spans, _ = spans_of(*lengths)
    found, others = join_spans(spans, torch.empty(1, 4, 16), expanded=expanded)
    assert [[spans.index(span) for span in each._spans] for each in found] == groups
    assert [spans.index(span) for span in others] == alone


@pytest.mark.parametrize("most", [40, 100, 8192])
@pytest.mark.parametrize("config", [SMALL, SQUARE], ids=["glm", "latent"])
def test_groups_answer_as_each_prompt_alone(joins, monkeypatch, config, most):
    model = random_model(config, None, "cpu", torch.float32)

    def answers(prompts, **options):
        requests = [request(prompt, tokens=8, params=SamplingParams(temperature=0)) for prompt in prompts]
        finish(Engine(model, **options), requests)
        return [each.token_ids for each in requests]

    with monkeypatch.context() as apart:
        apart.setattr(joined_spans, "can_pack", lambda q: False)
        expected = [answers([prompt])[0] for prompt in PROMPTS]
    for limit in ("MOST_EXPANDED", "MOST_GATHERED"):
        monkeypatch.setattr(joined_spans, limit, most)
    assert answers(PROMPTS) == expected
    assert answers(PROMPTS, max_num_batched_tokens=33) == expected
    assert answers([prompt for prompt in PROMPTS for _ in range(3)]) == [each for each in expected for _ in range(3)]


def peak_bytes(config, lengths):
    """The most bytes that a layer's attention takes at one time beside the cache, without its results."""
    model = random_model(config, None, "cpu", torch.float16)
    spans, blocks = spans_of(*lengths)
    cache = KVCache(config, blocks, device=CPU, dtype=torch.float16)
    cache.commit(blocks)
    positions = torch.cat([torch.arange(span.start, span.seen, dtype=torch.int32) for span in spans])
    slots = torch.cat([torch.arange(span.start, span.seen) + int(span.blocks[0]) * BLOCK for span in spans])
    angles = RopeAngles(Rotary(config.rope).table(512, CPU), positions)
    attention = PrefillAttention(config, angles, cache, slots, spans)
    inputs = torch.randn(1, len(positions), config.hidden_size, dtype=torch.float16)
    with LiveBytes("cpu") as live, torch.no_grad():
        model.layers[0].attention.inner(inputs, 0, None, None, attention)
    return live.peak


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("config", [SMALL, SQUARE], ids=["glm", "latent"])
def test_a_plan_counts_the_live_bytes_of_a_layer(joins, monkeypatch, config, rows):
    """Of sequences with 480 cached and two new tokens, of which 1,500 are attended together."""
    for module in (joined_spans, step_memory):
        for limit in ("MOST_EXPANDED", "MOST_GATHERED"):
            monkeypatch.setattr(module, limit, 1500)
    # As kernels allocate: the results alone.
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", lambda q, *others: (torch.empty_like(q),))

    def gathered(cache, scales, blocks, tokens, dtype):
        return torch.empty(tokens, config.attention.num_kv_heads, config.attention.head_dim, dtype=dtype)

    def latents(cache, blocks, tokens, rank, rope_dim, dtype):
        return torch.empty(tokens, 1, rank + rope_dim, dtype=dtype)

    monkeypatch.setattr(joined_spans, "gather_cache", gathered)
    monkeypatch.setattr(joined_spans, "gather_latents", latents)
    dtype, context = torch.float16, 482
    counted = context * read_bytes(config, dtype) + joined_bytes(config, dtype, rows, context)
    counted += expanded_bytes(config, dtype, 2 * rows, rows, context)
    activations = activation_bytes(config, dtype, 2 * rows)
    peak = peak_bytes(config, [(480, 2)] * rows)
    assert peak <= counted + activations
    assert peak > 0.9 * counted
