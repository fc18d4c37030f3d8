"""A layer at a time must be what the whole decoder is, and padding must leave no trace."""

import copy

import pytest
import torch

from warpbus.models import LINEARS, Decoder, DecoderLayer, ModelConfig, RopeConfig
from warpbus.quantization import Calibration
from warpbus.quantization.layerwise import embed, pass_through, quantize_layer

CPU = torch.device("cpu")


def make_decoder(**traits):
    config = ModelConfig(
        family="glm",
        vocab_size=50,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_size=48,
        norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0, rotary_dim=4, interleaved=True),
        max_context=64,
        **traits,
    )
    model = Decoder(config)
    model.initialize(torch.Generator().manual_seed(0), std=0.3)
    return model.eval()


def make_data(lengths=(9, 4, 7, 4, 1)):
    generator = torch.Generator().manual_seed(1)
    return Calibration(tuple(tuple(torch.randint(50, (n,), generator=generator).tolist()) for n in lengths))


def run(model, data, tokens, solve=lambda name, linear, hessian: None):
    states = embed(list(data.batches(tokens)), model.embedding.weight.data, model.config, CPU, torch.float32)
    for index, layer in enumerate(model.layers):
        quantize_layer(layer, index, states, solve, f"layers.{index}")
    return states


@pytest.mark.parametrize("traits", [{}, {"qkv_bias": True, "output_norms": True}, {"qk_norm": True}])
def test_states_end_as_the_decoders(traits):
    model, data = make_decoder(**traits), make_data()
    batches = list(data.batches(16))
    for batch, state in zip(batches, run(model, data, 16), strict=True):
        assert torch.allclose(model.final_norm(state.x), model.hidden(batch.ids), atol=1e-5)


def test_moments_are_those_of_the_inputs_in_the_decoder():
    model, data = make_decoder(qkv_bias=True), make_data()
    seen = {}

    def remember(name):
        def hook(module, arguments):
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
    found = []
    order = []

    def compare(name, linear, hessian):
        layer = next(i for i, layer in enumerate(model.layers) if layer.get_submodule(name) is linear)
        x = torch.cat(seen[layer, name])
        order.append((layer, name))
        found.append(torch.allclose(hessian.moments(), x.T @ x / len(x), rtol=1e-3, atol=1e-5))
        assert hessian.tokens == data.tokens

    run(model, data, 16, compare)
    assert order == [(layer, name) for layer in range(2) for name in LINEARS]
    assert all(found)


def test_batching_does_not_matter():
    moments = []
    for tokens in (1, 12, 1000):
        model, data = make_decoder(), make_data()
        collected = []
        run(model, data, tokens, lambda name, linear, hessian, into=collected: into.append(hessian.moments()))
        moments.append(collected)
    for one, other, all_at_once in zip(*moments, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)
        assert torch.allclose(one, all_at_once, rtol=1e-3, atol=1e-6)


def test_later_matrices_see_what_earlier_ones_became():
    data = make_data()
    untouched, changed = {}, {}
    for moments, factor in ((untouched, 1.0), (changed, 2.0)):
        model = make_decoder()

        def solve(name, linear, hessian, moments=moments, factor=factor):
            moments.setdefault(name, []).append(hessian.moments())
            if name == "attention.o":
                linear.weight.data.mul_(factor)

        run(model, data, 1000, solve)
    for name in ("attention.qkv", "attention.o"):
        assert torch.equal(untouched[name][0], changed[name][0])
        assert not torch.allclose(untouched[name][1], changed[name][1])
    for name in ("mlp.gate_up", "mlp.down"):
        assert not torch.allclose(untouched[name][0], changed[name][0])


def test_the_layer_is_whole_again_after_an_error():
    model, data = make_decoder(), make_data()

    def fail(name, linear, hessian):
        if name == "mlp.down":
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run(model, data, 1000, fail)
    layer = model.layers[0]
    assert isinstance(layer, DecoderLayer)
    assert isinstance(layer.attention.o, torch.nn.Linear)
    assert isinstance(layer.mlp.down, torch.nn.Linear)


def test_the_unquantized_model_runs_alongside():
    """Whatever becomes of the weights, `original` and with it the drift are those of the model that was loaded."""
    data, model = make_data(), make_decoder(qkv_bias=True, output_norms=True)
    batches = list(data.batches(16))
    with torch.no_grad():
        expected = [model.hidden(batch.ids) for batch in batches]
    drifts = []

    def solve(name, linear, hessian):
        drifts.append(float(hessian.drift().norm()))
        linear.weight.data.mul_(0.5)

    for state, hidden in zip(run(model, data, 16, solve), expected, strict=True):
        assert torch.allclose(model.final_norm(state.original), hidden, atol=1e-5)
        assert not torch.allclose(model.final_norm(state.x), hidden, atol=1e-2)
    assert drifts[0] == 0
    assert all(drift > 1e-4 for drift in drifts[1:])


def test_passing_through_is_what_quantizing_does():
    data, model = make_data(), make_decoder(qkv_bias=True)
    unquantized = copy.deepcopy(model)

    def solve(name, linear, hessian):
        linear.weight.data.mul_(0.9)

    first = run(model, data, 16, solve)
    second = embed(list(data.batches(16)), model.embedding.weight.data, model.config, CPU, torch.float32)
    for index, (layer, before) in enumerate(zip(model.layers, unquantized.layers, strict=True)):
        pass_through(layer, before, index, second)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.original, other.original)
