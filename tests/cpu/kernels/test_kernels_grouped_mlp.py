"""16-bit experts on the CPU: their definition, what is refused, and which tiles are chosen."""

import pytest
import torch
from torch.nn import functional as F

from warpbus.errors import TensorError
from warpbus.kernels.ops import gemm_sm90
from warpbus.kernels.ops.grouped_mlp import choose_sm80, choose_sm90, grouped_mlp
from warpbus.kernels.ops.w8a8 import quantize_rows, w8a8_linear


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def matrices(experts, hidden, ffn):
    gate_up = torch.randn(experts, 2 * ffn, hidden) / hidden**0.5
    return gate_up.bfloat16(), (torch.randn(experts, hidden, ffn) / ffn**0.5).bfloat16()


@pytest.mark.parametrize("shared", [False, True])
def test_a_layer_is_the_sum_of_its_experts(shared):
    gate_up, down = matrices(4, 96, 64)
    x, residual = torch.randn(7, 96).bfloat16(), torch.randn(7, 96).bfloat16()
    experts, weights = torch.rand(7, 3).argsort(1)[:, :2].int(), torch.rand(7, 2)
    if shared:
        experts, weights = F.pad(experts, (1, 0), value=3), F.pad(weights, (1, 0), value=1.0)
    out = grouped_mlp(x, experts, weights, gate_up, down, residual=residual)
    for row in range(7):
        expected = residual[row].double()
        for number, weight in zip(experts[row].tolist(), weights[row].double(), strict=True):
            gate, up = (gate_up[number].double() @ x[row].double()).chunk(2)
            expected = expected + weight * (down[number].double() @ (F.silu(gate) * up))
        torch.testing.assert_close(out[row].double(), expected, rtol=2e-2, atol=2e-2)


def test_experts_of_other_processes_add_nothing():
    gate_up, down = matrices(4, 96, 64)
    x, residual = torch.randn(5, 96).bfloat16(), torch.randn(5, 96).bfloat16()
    experts, weights = torch.tensor([[0, 2], [-1, 3], [1, -1], [-1, -1], [3, 0]]).int(), torch.rand(5, 2)
    out = grouped_mlp(x, experts, weights, gate_up, down, residual=residual, absent=2)
    without = grouped_mlp(x, experts.clamp_min(0), weights * (experts >= 0), gate_up, down, residual=residual)
    assert torch.equal(out, without)
    assert torch.equal(out[3], residual[3])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_8_bits(dtype):
    """Every expert computes what `w8a8_linear` does."""
    wide, back = matrices(4, 96, 64)
    gate_up, gate_up_scales = quantize_rows(wide.flatten(0, 1), dtype)
    down, down_scales = quantize_rows(back.flatten(0, 1), dtype)
    gate_up, down = gate_up.view_as(wide), down.view_as(back)
    scales = gate_up_scales.view(4, -1), down_scales.view(4, -1)
    x, experts = torch.randn(9, 96).bfloat16(), torch.rand(9, 4).argsort(1)[:, :2].int()
    weights = torch.rand(9, 2)
    out = grouped_mlp(x, experts, weights, gate_up, down, scales=scales)
    expected = torch.zeros(9, 96)
    for number in range(4):
        tokens, slots = (experts == number).nonzero(as_tuple=True)
        gate, up = w8a8_linear(x[tokens], gate_up[number], scales[0][number]).float().chunk(2, dim=-1)
        y = w8a8_linear((F.silu(gate) * up).bfloat16(), down[number], scales[1][number]).float()
        expected.index_add_(0, tokens, y * weights[tokens, slots, None])
    assert (out.float() - expected).norm() < 0.02 * expected.norm()
    with pytest.raises(TensorError, match=r"gate_up_scales has shape \[4, 96\], expected \[4, 128\]: one per row"):
        grouped_mlp(x, experts, weights, gate_up, down, scales=scales[::-1])
    with pytest.raises(TensorError, match="multiples of 16"):
        grouped_mlp(x[:, :88], experts, weights, gate_up[..., :88], down[:, :88], scales=scales)


def test_no_tokens():
    none = torch.empty(0, 2)
    out = grouped_mlp(torch.empty(0, 64).half(), none.int(), none, *(each.half() for each in matrices(2, 64, 32)))
    assert out.shape == (0, 64)


def test_compiled():
    gate_up, down = matrices(3, 32, 16)
    x, experts, weights = torch.randn(4, 32).bfloat16(), torch.zeros(4, 1).int(), torch.ones(4, 1)
    compiled = torch.compile(lambda x: grouped_mlp(x, experts, weights, gate_up, down) + 1, backend="aot_eager")
    torch.testing.assert_close(compiled(x), grouped_mlp(x, experts, weights, gate_up, down) + 1)


def test_what_is_refused():
    gate_up, down = matrices(2, 64, 32)
    x, experts, weights = torch.randn(3, 64).bfloat16(), torch.zeros(3, 1).int(), torch.ones(3, 1)
    with pytest.raises(TensorError, match=r"grouped_mlp: experts are torch.int64 and weights torch.float32"):
        grouped_mlp(x, experts.long(), weights, gate_up, down)
    with pytest.raises(TensorError, match=r"gate_up is \[2, 64, 64\] and down \[1, 64, 32\]: expected \[experts, 2 \*"):
        grouped_mlp(x, experts, weights, gate_up, down[:1])
    with pytest.raises(TensorError, match=r"gate_up is \[2, 62, 64\] and down \[2, 64, 31\]: .* multiples of 8"):
        grouped_mlp(x, experts, weights, gate_up[:, :62], down[..., :31])
    with pytest.raises(TensorError, match=r"at most 1023 experts"):
        grouped_mlp(x, experts, weights, gate_up[:1].expand(1024, -1, -1), down[:1].expand(1024, -1, -1))
    with pytest.raises(TensorError, match=r"grouped_mlp: weights has shape \[3, 2\], expected \[3, 1\]"):
        grouped_mlp(x, experts, torch.ones(3, 2), gate_up, down)
    with pytest.raises(TensorError, match=r"grouped_mlp: down is float16 and x bfloat16"):
        grouped_mlp(x, experts, weights, gate_up, down.half())


def test_tiles_grow_with_the_rows_of_experts():
    heights = [choose_sm90(rows).tile_m for rows in (0.1, 4, 30, 100, 1000)]
    assert heights == sorted(heights)
    assert {choose_sm90(rows) for rows in (0.1, 20, 50, 1000)} == set(gemm_sm90.OF_EXPERTS)
    assert [choose_sm80(rows).tile_m for rows in (1, 64, 65)] == [64, 64, 128]
