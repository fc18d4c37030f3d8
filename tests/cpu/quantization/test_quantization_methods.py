"""What each method makes of a matrix, by itself and with its rows dealt out, at all four places of a layer."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from dense_configs import dense_config
from quantization_threads import together
from torch import Tensor, nn

from warpbus.dist import SHARES, Group
from warpbus.errors import NumericError
from warpbus.models import DecoderLayer, RopeConfig
from warpbus.models.layers import CausalAttention, Rotary
from warpbus.qtensor import QTensor, Scheme
from warpbus.quantization.algorithms import rtn
from warpbus.quantization.algorithms.factored import factored
from warpbus.quantization.algorithms.gptq import gptq_rows
from warpbus.quantization.algorithms.weights import squared_loss
from warpbus.quantization.layerwise import LayerQuantization
from warpbus.quantization.methods import METHODS, Solved
from warpbus.quantization.preflight import Matrix
from warpbus.quantization.statistics import ALONE, Statistics
from warpbus.quantization.stopwatch import Stopwatch

LINEARS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")

# Rows of o and down (36) and of gate_up (84) that do not divide into shares.
CONFIG = dense_config(
    family="glm",
    vocab_size=50,
    hidden_size=36,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=42,
    norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0, rotary_dim=4, interleaved=True),
    max_context=64,
    qkv_bias=True,
)
SCHEMES = {"gptq": "w3a16", "awq": "w3a16-asym", "smoothquant": "w8a8-int8"}


def make_layer() -> DecoderLayer:
    layer = DecoderLayer(CONFIG.layers[0], CONFIG.rope)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / (6 if "norm" not in name else 3))
            if "norm" in name:
                parameter.add_(1)
    return layer


def columns_of(linear: str) -> int:
    module = make_layer().get_submodule(linear)
    assert isinstance(module, nn.Linear)
    return module.in_features


def statistics(linear: str, seed: int = 0) -> Statistics:
    """Of inputs that differ a lot in size, and are not those of the unquantized model."""
    generator, columns = torch.Generator().manual_seed(seed), columns_of(linear)
    x = torch.randn(200, columns, generator=generator) * torch.randn(columns, generator=generator).mul(1.5).exp()
    x += 0.5 * x.roll(1, 1)
    original = x + 0.05 * torch.randn(x.shape, generator=generator) * x.std(0)
    return Statistics(200, x.T @ x / 200, (original - x).T @ x / 200, x.abs().mean(0), x.abs().amax(0))


@dataclass
class Case:
    """A layer, and the matrix of it that is solved."""

    layer: LayerQuantization
    matrix: Matrix

    @property
    def weight(self) -> Tensor:
        return self.layer.weight(self.matrix)

    @property
    def scheme(self) -> Scheme:
        return self.matrix.scheme

    def solve(self, algorithm: str, given: Statistics) -> Solved:
        return METHODS[algorithm]().solve(self.layer, self.matrix, given)


def case(linear: str, scheme: str, group: Group = ALONE) -> Case:
    rows, columns = CONFIG.layers[0].matrix(linear).shape
    watch = Stopwatch(group.device)
    layer = LayerQuantization(make_layer(), 0, [], frozenset(), group=group, watch=watch, scale_dtype=torch.float32)
    return Case(layer, Matrix(0, linear, (linear,), (rows,), columns, torch.float32, Scheme.parse(scheme)))


def same(one: QTensor, other: QTensor) -> bool:
    zeros = (one.zeros is None) == (other.zeros is None) and (
        one.zeros is None or other.zeros is None or torch.equal(one.zeros, other.zeros)
    )
    return one.shape == other.shape and zeros and torch.equal(one.qweight, other.qweight) and same_scales(one, other)


def same_scales(one: QTensor, other: QTensor) -> bool:
    return one.scales.dtype == other.scales.dtype and torch.equal(one.scales, other.scales)


def moments_loss(change: Tensor, moments: Tensor) -> float:
    return float(((change.double() @ moments.double()) * change.double()).sum())


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 17, 40])
@pytest.mark.parametrize("scheme", ["w3a16-g32-asym", "w8a8-fp8"])
def test_rows_are_dealt_out_and_gathered(world: int, rows: int, scheme: str) -> None:
    """As if all had been quantized at once, whatever the height and the number of processes."""
    weight = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
    parsed = Scheme.parse(scheme)
    expected = rtn(weight, parsed, scale_dtype=torch.float16, name="q")
    seen: list[int] = []

    def deal(group: Group) -> tuple[QTensor, float]:
        def quantize(matrices: Tensor) -> list[tuple[QTensor, Tensor]]:
            (parts,) = matrices
            assert parts.shape == (len(group.shares()), -(-rows // SHARES), 64)
            seen.append(len(parts))
            found = rtn(parts.flatten(0, 1), parsed, scale_dtype=torch.float16, name="q")
            height = parts.shape[1]
            losses = [squared_loss(part, found.rows(i * height, (i + 1) * height)) for i, part in enumerate(parts)]
            return [(found, torch.tensor(losses, dtype=torch.float64))]

        (whole,) = case("attention.o", scheme, group).layer.by_rows([weight], quantize)
        return whole

    found = together(world, deal)
    assert sum(seen) == SHARES
    lost, total = squared_loss(weight, expected)
    for whole, error in found:
        assert same(whole, expected)
        assert error == found[0][1] == pytest.approx((lost / total) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("algorithm", METHODS)
@pytest.mark.parametrize("linear", LINEARS)
def test_any_number_of_processes_gives_the_same_bits(algorithm: str, linear: str) -> None:
    given = statistics(linear)

    def solve(group: Group) -> tuple[Solved, DecoderLayer]:
        own = case(linear, SCHEMES[algorithm], group)
        return own.solve(algorithm, given), own.layer.layer

    ((alone, layer),) = together(1, solve)
    for world in (2, 3):
        for solved, own in together(world, solve):
            assert same(solved.weight, alone.weight)
            assert solved.error == alone.error
            assert (solved.folded is None) == (alone.folded is None)
            assert solved.changed.keys() == alone.changed.keys()
            for mine, other in zip(own.parameters(), layer.parameters(), strict=True):
                assert torch.equal(mine, other)


@pytest.mark.parametrize("linear", LINEARS)
def test_gptq_is_that_of_the_whole_matrix(linear: str) -> None:
    given, own = statistics(linear), case(linear, "w4a16")
    weight = own.weight.clone()
    solved = own.solve("gptq", given)
    assert given.moments is not None
    hessian = factored(given.moments, damping=0.01, name="q")
    expected, losses = gptq_rows(weight[None], hessian, own.scheme, scale_dtype=torch.float32, drift=given.drift)
    # A sum of another length may round a tie the other way.
    assert (solved.weight.codes() == expected.codes()).float().mean() > 0.98
    lost, total = losses[0].tolist()
    assert solved.error == pytest.approx((lost / total) ** 0.5, rel=0.02)
    assert solved.folded is None
    assert solved.changed == {}
    assert torch.equal(own.weight, weight)  # the caller replaces it


@pytest.mark.parametrize("linear", LINEARS)
def test_gptq_without_drift_aims_at_the_weights(linear: str) -> None:
    given = statistics(linear)
    assert given.moments is not None
    own = case(linear, "w3a16")
    solved = own.solve("gptq", Statistics(given.tokens, given.moments))
    change = solved.weight.dequantize(torch.float32) - own.weight
    expected = (moments_loss(change, given.moments) / moments_loss(own.weight, given.moments)) ** 0.5
    assert solved.error == pytest.approx(expected, rel=1e-3)
    nearest = rtn(own.weight, own.scheme, scale_dtype=torch.float32).dequantize(torch.float32) - own.weight
    assert moments_loss(change, given.moments) < 0.8 * moments_loss(nearest, given.moments)


@pytest.mark.parametrize("linear", LINEARS)
@pytest.mark.parametrize("scheme", ["w3a16", "w4a16-asym", "w2a16"])
@pytest.mark.parametrize("seed", range(3))
def test_awq_never_chooses_what_is_worse_than_no_scaling(linear: str, scheme: str, seed: int) -> None:
    given, own = statistics(linear, seed), case(linear, scheme)
    assert given.moments is not None
    weight = own.weight.clone()
    # Without drift, so that what is rounded are the weights themselves.
    solved = own.solve("awq", replace(given, drift=None))
    assert solved.folded is not None
    found = solved.weight.dequantize(torch.float32) / solved.folded - weight
    importance = given.moments.diagonal().contiguous()
    plain = rtn(weight, own.scheme, scale_dtype=torch.float32, importance=importance).dequantize(torch.float32) - weight
    lost = moments_loss(found, given.moments)
    assert lost <= moments_loss(plain, given.moments) * (1 + 1e-4)
    assert solved.error == pytest.approx((lost / moments_loss(weight, given.moments)) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("algorithm", ["awq", "smoothquant"])
@pytest.mark.parametrize("linear", LINEARS)
def test_folding_keeps_what_the_layer_computes(algorithm: str, linear: str) -> None:
    own = case(linear, SCHEMES[algorithm])
    before = copy.deepcopy(own.layer.layer)
    solved = own.solve(algorithm, statistics(linear))
    assert solved.folded is not None
    x = torch.randn(2, 9, 36, generator=torch.Generator().manual_seed(5))
    positions = torch.arange(9).expand(2, 9)
    angles = Rotary(CONFIG.rope)(positions, torch.float32)
    with torch.no_grad():
        first, second = (layer(x, 0, positions, angles, CausalAttention()) for layer in (before, own.layer.layer))
    assert torch.allclose(first, second, rtol=1e-3, atol=1e-4 * float(first.abs().max()))
    expected = {
        "attention.qkv": {"attention_norm.weight"},
        "attention.o": {"attention.qkv.weight", "attention.qkv.bias"},
        "mlp.gate_up": {"mlp_norm.weight"},
        "mlp.down": {"mlp.gate_up.weight"},
    }
    assert solved.changed.keys() == expected[linear]
    earlier, now = dict(before.named_parameters()), dict(own.layer.layer.named_parameters())
    for name, parameter in now.items():
        if name in solved.changed:
            assert torch.equal(solved.changed[name], parameter)
        elif name != f"{linear}.weight":
            assert torch.equal(parameter, earlier[name])
    scaled = earlier[f"{linear}.weight"] * solved.folded
    assert torch.allclose(now[f"{linear}.weight"], scaled, rtol=1e-5)
    assert not torch.equal(solved.folded, torch.ones_like(solved.folded))


@pytest.mark.parametrize("algorithm", METHODS)
@pytest.mark.parametrize("linear", LINEARS)
def test_columns_that_never_had_an_input(algorithm: str, linear: str) -> None:
    """Whole heads of them for o, since heads that share a value are scaled alike."""
    given = statistics(linear)
    dead = list(range(16)) if linear == "attention.o" else [0, 5]
    for name in ("moments", "drift"):
        matrix = getattr(given, name)
        matrix[dead] = 0
        matrix[:, dead] = 0
    for name in ("mean_abs", "max_abs"):
        getattr(given, name)[dead] = 0
    solved = case(linear, SCHEMES[algorithm]).solve(algorithm, given)
    assert torch.isfinite(solved.weight.dequantize(torch.float32)).all()
    assert 0 < solved.error < 1
    if solved.folded is not None:
        assert bool((solved.folded > 0).all())
        assert torch.isfinite(solved.folded).all()


@pytest.mark.parametrize("algorithm", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused(algorithm: str, value: float) -> None:
    own = case("mlp.down", SCHEMES[algorithm])
    own.weight[3, 5] = value
    with pytest.raises(NumericError, match=r"^layers\.0\.mlp\.down: NaN or infinity among its weights") as raised:
        own.solve(algorithm, statistics("mlp.down"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("algorithm", METHODS)
def test_a_matrix_of_zeros(algorithm: str) -> None:
    own = case("mlp.down", SCHEMES[algorithm])
    own.weight.zero_()
    solved = own.solve(algorithm, statistics("mlp.down"))
    assert not solved.weight.dequantize(torch.float32).any()
    assert solved.error == 0


def test_each_method_has_its_schemes() -> None:
    schemes = ["w4a16-g128", "w3a16", "w2a16-g32-asym", "w8a16", "w8a8-int8", "w8a8-fp8"]
    for algorithm, fitting in (("gptq", schemes[:4]), ("awq", schemes[:4]), ("smoothquant", schemes[4:])):
        assert [text for text in schemes if METHODS[algorithm].fits(Scheme.parse(text))] == fitting
