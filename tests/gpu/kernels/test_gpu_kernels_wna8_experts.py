"""Experts whose rows are rounded to e4m3, against float64: schemes, sizes, tiles that are not full, absent experts."""

import pytest
import torch
from gpu_experts import normal, random_experts, slots_of
from gpu_wna8_products import TOLERANCE, check, product
from torch.nn import functional as F

from warpbus.cuda.capabilities import capabilities
from warpbus.cuda.jit import architecture
from warpbus.kernels.ops import moe_mlp as op
from warpbus.kernels.ops import wna8_sm90
from warpbus.kernels.ops.expert_rows import SortedRows
from warpbus.kernels.ops.moe_mlp import moe_mlp
from warpbus.kernels.ops.packed import unpack
from warpbus.kernels.ops.wna8_quantize import round_e4m3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not capabilities(architecture(0)).wgmma, reason="needs a Hopper GPU"
    ),
]
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    # What the operators allocate next holds NaN.
    del [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)][:]


def exact(x, experts, weights, gate_up, down, residual):
    """Float64 products of rounded inputs. Those of the second product are rounded from exact ones."""
    total = torch.zeros_like(x, dtype=torch.float64)
    for number in range(gate_up.count):
        tokens, slots = (experts == number).nonzero(as_tuple=True)
        if len(tokens) == 0:
            continue
        wide, back = (unpack(each.expert(number)) for each in (gate_up, down))
        gate, up = product(x[tokens], wide).chunk(2, dim=-1)
        y = product((F.silu(gate) * up).to(x.dtype), back)
        total.index_add_(0, tokens, y * weights[tokens, slots, None].double())
    return total if residual is None else total + residual.double()


def compare(out, expected):
    """A few inner values lie beside a border between two codes, on the other side of it than the exact ones."""
    error = (out.double() - expected).norm() / expected.norm()
    assert torch.isfinite(out).all()
    assert error.item() <= 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "scheme", ["w4a16-g128", "w4a16-g64", "w4a16-g64-asym", "w3a16-g128-asym", "w2a16-g64", "w4a16"]
)
@pytest.mark.parametrize(("hidden", "ffn"), [(512, 384), (320, 192)])
@pytest.mark.parametrize("tokens", [700, 1333])
def test_experts(tokens, hidden, ffn, scheme, dtype):
    shared = tokens % 2 == 1
    gate_up = random_experts(scheme, 5 + shared, 2 * ffn, hidden, dtype)
    down = random_experts(scheme, 5 + shared, hidden, ffn, dtype)
    x, before = (normal(tokens, hidden, dtype=dtype) for _ in range(2))
    chosen, weights = slots_of(tokens, 5, 2, shared)
    rest = {"residual": before, "shared": shared, "activation_dtype": E4M3}
    out = moe_mlp(x, chosen, weights, gate_up, down, **rest)
    compare(out, exact(x, chosen, weights, gate_up, down, before))
    assert torch.equal(out, moe_mlp(x, chosen, weights, gate_up, down, **rest))
    assert not torch.equal(out, moe_mlp(x, chosen, weights, gate_up, down, residual=before, shared=shared))


@pytest.mark.parametrize("scheme", ["w4a16-g128", "w4a16-g64-asym"])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129, 300])
def test_the_products_of_tiles_of_any_height(tokens, scheme, monkeypatch):
    """Each product alone, whose tolerance is that of one."""
    monkeypatch.setattr(op, "_rows_of_tile", lambda *_: (128, False))
    hidden, ffn, dtype = 320, 192, torch.bfloat16
    gate_up = random_experts(scheme, 3, 2 * ffn, hidden, dtype)
    x = normal(tokens, hidden, dtype=dtype)
    chosen = torch.full((tokens, 1), 1, dtype=torch.int32, device="cuda")
    chosen[: tokens // 3] = 2
    rows = SortedRows.sort(chosen, 3, 128, dtype)
    both = x.new_empty(rows.count, 2 * ffn)
    wna8_sm90.multiply_experts(x, gate_up, rows, both, gathers=True)
    inner = x.new_empty(rows.count, ffn)
    wna8_sm90.multiply_experts(rows.gather(x), gate_up, rows, inner, gated=True)
    for number in (1, 2):
        own = (chosen[:, 0] == number).nonzero().flatten()
        if len(own) == 0:
            continue
        expected = product(x[own], unpack(gate_up.expert(number)))
        places = rows.place[own].long()
        check(both[places], expected)
        gate, up = expected.chunk(2, dim=-1)
        check(inner[places], F.silu(gate) * up, 4 * TOLERANCE)


def test_experts_of_other_processes_add_nothing():
    hidden, ffn, dtype = 320, 192, torch.bfloat16
    gate_up = random_experts("w4a16-g128", 4, 2 * ffn, hidden, dtype)
    down = random_experts("w4a16-g128", 4, hidden, ffn, dtype)
    x = normal(1500, hidden, dtype=dtype)
    chosen, weights = slots_of(1500, 8, 2, False)
    chosen[chosen >= 4] = -1
    chosen[0] = -1
    out = moe_mlp(x, chosen, weights, gate_up, down, absent=4, activation_dtype=E4M3)
    compare(out, exact(x, chosen, weights, gate_up, down, None))
    assert not out[0].any()


def test_few_rows_and_other_schemes_are_not_rounded():
    hidden, ffn, dtype = 320, 192, torch.float16
    for scheme, tokens in (("w4a16-g128", 40), ("w4a16-g32", 1000), ("w8a16", 1000)):
        gate_up = random_experts(scheme, 4, 2 * ffn, hidden, dtype)
        down = random_experts(scheme, 4, hidden, ffn, dtype)
        x = normal(tokens, hidden, dtype=dtype)
        chosen, weights = slots_of(tokens, 4, 2, False)
        out = moe_mlp(x, chosen, weights, gate_up, down, activation_dtype=E4M3)
        assert torch.equal(out, moe_mlp(x, chosen, weights, gate_up, down))


def test_rows_of_zeros_and_of_nan_stay_alone():
    hidden, ffn, dtype = 320, 192, torch.bfloat16
    gate_up = random_experts("w4a16-g64-asym", 4, 2 * ffn, hidden, dtype)
    down = random_experts("w4a16-g64-asym", 4, hidden, ffn, dtype)
    x = normal(1000, hidden, dtype=dtype)
    x[3], x[4] = 0.0, float("nan")
    chosen, weights = slots_of(1000, 4, 2, False)
    out = moe_mlp(x, chosen, weights, gate_up, down, activation_dtype=E4M3)
    assert not out[3].any()
    assert out[4].isnan().all()
    assert torch.isfinite(out[5:]).all()
    assert torch.isfinite(out[:3]).all()


def test_rows_are_rounded_in_the_order_of_the_experts():
    x = normal(500, 512, dtype=torch.bfloat16)
    chosen, _ = slots_of(500, 4, 2, False)
    rows = SortedRows.sort(chosen, 4, 128, x.dtype)
    found, expected = round_e4m3(x, 64, 1.0, rows), round_e4m3(rows.gather(x), 64, 1.0)
    for ours, theirs in zip(found, expected, strict=True):
        ours, theirs = (each[: rows.count].contiguous().view(torch.uint8) for each in (ours, theirs))
        assert torch.equal(ours, theirs)
