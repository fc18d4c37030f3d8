"""The router and the experts of a mixture of experts against float64: every way of computing them, odd sizes."""

import itertools

import pytest
import torch
from gpu_experts import check, normal, random_experts, slots_of
from torch.nn import functional as F

from warpbus.cuda.capabilities import Capabilities, capabilities
from warpbus.cuda.jit import architecture
from warpbus.errors import TensorError
from warpbus.kernels.ops import moe_mlp as op
from warpbus.kernels.ops.moe_mlp import moe_mlp
from warpbus.kernels.ops.moe_router import moe_route
from warpbus.kernels.ops.packed import unpack
from warpbus.kernels.ops.packed_experts import PackedExperts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = [torch.float16, torch.bfloat16]
ABLE = capabilities(architecture(0)) if torch.cuda.is_available() else Capabilities("sm_80")
MMA_ONLY = Capabilities("sm_80", mma=True)
EPS = 1e-5


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    # What the operators allocate next holds NaN.
    del [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(4)][:]


def exact(x, experts, weights, gate_up, down, residual):
    total = torch.zeros_like(x, dtype=torch.float64)
    for number in range(gate_up.count):
        tokens, slots = (experts == number).nonzero(as_tuple=True)
        wide, back = (unpack(each.expert(number)).dequantize(torch.float64) for each in (gate_up, down))
        gate, up = (x[tokens].double() @ wide.T).chunk(2, dim=-1)
        y = (F.silu(gate) * up) @ back.T
        total.index_add_(0, tokens, y * weights[tokens, slots, None].double())
    return total if residual is None else total + residual.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "scheme", ["w4a16-g128", "w4a16-g32-asym", "w8a16-g64", "w3a16-g128-asym", "w2a16-g64", "w4a16"]
)
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 13, 64, 200, 1000])
def test_experts(tokens, scheme, dtype):
    shared, residual = tokens % 2 == 1, tokens % 3 != 1
    hidden, ffn, experts, top_k = 320, 160, 11, 3
    gate_up = random_experts(scheme, experts + shared, 2 * ffn, hidden, dtype)
    down = random_experts(scheme, experts + shared, hidden, ffn, dtype)
    x = normal(tokens, hidden, dtype=dtype)
    before = normal(tokens, hidden, dtype=dtype) if residual else None
    chosen, weights = slots_of(tokens, experts, top_k, shared)
    out = moe_mlp(x, chosen, weights, gate_up, down, residual=before, shared=shared)
    check(out, exact(x, chosen, weights, gate_up, down, before))
    assert torch.equal(out, moe_mlp(x, chosen, weights, gate_up, down, residual=before, shared=shared))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("able", "kernel"), [(ABLE, "decode"), (ABLE, "tiles"), (MMA_ONLY, "tiles")])
@pytest.mark.parametrize("height", [8, 32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 37, 300])
@pytest.mark.parametrize(("hidden", "ffn", "bits"), [(512, 1408, 4), (992, 416, 8)])
def test_every_tile(kernel, height, tokens, hidden, ffn, bits, able, dtype, monkeypatch):
    by_decode = kernel == "decode"
    heights = (8,) if by_decode else (32, 64, 128)
    if (by_decode and not able.tma) or height not in heights:
        pytest.skip("no kernel has such tiles")
    monkeypatch.setattr(op, "_rows_of_tile", lambda *_: (height, by_decode))
    gate_up = random_experts(f"w{bits}a16-g32", 5, 2 * ffn, hidden, dtype)
    down = random_experts(f"w{bits}a16-g32", 5, hidden, ffn, dtype)
    x, before = normal(tokens, hidden, dtype=dtype), normal(tokens, hidden, dtype=dtype)
    chosen, weights = slots_of(tokens, 4, 2, True)
    out = op._by_tile(x, chosen, weights, gate_up, down, before, 0, able)
    check(out, exact(x, chosen, weights, gate_up, down, before))


@pytest.mark.parametrize("scheme", ["w4a16-g128", "w8a16-g64", "w4a16-g32-asym"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 13, 64, 300])
@pytest.mark.parametrize("shared", [False, True])
def test_experts_of_other_processes_add_nothing(tokens, scheme, shared):
    """Negative slots, as with expert parallelism; the first token has no expert here."""
    hidden, ffn, experts, top_k = 320, 160, 5, 3
    gate_up = random_experts(scheme, experts + shared, 2 * ffn, hidden, torch.float16)
    down = random_experts(scheme, experts + shared, hidden, ffn, torch.float16)
    x, before = (normal(tokens, hidden, dtype=torch.float16) for _ in range(2))
    chosen, weights = slots_of(tokens, experts + 7, top_k, False)
    chosen[0] = experts
    chosen[chosen >= experts] = -1
    if shared:
        chosen, weights = F.pad(chosen, (1, 0), value=experts), F.pad(weights, (1, 0), value=1.0)
    for residual in (None, before):
        out = moe_mlp(x, chosen, weights, gate_up, down, residual=residual, shared=shared, absent=7)
        expected = exact(x, chosen, weights, gate_up, down, residual)
        if tokens == 1 and not shared:
            assert torch.equal(out, torch.zeros_like(x) if residual is None else residual)
        else:
            check(out, expected)


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_two_shares_of_experts_add_up_to_all(tokens):
    """Slots by the router's table, in a graph: the routing changes, the table does not."""
    sizes = {"gate_up": (512, 256), "down": (256, 256)}
    whole = {name: random_experts("w4a16-g64", 9, *size, torch.float16) for name, size in sizes.items()}
    shares = []
    for own in (range(4), range(4, 9)):
        stacks = [PackedExperts.stack([each.expert(number) for number in own]) for each in whole.values()]
        table = [own.index(number) if number in own else -1 for number in range(9)]
        shares.append((stacks, torch.tensor(table, dtype=torch.int32, device="cuda")))
    x, router = (normal(rows, 256, dtype=torch.float16) for rows in (tokens, 9))

    def share(stacks, table):
        _, chosen, weights = moe_route(x, router, top_k=3, slots=table)
        return moe_mlp(x, chosen, weights, *stacks, absent=9 - stacks[0].count)

    def both():
        return sum(share(*each).double() for each in shares)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both()
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        graph.replay()
        _, chosen, weights = moe_route(x, router, top_k=3)
        expected = exact(x, chosen, weights, whole["gate_up"], whole["down"], None)
        assert ((found - expected).norm() / expected.norm()).item() <= 3 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize("shape", [(4096, 1408, 8), (2048, 1536, 4), (2048, 768, 8), (6144, 2048, 8)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 24, 150])
def test_shapes_of_models(shape, tokens):
    hidden, ffn, top_k = shape
    gate_up = random_experts("w4a16-g128", 13, 2 * ffn, hidden, torch.bfloat16)
    down = random_experts("w4a16-g128", 13, hidden, ffn, torch.bfloat16)
    x, before = (normal(tokens, hidden, dtype=torch.bfloat16) for _ in range(2))
    chosen, weights = slots_of(tokens, 12, top_k, True)
    out = moe_mlp(x, chosen, weights, gate_up, down, residual=before, shared=True)
    check(out, exact(x, chosen, weights, gate_up, down, before))


@pytest.mark.parametrize("tokens", [1, 4, 9, 120])
def test_in_a_graph_with_another_routing(tokens):
    gate_up, down = (random_experts("w4a16-g64", 9, n, k, torch.float16) for n, k in ((512, 256), (256, 256)))
    x = normal(tokens, 256, dtype=torch.float16)
    router, bias = normal(8, 256, dtype=torch.float16), torch.randn(8, device="cuda")

    def layer():
        normed, chosen, weights = moe_route(x, router, bias, top_k=3, shared=True)
        return moe_mlp(normed, chosen, weights, gate_up, down, residual=x, shared=True)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, layer())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("experts", "hidden", "options"),
    [
        (128, 4096, {"top_k": 8, "scale": 1.0}),
        (160, 5120, {"top_k": 8, "scale": 2.5}),
        (64, 2048, {"top_k": 4, "scale": 1.8}),
        (256, 7168, {"top_k": 8, "groups": 8, "top_groups": 4, "scale": 2.5}),
        (128, 2048, {"top_k": 8, "scoring": "softmax"}),
        (9, 72, {"top_k": 3, "normalized": False, "groups": 3, "top_groups": 1}),
        (5, 100, {"top_k": 5}),
        (33, 64, {"top_k": 1, "scoring": "softmax", "normalized": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 500])
@pytest.mark.parametrize(("normed", "biased", "shared"), itertools.product((False, True), repeat=3))
def test_router(tokens, experts, hidden, options, dtype, normed, biased, shared):
    x, router = normal(tokens, hidden, dtype=dtype), normal(experts, hidden, dtype=dtype) * hidden**-0.5
    norm = (torch.rand(hidden, device="cuda") + 0.5).to(dtype) if normed else None
    bias = torch.randn(experts, device="cuda") * 0.1 if biased else None
    y, chosen, weights = moe_route(x, router, bias, norm=norm, eps=EPS, shared=shared, **options)
    wide = x.double()
    if normed:
        expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * norm.double()
        assert ((y.double() - expected).abs() <= 2 * torch.finfo(dtype).eps * expected.abs() + 1e-7).all()
    else:
        assert torch.equal(y, x)
    if shared:
        assert (chosen[:, 0] == experts).all()
        assert (weights[:, 0] == 1).all()
        chosen, weights = chosen[:, 1:], weights[:, 1:]
    logits = y.double() @ router.double().T
    scores = logits.softmax(-1) if options.get("scoring") == "softmax" else logits.sigmoid()
    keys = scores if bias is None else scores + bias.double()
    groups, top_groups = options.get("groups", 1), options.get("top_groups", 1)
    if top_groups < groups:
        best = keys.view(tokens, groups, -1).topk(2).values.sum(-1)
        floor = best.topk(top_groups).values[:, -1:]
        keys = keys.masked_fill((best < floor).repeat_interleave(experts // groups, 1), -torch.inf)
    # Experts whose keys differ by less than the rounding of float32 may change places.
    taken = keys.gather(1, chosen.long())
    assert (chosen.sort(1).values.diff(dim=1) > 0).all()
    torch.testing.assert_close(taken, keys.topk(options["top_k"]).values, rtol=1e-5, atol=1e-5)
    wanted = scores.gather(1, chosen.long())
    if options.get("normalized", True):
        wanted = wanted / wanted.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), wanted * options.get("scale", 1.0), rtol=1e-4, atol=1e-6)


def test_nan_chooses_experts_that_exist():
    x = torch.full((3, 64), float("nan"), dtype=torch.float16, device="cuda")
    _, chosen, _ = moe_route(x, normal(16, 64, dtype=torch.float16), top_k=4, groups=4, top_groups=2)
    assert ((chosen >= 0) & (chosen < 16)).all()


def test_refuses_experts_that_differ():
    first, second = (random_experts(f"w{bits}a16-g64", 1, 128, 64, torch.float16).expert(0) for bits in (4, 8))
    with pytest.raises(TensorError, match="expert 1 is"):
        PackedExperts.stack([first, second])
