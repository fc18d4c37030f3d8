"""mla_queries and mla_attention on a GPU against float64: heads, lengths, blocks, graphs; the same bits for any cut."""

import pytest
import torch
from latent_cases import exact_attention, exact_queries, latent_problem, listed, queries_problem

from warpbus.errors import TensorError
from warpbus.kernels.ops import mla
from warpbus.kernels.ops.mla import mla_attention, mla_queries, mla_rope_and_cache
from warpbus.kernels.ops.mla_plan import LatentDevice

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HALVES = [torch.float16, torch.bfloat16]
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def _seed(seed):
    """Each test has random numbers of its own."""


def asked_for(positions, dtype=torch.bfloat16, **options):
    return latent_problem(positions, dtype=dtype, device="cuda", **options)


def check(asked):
    dtype = asked["q"].dtype
    found = mla_attention(**asked)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), exact_attention(asked), rtol=tolerance, atol=tolerance)
    assert torch.equal(mla_attention(**asked), found)
    return found


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("heads", [1, 5, 8, 10, 16, 20, 24, 32, 40, 64])
def test_heads(dtype, heads):
    check(asked_for([0, 31, 32, 700, 95], dtype, heads=heads))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("block", [16, 32, 64, 256])
@pytest.mark.parametrize("position", [0, 15, 31, 32, 127, 128, 511, 512, 1023, 2048, 4095, 5000])
def test_lengths_and_blocks(dtype, block, position):
    check(asked_for([position, position // 2], dtype, block=block))


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 40, 130])
@pytest.mark.parametrize("value", [64, 128, 256])
def test_rows_and_values(rows, value):
    check(asked_for([37 * row % 900 for row in range(rows)], value=value, block=32))


@pytest.mark.parametrize("limit", [20_000, 131_072])
def test_long_sequences(limit):
    check(asked_for([limit - 1, 3, limit // 2], block=32, limit=limit))


def test_large_scores_overflow_nothing():
    asked = asked_for([300, 5])
    asked["q"] *= 100
    check(asked)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("heads", [1, 8, 20, 64])
@pytest.mark.parametrize("counts", [[1], [45, 64, 1, 900], [2048, 2047, 3]], ids=str)
@pytest.mark.parametrize("block", [16, 32, 256])
def test_listed_keys(dtype, heads, counts, block):
    check(
        listed(
            asked_for([count + 1000 * row for row, count in enumerate(counts)], dtype, heads=heads, block=block), counts
        )
    )


def test_a_list_of_all_keys_gives_the_same_bits():
    asked = asked_for([900, 37, 0], block=32, limit=901)
    assert torch.equal(mla_attention(**listed(asked, [901, 38, 1])), mla_attention(**asked))


@pytest.mark.parametrize("limit", [400, 1000, 4096, 9000])
@pytest.mark.parametrize("heads", [20, 64])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(monkeypatch, limit, heads):
    """Where the projection to values has the same kernel: that of many rows is cuBLAS's."""
    monkeypatch.setattr(mla, "_FEW_ROWS", 1000)
    positions = [(limit - 1 - 131 * row) % limit for row in range(40)]
    asked = asked_for(positions, limit=limit, block=32, heads=heads)
    together = check(asked)
    for rows in ([0], [7], [3, 20], list(range(12))):
        part = {**asked, **{name: asked[name][rows].contiguous() for name in ("q", "positions", "blocks")}}
        assert torch.equal(mla_attention(**part), together[rows])


@pytest.mark.parametrize("multiprocessors", [1, 20, 132, 1000])
def test_the_cut_changes_no_bits(monkeypatch, multiprocessors):
    asked = asked_for([4095, 4000, 100], limit=4096, block=32)
    expected = check(asked)
    monkeypatch.setattr(mla, "multiprocessors", lambda device: multiprocessors)
    assert torch.equal(mla_attention(**asked), expected)


@pytest.mark.parametrize("heads", [5, 16, 20, 64])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("shared", "keys"), [(228, 32), (164, 32), (100, 16)], ids=["b200", "a100", "rtx4090"])
@pytest.mark.parametrize("positions", [[2999, 17, 640, 33], [0], [31, 32, 500]], ids=str)
def test_gpus_without_wgmma(monkeypatch, heads, dtype, shared, keys, positions):
    device = LatentDevice(132, shared << 10, wgmma=False)
    monkeypatch.setattr(mla, "_device", lambda _: device)
    assert mla.plan(4, heads, 3000, device).keys == keys
    check(asked_for(positions, dtype, limit=3000, block=16, heads=heads))
    check(listed(asked_for(positions, dtype, block=16, heads=heads), [position // 2 + 1 for position in positions]))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 4, 16, 17, 100])
@pytest.mark.parametrize("heads", [1, 20, 64])
@pytest.mark.parametrize("interleaved", [True, False])
def test_queries(dtype, rows, heads, interleaved):
    asked = queries_problem(rows, heads=heads, dtype=dtype, interleaved=interleaved, device="cuda")
    before = asked["latents"].clone()
    queries, stored = exact_queries(asked)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(mla_queries(**asked).double(), queries, rtol=tolerance, atol=tolerance)
    blocks, inside = asked["slots"] // 16, asked["slots"] % 16
    written = asked["latents"][blocks, 0, inside]
    torch.testing.assert_close(written.double(), stored, rtol=tolerance, atol=tolerance)
    before[blocks, 0, inside] = written
    assert torch.equal(before.view(torch.int16), asked["latents"].view(torch.int16))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("heads", [1, 20, 64])
def test_prompts_rotate_in_place(dtype, interleaved, heads):
    asked = queries_problem(50, heads=heads, dtype=dtype, interleaved=interleaved, device="cuda")
    queries, stored = exact_queries(asked)
    own = asked["q"].clone()
    others = {name: asked[name] for name in asked if name not in ("q", "kv_b")}
    found, tolerance = mla_rope_and_cache(own, **others), TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), stored, rtol=tolerance, atol=tolerance)
    assert torch.equal(own[..., :192], asked["q"][..., :192])
    torch.testing.assert_close(own[..., 192:].double(), queries[..., 512:], rtol=tolerance, atol=tolerance)
    assert torch.equal(asked["latents"][asked["slots"] // 16, 0, asked["slots"] % 16], found)


def test_queries_of_a_row_are_the_same_alone_and_in_a_batch():
    asked = queries_problem(40, dtype=torch.bfloat16, device="cuda")
    together = mla_queries(**asked)
    part = {**asked, **{name: asked[name][9:10] for name in ("q", "latent", "positions", "slots")}}
    assert torch.equal(mla_queries(**part), together[9:10])


@pytest.mark.parametrize("wgmma", [True, False])
@pytest.mark.parametrize("inputs_ready", [False, True])
@pytest.mark.parametrize("tokens", [40, 700])
def test_a_graph_of_both_follows_positions_blocks_and_latents(monkeypatch, inputs_ready, tokens, wgmma):
    """The attention sees the latents that the kernel just ahead has stored."""
    if not wgmma:
        monkeypatch.setattr(mla, "_device", lambda _: LatentDevice(132, 228 << 10, wgmma=False))
    asked = asked_for([0, 0, 0], limit=tokens, block=32)
    new = queries_problem(3, block=32, dtype=torch.bfloat16, device="cuda")
    cache = torch.full((80, 1, 32, 576), float("nan"), dtype=torch.bfloat16, device="cuda")
    asked |= {"latents": cache, "kv_b": new["kv_b"], "inputs_ready": inputs_ready}
    new |= {"latents": cache, "positions": asked["positions"]}
    new["table"] = torch.cat((torch.rand(tokens, 32).cos(), torch.rand(tokens, 32).sin()), dim=1).cuda()

    def work():
        queries = mla_queries(**new)
        return queries, mla_attention(**{**asked, "q": queries})

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        queries, found = work()
    for _ in range(3):
        positions = torch.randint(tokens, (3,))
        cache.normal_()
        asked["blocks"].copy_(torch.randperm(80)[: asked["blocks"].numel()].view(3, -1))
        asked["positions"].copy_(positions)
        slots = asked["blocks"].cpu().gather(1, positions[:, None] // 32)[:, 0].long() * 32 + positions % 32
        new["slots"].copy_(slots)
        new["q"].normal_()
        torch.cuda.synchronize()
        graph.replay()
        expected = exact_attention({**asked, "q": queries})
        torch.testing.assert_close(found.double(), expected, rtol=3e-2, atol=3e-2)


def test_caches_that_kernels_cannot_read_are_refused():
    asked = asked_for([5])
    shifted = torch.zeros(4 * 16 * 577, dtype=torch.bfloat16, device="cuda").view(4, 1, 16, 577)[..., 1:]
    with pytest.raises(TensorError, match=r"^mla_attention: latents begin at"):
        mla_attention(**{**asked, "latents": shifted})
    new = queries_problem(1, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(TensorError, match=r"^mla_queries: latents begin at"):
        mla_queries(**{**new, "latents": shifted})
