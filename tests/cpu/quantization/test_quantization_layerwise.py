"""A layer at a time must be what the whole decoder is, and padding must leave no trace."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_configs import dense_config
from torch import Tensor, nn

from warpbus.dist import SHARES
from warpbus.models import (
    Decoder,
    DecoderLayer,
    IndexerSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelConfig,
    NormSpec,
    RopeConfig,
)
from warpbus.models.layers import CausalAttention
from warpbus.quantization import Calibration
from warpbus.quantization import states as batches_of
from warpbus.quantization.folding import fold
from warpbus.quantization.layerwise import LayerQuantization
from warpbus.quantization.states import States, embed
from warpbus.quantization.statistics import ALONE, DRIFT, MAX_ABS, MEAN_ABS, MOMENTS, Statistics
from warpbus.quantization.stopwatch import Stopwatch

LINEARS = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")

ALL = frozenset({MOMENTS, DRIFT, MEAN_ABS, MAX_ABS})
FOLDING: list[dict[str, Any]] = [{}, {"qkv_bias": True, "output_norms": True}, {"qk_norm": True}]
CHATGLM6B: dict[str, Any] = {
    "rope": RopeConfig(theta=10000.0, rotary_dim=4, interleaved=False, two_dimensional=True),
    "num_kv_heads": 4,
    "qkv_bias": True,
    "output_bias": True,
    "layer_norm": True,
    "gated": False,
    "mlp_bias": True,
    "normed_residual": 2.0,
    "prompt_end": 7,
}
TRAITS = [*FOLDING, CHATGLM6B]
Solver = Callable[[int, DecoderLayer, str, Statistics], Tensor | None]


def make_decoder(**traits: Any) -> Decoder:
    shape: dict[str, Any] = {
        "family": "glm",
        "vocab_size": 50,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_size": 48,
        "norm_eps": 1e-5,
        "rope": RopeConfig(theta=10000.0, rotary_dim=4, interleaved=True),
        "max_context": 64,
    }
    config = dense_config(**(shape | traits))
    model = Decoder(config)
    model.initialize(torch.Generator().manual_seed(0), std=0.3)
    return model.eval()


def make_data(lengths: Iterable[int] = (9, 4, 7, 4, 1)) -> Calibration:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(8, 50, (n,), generator=generator).tolist() for n in lengths]
    # In some of them what ends a prompt of ChatGLM-6B.
    return Calibration(tuple(tuple(7 if i == 3 else token for i, token in enumerate(ids)) for ids in drawn))


def embedded(model: Decoder, data: Calibration, tokens: int, *, drift: bool = True) -> list[States]:
    return embed(data, tokens, model.embedding.weight.data, model.config, ALONE, torch.float32, drift=drift)


def passes(
    model: Decoder, states: list[States], needed: frozenset[str] = ALL, *, keep: bool = True
) -> Iterable[tuple[int, DecoderLayer, LayerQuantization]]:
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        watch = Stopwatch(ALONE.device)
        yield index, layer, LayerQuantization(layer, index, states, needed, group=ALONE, watch=watch, keep=keep)


def nothing(index: int, layer: DecoderLayer, linear: str, statistics: Statistics) -> None:
    """Leave a matrix as it is."""


def run(
    model: Decoder,
    data: Calibration,
    tokens: int,
    solve: Solver = nothing,
    needed: frozenset[str] = ALL,
    *,
    keep: bool = True,
) -> list[States]:
    states = embedded(model, data, tokens, drift=DRIFT in needed)
    for index, layer, through in passes(model, states, needed, keep=keep):
        through.visit(lambda linear, found, index=index, layer=layer: solve(index, layer, linear, found))
    return states


def weight_of(layer: DecoderLayer, linear: str) -> Tensor:
    module = layer.get_submodule(linear)
    assert isinstance(module, nn.Linear)
    return module.weight.data


def there(statistic: Tensor | None) -> Tensor:
    assert statistic is not None
    return statistic


@pytest.mark.parametrize("tokens", [1, 16, 1000])
def test_batches_are_embedded_share_by_share(tokens: int) -> None:
    model, data = make_decoder(), make_data(range(1, 12))
    states, batches = embedded(model, data, tokens), data.batches(tokens)
    assert len(states) == len(batches)
    shares = [state.share for state in states]
    assert shares == sorted(shares)
    assert set(shares) <= set(range(SHARES))
    assert len(batches) < SHARES or len(set(shares)) == SHARES
    for state, batch in zip(states, batches, strict=True):
        assert torch.equal(state.x, model.embedding(batch.ids))
        assert state.original is not None
        assert torch.equal(state.original, state.x)
        assert (state.real is None) == bool(batch.real.all())
        assert torch.equal(state.tokens(state.x), state.x[batch.real])


@pytest.mark.parametrize("traits", TRAITS)
def test_states_end_as_the_decoders(traits: dict[str, Any]) -> None:
    model, data = make_decoder(**traits), make_data()
    for batch, state in zip(data.batches(16), run(model, data, 16), strict=True):
        assert torch.allclose(model.final_norm(state.x), model.hidden(batch.ids), atol=1e-5)


def test_statistics_are_those_of_the_inputs_in_the_decoder() -> None:
    model, data = make_decoder(qkv_bias=True), make_data()
    seen: dict[tuple[int, str], list[Tensor]] = {}

    def remember(name: tuple[int, str]) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(module: nn.Module, arguments: tuple[Tensor]) -> None:
            seen.setdefault(name, []).append(arguments[0].detach().flatten(0, -2))

        return hook

    hooks = [
        layer.get_submodule(linear).register_forward_pre_hook(remember((index, linear)))
        for index, layer in enumerate(model.layers)
        for linear in LINEARS
    ]
    with torch.no_grad():
        for ids in data.sequences:
            model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    order = []

    def compare(index: int, layer: DecoderLayer, linear: str, found: Statistics) -> None:
        x = torch.cat(seen[index, linear])
        order.append((index, linear))
        assert found.tokens == len(x) == data.tokens
        assert torch.allclose(there(found.moments), x.T @ x / len(x), rtol=1e-3, atol=1e-5)
        assert torch.allclose(there(found.mean_abs), x.abs().mean(0), rtol=1e-3, atol=1e-5)
        assert torch.allclose(there(found.max_abs), x.abs().amax(0), rtol=1e-3, atol=1e-5)
        assert torch.allclose(there(found.drift), torch.zeros(len(x[0]), len(x[0])), atol=1e-5)

    run(model, data, 16, compare)
    assert order == [(index, linear) for index in range(2) for linear in LINEARS]


def test_batching_does_not_matter() -> None:
    moments = []
    for tokens in (1, 12, 1000):
        collected: list[Tensor] = []

        def collect(index: int, layer: DecoderLayer, linear: str, found: Statistics, into: Any = collected) -> None:
            into.append(found.moments)

        run(make_decoder(), make_data(), tokens, collect)
        moments.append(collected)
    for one, other, all_at_once in zip(*moments, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)
        assert torch.allclose(one, all_at_once, rtol=1e-3, atol=1e-6)


def test_later_matrices_see_what_earlier_ones_became() -> None:
    data = make_data()
    untouched: dict[str, list[Tensor]] = {}
    changed: dict[str, list[Tensor]] = {}
    for moments, factor in ((untouched, 1.0), (changed, 2.0)):

        def solve(
            index: int, layer: DecoderLayer, linear: str, found: Statistics, into: Any = moments, by: float = factor
        ) -> None:
            into.setdefault(linear, []).append(found.moments)
            if linear == "attention.o":
                weight_of(layer, linear).mul_(by)

        run(make_decoder(), data, 1000, solve)
    for name in ("attention.qkv", "attention.o"):
        assert torch.equal(untouched[name][0], changed[name][0])
        assert not torch.allclose(untouched[name][1], changed[name][1])
    for name in ("mlp.gate_up", "mlp.down"):
        assert not torch.allclose(untouched[name][0], changed[name][0])


@pytest.mark.parametrize("last", LINEARS)
def test_the_layer_is_whole_again_after_an_error(last: str) -> None:
    model, data = make_decoder(), make_data()

    def fail(index: int, layer: DecoderLayer, linear: str, found: Statistics) -> None:
        if linear == last:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run(model, data, 1000, fail)
    for linear in LINEARS:
        assert isinstance(model.layers[0].get_submodule(linear), nn.Linear)


def halve(index: int, layer: DecoderLayer, linear: str, found: Statistics) -> None:
    """What quantizing does, only more so."""
    weight_of(layer, linear).mul_(0.5)


@pytest.mark.parametrize("traits", TRAITS)
def test_the_unquantized_model_runs_alongside(traits: dict[str, Any]) -> None:
    """Whatever becomes of the weights, `original` and with it the drift are those of the model that was loaded."""
    data, model = make_data(), make_decoder(**traits)
    batches = data.batches(16)
    with torch.no_grad():
        expected = [model.hidden(batch.ids) for batch in batches]
    drifts = []

    def solve(index: int, layer: DecoderLayer, linear: str, found: Statistics) -> None:
        drifts.append(float(there(found.drift).norm()))
        halve(index, layer, linear, found)

    for state, hidden in zip(run(model, data, 16, solve), expected, strict=True):
        assert state.original is not None
        assert torch.allclose(model.final_norm(state.original), hidden, atol=1e-5)
        assert not torch.allclose(model.final_norm(state.x), hidden, atol=1e-2)
    assert drifts[0] < 1e-6
    assert all(drift > 1e-4 for drift in drifts[1:])


@pytest.mark.parametrize("traits", TRAITS)
@pytest.mark.parametrize("keep", [True, False])
def test_the_states_are_those_of_the_quantized_layer(traits: dict[str, Any], keep: bool) -> None:
    """To the bit: what calibration saw is what the model computes that is written."""
    data, model = make_data(), make_decoder(**traits)
    states = embedded(model, data, 16)
    for index, layer, through in passes(model, states, keep=keep):
        before = [state.x.clone() for state in states]
        through.visit(lambda linear, found, layer=layer, index=index: halve(index, layer, linear, found))
        for state, x in zip(states, before, strict=True):
            with torch.no_grad():
                expected = layer(x, index, state.positions, state.angles, state.context)
            assert torch.equal(state.x, expected)


@pytest.mark.parametrize("needed", [ALL, frozenset({MOMENTS})])
def test_keeping_inputs_or_computing_them_again_gives_the_same_bits(needed: frozenset[str]) -> None:
    data = make_data()
    kept, again = (run(make_decoder(qkv_bias=True), data, 16, halve, needed, keep=keep) for keep in (True, False))
    for one, other in zip(kept, again, strict=True):
        assert torch.equal(one.x, other.x)


def test_of_many_tokens_about_half_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of every share, so that it does not depend on who has it; what goes on is the same."""
    data = make_data([6] * 40)
    every = run(make_decoder(), data, 12, halve)
    monkeypatch.setattr(batches_of, "COMPARED_TOKENS", data.tokens - 1)
    some = run(make_decoder(), data, 12, halve)
    assert all(state.original is not None for state in every)
    for share in range(SHARES):
        compared = [state.original is not None for state in some if state.share == share]
        assert sum(compared) == -(-len(compared) // 2)
    for one, other in zip(every, some, strict=True):
        assert torch.equal(one.x, other.x)
        if other.original is not None:
            assert one.original is not None
            assert torch.equal(one.original, other.original)


def test_no_drift_for_who_does_not_ask() -> None:
    needed = frozenset({MOMENTS, MEAN_ABS})
    found = []

    def look(index: int, layer: DecoderLayer, linear: str, statistics: Statistics) -> None:
        found.append((statistics.drift, statistics.max_abs))

    states = run(make_decoder(), make_data(), 16, look, needed)
    assert found == [(None, None)] * 8
    assert all(state.original is None for state in states)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("traits", FOLDING)
def test_factors_that_are_folded_in_divide_the_inputs(traits: dict[str, Any], keep: bool) -> None:
    """The inputs of o and down were computed before the fold; what goes on is what the folded layer computes."""
    data, model = make_data(), make_decoder(**traits)
    states = embedded(model, data, 16, drift=False)
    original = run(make_decoder(**traits), data, 16, needed=frozenset({MOMENTS}))
    for index, layer, through in passes(model, states, frozenset({MOMENTS}), keep=keep):
        before = [state.x.clone() for state in states]

        def solve(linear: str, found: Statistics, layer: DecoderLayer = layer) -> Tensor | None:
            columns = weight_of(layer, linear).shape[1]
            # Powers of two, alike for all heads: nothing is rounded.
            factors = 2.0 ** (torch.arange(columns) % 8 % 3 - 1)
            return fold(layer, linear, factors).scale

        through.visit(solve)
        for state, x in zip(states, before, strict=True):
            with torch.no_grad():
                expected = layer(x, index, state.positions, state.angles, state.context)
            assert torch.equal(state.x, expected)
    for folded, state in zip(states, original, strict=True):
        assert torch.allclose(folded.x, state.x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("needed", [ALL, frozenset({MOMENTS})])
def test_skipping_is_what_quantizing_does(needed: frozenset[str]) -> None:
    data, model = make_data(), make_decoder(qkv_bias=True)
    first = run(model, data, 16, halve, needed)
    again = make_decoder(qkv_bias=True)
    second = embedded(again, data, 16, drift=DRIFT in needed)
    for index, layer, through in passes(again, second, needed):
        through.skip(lambda layer=layer, done=model.layers[index]: layer.load_state_dict(done.state_dict()))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.x, other.x)
        if one.original is None:
            assert other.original is None
        else:
            assert other.original is not None
            assert torch.equal(one.original, other.original)


def test_each_model_attends_to_the_tokens_that_its_own_indexers_select() -> None:
    """The second layer shares the selection of the first, which differs once that is quantized."""
    attention = LatentAttentionSpec(3, query_rank=16, kv_rank=20, nope_dim=8, rope_dim=4, value_dim=8, norm_eps=1e-6)
    indexer = IndexerSpec(heads=4, head_dim=8, top_k=3)
    layers = tuple(
        LayerSpec(32, replace(attention, indexer=replace(indexer, shared=shared)), MLPSpec(48), NormSpec(1e-5))
        for shared in (False, True)
    )
    model = Decoder(ModelConfig("glm_moe_dsa", 50, layers, RopeConfig(1e4, 4, interleaved=True), 64))
    model.initialize(torch.Generator().manual_seed(0), std=0.3)
    original, data = copy.deepcopy(model.eval()), make_data((21, 21))
    states = embedded(model, data, 64)

    def halve(index: int, layer: DecoderLayer, linear: str, statistics: Statistics) -> None:
        if linear == "attention.qkv_a":
            layer.get_submodule(linear).weight.data.mul_(torch.linspace(-1, 2, 40)[:, None])

    for index, layer, run in passes(model, states, frozenset({DRIFT})):
        run.visit(lambda linear, statistics, index=index, layer=layer: halve(index, layer, linear, statistics))
    for state in states:
        tokens = torch.tensor([data.sequences[row] for row in range(2)])
        with torch.no_grad():
            positions = state.positions
            for decoder, found in ((original, state.original), (model, state.x)):
                assert found is not None
                expected = decoder.transform(decoder.embed(tokens), positions, CausalAttention())
                torch.testing.assert_close(found, expected)
