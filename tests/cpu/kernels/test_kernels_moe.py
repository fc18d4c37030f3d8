"""The router and the experts on the CPU: their definition, what is refused, and how rows are cut into tiles."""

import pytest
import torch
from torch.nn import functional as F

from warpbus.cuda.capabilities import capabilities
from warpbus.errors import TensorError, UsageError
from warpbus.kernels.ops.moe_mlp import _rows_of_tile, moe_mlp
from warpbus.kernels.ops.moe_router import moe_route
from warpbus.kernels.ops.packed import pack, unpack
from warpbus.kernels.ops.packed_experts import PackedExperts
from warpbus.qtensor import QTensor, Scheme


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def matrices(scheme, experts, n, k):
    scheme = Scheme.parse(scheme)
    return [
        QTensor.from_codes(
            scheme,
            torch.randint(0, scheme.max_code + 1, (n, k), dtype=torch.uint8),
            torch.rand(n, scheme.groups(k)).half() / (scheme.max_code * k**0.5),
            None
            if scheme.symmetric
            else torch.randint(0, scheme.max_code + 1, (n, scheme.groups(k)), dtype=torch.uint8),
        )
        for _ in range(experts)
    ]


def stacked(parts):
    return PackedExperts.stack([pack(part, torch.float16) for part in parts])


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a16-g64-asym"])
def test_stacking_keeps_each_expert(scheme):
    parts = matrices(scheme, 5, 96, 64)
    whole = stacked(parts)
    assert whole.count == 5
    for number, part in enumerate(parts):
        kept = unpack(whole.expert(number))
        assert torch.equal(kept.codes(), part.codes())
        assert torch.equal(kept.scales, part.scales)
        assert whole.expert(number).codes.data_ptr() >= whole.weights.codes.data_ptr()
    assert [torch.equal(each.codes(), part.codes()) for each, part in zip(whole.unpacked(), parts, strict=True)] == [
        True
    ] * 5


@pytest.mark.parametrize("shared", [False, True])
def test_a_layer_is_the_sum_of_its_experts(shared):
    wide, back = matrices("w4a16-g32", 4, 128, 96), matrices("w4a16-g32", 4, 96, 64)
    x, residual = torch.randn(7, 96).half(), torch.randn(7, 96).half()
    experts, weights = torch.rand(7, 3).argsort(1)[:, :2].int(), torch.rand(7, 2)
    if shared:
        experts, weights = F.pad(experts, (1, 0), value=3), F.pad(weights, (1, 0), value=1.0)
    out = moe_mlp(x, experts, weights, stacked(wide), stacked(back), residual=residual, shared=shared)
    for row in range(7):
        expected = residual[row].double()
        for number, weight in zip(experts[row].tolist(), weights[row].double(), strict=True):
            gate, up = (x[row].double() @ wide[number].dequantize(torch.float64).T).chunk(2)
            expected = expected + weight * ((F.silu(gate) * up) @ back[number].dequantize(torch.float64).T)
        torch.testing.assert_close(out[row].double(), expected, rtol=2e-3, atol=2e-3)


def test_experts_of_other_processes_add_nothing():
    wide, back = (stacked(matrices("w4a16-g32", 4, *shape)) for shape in ((128, 96), (96, 64)))
    x, residual = torch.randn(5, 96).half(), torch.randn(5, 96).half()
    experts, weights = torch.tensor([[0, 2], [-1, 3], [1, -1], [-1, -1], [3, 0]]).int(), torch.rand(5, 2)
    out = moe_mlp(x, experts, weights, wide, back, residual=residual, absent=2)
    without = moe_mlp(x, experts.clamp_min(0), weights * (experts >= 0), wide, back, residual=residual)
    assert torch.equal(out, without)
    assert torch.equal(out[3], residual[3])


def test_a_token_without_rows():
    wide, back = matrices("w4a16-g32", 2, 128, 64), matrices("w4a16-g32", 2, 64, 64)
    empty = torch.empty(0, 64).half()
    out = moe_mlp(empty, torch.empty(0, 2).int(), torch.empty(0, 2), stacked(wide), stacked(back))
    assert out.shape == (0, 64)


def test_the_router_prefers_by_score_and_correction():
    x = torch.eye(4).half()
    weight = torch.tensor([[0.0, 1, 2, 3], [3, 0, 1, 2], [2, 3, 0, 1]]).half()
    _, experts, weights = moe_route(x, weight, top_k=2, scale=2.0)
    assert experts.tolist() == [[1, 2], [2, 0], [0, 1], [0, 1]]
    scores = torch.tensor([3.0, 2.0]).sigmoid()
    torch.testing.assert_close(weights[0], 2 * scores / scores.sum())
    # The correction changes the choice, and no weight.
    normed, experts, weights = moe_route(x, weight, torch.tensor([-9.0, 0, 0]), top_k=1, normalized=False, shared=True)
    assert experts.tolist() == [[3, 1], [3, 2], [3, 1], [3, 1]]
    torch.testing.assert_close(weights[3], torch.tensor([1.0, torch.tensor(2.0).sigmoid()]))
    assert torch.equal(normed, x)


def test_only_the_best_groups_are_chosen_from():
    weight = torch.zeros(6, 8).half()
    weight[:, 0] = torch.tensor([5.0, -5, 1, 1, 2, -4])  # groups of two: 5 - 5, 1 + 1, 2 - 4 as scores
    x = torch.zeros(1, 8).half()
    x[0, 0] = 1
    options = {"top_k": 2, "groups": 3, "top_groups": 1}
    assert moe_route(x, weight, **options)[1].tolist() == [[2, 3]]
    assert moe_route(x, weight, **options | {"groups": 1})[1].tolist() == [[0, 4]]


def test_what_is_refused():
    x, weight = torch.randn(2, 16).half(), torch.randn(6, 16).half()
    with pytest.raises(UsageError, match="moe_route: scoring is 'relu': give one of sigmoid, softmax"):
        moe_route(x, weight, top_k=1, scoring="relu")
    with pytest.raises(TensorError, match=r"moe_route: 3 of 6 experts in the 1 best of 3 groups: expected groups"):
        moe_route(x, weight, top_k=3, groups=3, top_groups=1)
    with pytest.raises(TensorError, match=r"moe_route: bias is torch.float16, expected float32: convert it"):
        moe_route(x, weight, torch.zeros(6).half(), top_k=1)
    with pytest.raises(TensorError, match=r"moe_route: x has shape \[2, 8\], expected \[2, 16\]: the router is 6 x 16"):
        moe_route(x[:, :8], weight, top_k=1)
    wide, back = stacked(matrices("w4a16-g32", 2, 128, 64)), stacked(matrices("w4a16-g32", 2, 64, 64))
    x, experts, weights = torch.randn(3, 64).half(), torch.zeros(3, 1).int(), torch.ones(3, 1)
    with pytest.raises(TensorError, match=r"moe_mlp: experts are torch.int64 and weights torch.float32"):
        moe_mlp(x, experts.long(), weights, wide, back)
    with pytest.raises(TensorError, match=r"moe_mlp: gate_up of 2 experts \[64, 64\], down of 2 \[64, 64\]: expected"):
        moe_mlp(x, experts, weights, back, back)
    with pytest.raises(TensorError, match=r"moe_mlp: weights has shape \[3, 2\], expected \[3, 1\]"):
        moe_mlp(x, experts, torch.ones(3, 2), wide, back)
    with pytest.raises(TensorError, match=r"experts: expert 1 is \[128, 64\] w4a16-g32 .*expert 0 is \[64, 64\]"):
        PackedExperts.stack([back.expert(0), wide.expert(0)])


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_tiles_grow_with_the_rows_of_experts(arch):
    able = capabilities(arch)
    heights = [_rows_of_tile(rows, able, 1408) for rows in (0.1, 1, 3, 5, 10, 40, 500)]
    assert heights == sorted(heights, key=lambda chosen: chosen[0])
    assert heights[-1] == (128, False)
    assert heights[0] == ((8, True) if able.tma else (32, False))
    # The kernel for few rows takes gates of whole tiles of 16 rows.
    assert not _rows_of_tile(1, able, 1400)[1]


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a16-g64-asym"])
def test_offloaded_experts_come_behind_the_others(scheme):
    wide, back = matrices(scheme, 5, 128, 64), matrices(scheme, 5, 64, 64)
    order = [3, 0, 4, 1, 2]  # the experts slot by slot
    slots = torch.tensor([order.index(expert) for expert in range(5)], dtype=torch.int32)
    x, router = torch.randn(7, 64).half(), torch.randn(5, 64).half()

    def arranged(parts, resident):
        packed = [pack(parts[number], torch.float16) for number in order]
        return PackedExperts.stack(packed[:resident], packed[resident:])

    far = [arranged(parts, 2) for parts in (wide, back)]
    parts = 6 if "asym" in scheme else 4
    assert [(each.count, each.resident, len(each.parts)) for each in far] == [(5, 2, parts)] * 2
    for slot, number in enumerate(order):
        assert torch.equal(unpack(far[0].expert(slot)).codes(), wide[number].codes())
    _, experts, weights = moe_route(x, router, top_k=2)
    counts = torch.ones(5, dtype=torch.int32)
    _, placed, same = moe_route(x, router, top_k=2, slots=slots, counts=counts)
    assert torch.equal(same, weights)
    assert torch.equal(placed, slots[experts.long()])
    assert torch.equal(counts - 1, torch.bincount(experts.flatten(), minlength=5).int())
    expected = moe_mlp(x, experts, weights, stacked(wide), stacked(back))
    torch.testing.assert_close(moe_mlp(x, placed, weights, *far), expected, rtol=1e-3, atol=1e-3)


def test_the_shared_expert_has_a_slot_too():
    slots = torch.tensor([1, 2, 0], dtype=torch.int32)
    _, placed, _ = moe_route(torch.eye(2).half(), torch.eye(2).half(), top_k=1, shared=True, slots=slots)
    assert placed.tolist() == [[0, 1], [0, 2]]


def test_tables_of_slots_and_counts_have_an_entry_per_expert():
    x, router = torch.randn(2, 16).half(), torch.randn(6, 16).half()
    with pytest.raises(TensorError, match=r"slots is \[6\] torch.int32, expected \[7\] int32: one per expert"):
        moe_route(x, router, top_k=1, shared=True, slots=torch.zeros(6, dtype=torch.int32))
    with pytest.raises(TensorError, match=r"counts is \[6\] torch.int64, expected \[6\] int32"):
        moe_route(x, router, top_k=1, counts=torch.zeros(6, dtype=torch.int64))
