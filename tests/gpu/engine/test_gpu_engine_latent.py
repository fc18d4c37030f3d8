"""Multi-head latent attention on a GPU, with and without an indexer: what the model says on the CPU in float32."""

from dataclasses import replace

import pytest
import torch
from gpu_engine_models import GPU

from warpbus.engine.engine import Engine, request
from warpbus.engine.sampling_params import SamplingParams
from warpbus.errors import UsageError
from warpbus.kernels.ops import dsa, mla
from warpbus.models import SHAPES, IndexerSpec, MLPSpec, random_model
from warpbus.models.layers import QuantizedLinear
from warpbus.qtensor import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

FLASH = SHAPES["glm-4.7-flash"]
DENSE = tuple(replace(layer, mlp=MLPSpec(1024)) for layer in FLASH.layers[:2])
LATENT = replace(FLASH, vocab_size=1000, layers=DENSE)
INDEXER = IndexerSpec(heads=32, head_dim=128, top_k=40)
SPARSE = replace(
    LATENT,
    layers=tuple(
        replace(layer, attention=replace(layer.attention, indexer=replace(INDEXER, shared=shared)))
        for layer, shared in zip(DENSE, (False, True), strict=True)
    ),
)
PROMPTS = [list(range(5, 75)), [20, 21], list(range(100, 133)), [7 * at % 1000 for at in range(300)]]
GREEDY = SamplingParams(temperature=0, logprobs=1)


def copied(model, config, dtype):
    """The same weights in float32 on the CPU, and in a dtype on the GPU."""
    other = random_model(config, None, GPU, dtype)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(model.get_parameter(name))
    return other


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.25)])
@pytest.mark.parametrize("config", [LATENT, SPARSE], ids=["latent", "sparse"])
@pytest.mark.parametrize("max_num_batched_tokens", [None, 50])
@torch.no_grad()
def test_answers_are_those_of_the_model_alone(config, dtype, tolerance, max_num_batched_tokens):
    """In bfloat16 an indexer may choose other tokens, so that only whole answers without it are compared closely."""
    if config is SPARSE and dtype != torch.float32:
        pytest.skip("rounding changes which tokens are chosen")
    reference = random_model(config, None, "cpu", torch.float32)
    engine = Engine(copied(reference, config, dtype), max_model_len=512, max_num_batched_tokens=max_num_batched_tokens)
    requests = [request(prompt, tokens=20, params=GREEDY) for prompt in PROMPTS]
    for each in requests:
        engine.add(each)
    while engine.has_work:
        engine.step()
    for each in requests:
        row = torch.tensor([[*each.prompt, *each.token_ids[:-1]]])
        expected = reference(row)[0, len(each.prompt) - 1 :].log_softmax(-1)
        of_chosen = expected.gather(1, torch.tensor(each.token_ids)[:, None])[:, 0]
        found = torch.tensor([logprob.logprob for logprob in each.logprobs])
        assert (found - of_chosen).abs().max() < tolerance
        assert (expected.amax(-1) - of_chosen).max() < 2 * tolerance


@pytest.mark.parametrize("max_num_batched_tokens", [None, 50])
@torch.no_grad()
def test_answers_with_an_fp8_cache_are_close_to_those_of_the_model(max_num_batched_tokens):
    """By decode kernels, and for prompts in chunks by gathered latents; together as alone."""
    reference = random_model(LATENT, None, "cpu", torch.float32)
    model = copied(reference, LATENT, torch.bfloat16)
    engine = Engine(model, max_model_len=512, max_num_batched_tokens=max_num_batched_tokens, kv_dtype="fp8")
    assert engine.kv_kind == "fp8"
    requests = [request(prompt, tokens=20, params=GREEDY) for prompt in PROMPTS]
    for each in requests:
        engine.add(each)
    while engine.has_work:
        engine.step()
    assert engine._instance.step._graphs is not None
    for each in requests:
        row = torch.tensor([[*each.prompt, *each.token_ids[:-1]]])
        expected = reference(row)[0, len(each.prompt) - 1 :].log_softmax(-1)
        of_chosen = expected.gather(1, torch.tensor(each.token_ids)[:, None])[:, 0]
        found = torch.tensor([logprob.logprob for logprob in each.logprobs])
        assert (found - of_chosen).abs().max() < 0.5
        assert (expected.amax(-1) - of_chosen).max() < 1


@torch.no_grad()
def test_an_fp8_cache_is_the_same_on_cpu_and_gpu():
    """The engine on the CPU rounds latents as the kernels do: logits differ by the rounding of activations."""
    reference = random_model(LATENT, None, "cpu", torch.bfloat16)
    on_gpu = copied(reference, LATENT, torch.bfloat16)
    logprobs = []
    for model in (reference, on_gpu):
        each = request(PROMPTS[0], tokens=1, params=SamplingParams(temperature=0, logprobs=20))
        engine = Engine(model, max_model_len=512, kv_dtype="fp8", max_num_batched_tokens=40)
        engine.add(each)
        while engine.has_work:
            engine.step()
        logprobs.append(dict(each.logprobs[0].top))
    shared = set(logprobs[0]) & set(logprobs[1])
    assert len(shared) > 10
    assert max(abs(logprobs[0][token] - logprobs[1][token]) for token in shared) < 0.25


@torch.no_grad()
def test_an_fp8_cache_in_float32_is_refused():
    with pytest.raises(UsageError, match=r"^kv_dtype is 'fp8', but there are no kernels for it for this model"):
        Engine(random_model(LATENT, None, GPU, torch.float32), max_model_len=512, kv_dtype="fp8")


@torch.no_grad()
def test_a_quantized_model_generates_the_same_alone_and_together():
    model = random_model(LATENT, Scheme.parse("w4a16-g128"), GPU, torch.bfloat16)
    assert isinstance(model.layers[0].get_submodule("attention.qkv_a"), QuantizedLinear)
    together = Engine(model, max_model_len=512).decode(PROMPTS, 20)
    assert all(len(answer) == 20 for answer in together)
    logits = model(torch.tensor([[*PROMPTS[2], *together[2][:-1]]], device=GPU))[0, len(PROMPTS[2]) - 1 :].float()
    chosen = logits.gather(1, torch.tensor(together[2], device=GPU)[:, None])[:, 0]
    assert (logits.amax(-1) - chosen).max() < 0.25


def generated(model, prompts, tokens, *, graphs, **options):
    """The requests after greedy decoding, and that decoding ran in graphs or did not."""
    engine = Engine(model, **options)
    requests = [request(prompt, tokens=tokens, params=SamplingParams(temperature=0, logprobs=5)) for prompt in prompts]
    for each in requests:
        engine.add(each)
    while engine.has_work:
        engine.step()
    assert (engine._instance.step._graphs is not None) == graphs
    return requests


@pytest.mark.parametrize(
    ("top_k", "prompts", "length"),
    [(40, PROMPTS, 512), (2048, [[7 * at % 1000 for at in range(count)] for count in (2046, 3000, 33)], 4096)],
    ids=["40", "2048"],
)
@torch.no_grad()
def test_kernels_of_sparse_attention_generate_the_tokens_of_torch(monkeypatch, top_k, prompts, length):
    """In graphs, against PyTorch's operators on the same GPU: up to the rounding of sums, and ties that it decides."""
    config = replace(
        SPARSE,
        layers=tuple(
            replace(layer, attention=replace(layer.attention, indexer=replace(layer.attention.indexer, top_k=top_k)))
            for layer in SPARSE.layers
        ),
    )
    model = random_model(config, None, GPU, torch.bfloat16)
    by_kernels = generated(model, prompts, 24, graphs=True, max_model_len=length)
    for module in (dsa, mla):
        monkeypatch.setattr(module, "has_kernel", lambda *_: False)
    monkeypatch.setattr(dsa, "runs_on", lambda *_: False)
    by_torch = generated(model, prompts, 24, graphs=False, max_model_len=length)
    for ours, theirs in zip(by_kernels, by_torch, strict=True):
        same = next((at for at in range(24) if ours.token_ids[at] != theirs.token_ids[at]), 24)
        for at in range(same):
            assert abs(ours.logprobs[at].logprob - theirs.logprobs[at].logprob) < 0.2
        if same < 24:  # the best two tokens are close
            top = dict(theirs.logprobs[same].top)
            assert top[theirs.token_ids[same]] - top[ours.token_ids[same]] < 0.2


@pytest.mark.parametrize("config", [LATENT, SPARSE], ids=["latent", "sparse"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_steps_are_captured_in_graphs(config, kv_dtype):
    engine = Engine(random_model(config, None, GPU, torch.bfloat16), max_model_len=512, kv_dtype=kv_dtype)
    engine.decode(PROMPTS, 20)
    assert engine._instance.step._graphs is not None
