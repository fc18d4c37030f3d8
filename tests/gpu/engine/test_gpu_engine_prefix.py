"""Prefixes (P-Tuning v2) in the engine on a GPU: what the model alone says behind them on the CPU in float32."""

from dataclasses import replace

import pytest
import torch
from dense_configs import with_traits
from gpu_engine_models import GPU, SMALL, W4, finish, model_of
from test_gpu_engine_chatglm import PROMPTS as CHATGLM_PROMPTS
from test_gpu_engine_chatglm import SMALL as CHATGLM
from test_gpu_engine_chatglm import model_of as chatglm_of
from test_gpu_engine_chatglm import on_the_cpu

from warpbus.engine.blocks import BLOCK
from warpbus.engine.engine import Engine, request
from warpbus.engine.offload import OffloadableModel
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.step import MIXED_ROWS
from warpbus.kernels.ops.cache import gather_cache
from warpbus.models.adapters import Prefix
from warpbus.models.layers.prefixed import PrefixedAttention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

LENGTHS = {"short": 3, "block": BLOCK, "long": 4 * BLOCK + 7}
PROMPTS = [list(range(5, 75)), [20, 21], list(range(100, 133)), [7 * at % 1000 for at in range(MIXED_ROWS + 100)]]
TOLERANCES = {torch.float32: 2e-3, torch.float16: 0.04, torch.bfloat16: 0.25}  # of logarithms of probabilities
GREEDY = SamplingParams(temperature=0, logprobs=1)


def drawn(config, name):
    """A prefix, on the CPU in float32, as it is loaded."""
    generator = torch.Generator().manual_seed(len(name))
    shape = config.num_layers, LENGTHS[name], config.attention.num_kv_heads, config.attention.head_dim
    return Prefix(name, *(torch.randn(shape, generator=generator) for _ in range(2)))


def asked(prompts, adapters, tokens):
    requests = [request(prompt, tokens=tokens, params=GREEDY) for prompt in prompts for _ in adapters]
    for at, each in enumerate(requests):
        each.adapter = adapters[at % len(adapters)]
    return requests


@torch.no_grad()
def check(reference, prefixes, requests, tolerance):
    for each in requests:
        row, context = torch.tensor([[*each.prompt, *each.token_ids[:-1]]]), None
        if each.adapter is not None:
            prefix = prefixes[each.adapter]
            context = PrefixedAttention(prefix.keys_lthd, prefix.values_lthd)
        expected = reference(row, None, context)[0, len(each.prompt) - 1 :].log_softmax(-1)
        found = torch.tensor([logprob.logprob for logprob in each.logprobs])
        of_chosen = expected.gather(1, torch.tensor(each.token_ids)[:, None])[:, 0]
        worst = (found - of_chosen).abs().max().item()
        assert worst < tolerance, f"{each.adapter}, a prompt of {len(each.prompt)} tokens: {worst:.4f}"
        assert (expected.amax(-1) - of_chosen).max() < 2 * tolerance


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture(scope="module")
def reference(model):
    return on_the_cpu(model)


@pytest.fixture(scope="module")
def prefixes():
    return {name: drawn(SMALL, name) for name in LENGTHS}


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("scheme", [None, W4])
def test_each_request_has_its_own_prefix_or_none(dtype, scheme, prefixes):
    model = model_of(SMALL, scheme, dtype)
    engine = Engine(model, adapters=list(prefixes.values()))
    requests = asked(PROMPTS, [None, *prefixes], 20)
    finish(engine, requests)
    check(on_the_cpu(model), prefixes, requests, TOLERANCES[dtype])


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 48},
        {"max_num_seqs": 3},
        {"speculation": 3},
        {"mixed_rows": 256, "most_graphs": 2},
        {"cache_tokens": 40 * BLOCK, "max_model_len": 40 * BLOCK},
    ],
    ids=str,
)
def test_however_they_are_computed(model, reference, prefixes, options):
    engine = Engine(model, adapters=list(prefixes.values()), **options)
    for _ in range(2):  # with what the cache holds of the first time
        requests = asked(PROMPTS, [None, *prefixes], 40)
        finish(engine, requests)
        check(reference, prefixes, requests, TOLERANCES[torch.float16])


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("int8", 0.04), ("fp8", 0.15), ("int4", 0.4)])
def test_a_cache_of_codes(model, reference, prefixes, kv_dtype, tolerance):
    engine = Engine(model, adapters=list(prefixes.values()), kv_dtype=kv_dtype)
    blocks, given = engine._memory.prefixes.of("long")
    keys, _, scales, _ = engine._instance.cache.layers[1]
    found = gather_cache(keys, scales, torch.tensor(blocks, device=GPU), given, torch.float16).float().cpu()
    rounding = {"int8": 0.02, "fp8": 0.07, "int4": 0.25}[kv_dtype]
    torch.testing.assert_close(found, prefixes["long"].keys_lthd[1], atol=2 * rounding, rtol=rounding)
    requests = asked(PROMPTS, [None, *prefixes], 20)
    finish(engine, requests)
    check(reference, prefixes, requests, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("speculation", [0, 3])
def test_chatglm_behind_a_prefix(dtype, speculation):
    model = chatglm_of(dtype=dtype)
    prefixes = {name: drawn(CHATGLM, name) for name in LENGTHS}
    engine = Engine(model, adapters=list(prefixes.values()), speculation=speculation)
    requests = asked(CHATGLM_PROMPTS, [*prefixes, None], 20)
    finish(engine, requests)
    check(on_the_cpu(model), prefixes, requests, TOLERANCES[dtype])


def test_other_heads_and_no_interleaving():
    config = with_traits(
        SMALL, qk_norm=True, num_kv_heads=8, rope=replace(SMALL.rope, rotary_dim=64, interleaved=False)
    )
    model, prefixes = model_of(config), {"long": drawn(config, "long")}
    requests = asked(PROMPTS, ["long"], 20)
    finish(Engine(model, adapters=list(prefixes.values())), requests)
    check(on_the_cpu(model), prefixes, requests, TOLERANCES[torch.float16])


def test_sleep_and_memory_that_is_given_back_leave_the_prefixes(prefixes):
    model = model_of()
    reference = on_the_cpu(model)
    engine = Engine(model, adapters=list(prefixes.values()), offloadable=OffloadableModel(model))
    engine.warm(rows=4)
    for again in (engine.shrink, engine.sleep, lambda: None):
        requests = asked(PROMPTS, [None, *prefixes], 20)
        finish(engine, requests)
        check(reference, prefixes, requests, TOLERANCES[torch.float16])
        again()
        engine.wake()


def test_without_prefixes_the_kernels_are_the_same_as_ever(model):
    """No row is placed apart, and the same tokens come of the same steps."""
    assert Engine(model)._instance.step.positioning is None
