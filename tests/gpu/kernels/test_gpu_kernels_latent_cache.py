"""The FP8 cache of latents on a GPU: stored to the bit as the reference does, read against float64, cut in any way."""

import pytest
import torch
from latent_cases import exact_attention, exact_latents, latent_problem, listed, queries_problem

from warpbus.errors import TensorError
from warpbus.kernels.ops import mla
from warpbus.kernels.ops.latent_cache import gather_latents
from warpbus.kernels.ops.mla import mla_attention, mla_queries, mla_rope_and_cache
from warpbus.kernels.ops.mla_plan import LatentDevice
from warpbus.kernels.reference.latent_cache import LATENT_CODES, dequantize, quantize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HALVES = [torch.float16, torch.bfloat16]
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
NO_WGMMA = {"h200": 228, "a100": 164, "rtx4090": 100}  # KiB of shared memory, which decides chunks and stages


@pytest.fixture(autouse=True)
def _seed(seed):
    """Each test has random numbers of its own."""


def asked_for(positions, dtype=torch.bfloat16, **options):
    return latent_problem(positions, dtype=dtype, device="cuda", coded=True, **options)


def poison():
    """Make what the next outputs and partial sums get from torch's pools NaN."""
    held = [torch.full((2**size,), float("nan"), device="cuda") for size in range(5, 25) for _ in range(4)]
    del held


def check(asked):
    """Against float64; whatever is not written of the output is NaN."""
    dtype = asked["q"].dtype
    poison()
    found = mla_attention(**asked)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), exact_attention(asked), rtol=tolerance, atol=tolerance)
    assert torch.equal(mla_attention(**asked), found)
    return found


def without_wgmma(monkeypatch, name):
    device = LatentDevice(132, NO_WGMMA[name] << 10, wgmma=False)
    monkeypatch.setattr(mla, "_device", lambda _: device)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("heads", [1, 5, 8, 10, 16, 20, 24, 32, 40, 64])
def test_heads(dtype, heads):
    check(asked_for([0, 31, 32, 700, 95], dtype, heads=heads))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("block", [16, 32, 64, 256])
@pytest.mark.parametrize("position", [0, 7, 8, 15, 31, 32, 63, 64, 65, 127, 128, 191, 511, 1023, 2048, 4095, 5000])
def test_lengths_and_blocks(dtype, block, position):
    check(asked_for([position, position // 2], dtype, block=block))


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 17, 32, 64, 130])
@pytest.mark.parametrize("value", [64, 256])
def test_rows_and_values(rows, value):
    check(asked_for([37 * row % 900 for row in range(rows)], value=value, block=32))


@pytest.mark.parametrize("limit", [20_000, 131_072, 200_000])
def test_long_sequences(limit):
    check(asked_for([limit - 1, 3, limit // 2], block=32, limit=limit))


def test_large_scores_overflow_nothing():
    asked = asked_for([300, 5])
    asked["q"] *= 100
    check(asked)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_code_and_scale(dtype):
    """All codes but NaN, and scales from the smallest to the largest, are the elements that they stand for."""
    cached = torch.zeros(64, 1, 16, 656, dtype=torch.uint8, device="cuda")
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8, device="cuda")
    cached[..., :512] = codes[torch.randint(len(codes), (64, 1, 16, 512), device="cuda")]
    scales = 2.0 ** torch.randint(-24, 8, (64, 1, 16, 4), device="cuda").float()
    cached[..., 512:528] = scales.view(torch.uint8)
    cached[..., 528:] = torch.randn(64, 1, 16, 64, device="cuda").to(dtype).view(torch.uint8)
    blocks = torch.randperm(64, device="cuda", dtype=torch.int32)
    found = gather_latents(cached.view(LATENT_CODES), blocks, 1024, 512, 64, dtype)
    expected = exact_latents(cached[blocks.long(), 0].view(LATENT_CODES), 512, 64, dtype).flatten(0, 1)
    assert torch.equal(found[:, 0], expected.to(dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("counts", [[1], [45, 64, 1, 900], [2048, 2047, 3]], ids=str)
@pytest.mark.parametrize("heads", [5, 20, 64])
@pytest.mark.parametrize("device", [None, *NO_WGMMA])
def test_listed_keys(monkeypatch, dtype, counts, heads, device):
    if device is not None:
        without_wgmma(monkeypatch, device)
    asked = asked_for([count + 1000 * row for row, count in enumerate(counts)], dtype, heads=heads, block=32)
    check(listed(asked, counts))


@pytest.mark.parametrize("limit", [400, 1000, 4096, 9000])
@pytest.mark.parametrize("heads", [20, 64])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(monkeypatch, limit, heads):
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


@pytest.mark.parametrize("dtype", HALVES)
def test_outputs_have_the_bits_of_a_cache_of_the_same_elements(monkeypatch, dtype):
    """Codes are elements before they are multiplied: only the way to shared memory differs."""
    asked = asked_for([4095, 17, 2000, 63, 64], dtype, limit=4096, block=32)
    whole = asked["latents"].contiguous().view(torch.uint8)
    plain = {**asked, "latents": dequantize(whole, 512, 64, dtype)}
    assert torch.equal(mla_attention(**asked), mla_attention(**plain))
    without_wgmma(monkeypatch, "a100")
    assert torch.equal(mla_attention(**asked), mla_attention(**plain))


@pytest.mark.parametrize("heads", [5, 16, 20, 32, 64])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("device", list(NO_WGMMA))
@pytest.mark.parametrize("positions", [[2999, 17, 640, 33], [0], [31, 32, 500]], ids=str)
def test_gpus_without_wgmma(monkeypatch, heads, dtype, device, positions):
    without_wgmma(monkeypatch, device)
    check(asked_for(positions, dtype, limit=3000, block=16, heads=heads))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 4, 16, 17, 100])
@pytest.mark.parametrize("heads", [1, 20])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-3, 300.0])
def test_new_latents_are_stored_as_the_reference_stores_them(dtype, rows, heads, interleaved, size):
    """The kernel's own latents of 16 bits, rounded by torch, are the bytes of its FP8 cache."""
    plain = queries_problem(rows, heads=heads, dtype=dtype, interleaved=interleaved, device="cuda")
    plain["norm"] = (plain["norm"] * size).to(dtype)
    asked = {**plain, "latents": queries_problem(rows, dtype=dtype, device="cuda", coded=True)["latents"]}
    before = asked["latents"].view(torch.uint8).clone()
    assert torch.equal(mla_queries(**asked), mla_queries(**plain))
    where = asked["slots"] // 16, 0, asked["slots"] % 16
    before[where] = quantize(plain["latents"][where].cpu(), 512).cuda()
    assert torch.equal(asked["latents"].view(torch.uint8), before)
    del asked["kv_b"]
    asked["latents"].view(torch.uint8)[where] = 0xFF
    found = mla_rope_and_cache(asked.pop("q").clone(), **asked)
    assert torch.equal(found, dequantize(before[where], 512, 64, dtype))
    assert torch.equal(asked["latents"].view(torch.uint8), before)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("block", [16, 32, 256])
@pytest.mark.parametrize("indices", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 31, 32, 33, 1000, 5001])
def test_a_sequence_is_gathered(dtype, block, indices, tokens):
    asked = asked_for([5001], dtype, block=block)
    count = 5001 // block + 1
    blocks = asked["blocks"][0, :count].to(indices)
    found = gather_latents(asked["latents"], blocks, tokens, 512, 64, dtype)
    expected = exact_latents(asked["latents"][blocks.long(), 0], 512, 64, dtype).flatten(0, 1)[:tokens]
    assert torch.equal(found[:, 0], expected.to(dtype))


@pytest.mark.parametrize("wgmma", [True, False])
@pytest.mark.parametrize("inputs_ready", [False, True])
@pytest.mark.parametrize("tokens", [40, 64, 130, 700])
def test_a_graph_of_both_follows_positions_blocks_and_latents(monkeypatch, inputs_ready, tokens, wgmma):
    """The attention sees the latents that the kernel just ahead has stored."""
    if not wgmma:
        without_wgmma(monkeypatch, "h200")
    asked = asked_for([0, 0, 0], limit=tokens, block=32)
    new = queries_problem(3, block=32, dtype=torch.bfloat16, device="cuda")
    cache = torch.empty(80, 1, 32, 656, dtype=torch.uint8, device="cuda").view(LATENT_CODES)
    asked |= {"latents": cache, "kv_b": new["kv_b"], "inputs_ready": inputs_ready}
    new |= {"latents": cache, "positions": asked["positions"]}
    new["table"] = torch.cat((torch.rand(tokens, 32).cos(), torch.rand(tokens, 32).sin()), dim=1).cuda()

    def refill():
        random = torch.randn(80 * 32, 576, device="cuda").bfloat16()
        cache.view(torch.uint8).copy_(quantize(random, 512).view(80, 1, 32, 656))

    def work():
        queries = mla_queries(**new)
        return queries, mla_attention(**{**asked, "q": queries})

    refill()
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        queries, found = work()
    for _ in range(5):
        positions = torch.randint(tokens, (3,))
        refill()
        asked["blocks"].copy_(torch.randperm(80)[: asked["blocks"].numel()].view(3, -1))
        asked["positions"].copy_(positions)
        slots = asked["blocks"].cpu().gather(1, positions[:, None] // 32)[:, 0].long() * 32 + positions % 32
        new["slots"].copy_(slots)
        new["q"].normal_()
        new["latent"].normal_(0, 3)
        torch.cuda.synchronize()
        graph.replay()
        expected = exact_attention({**asked, "q": queries})
        torch.testing.assert_close(found.double(), expected, rtol=3e-2, atol=3e-2)


def test_caches_that_kernels_cannot_read_are_refused():
    asked = asked_for([5])
    whole = torch.zeros(4 * 16 * 664, dtype=torch.uint8, device="cuda").view(LATENT_CODES).view(4, 1, 16, 664)
    shifted = whole[..., 8:]
    with pytest.raises(TensorError, match=r"^mla_attention: latents begin at"):
        mla_attention(**{**asked, "latents": shifted})
    new = queries_problem(1, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(TensorError, match=r"^mla_queries: latents begin at"):
        mla_queries(**{**new, "latents": shifted})
    blocks = torch.arange(4, device="cuda")
    assert not gather_latents(shifted, blocks, 64, 512, 64, torch.bfloat16).any()  # by torch
