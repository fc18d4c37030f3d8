"""Experts in 16 bits or w8a8 as one tensor of each kind: here in main memory, by the reference of the kernels."""

from dataclasses import replace

import pytest
import torch
from stacked_models import SMALL, W4, config_of, experts_of
from torch import nn

from warpbus.errors import UsageError
from warpbus.formats import Checkpoint
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.ops.rounding import round_to_nearest
from warpbus.models import Decoder, load_layer, load_model, read_config
from warpbus.models.layer_spec import MLPSpec, MoESpec, RouterSpec
from warpbus.models.layers import MoE, QuantizedLinear, grouped_experts, moe
from warpbus.models.random_checkpoint import write_random_checkpoint
from warpbus.qtensor import Scheme

TOKENS = torch.arange(24)[None]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """The CPU counts as a GPU: the operators run their references there."""
    monkeypatch.setattr(grouped_experts, "gpu_has_kernels", lambda device: True)
    monkeypatch.setattr(moe, "has_kernels", lambda x: not torch.is_grad_enabled())


@torch.no_grad()
def model_of(config, dtype=torch.bfloat16):
    model = Decoder(config)
    model.initialize(torch.Generator().manual_seed(0), std=0.1)
    return model.to(dtype).eval().requires_grad_(False)


def stack(model, offloaded=0):
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.stack(offloaded)
    return model


@pytest.mark.parametrize("shared", [False, True])
@torch.no_grad()
def test_a_stacked_model_computes_the_same(shared):
    config = config_of(5, shared=shared)
    expected, model = model_of(config)(TOKENS).float(), stack(model_of(config))
    assert not model.waits_for_gpu
    assert [len(each.gate_up) for each in experts_of(model)] == [5 + shared] * 2
    found = model(TOKENS).float()
    assert (found - expected).norm() < 0.02 * expected.norm()


@torch.no_grad()
def test_there_is_one_copy_of_each_weight():
    config = config_of(4)
    before = {name: each.clone() for name, each in model_of(config).layers[-1].mlp.experts.named_parameters()}
    model = stack(model_of(config))
    mlp = model.layers[-1].mlp
    for name, weight in before.items():
        number, kind, _ = name.split(".")
        assert torch.equal(getattr(mlp.experts, kind)[int(number)], weight)
    for kind in ("gate_up", "down"):
        view, whole = getattr(mlp.shared, kind).weight, getattr(mlp.experts, kind)
        assert view.data_ptr() == whole[4].data_ptr()
        assert whole.numel() == 5 * view.numel()
    names = [name for name, _ in mlp.named_parameters() if "experts" in name]
    assert names == ["experts.gate_up", "experts.down"]


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w8a8-fp8"])
@torch.no_grad()
def test_8_bits(scheme):
    """With one copy of each weight, the shared expert's too."""
    mlps = []
    for _ in range(2):
        mlp = model_of(config_of(4)).layers[-1].mlp
        for expert in (*mlp.experts.values(), mlp.shared):
            quantize(expert, Scheme.parse(scheme))
        mlps.append(mlp)
    plain, stacked = mlps
    stacked.stack()
    assert stacked.stacked
    assert stacked.experts.gate_up.dtype == Scheme.parse(scheme).dtype
    assert stacked.experts.gate_up.shape == (5, 64, 64)
    assert stacked.shared.down.form.qweight.data_ptr() == stacked.experts.down[4].data_ptr()
    x = torch.randn(9, 64).bfloat16()
    with torch.enable_grad():
        expected, alone = plain(x).float(), stacked(x).float()
    torch.testing.assert_close(alone, expected)
    # A sum that differs in its last bit moves some of the second rounding's codes: up to 1/8 apart in e4m3.
    bound = 0.045 if scheme == "w8a8-fp8" else 0.02
    assert (stacked(x).float() - expected).norm() < bound * expected.norm()


def test_gradients_pass_the_experts():
    config = config_of(4)
    plain, stacked = model_of(config).layers[-1].mlp, stack(model_of(config)).layers[-1].mlp
    x = torch.randn(9, config.hidden_size).bfloat16()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for mlp, each in zip((plain, stacked), inputs, strict=True):
        mlp(each).float().square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)


@torch.no_grad()
def test_an_adapted_shared_expert_is_computed_alone():
    class Doubled(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def forward(self, x):
            return 2 * self.part(x)

    mlp = stack(model_of(config_of(4))).layers[-1].mlp
    x = torch.randn(6, 64).bfloat16()
    before, shared = mlp(x), mlp.shared(x)
    mlp.shared.down = Doubled(mlp.shared.down)
    torch.testing.assert_close(mlp(x), before + shared, rtol=2e-2, atol=2e-2)


def quantize(expert, scheme=W4):
    for name in ("gate_up", "down"):
        rounded = round_to_nearest(getattr(expert, name).weight.float(), scheme, scale_dtype=torch.bfloat16)
        form = rounded if rounded.holds_values else pack(rounded, torch.bfloat16)
        setattr(expert, name, QuantizedLinear(form, dtype=torch.bfloat16))


@torch.no_grad()
def test_a_quantized_shared_expert_stays_apart():
    model = model_of(config_of(4))
    mlp = model.layers[-1].mlp
    quantize(mlp.shared)
    x = torch.randn(6, 64).bfloat16()
    with torch.enable_grad():
        expected = mlp(x)
    mlp.stack()
    assert mlp.stacked
    assert len(mlp.experts.gate_up) == 4
    torch.testing.assert_close(mlp(x), expected, rtol=2e-2, atol=2e-2)


def grow_biases(mlp):
    mlp.experts["1"].down.bias = nn.Parameter(torch.zeros(64).bfloat16(), requires_grad=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda mlp: quantize(mlp.experts["2"]),
        grow_biases,
        lambda mlp: mlp.float(),
        lambda mlp: mlp.experts.requires_grad_(True),
    ],
    ids=["quantized", "bias", "float32", "trained"],
)
@torch.no_grad()
def test_which_experts_are_not_stacked(change):
    model = model_of(config_of(3))
    change(model.layers[-1].mlp)
    stack(model)
    assert [layer.mlp.stacked for layer in model.layers[1:]] == [True, False]
    assert model.waits_for_gpu


def test_unquantized_experts_cannot_be_offloaded():
    with pytest.raises(UsageError, match="1 experts of a layer cannot be offloaded: quantize them, all"):
        stack(model_of(config_of(3)), offloaded=1)


def test_a_layer_that_is_loaded_alone_keeps_its_experts_apart(tmp_path):
    """Quantization replaces them one by one."""
    spec = MoESpec(RouterSpec(4, 2, "softmax"), MLPSpec(32), None)
    config = replace(SMALL, layers=(replace(SMALL.layers[0], mlp=spec),))
    write_random_checkpoint(tmp_path / "model", config, torch.bfloat16, device="cpu")
    checkpoint = Checkpoint(tmp_path / "model")
    whole = load_model(checkpoint, device="cpu", dtype=torch.bfloat16).layers[-1].mlp.experts
    assert isinstance(whole, grouped_experts.GroupedExperts)
    layer = load_layer(checkpoint, read_config(checkpoint), 0, device="cpu", dtype=torch.bfloat16)
    for number, expert in layer.mlp.experts.items():
        assert type(expert.gate_up) is nn.Linear
        assert torch.equal(expert.down.weight, whole.down[int(number)])
