"""The indexer of sparse attention on a GPU against float64: lengths, blocks, ties, graphs, rows alone and together."""

import pytest
import torch
from dsa_cases import exact_features, exact_scores, exact_slots, features_problem, index_problem
from latent_cases import exact_attention, latent_problem

from warpbus.kernels.ops import dsa
from warpbus.kernels.ops.dsa import index_rope_and_cache, index_scores, index_select
from warpbus.kernels.ops.mla import mla_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HALVES = [torch.float16, torch.bfloat16]
TOP_K = 2048
CONTEXTS = [1, 2047, 2048, 2049, 4096, 50_000, 200_000]


@pytest.fixture(autouse=True)
def _seed(seed):
    """Each test has random numbers of its own."""


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that the operators are given for results is NaN, or -1."""
    empty = torch.Tensor.new_empty

    def new_empty(tensor, *arguments, **options):
        made = empty(tensor, *arguments, **options)
        return made.fill_(float("nan") if made.is_floating_point() else -1)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


def asked_for(positions, dtype=torch.bfloat16, **options):
    return index_problem(positions, dtype=dtype, device="cuda", **options)


def check_scores(asked):
    found = index_scores(**asked)
    for row, (scores, bound) in enumerate(exact_scores(asked)):
        own = found[row].double()
        assert ((own[: len(scores)] - scores).abs() <= bound).all()
        assert own[len(scores) :].isnan().all()  # not written
    assert torch.equal(index_scores(**asked).nan_to_num(), found.nan_to_num())
    return found


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_scores_of_contexts(poisoned, dtype, context):
    check_scores(asked_for([context - 1], dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("block", [16, 32, 64, 256])
def test_scores_of_several_sequences(poisoned, dtype, block):
    check_scores(asked_for([0, 15, 16, 17, 63, 64, 65, 700, 4097], dtype, block=block))
    check_scores(asked_for([300, 5, 1000], dtype, block=block, limit=1021))


def test_many_rows_and_long_tables(poisoned):
    check_scores(asked_for([(997 * row) % 3000 for row in range(150)], limit=20_000))


@pytest.mark.parametrize("tiles", [1, 2, 5, 16])
def test_tiles_change_no_bits(monkeypatch, tiles):
    asked = asked_for([4999, 77, 1023])
    expected = index_scores(**asked)
    monkeypatch.setattr(dsa, "tiles_of", lambda *_: tiles)
    found = index_scores(**asked)
    for row, position in enumerate(asked["positions"].tolist()):
        assert torch.equal(found[row, : position + 1], expected[row, : position + 1])


def test_a_row_has_the_same_bits_alone_and_in_any_batch():
    asked = asked_for([(311 * row) % 6000 for row in range(40)], limit=8192)
    together = index_scores(**asked)
    for row in (0, 7, 39):
        part = {**asked, **{name: asked[name][row : row + 1] for name in ("q", "weights", "positions", "blocks")}}
        seen = int(asked["positions"][row]) + 1
        assert torch.equal(index_scores(**part)[0, :seen], together[row, :seen])


def scores_of(positions, width, distinct=None):
    """Random scores, or some of a few numbers; NaN past the positions."""
    scores = torch.randn(len(positions), width, device="cuda")
    if distinct is not None:
        numbers = torch.tensor([0.0, -0.0, -1.5, 3.0, 1e-40, float("-inf")][:distinct], device="cuda")
        scores = numbers[torch.randint(distinct, scores.shape, device="cuda")]
    last = torch.tensor(positions, dtype=torch.int32, device="cuda")
    scores[torch.arange(width, device="cuda") > last[:, None]] = float("nan")
    return scores, last


def check_selected(positions, top_k=TOP_K, block=32, width=None, distinct=None):
    width = width or -(-(max(positions) + 1) // 4) * 4
    scores, last = scores_of(positions, width, distinct)
    count = len(positions) * -(-width // block)
    blocks = torch.randperm(count, dtype=torch.int32, device="cuda").view(len(positions), -1)
    found = index_select(scores, last, blocks, top_k=top_k, block=block)
    assert torch.equal(found.cpu(), exact_slots(scores.cpu(), last, blocks, top_k, block))
    assert torch.equal(index_select(scores, last, blocks, top_k=top_k, block=block), found)


@pytest.fixture(params=[True, False], ids=["cluster", "block"])
def sharing(request, monkeypatch):
    """With as many blocks for a row as the GPU lets share it, and with one, as on GPUs before Hopper."""
    if not request.param:
        monkeypatch.setattr(dsa, "blocks_of_row", lambda device: 1)


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("distinct", [None, 1, 3, 6])
def test_selection_of_contexts(poisoned, context, distinct):
    check_selected([context - 1], distinct=distinct)


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("top_k", [1, 40, 100, 2048, 5000])
@pytest.mark.parametrize("width", [9000, 9001, 9003])
def test_selection_of_several_sequences(poisoned, top_k, width):
    check_selected([8999, 0, top_k - 1, min(top_k, 8000), 5003, 77], top_k, block=64, width=width)


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("distinct", [None, 3])
def test_selection_of_many_rows(poisoned, distinct):
    check_selected([3000 + 7 * row for row in range(150)], top_k=300, block=16, distinct=distinct)


@pytest.mark.usefixtures("sharing")
def test_close_scores_are_told_apart(poisoned):
    """Of neighbouring numbers, which differ in the last bits alone."""
    bits = torch.randperm(30_000, device="cuda", dtype=torch.int32)[None] + 0x3F800000
    scores, last = bits.view(torch.float32), torch.tensor([29_999], dtype=torch.int32, device="cuda")
    blocks = torch.arange(938, dtype=torch.int32, device="cuda")[None]
    found = index_select(scores, last, blocks, top_k=TOP_K, block=32)
    assert torch.equal(found[0].long(), scores[0].topk(TOP_K).indices.sort().values)


def test_one_block_table_for_several_rows():
    """Rows of a table with a stride of 0, as of tokens of one sequence."""
    asked = asked_for([999])
    rows = {"q": asked["q"].repeat(3, 1, 1), "weights": asked["weights"].repeat(3, 1)}
    rows["positions"] = torch.tensor([999, 500, 20], dtype=torch.int32, device="cuda")
    rows["blocks"] = asked["blocks"].expand(3, -1)
    found = index_scores(**{**asked, **rows})
    expected = index_scores(**asked)
    slots = index_select(found, rows["positions"], rows["blocks"], top_k=100, block=32)
    assert torch.equal(found[1, :501], expected[0, :501])
    assert torch.equal(slots.cpu(), exact_slots(found, rows["positions"], rows["blocks"], 100, 32))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(32, 128, 64), (5, 24, 16), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("tokens", [1, 50])
def test_features(poisoned, dtype, interleaved, shape, tokens):
    heads, size, rotary = shape
    asked = features_problem(tokens, heads=heads, size=size, rotary=rotary, dtype=dtype, device="cuda")
    before = asked["keys"].clone()
    q, k = index_rope_and_cache(**asked, interleaved=interleaved)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    expected_q, expected_k = exact_features(asked, interleaved)
    torch.testing.assert_close(q.double(), expected_q, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(k.double(), expected_k, rtol=tolerance, atol=tolerance)
    before[asked["slots"] // 32, 0, asked["slots"] % 32] = k
    assert torch.equal(before.view(torch.int16), asked["keys"].view(torch.int16))


@pytest.mark.parametrize("coded", [False, True], ids=["elements", "fp8"])
def test_a_graph_of_all_follows_positions_and_caches(coded):
    """Scores, selection and attention, replayed with sequences of other lengths."""
    contexts, top_k = [300, 4992, 90], 256  # the longest fills its blocks, so that no row has NaN where another reads
    limit = max(contexts)
    asked = asked_for([limit - 1] * 3)
    attended = latent_problem([limit - 1] * 3, dtype=torch.bfloat16, device="cuda", block=32, coded=coded)
    attended |= {"blocks": asked["blocks"], "limit": top_k, "listed": True}
    positions = asked["positions"]

    def work():
        scores = index_scores(**asked)
        slots = index_select(scores, positions, asked["blocks"], top_k=top_k, block=32)
        last = positions.clamp(max=top_k - 1)
        return scores, slots, last, mla_attention(**{**attended, "positions": last, "blocks": slots})

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores, slots, last, found = work()
    for _ in range(3):
        positions.copy_(torch.tensor([context - 1 for context in contexts]))
        asked["q"].normal_()
        asked["keys"].copy_(torch.randn_like(asked["keys"]))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        for row, (expected, bound) in enumerate(exact_scores(asked)):
            assert ((scores[row, : len(expected)].double() - expected).abs() <= bound).all()
        assert torch.equal(slots.cpu(), exact_slots(scores, positions, asked["blocks"], top_k, 32))
        expected = exact_attention({**attended, "positions": last, "blocks": slots})
        torch.testing.assert_close(found.double(), expected, rtol=3e-2, atol=3e-2)
        contexts = [contexts[-1], *contexts[:-1]]


def test_keys_that_the_kernel_cannot_read_go_another_way():
    """Tokens that do not begin at multiples of 16 bytes."""
    asked = asked_for([40, 7])
    wider = torch.empty(*asked["keys"].shape[:-1], 129, dtype=torch.bfloat16, device="cuda")
    wider[..., 1:] = asked["keys"]
    found = index_scores(**{**asked, "keys": wider[..., 1:]})
    for row, (scores, bound) in enumerate(exact_scores(asked)):
        assert ((found[row, : len(scores)].double() - scores).abs() <= bound).all()
