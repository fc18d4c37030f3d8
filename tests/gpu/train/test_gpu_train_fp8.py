"""FP8 linear layers on a GPU against the same roundings computed in float32, eager and compiled."""

from dataclasses import replace

import pytest
import torch
from dense_configs import with_traits
from torch import nn

from warpbus.cuda.jit import architecture
from warpbus.cuda.kernel import runs_on
from warpbus.errors import DeviceError
from warpbus.kernels.ops.fp8 import round_to_fp8
from warpbus.models import SHAPES, random_model
from warpbus.models.layers import CausalAttention
from warpbus.train.fp8 import E4M3, E5M2, Fp8Linear, FrozenFp8Linear, use_fp8
from warpbus.train.lora import attach_lora
from warpbus.train.loss import summed_cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

HAS_E4M3 = torch.cuda.is_available() and runs_on(architecture(0), "sm_89")
needs_e4m3 = pytest.mark.skipif(not HAS_E4M3, reason="needs sm_89")
SMALL = with_traits(
    SHAPES["chatglm2-6b"], vocab_size=1000, hidden_size=256, num_layers=3, num_heads=8, head_dim=64, ffn_size=384
)
SMALL = replace(SMALL, rope=replace(SMALL.rope, rotary_dim=32), max_context=2048)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def rounded(tensor, dtype):
    codes, _, scale = round_to_fp8(tensor.detach(), dtype)
    return codes.float() * scale


def near(ours, theirs, tolerance):
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < tolerance


@needs_e4m3
@pytest.mark.parametrize("rows", [16, 100, 1024])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_products_of_rounded_matrices(rows, frozen, compiled):
    linear = nn.Linear(512, 768, device="cuda")
    if frozen:
        layer = FrozenFp8Linear(linear)
    else:
        layer = Fp8Linear(512, 768, device="cuda")
        layer.load_state_dict(linear.state_dict())
    called = torch.compile(layer) if compiled else layer
    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(rows, 768, device="cuda", dtype=torch.bfloat16)
    y = called(x)
    y.backward(dy)
    wx, ww, wdy = rounded(x, E4M3), rounded(linear.weight, E4M3), rounded(dy, E5M2)
    assert y.dtype == torch.bfloat16
    assert near(y, wx @ ww.T + linear.bias, 1e-2)
    assert near(x.grad, wdy @ ww, 1e-2)
    if not frozen:
        assert layer.weight.grad.dtype == torch.float32
        assert near(layer.weight.grad, wdy.T @ wx, 1e-2)
        assert near(layer.bias.grad, dy.float().sum(0), 1e-2)


@needs_e4m3
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_eager_and_compiled(held, given):
    """Eager rounds by the kernel and adds the bias in the product, compiled by what Inductor makes of it."""
    torch.compiler.reset()  # Dynamo gives up a function that it has compiled for many layers
    layer = Fp8Linear(512, 768, device="cuda", dtype=held)
    x = torch.randn(2, 50, 512, device="cuda", dtype=given)
    dy = torch.randn(2, 50, 768, device="cuda", dtype=given)
    found = []
    for called in (layer, torch.compile(layer)):
        layer.zero_grad()
        own = x.clone().requires_grad_()
        y = called(own)
        y.backward(dy)
        found.append((y, own.grad, layer.weight.grad, layer.bias.grad))
        assert [each.dtype for each in found[-1]] == [given, given, held, held]
    for eager, compiled in zip(*found, strict=True):
        assert eager.isfinite().all()
        assert near(compiled, eager, 1e-2)
    dw = found[0][2]
    if held == torch.float32 and given != held:
        assert not torch.equal(dw, dw.to(given).float())  # it is not rounded to 16 bits on its way


@needs_e4m3
@pytest.mark.parametrize("rows", [7, 64])
def test_what_eager_keeps(rows):
    """A byte for a number of the input and of the weight, by columns alone, and two scales."""
    layer = Fp8Linear(256, 128, device="cuda")
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
    columns = 256 * (-(-rows // 16) * 16)
    kept = []

    def keep(tensor):
        kept.append(tensor.nbytes)
        return tensor

    for x_learns, weight_learns, expected in (
        (True, True, columns + layer.weight.numel()),
        (True, False, layer.weight.numel()),
        (False, True, columns),
    ):
        x.requires_grad_(x_learns)
        layer.weight.requires_grad_(weight_learns)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(x)
        assert sum(kept) == expected + 8
    x.requires_grad_()
    y = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), y)


@needs_e4m3
@pytest.mark.parametrize("lora", [False, True])
def test_a_decoder_learns_as_in_bfloat16(lora):
    tokens = torch.randint(1000, (4, 128), device="cuda")
    losses = {}
    for fp8 in (False, True):
        model = random_model(SMALL, None, "cuda", torch.bfloat16 if lora else torch.float32).train()
        torch.manual_seed(3)
        trained = attach_lora(model, rank=8, alpha=16.0) if lora else list(model.requires_grad_(True).parameters())
        if fp8:
            assert use_fp8(model) == 12
        optimizer = torch.optim.AdamW(trained, lr=1e-2 if lora else 1e-3)
        found = []
        for _ in range(12):
            with torch.autocast("cuda", torch.bfloat16):
                hidden = model.hidden(tokens, None, CausalAttention(torch.zeros_like(tokens)))
                loss = summed_cross_entropy(hidden[:, :-1], model.head, tokens[:, 1:])
            (loss / tokens.numel()).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()) / tokens.numel())
        losses[fp8] = found
    assert losses[True][0] == pytest.approx(losses[False][0], rel=0.02)
    fallen = {fp8: found[0] - found[-1] for fp8, found in losses.items()}
    assert fallen[False] > 0.1
    assert fallen[True] > 0.75 * fallen[False]


@pytest.mark.skipif(HAS_E4M3, reason="this GPU has fp8")
def test_older_gpus_are_refused():
    model = random_model(SMALL, None, "cuda", torch.bfloat16)
    with pytest.raises(DeviceError, match="needs a GPU from sm_89"):
        use_fp8(model)
