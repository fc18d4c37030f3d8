"""The indexer of sparse attention: references against float64, what is refused, and which lanes compute what."""

import pytest
import torch
from dsa_cases import chosen_tokens, exact_features, exact_scores, exact_slots, features_problem, index_problem
from torch.library import opcheck

from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops.dsa import has_kernel, index_rope_and_cache, index_scores, index_select, tiles_of
from warpbus.models.layers import select_tokens

SMALL = {"heads": 5, "size": 12, "block": 16}


@pytest.fixture(autouse=True)
def _seed(seed):
    """Each test has random numbers of its own."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("positions", [[0], [15, 16, 17], [40, 0, 31, 63]], ids=str)
def test_scores(positions, dtype):
    asked = index_problem(positions, dtype=dtype, **SMALL)
    found = index_scores(**asked)
    assert found.dtype == torch.float32
    assert found.shape == (len(positions), -(-asked["limit"] // 4) * 4)
    for row, (scores, bound) in enumerate(exact_scores(asked)):
        assert ((found[row, : len(scores)].double() - scores).abs() <= bound).all()


@pytest.mark.parametrize("top_k", [1, 3, 17, 40, 100])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("distinct", [None, 1, 3])
def test_the_best_tokens_are_selected(top_k, block, distinct):
    positions = torch.tensor([0, 15, 39, 89], dtype=torch.int32)
    scores = torch.randn(4, 90)
    if distinct is not None:  # ties, the two zeros among them
        scores = torch.tensor([0.0, -0.0, 1.5][:distinct])[torch.randint(distinct, (4, 90))]
    scores[torch.arange(90) > positions[:, None]] = float("nan")
    blocks = torch.randperm(400)[: 4 * (90 // block + 1)].int().view(4, -1)
    found = index_select(scores, positions, blocks, top_k=top_k, block=block)
    assert torch.equal(found, exact_slots(scores, positions, blocks, top_k, block))


@pytest.mark.parametrize("distinct", [None, 2])
def test_selected_are_the_tokens_of_the_model(distinct):
    """The slots that decoding attends to are the tokens of the mask that prompts attend with."""
    asked = index_problem([89, 20, 50], **SMALL)
    if distinct is not None:
        asked["keys"][...] = torch.randn(distinct, 12)[torch.randint(distinct, asked["keys"].shape[:3])]
    scores = index_scores(**asked)
    slots = index_select(scores, asked["positions"], asked["blocks"], top_k=24, block=16)
    for row, position in enumerate(asked["positions"].tolist()):
        named = asked["blocks"][row, : position // 16 + 1].long()
        keys = asked["keys"][named, 0].flatten(0, 1)[: position + 1]
        q, weights = asked["q"][row, None, None], asked["weights"][row, None, None]
        mask = select_tokens(q, weights, keys[None], torch.ones(1, 1, position + 1, dtype=torch.bool), 24)[0, 0]
        tokens = mask.nonzero()[:, 0]
        expected = named[tokens // 16] * 16 + tokens % 16
        assert slots[row, : len(tokens)].tolist() == expected.tolist()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary", [4, 12])
def test_features_are_rotated_and_stored(interleaved, rotary):
    asked = features_problem(6, rotary=rotary, **SMALL)
    before = asked["keys"].clone()
    q, k = index_rope_and_cache(**asked, interleaved=interleaved)
    expected_q, expected_k = exact_features(asked, interleaved)
    torch.testing.assert_close(q.double(), expected_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k.double(), expected_k, rtol=1e-5, atol=1e-5)
    before[asked["slots"] // 16, 0, asked["slots"] % 16] = k
    torch.testing.assert_close(asked["keys"], before, rtol=0, atol=0, equal_nan=True)


def test_no_rows():
    asked = index_problem([], **SMALL, limit=40)
    assert index_scores(**asked).shape == (0, 40)
    assert index_select(torch.zeros(0, 40), asked["positions"], asked["blocks"], top_k=7, block=16).shape == (0, 7)
    q, k = index_rope_and_cache(**features_problem(0, **SMALL, rotary=4), interleaved=True)
    assert (q.shape, k.shape) == ((0, 5, 12), (0, 12))


def test_the_operators_are_registered():
    asked = index_problem([5, 20], **SMALL)
    opcheck(torch.ops.warpbus.index_scores.default, tuple(asked.values()))
    arguments = torch.randn(2, 24), asked["positions"], asked["blocks"], 7, 16
    opcheck(torch.ops.warpbus.index_select.default, arguments)
    features = features_problem(2, **SMALL, rotary=4)
    features["keys"].zero_()  # opcheck compares what is written, and NaN is not equal to itself
    opcheck(torch.ops.warpbus.index_rope_and_cache.default, (*features.values(), True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 60)}, r"q has shape \[2, 60\]"),
        ({"q": torch.zeros(2, 5, 12).half()}, r"keys is torch.float32"),
        ({"weights": torch.zeros(2, 5).half()}, r"weights is float16"),
        ({"weights": torch.zeros(2, 6)}, r"weights has shape \[2, 6\]"),
        ({"keys": torch.zeros(4, 1, 16, 10)}, r"keys are torch.float32 \[4, 1, 16, 10\]"),
        ({"keys": torch.zeros(4, 2, 16, 12)}, r"keys are torch.float32 \[4, 2, 16, 12\]"),
        ({"keys": torch.zeros(4, 1, 12, 12)}, r"keys has blocks of 12 tokens"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, r"positions are torch.int64, expected torch.int32"),
        ({"blocks": torch.zeros(3, 2, dtype=torch.int32)}, r"blocks has shape"),
    ],
)
def test_scores_of_tensors_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(TensorError, match=rf"^index_scores: {message}"):
        index_scores(**{**index_problem([5, 20], **SMALL), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(2, 10)}, r"k has shape \[2, 10\], expected \[2, 12\]"),
        ({"table": torch.zeros(64, 5)}, r"table is \[64, 5\]"),
        ({"table": torch.zeros(64, 14)}, r"table is \[64, 14\]"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, r"slots are torch.int32, expected torch.int64"),
    ],
)
def test_features_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(TensorError, match=rf"^index_rope_and_cache: {message}"):
        index_rope_and_cache(**{**features_problem(2, **SMALL, rotary=4), **changes}, interleaved=True)


def test_sizes_that_do_not_fit_are_refused():
    asked = index_problem([5, 20], **SMALL)
    for limit in (0, 49):
        with pytest.raises(UsageError, match=rf"^index_scores: limit is {limit}, with blocks for 48"):
            index_scores(**{**asked, "limit": limit})
    rows = asked["positions"], asked["blocks"]
    for top_k, block, width in ((0, 16, 24), (3, 12, 24), (3, 16, 56)):
        with pytest.raises(UsageError, match=rf"^index_select: top_k is {top_k}, block {block}"):
            index_select(torch.zeros(2, width), *rows, top_k=top_k, block=block)
    with pytest.raises(TensorError, match=r"^index_select: scores have strides"):
        index_select(torch.zeros(24, 2).T, *rows, top_k=3, block=16)


def test_kernels_are_for_gpus():
    assert not has_kernel(torch.bfloat16, 32, 128, torch.device("cpu"))


@pytest.mark.parametrize("rows", [1, 8, 32, 256])
@pytest.mark.parametrize("limit", [2049, 4096, 131_072, 200_000])
def test_long_contexts_share_queries(rows, limit):
    """Warps get more tiles only where there are several times as many blocks as a GPU runs."""
    tiles = tiles_of(rows, limit, 132)
    assert 1 <= tiles <= 16
    assert tiles == 1 or rows * limit / (64 * tiles) >= 4 * 3 * 132 * 0.9


# ---- What the kernels do, lane by lane: csrc/dsa/scores.cu and csrc/dsa/select.cu ----


def lane_scores(q, weights, keys):
    """The scores of 16 keys by csrc/dsa/scores.cu: which features each lane loads, and where mma has them."""
    lanes = torch.arange(32)
    group, quarter = lanes // 4, lanes % 4
    scores = torch.zeros(16)
    for n in range(2):
        sums = torch.zeros(32, 2)
        for m in range(2):
            products = torch.zeros(32, 4)
            for piece in range(4):
                at = 32 * piece + 8 * quarter[:, None] + torch.arange(8)
                key = keys[8 * n + group[:, None], at]
                low, high = q[16 * m + group[:, None], at], q[16 * m + 8 + group[:, None], at]
                for half in (0, 4):  # .x and .y, then .z and .w
                    a = low[:, half : half + 2], high[:, half : half + 2]
                    a = *a, low[:, half + 2 : half + 4], high[:, half + 2 : half + 4]
                    products += mma(a, (key[:, half : half + 2], key[:, half + 2 : half + 4]))
            for i in range(4):
                sums[:, i % 2] += products[:, i].clamp(min=0) * weights[16 * m + group + i // 2 * 8]
        for offset in (4, 8, 16):
            sums = sums + sums[lanes ^ offset]
        for i in range(2):
            scores[8 * n + 2 * quarter[:4] + i] = sums[:4, i]
    return scores


def mma(a, b):
    """D of mma.m16n8k16 by lanes, from the pairs of each lane as csrc/common/ptx.cuh says."""
    lanes = torch.arange(32)
    g, t = lanes // 4, lanes % 4
    left, right = torch.zeros(16, 16), torch.zeros(16, 8)
    for i in range(2):
        for index, (rows, columns) in enumerate(((g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8))):
            left[rows, columns + i] = a[index][:, i]
        for index, rows in enumerate((2 * t, 2 * t + 8)):
            right[rows + i, g] = b[index][:, i]
    d = left @ right
    return torch.stack((d[g, 2 * t], d[g, 2 * t + 1], d[g + 8, 2 * t], d[g + 8, 2 * t + 1]), dim=1)


def test_lanes_score_their_keys():
    asked = index_problem([15], block=16)
    keys = asked["keys"][asked["blocks"][0, 0], 0]
    (expected, bound), *_ = exact_scores(asked)
    found = lane_scores(asked["q"][0], asked["weights"][0], keys)
    assert ((found.double() - expected).abs() <= bound).all()


def key_of(scores):
    """step::key_of of float32, as int64."""
    bits = scores.view(torch.int32).long() & 0xFFFFFFFF
    negative = torch.where(bits == 1 << 31, 1 << 31, ~bits & 0xFFFFFFFF)
    keys = torch.where(bits >> 31 == 1, negative, bits | 1 << 31)
    return torch.where(scores.isnan(), 0xFFFFFFFF, keys)


def blocks_select(scores, top_k, blocks, threads):
    """The tokens that `blocks` blocks of so many threads select, by csrc/dsa/select.cu, each at its place."""
    count = len(scores)
    chunks = -(-count // 4)
    share = -(-chunks // blocks)
    keys = key_of(scores)
    parts = [keys[min(rank * share, chunks) * 4 : min((rank + 1) * share, chunks) * 4] for rank in range(blocks)]
    prefix, shift, left = 0, 32, top_k
    while shift > 0:
        shift -= 8
        histogram = torch.zeros(256, dtype=torch.int64)
        for part in parts:
            agreeing = part[(part ^ prefix) >> shift >> 8 == 0]
            histogram += torch.bincount(agreeing >> shift & 255, minlength=256)
        upto = histogram.flip(0).cumsum(0)
        place = int((upto >= left).nonzero()[0])
        prefix |= (255 - place) << shift
        left -= int(upto[place] - histogram[255 - place])
        if histogram[255 - place] == left:
            break
    out = torch.full((top_k,), -1)
    better = equal = 0
    for rank, part in enumerate(parts):
        for base in range(0, len(part), 4 * threads):
            tile = part[base : base + 4 * threads]
            is_better, is_equal = tile >> shift > prefix >> shift, tile >> shift == prefix >> shift
            before_better = better + is_better.cumsum(0) - is_better.long()
            before_equal = equal + is_equal.cumsum(0) - is_equal.long()
            chosen = is_better | (is_equal & (before_equal < left))
            tokens = min(rank * share, chunks) * 4 + base + torch.arange(len(tile))
            out[(before_better + before_equal.clamp(max=left))[chosen]] = tokens[chosen]
            better, equal = better + int(is_better.sum()), equal + int(is_equal.sum())
    return out.tolist()


@pytest.mark.parametrize("blocks", [1, 8])
@pytest.mark.parametrize("count", [41, 100, 1000])
@pytest.mark.parametrize("top_k", [1, 40])
@pytest.mark.parametrize("distinct", [None, 1, 4])
def test_blocks_select_the_best_tokens(blocks, count, top_k, distinct):
    scores = torch.randn(count)
    if distinct is not None:
        scores = torch.tensor([0.0, -0.0, -1.5, 3.0][:distinct])[torch.randint(distinct, (count,))]
    assert blocks_select(scores, top_k, blocks, threads=8) == chosen_tokens(scores, top_k)
