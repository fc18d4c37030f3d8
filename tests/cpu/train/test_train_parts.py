"""LoRA, recomputation and FP8 in a small decoder: what they compute, what they train, what they keep."""

from collections.abc import Callable

import pytest
import torch
from dense_configs import dense_config, with_traits
from torch import Tensor, nn

from warpbus.errors import UsageError
from warpbus.kernels.ops.packed import pack
from warpbus.kernels.reference.fp8 import round_to_fp8
from warpbus.models import Decoder, ModelConfig
from warpbus.models.config import RopeConfig
from warpbus.models.layers import QuantizedLinear, project
from warpbus.qtensor import QTensor, Scheme
from warpbus.train.fp8 import E4M3, E5M2, Fp8Linear, FrozenFp8Linear, use_fp8
from warpbus.train.lora import LoraLinear, attach_lora, lora_of
from warpbus.train.loss import summed_cross_entropy
from warpbus.train.recompute import recompute_layers

CONFIG = dense_config(
    family="chatglm2",
    vocab_size=64,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=48,
    norm_eps=1e-5,
    rope=RopeConfig(theta=1e4, rotary_dim=8, interleaved=True),
    max_context=64,
    qkv_bias=True,
)
V1_LIKE = with_traits(
    CONFIG, num_kv_heads=4, gated=False, mlp_bias=True, output_bias=True, layer_norm=True, normed_residual=2.0
)
TOKENS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def decoder(config: ModelConfig = CONFIG) -> Decoder:
    model = Decoder(config)
    model.initialize(torch.Generator().manual_seed(1), std=0.2)
    return model.train()


def loss_of(model: Decoder) -> Tensor:
    return summed_cross_entropy(model.hidden(TOKENS)[:, :-1], model.head, TOKENS[:, 1:])


def step(model: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients of what is trained."""
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def learnt(model: Decoder) -> None:
    """As if it had been trained: b is no longer 0."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            nn.init.normal_(module.b, std=0.1)


@pytest.mark.parametrize("config", [CONFIG, V1_LIKE], ids=["gated", "v1"])
def test_lora_begins_as_its_base_and_trains_a_and_b_alone(config: ModelConfig) -> None:
    model = decoder(config)
    before = loss_of(model).detach()
    trained = attach_lora(model, rank=4, alpha=8.0)
    assert len(trained) == 3 * 4 * 2
    torch.testing.assert_close(loss_of(model).detach(), before)
    learnt(model)
    _, gradients = step(model)
    assert len(gradients) == len(trained)
    assert all(name.endswith((".a", ".b")) and gradient.any() for name, gradient in gradients.items())


@pytest.mark.parametrize("config", [CONFIG, V1_LIKE], ids=["gated", "v1"])
def test_lora_of_is_the_change_of_the_weights(config: ModelConfig) -> None:
    model = decoder(config)
    plain = decoder(config)
    first, *_, last = (matrix.name for matrix in config.layers[0].matrices)
    attach_lora(model, rank=3, alpha=6.0, targets=[first, last])
    learnt(model)
    lora = lora_of(model, "poet")
    assert lora.rank == 3
    assert sorted(lora.parts) == sorted(f"layers.{index}.{name}" for index in range(3) for name in (first, last))
    with torch.no_grad():
        for name, part in lora.parts.items():
            plain.get_submodule(name).weight += part.b @ part.a
    torch.testing.assert_close(loss_of(model), loss_of(plain))


def test_lora_of_a_product_with_activation_and_residual() -> None:
    base = nn.Linear(16, 24)
    lora = LoraLinear(base, 2, 4.0)
    nn.init.normal_(lora.b)
    merged = nn.Linear(16, 24)
    merged.weight = nn.Parameter(base.weight + 2 * lora.b @ lora.a)
    merged.bias = base.bias
    x, residual = torch.randn(3, 5, 16), torch.randn(3, 5, 12)
    given: dict[str, object] = {"activation": "swiglu", "residual": residual}
    torch.testing.assert_close(project(lora, x, **given), project(merged, x, **given))  # type: ignore[arg-type]


def test_dropout_hides_inputs_from_lora_while_training() -> None:
    lora = LoraLinear(nn.Linear(64, 8), 2, 2.0, dropout=0.5)
    nn.init.normal_(lora.b)
    x = torch.randn(4, 64)
    assert not torch.equal(lora(x), lora(x))
    lora.eval()
    assert torch.equal(lora(x), lora(x))


def test_lora_on_quantized_weights() -> None:
    """QLoRA: the gradients of a and b are those on the dequantized weights."""
    model, dense = decoder(), decoder()
    scheme = Scheme.parse("w4a16")
    for source, target in zip(model.layers, dense.layers, strict=True):
        for name in (matrix.name for matrix in CONFIG.layers[0].matrices):
            parent, _, leaf = name.rpartition(".")
            linear = source.get_submodule(name)
            groups = scheme.groups(linear.in_features)
            codes = torch.randint(0, 16, linear.weight.shape, dtype=torch.uint8)
            quantized = QTensor.from_codes(scheme, codes, torch.rand(linear.out_features, groups) * 0.05)
            layer = QuantizedLinear(quantized, linear.bias, dtype=torch.float32)
            setattr(source.get_submodule(parent), leaf, layer)
            target.get_submodule(name).weight = nn.Parameter(quantized.dequantize(torch.float32))
    for each in (model, dense):
        torch.manual_seed(3)
        attach_lora(each, rank=4, alpha=8.0)
        learnt(each)
    ours, theirs = step(model), step(dense)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-4)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in ours[1].items():
        torch.testing.assert_close(gradient, theirs[1][name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["dense", "fp8", "packed"])
@pytest.mark.parametrize("learns", [True, False])
def test_lora_adds_its_part_in_place(kind: str, learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    base: nn.Module = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    if kind == "fp8":
        base = FrozenFp8Linear(base)
    if kind == "packed":
        codes = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
        quantized = QTensor.from_codes(Scheme.parse("w4a16"), codes, torch.rand(32, 1) * 0.05)
        base = QuantizedLinear(pack(quantized, torch.bfloat16))
    lora = LoraLinear(base, 2, 4.0)
    nn.init.normal_(lora.b, std=0.1)
    given = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    found = []
    for refused in (torch.addmm, Tensor.addmm_):

        def fail(*_: object, **__: object) -> None:
            raise AssertionError("the other one adds")

        x = given.clone().requires_grad_(learns)
        with monkeypatch.context() as patched:
            if refused is torch.addmm:
                patched.setattr(torch, "addmm", fail)
            else:  # as for a base whose output is a view
                patched.setattr(Tensor, "_is_view", lambda _: True)
                patched.setattr(Tensor, "addmm_", fail)
            y = lora(x)
        lora.zero_grad()
        y.float().square().sum().backward()
        found.append([y.detach(), *(each.grad for each in (x, lora.a, lora.b))])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def test_lora_targets_that_are_not_there() -> None:
    with pytest.raises(UsageError, match=r"choose among attention.qkv, attention.o, mlp.gate_up, mlp.down"):
        attach_lora(decoder(), rank=4, alpha=8.0, targets=["q_proj"])
    with pytest.raises(UsageError, match="rank 0"):
        attach_lora(decoder(), rank=0, alpha=8.0)
    with pytest.raises(UsageError, match="has no LoRA"):
        lora_of(decoder(), "nothing")


def kept_bytes(model: Decoder) -> int:
    """Of what the forward pass keeps for the backward pass."""
    storages: dict[int, int] = {}
    alive: list[Tensor] = []
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(model)
    return sum(storages.values())


@pytest.mark.parametrize("prepare", [lambda model: None, lambda model: attach_lora(model, rank=2, alpha=4.0)])
def test_recomputation_changes_no_bit(prepare: Callable[[Decoder], object]) -> None:
    model, recomputing = decoder(), decoder()
    for each in (model, recomputing):
        torch.manual_seed(2)
        prepare(each)
        learnt(each)
    recompute_layers(recomputing)
    expected, found = step(model), step(recomputing)
    assert torch.equal(expected[0], found[0])
    assert expected[1].keys() == found[1].keys()
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in expected[1].items())


def test_recomputation_keeps_less() -> None:
    everything, some, none = decoder(), decoder(), decoder()
    recompute_layers(some, every=2)
    recompute_layers(none)
    kept = [kept_bytes(each) for each in (none, some, everything)]
    assert kept[0] < 0.4 * kept[2]
    assert kept[0] < kept[1] < kept[2]
    assert list(none.state_dict()) == list(everything.state_dict())
    with pytest.raises(UsageError, match="every 0"):
        recompute_layers(none, every=0)


def test_recomputation_drops_the_same() -> None:
    model, recomputing = decoder(), decoder()
    found = []
    for each in (model, recomputing):
        torch.manual_seed(2)
        attach_lora(each, rank=2, alpha=4.0, dropout=0.5)
        learnt(each)
        if each is recomputing:
            recompute_layers(each)
        torch.manual_seed(3)
        found.append(step(each))
    assert all(torch.equal(gradient, found[1][1][name]) for name, gradient in found[0][1].items())


def test_recomputation_rounds_as_autocast_did_and_can_be_repeated() -> None:
    found = []
    for every in (0, 1):
        model = decoder()
        if every:
            recompute_layers(model, every)
        with torch.autocast("cpu", torch.bfloat16):
            total = model.hidden(TOKENS).float().square().sum()
        for _ in range(2):
            model.zero_grad()
            total.backward(retain_graph=True)
            found.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    for others in found[1:]:
        assert others.keys() == found[0].keys()
        assert all(torch.equal(gradient, others[name]) for name, gradient in found[0].items())


def test_the_last_product_of_a_layer_is_not_computed_again() -> None:
    model = decoder(with_traits(CONFIG, hidden_size=128))
    attach_lora(model, rank=2, alpha=4.0)
    recompute_layers(model)
    computed = {"gate_up": 0, "down": 0}
    for layer in model.layers:
        for name in computed:

            def count(*_: object, name: str = name) -> None:
                computed[name] += 1

            layer.mlp.get_submodule(f"{name}.base").register_forward_hook(count)
    model.hidden(torch.randint(64, (1, 128))).sum().backward()
    assert computed == {"gate_up": 6, "down": 3}


def test_fp8_scales_fill_the_format() -> None:
    for dtype, steps in ((E4M3, 2**-4), (E5M2, 2**-3)):
        x = torch.randn(40, 30) * 3
        codes, _, scale = round_to_fp8(x, dtype, False)
        assert float(codes.float().abs().max()) == torch.finfo(dtype).max
        near = (codes.float() * scale - x).abs()
        assert bool((near <= steps * x.abs() + scale * torch.finfo(dtype).smallest_normal).all())
    codes, _, scale = round_to_fp8(torch.zeros(3, 3), E4M3, False)
    assert not codes.float().any()
    assert scale.isfinite()
    codes, _, _ = round_to_fp8(torch.tensor([[1.0, float("inf")], [float("nan"), 2.0]]), E4M3, False)
    assert codes.float().isnan().any()


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_largest_magnitude_never_overflows(source: torch.dtype, dtype: torch.dtype) -> None:
    for exponent in range(-12, 13, 3):
        for drawn in torch.rand(64):
            x = ((1 + drawn) * 2.0**exponent).to(source).view(1, 1)
            codes, _, scale = round_to_fp8(x, dtype, False)
            assert float(codes.float()) == torch.finfo(dtype).max
            assert float(codes.float() * scale) == pytest.approx(float(x), rel=1e-5)


@pytest.mark.parametrize("rows", [16, 7])
@pytest.mark.parametrize("frozen", [False, True])
def test_fp8_linear_is_the_product_of_rounded_matrices(rows: int, frozen: bool) -> None:
    linear = nn.Linear(32, 48)
    model = nn.ModuleDict({"it": linear})
    layer = FrozenFp8Linear(linear) if frozen else Fp8Linear(32, 48)
    if not frozen:
        layer.load_state_dict(linear.state_dict())
    x = torch.randn(rows, 32, requires_grad=True)
    y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)

    def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        codes, _, scale = round_to_fp8(tensor.detach(), dtype, False)
        return codes.float() * scale

    wx, ww, wdy = rounded(x, E4M3), rounded(linear.weight, E4M3), rounded(dy, E5M2)
    torch.testing.assert_close(y, wx @ ww.T + model["it"].bias, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, wdy @ ww, rtol=1e-5, atol=1e-5)
    if not frozen:
        torch.testing.assert_close(layer.weight.grad, wdy.T @ wx, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer.bias.grad, dy.sum(0))


def test_fp8_keeps_a_byte_of_a_number() -> None:
    layer = Fp8Linear(32, 48, bias=False)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    for x_learns, weight_learns, expected in (
        (True, True, 32 * 16 + 48 * 32 + 8),  # the columns of 7 rows, padded; the weight's; two scales
        (True, False, 48 * 32 + 8),
        (False, True, 32 * 16 + 8),
    ):
        x = torch.randn(7, 32, requires_grad=x_learns)
        layer.weight.requires_grad_(weight_learns)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = layer(x)
        assert sum(kept) == expected
        with torch.no_grad():
            assert torch.equal(layer(x), y)


def test_use_fp8_takes_what_fits() -> None:
    model = decoder()
    exact = step(model)
    parameters = dict(model.named_parameters())
    assert use_fp8(model) == 12
    assert {name: id(each) for name, each in model.named_parameters()} == {
        name: id(each) for name, each in parameters.items()
    }
    assert type(model.head) is nn.Linear
    rounded = step(model)
    assert abs(float(rounded[0] / exact[0]) - 1) < 0.05
    assert exact[1].keys() == rounded[1].keys()
    for name, gradient in rounded[1].items():
        assert float((gradient - exact[1][name]).norm() / exact[1][name].norm()) < 0.4, name
    assert use_fp8(decoder(with_traits(CONFIG, ffn_size=40))) == 9  # mlp.down takes 40, no multiple of 16


def test_fp8_base_of_lora() -> None:
    model = decoder()
    trained = attach_lora(model, rank=4, alpha=8.0)
    assert use_fp8(model) == 12
    assert all(isinstance(each.base, FrozenFp8Linear) for each in model.modules() if isinstance(each, LoraLinear))
    learnt(model)
    _, gradients = step(model)
    assert len(gradients) == len(trained)
    assert all(bool(each.isfinite().all()) and each.any() for each in gradients.values())
