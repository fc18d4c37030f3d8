"""Steps with prompts as graphs between the attention of layers: as kernel by kernel, at every number of tokens."""

from dataclasses import replace

import pytest
import torch
from gpu_engine_models import GLM, GPU, SMALL, model_of, random_lora

from warpbus.engine import Engine
from warpbus.engine.engine import request
from warpbus.engine.prompt_graphs import graph_rows
from warpbus.engine.sampling_params import SamplingParams
from warpbus.models import SHAPES, IndexerSpec, MLPSpec, random_model
from warpbus.qtensor import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

FLASH = SHAPES["glm-4.7-flash"]
LATENT = replace(FLASH, vocab_size=1000, layers=tuple(replace(layer, mlp=MLPSpec(1024)) for layer in FLASH.layers[:2]))
INDEXER = IndexerSpec(heads=32, head_dim=128, top_k=600)
SPARSE = replace(
    LATENT,
    layers=tuple(
        replace(layer, attention=replace(layer.attention, indexer=replace(INDEXER, shared=shared)))
        for layer, shared in zip(LATENT.layers, (False, True), strict=True)
    ),
)
GREEDY = SamplingParams(temperature=0, logprobs=1)


def made(name):
    if name in ("latent", "sparse"):
        return random_model({"latent": LATENT, "sparse": SPARSE}[name], None, GPU, torch.bfloat16)
    config = replace({"dense": SMALL, "experts": GLM}[name], max_context=8192)
    return model_of(config)


def prompt_of(length, seed):
    return torch.randint(0, 1000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_of(model, *, graphs=True, **options):
    engine = Engine(model, max_model_len=8192, **options)
    step = engine._pipeline.instance.step
    assert step._prompts is not None
    if not graphs:
        step._prompts = None
    return engine


def answers(engine, prompts, *, adapter=None):
    requests = [request(prompt, tokens=3, params=GREEDY) for prompt in prompts]
    for each in requests:
        each.adapter = adapter
        engine.add(each)
    while engine.has_work:
        engine.step()
    assert all(each.error is None for each in requests)
    return [(each.token_ids, [logprob.logprob for logprob in each.logprobs]) for each in requests]


def captured(engine):
    return sorted(engine._pipeline.instance.step._prompts._captured)


def test_they_are_for_models_that_take_longer_to_launch_than_to_run():
    assert graph_rows(made("experts"), GPU) == 4096


@pytest.mark.parametrize("name", ["dense", "experts", "latent", "sparse"])
@torch.no_grad()
def test_answers_are_those_of_kernels_launched_one_by_one(name):
    model = made(name)
    engine, plain = engine_of(model, prefix_caching=False), engine_of(model, graphs=False, prefix_caching=False)
    for lengths in ((1100,), (1500,), (1210,), (2500, 900, 300), (4096,), (2600,)):
        prompts = [prompt_of(length, length) for length in lengths]
        first = answers(engine, prompts)
        assert answers(engine, prompts) == first  # the first time the graphs were captured, the second time replayed
        for (_, found), (_, expected) in zip(first, answers(plain, prompts), strict=True):
            assert abs(found[0] - expected[0]) < (0.3 if name == "sparse" else 0.1)
    assert captured(engine) == [1280, 1536, 3072, 4096]


@pytest.mark.parametrize("name", ["experts", "latent"])
@torch.no_grad()
def test_chunks_behind_a_cached_prefix(name):
    model = made(name)
    engine, plain = engine_of(model), engine_of(model, graphs=False)
    prefix = prompt_of(3000, 0)
    for each in (engine, plain):
        answers(each, [prefix])
    for length in (20, 70, 200, 777):
        prompts = [[*prefix, *prompt_of(length, length)], [*prefix[:2000], *prompt_of(length, length + 1)]]
        for (_, found), (_, expected) in zip(answers(engine, prompts), answers(plain, prompts), strict=True):
            assert abs(found[0] - expected[0]) < 0.1
    assert min(captured(engine)) <= 128


@torch.no_grad()
def test_decoding_goes_on_beside_them():
    model = made("experts")
    engine = engine_of(model, prefix_caching=False)
    alone = [answers(engine, [prompt_of(length, length)])[0] for length in (3000, 40, 2900)]
    together = answers(engine, [prompt_of(length, length) for length in (3000, 40, 2900)])
    for (_, found), (_, expected) in zip(together, alone, strict=True):
        assert abs(found[0] - expected[0]) < 0.1


@torch.no_grad()
def test_steps_with_adapters_do_without():
    model = made("dense")
    engine = engine_of(model, adapters=[random_lora(model, "a", 4)], prefix_caching=False)
    with_adapter = answers(engine, [prompt_of(1500, 1)], adapter="a")
    assert captured(engine) == []
    without = answers(engine, [prompt_of(1500, 1)])
    assert captured(engine) == [1536]
    assert with_adapter != without


@torch.no_grad()
def test_a_memory_plan_leaves_no_room_for_them():
    engine = Engine(made("dense"), max_model_len=4096, most_graphs=4)
    assert engine._pipeline.instance.step._prompts is None


def test_their_memory_does_not_grow_with_the_layers():
    """The states between two graphs lie where others lay: of 12 layers no more memory than of 3."""
    taken = []
    for layers in (3, 12):
        config = replace(SMALL, layers=SMALL.layers[:1] * layers, max_context=8192)
        engine = engine_of(model_of(config, Scheme.parse("w4a16-g32")), prefix_caching=False)
        before = torch.cuda.memory_reserved()
        answers(engine, [prompt_of(4000, 1)])
        taken.append(torch.cuda.memory_reserved() - before)
    assert taken[1] <= taken[0] + 2**21
