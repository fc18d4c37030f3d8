"""16-bit experts on the CPU: their definition, what is refused, and which tiles are chosen."""

import pytest
import torch
from torch.nn import functional as F

from warpbus.errors import TensorError
from warpbus.kernels.ops import gemm_sm90
from warpbus.kernels.ops.grouped_mlp import choose_sm80, choose_sm90, grouped_mlp


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
    assert {choose_sm90(rows) for rows in (0.1, 50, 1000)} <= set(gemm_sm90.OF_EXPERTS)
    assert [choose_sm80(rows).tile_m for rows in (1, 64, 65)] == [64, 64, 128]
