from dataclasses import replace

import pytest
import torch
from dense_configs import with_traits

from warpbus.kernels.ops.rounding import round_to_nearest
from warpbus.models import SHAPES, random_model
from warpbus.models.layers import QuantizedEmbedding, QuantizedLinear
from warpbus.qtensor import Scheme

SMALL = with_traits(SHAPES["chatglm2-6b"], vocab_size=300, hidden_size=128, num_layers=2, num_heads=4, head_dim=32)
SMALL = with_traits(SMALL, num_kv_heads=2, ffn_size=224, rope=replace(SMALL.rope, rotary_dim=16))
TOKENS = torch.arange(40)[None]


@pytest.mark.parametrize(
    "scheme", [None, "w4a16-g32", "w3a16", "w8a16-g32-asym", "w2a16-g32", "w8a8-int8", "w8a8-fp8", "w3a16-trellis"]
)
@torch.no_grad()
def test_outputs_are_finite_and_of_moderate_size(scheme):
    chosen = scheme and Scheme.parse(scheme)
    head = None if chosen is not None and chosen.is_trellis else chosen  # 300 rows are no whole tiles
    model = random_model(SMALL, chosen, "cpu", torch.float32, head=head)
    logits = model(TOKENS)
    assert logits.shape == (1, 40, 300)
    assert 0.2 < logits.std() < 5
    assert isinstance(model.layers[1].mlp.down, QuantizedLinear) == (scheme is not None)
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def test_a_seed_draws_a_model():
    first, again, other = (
        random_model(SMALL, Scheme.parse("w4a16-g32"), "cpu", torch.float32, seed)(TOKENS) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("scheme", ["w2a16-g32", "w4a16-g32", "w4a16-g32-asym"])
@torch.no_grad()
def test_weights_have_a_mean_of_zero(scheme):
    # Otherwise the hidden states of a deep model become constant vectors, which take less power than those of others.
    weight = random_model(SMALL, Scheme.parse(scheme), "cpu", torch.float32).layers[0].mlp.gate_up.weight.dequantize()
    assert weight.mean().abs() < 0.05 * weight.std()


@torch.no_grad()
def test_a_tied_head_is_the_embedding():
    model = random_model(replace(SMALL, tie_embeddings=True), None, "cpu", torch.float32)
    assert model.head.weight is model.embedding.weight
    scheme = Scheme.parse("w8a16-g32")
    rounded = random_model(replace(SMALL, tie_embeddings=True), None, "cpu", torch.float32, head=scheme).head
    assert isinstance(rounded, QuantizedLinear)
    assert rounded.scheme == scheme
    assert (rounded.weight.dequantize() - model.embedding.weight).abs().max() < 1e-3


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_an_embedding_may_be_rounded(tied):
    config, scheme = replace(SMALL, tie_embeddings=tied), Scheme.parse("w8a16-g32")
    plain = random_model(config, None, "cpu", torch.float32)
    model = random_model(config, None, "cpu", torch.float32, embedding=scheme)
    assert isinstance(model.embedding, QuantizedEmbedding)
    assert torch.equal(
        model.embed(TOKENS),
        round_to_nearest(plain.embedding.weight, scheme, scale_dtype=torch.float32).dequantize()[TOKENS],
    )
    assert isinstance(model.head, QuantizedLinear) == tied
    if tied:
        assert torch.equal(model.head.weight.codes(), model.embedding.weight.codes())
    expected = plain(TOKENS)
    assert (model(TOKENS) - expected).norm() < 0.03 * expected.norm()


@torch.no_grad()
@pytest.mark.parametrize("scheme", [None, "w4a16-g32"])
def test_the_first_chatglm(scheme):
    config = with_traits(
        SHAPES["chatglm-6b"], vocab_size=300, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4
    )
    config = with_traits(config, head_dim=32, ffn_size=224, rope=replace(config.rope, rotary_dim=16), prompt_end=20)
    logits = random_model(config, scheme and Scheme.parse(scheme), "cpu", torch.float32)(TOKENS)
    assert 0.05 < logits.std() < 5


def test_sizes_of_the_known_shapes():
    sizes = {name: round(config.num_parameters / 1e9, 2) for name, config in SHAPES.items()}
    assert sizes == {
        "chatglm-6b": 6.17,
        "chatglm2-6b": 6.24,
        "glm-4-9b": 9.4,
        "llama-3-8b": 8.03,
        "glm-4.5-air": 106.85,
        "glm-4.7-flash": 29.94,
        "qwen3-30b-a3b": 30.53,
    }


def test_groups_that_do_not_divide_a_matrix_become_smaller():
    """The first layer of GLM-4.5-Air has 10944 inner features, 85.5 groups of 128."""
    model = random_model(with_traits(SMALL, ffn_size=192), Scheme.parse("w4a16-g128"), "cpu", torch.float32)
    assert str(model.layers[0].mlp.down.scheme) == "w4a16-g64"
    assert str(model.layers[0].mlp.gate_up.scheme) == "w4a16-g128"
