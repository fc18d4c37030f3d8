"""Chunks of several prompts are attended in one call: what each is by itself, with and without what is cached."""

import pytest
import torch

from warpbus.engine.chunk_attention import LONGEST_ALONE, attend_chunk, attends_in_parts
from warpbus.engine.joined_spans import MOST_GATHERED, ChunkSpan, join_spans

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BLOCK = 32


def spans_of(lengths):
    """Chunks of `(cached, new)` tokens, whose blocks follow each other."""
    spans, begin, block = [], 0, 0
    for cached, new in lengths:
        count = -(-(cached + new) // BLOCK)
        table = torch.arange(block, block + count, dtype=torch.int32, device="cuda") if cached else None
        spans.append(ChunkSpan(begin, begin + new, cached, table))
        begin, block = begin + new, block + count
    return spans, begin, block


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 2, 128), (20, 20, 256), (6, 3, 64)])
@pytest.mark.parametrize(
    ("lengths", "alone"),
    [
        ([(0, 40), (0, 7), (0, 300)], 0),
        ([(64, 50), (0, 20), (100, 1)], 0),
        ([(500, 30)], 0),
        ([(0, 30)], 1),
        ([(0, 30), (0, LONGEST_ALONE), (33, 60)], 1),
        ([(MOST_GATHERED - 40, 30), (64, 20), (0, 20), (MOST_GATHERED, 10), (33, 60)], 0),
    ],
    ids=str,
)
def test_chunks_are_attended_as_each_alone(heads, kv_heads, size, lengths, alone):
    spans, tokens, blocks = spans_of(lengths)
    q, k, v = (torch.randn(tokens, n, size, device="cuda").bfloat16() for n in (heads, kv_heads, kv_heads))
    stored = torch.randn(2, blocks, kv_heads, BLOCK, size, device="cuda").bfloat16()
    for span in spans:
        if span.blocks is not None:
            for which, new in enumerate((k, v)):
                flat = stored[which, span.blocks.long()].transpose(1, 2).flatten(0, 1)
                flat[span.start : span.seen] = new[span.part]
                stored[which, span.blocks.long()] = flat.unflatten(0, (-1, BLOCK)).transpose(1, 2)
    groups, others = join_spans(spans, q, expanded=False)
    assert len(others) == alone
    attended = torch.full_like(q, float("nan"))
    for group in groups:
        attended = group.attend(q, group.keys(k, stored[0], None), group.keys(v, stored[1], None), attended)
    for span in spans:
        if span in others:
            assert attended[span.part].isnan().all()
            continue
        keys, values = k[span.part], v[span.part]
        if span.blocks is not None:
            keys, values = (each[span.blocks.long()].transpose(1, 2).flatten(0, 1)[: span.seen] for each in stored)
        keys, values = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[span.part].double(), keys) * size**-0.5
        mask = torch.ones(scores.shape[1:], dtype=torch.bool, device="cuda").tril(span.start)
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), values)
        torch.testing.assert_close(attended[span.part].double(), expected, rtol=2e-2, atol=2e-2)


def test_float32_and_bidirectional_chunks_stay_alone():
    spans, tokens, _ = spans_of([(0, 20), (0, 30)])
    q = torch.randn(tokens, 4, 64, device="cuda")
    assert join_spans(spans, q, expanded=False) == ([], spans)
    both = [ChunkSpan(0, 20, 0, None, bidirectional=5), ChunkSpan(20, 50, 0, None, bidirectional=9)]
    assert join_spans(both, q.half(), expanded=False) == ([], both)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 2, 128), (20, 20, 256), (6, 3, 64)])
@pytest.mark.parametrize(
    ("start", "tokens"), [(0, 1024), (0, 1100), (0, 1537), (2048, 2048), (2100, 2077), (5000, 3000)]
)
def test_long_chunks_are_rounded_up_or_attended_in_parts(heads, kv_heads, size, start, tokens):
    """As all tokens by themselves, in float64, a few queries at a time."""
    end = start + tokens
    q, k, v = (
        torch.randn(n, count, size, device="cuda").bfloat16()
        for n, count in ((tokens, heads), (end, kv_heads), (end, kv_heads))
    )
    found = attend_chunk(q, k, v, causal=True)
    assert found.shape == q.shape
    in_parts = torch.cuda.get_device_capability()[0] >= 9 and start >= 2048
    assert attends_in_parts(q, tokens, end) == in_parts
    keys, values = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    for at in (0, 1, tokens // 3, tokens - 1):
        scores = torch.einsum("hd,khd->hk", q[at].double(), keys[: start + at + 1]) * size**-0.5
        expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values[: start + at + 1])
        torch.testing.assert_close(found[at].double(), expected, rtol=2e-2, atol=1e-2)


def test_a_long_chunk_behind_cached_tokens_is_attended_in_parts():
    spans, tokens, _ = spans_of([(2080, 2100)])
    q = torch.randn(tokens, 4, 64, device="cuda").half()
    (joined,), _ = join_spans(spans, q, expanded=False)
    k, v = (torch.randn(2080 + 2100, 2, 64, device="cuda").half() for _ in range(2))
    attended = torch.full_like(q, float("nan"))
    assert torch.equal(joined.attend(q, k, v, attended), attend_chunk(q, k, v, causal=True))
    assert attended.isfinite().all()
