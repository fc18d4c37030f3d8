"""Prompts read with activations of 8 bits: what the model says stays close, and decoding is what it was."""

import pytest
import torch
from gpu_engine_models import GPU, model_of

from warpbus.engine.engine import Engine, request
from warpbus.errors import UsageError
from warpbus.models.layers.activation_dtype import round_activations
from warpbus.qtensor import Scheme

available = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not available, reason="needs an NVIDIA GPU")]
e4m3 = pytest.mark.skipif(not available or torch.cuda.get_device_capability() < (8, 9), reason="needs an Ada GPU")
each_word = pytest.mark.parametrize("word", ["int8", pytest.param("fp8", marks=e4m3)])


def answers(engine, prompts, tokens=8):
    asked = [request(prompt, tokens=tokens) for prompt in prompts]
    for each in asked:
        engine.add(each)
    while engine.has_work:
        engine.step()
    return [list(each.token_ids) for each in asked]


@each_word
def test_logits_of_a_prompt_move_by_the_rounding_alone(word):
    model = model_of(scheme=Scheme.parse("w4a16"))
    tokens = torch.randint(0, model.config.vocab_size, (1, 600), device=GPU)
    with torch.no_grad():
        exact = model(tokens).double()
        round_activations(model, word)
        rounded, short = model(tokens).double(), model(tokens[:, :100]).double()
        for linear in model.modules():
            linear.activation_dtype = None
        assert torch.equal(model(tokens[:, :100]).double(), short)
    moved = ((rounded - exact).norm() / exact.norm()).item()
    assert 1e-3 < moved < 0.1


@each_word
def test_an_engine_answers_prompts_in_chunks_and_beside_each_other(word):
    """The same requests twice give the same answers: all kernels are deterministic."""
    model = model_of(scheme=Scheme.parse("w4a16"))
    round_activations(model, word)
    engine = Engine(model, max_num_seqs=4, prefix_caching=False)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, model.config.vocab_size, (length,), generator=generator).tolist() for length in (700, 20, 1100)
    ]
    assert answers(engine, prompts) == answers(engine, prompts)


@each_word
def test_models_without_a_matrix_for_it_are_refused(word):
    with pytest.raises(
        UsageError, match=rf"activation_dtype {word} needs matrices of up to 4 bits.* the model is w6a16"
    ):
        round_activations(model_of(scheme=Scheme.parse("w6a16")), word)
