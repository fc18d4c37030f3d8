"""The CPU's kernel for experts against its own products one by one, and what is refused."""

import pytest
import torch

from warpbus.cuda.host_compiler import VARIANTS
from warpbus.errors import TensorError
from warpbus.kernels.ops.cpu_codes import codes_linear, pack_codes
from warpbus.kernels.ops.cpu_experts import CpuExperts, cpu_moe_mlp
from warpbus.qtensor import QTensor, Scheme

HERE = [variant for variant in VARIANTS if variant.runs_here]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(3)


def stacked(scheme, count, n, k, dtype=torch.float16):
    scheme = Scheme.parse(scheme)
    shape = (n, scheme.groups(k))

    def one():
        codes = torch.randint(0, 2**scheme.bits, (n, k), dtype=torch.uint8)
        zeros = None if scheme.symmetric else torch.randint(0, 2**scheme.bits, shape, dtype=torch.uint8)
        return pack_codes(QTensor.from_codes(scheme, codes, (0.01 * torch.rand(shape) + 0.001).to(dtype), zeros))

    return CpuExperts.stack([one() for _ in range(count)])


def layer(scheme="w4a16-g32", count=6, hidden=96, ffn=64):
    return stacked(scheme, count, 2 * ffn, hidden), stacked(scheme, count, hidden, ffn)


def one_by_one(x, experts, weights, gate_up, down, residual, variant=None):
    """The same products, an expert and a token at a time."""
    out = torch.zeros(x.shape) if residual is None else residual.float().clone()
    for token, own in enumerate(experts.tolist()):
        for slot, expert in enumerate(own):
            if expert < 0:
                continue
            inner = codes_linear(x[token], gate_up.expert(expert), gated=True, variant=variant)
            product = codes_linear(inner, down.expert(expert), variant=variant)
            out[token] += weights[token, slot] * product
    return out


@pytest.mark.parametrize("variant", HERE, ids=lambda variant: variant.name)
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w4a16-g32-asym", "w8a16", "w2a16-g32"])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_a_layer_is_the_sum_of_its_experts(tokens, scheme, variant):
    gate_up, down = layer(scheme)
    x, residual = torch.randn(tokens, 96), torch.randn(tokens, 96)
    experts, weights = torch.rand(tokens, 6).argsort(1)[:, :3], torch.rand(tokens, 3)
    found = cpu_moe_mlp(x, experts, weights, gate_up, down, residual=residual, variant=variant)
    wanted = one_by_one(x, experts, weights, gate_up, down, residual, variant)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)  # products are the same bits, a sum may be fused


def test_against_float64():
    gate_up, down = layer("w8a16", count=4, hidden=256, ffn=128)
    x, experts = torch.randn(16, 256), torch.rand(16, 4).argsort(1)[:, :2]
    weights = torch.rand(16, 2)
    wanted = torch.zeros(16, 256, dtype=torch.float64)
    for token, own in enumerate(experts.tolist()):
        for slot, expert in enumerate(own):
            wide, back = (each.expert(expert).unpack().dequantize(torch.float64) for each in (gate_up, down))
            gate, up = (wide @ x[token].double()).chunk(2)
            wanted[token] += weights[token, slot].double() * (back @ (torch.nn.functional.silu(gate) * up))
    found = cpu_moe_mlp(x, experts, weights, gate_up, down)
    # Rounding x to 8 bits moves gate and up by about 0.6 % each. Their product, whose largest elements stand out more,
    # is rounded by about 1 %.
    assert float((found.double() - wanted).norm() / wanted.norm()) < 0.02


def test_a_token_has_the_same_bits_alone_and_in_any_batch():
    gate_up, down = layer()
    x, experts, weights = torch.randn(23, 96), torch.randint(0, 6, (23, 2)), torch.rand(23, 2)
    together = cpu_moe_mlp(x, experts, weights, gate_up, down)
    for first, last in ((0, 1), (4, 6), (6, 23)):
        part = slice(first, last)
        assert torch.equal(cpu_moe_mlp(x[part], experts[part], weights[part], gate_up, down), together[part])


def test_slots_without_an_expert_add_nothing():
    gate_up, down = layer()
    x, weights = torch.randn(3, 96), torch.rand(3, 2)
    experts = torch.tensor([[2, -1], [-1, -1], [-1, 5]], dtype=torch.int32)
    found = cpu_moe_mlp(x, experts, weights, gate_up, down)
    assert torch.equal(found[1], torch.zeros(96))
    torch.testing.assert_close(found, one_by_one(x, experts, weights, gate_up, down, None), rtol=1e-5, atol=1e-6)
    nothing = cpu_moe_mlp(x, torch.full_like(experts, -1), weights, gate_up, down, residual=x)
    assert torch.equal(nothing, x)


def test_experts_that_no_token_has_are_not_read():
    gate_up, down = layer(count=4)
    x, weights = torch.randn(2, 96), torch.rand(2, 2)
    experts = torch.tensor([[1, 3], [3, 1]])
    wanted = cpu_moe_mlp(x, experts, weights, gate_up, down)
    for stack in (gate_up, down):
        for idle in (0, 2):
            stack.expert(idle).scales.fill_(float("nan"))
    assert torch.equal(cpu_moe_mlp(x, experts, weights, gate_up, down), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_of_16_bits(dtype):
    gate_up, down = layer()
    x, experts, weights = torch.randn(5, 96).to(dtype), torch.randint(0, 6, (5, 2)), torch.rand(5, 2)
    found = cpu_moe_mlp(x, experts, weights, gate_up, down)
    assert found.dtype == dtype
    assert torch.equal(found, cpu_moe_mlp(x.float(), experts, weights, gate_up, down).to(dtype))
    assert cpu_moe_mlp(x[:0], experts[:0], weights[:0], gate_up, down).shape == (0, 96)


def test_rejects():
    gate_up, down = layer(count=3)
    x, experts, weights = torch.randn(2, 96), torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2)
    with pytest.raises(TensorError, match="a token has expert 3, there are 3"):
        cpu_moe_mlp(x, experts + 3, weights, gate_up, down)
    with pytest.raises(TensorError, match="expected as many experts"):
        cpu_moe_mlp(x, experts, weights, gate_up, stacked("w4a16-g32", 2, 96, 64))
    with pytest.raises(TensorError, match=r"weights has shape \[2, 1\], expected \[2, 2\]"):
        cpu_moe_mlp(x, experts, weights[:, :1], gate_up, down)
    with pytest.raises(TensorError, match="experts are torch"):
        cpu_moe_mlp(x, experts.float(), weights, gate_up, down)
    with pytest.raises(TensorError, match=r"x has shape \[96\] on cpu, expected two axes"):
        cpu_moe_mlp(x[0], experts, weights, gate_up, down)
    parts = [gate_up.expert(0), down.expert(0)]
    with pytest.raises(TensorError, match=r"expert 1 is \[96, 64\]"):
        CpuExperts.stack(parts)
