"""Prefixes (P-Tuning v2) in the engine: what a request with one gets is what attention with more keys and values gives.

The reference is written here: a whole sequence at once, with the prefix's keys and values in front, which no rotation
touches and every token sees.
"""

import pytest
import torch
from dense_configs import with_traits
from engine_models import FAMILIES, PROMPTS, SMALL, as_on_a_gpu, assert_best, finish
from test_engine_chatglm import PROMPTS as CHATGLM_PROMPTS
from test_engine_chatglm import SMALL as CHATGLM
from torch.nn import functional as F

from warpbus.engine.blocks import BLOCK
from warpbus.engine.engine import Engine, request
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.moving import EngineMigration
from warpbus.engine.offload import OffloadableModel
from warpbus.engine.prefixes import Prefixes
from warpbus.engine.sampling_params import SamplingParams
from warpbus.errors import CheckpointError, UsageError
from warpbus.kernels.ops.cache import gather_cache
from warpbus.models import random_model
from warpbus.models.adapters import Prefix

CPU = torch.device("cpu")
SEEDED = SamplingParams(seed=6, top_p=0.9, temperature=0.8)  # with 5 a draw falls within a rounding of a bound
GREEDY = SamplingParams(temperature=0, logprobs=1)
KINDS = pytest.mark.parametrize("kind", [lambda engine: engine, as_on_a_gpu], ids=["plain", "graphs"])
LENGTHS = {"short": 3, "block": BLOCK, "long": 2 * BLOCK + 7}
OPTIONS = [
    {},
    {"max_num_batched_tokens": 7},
    {"speculation": 3},
    {"cache_tokens": 4 * BLOCK, "max_model_len": 4 * BLOCK},
    {"cache_tokens": 4 * BLOCK, "max_model_len": 4 * BLOCK, "max_num_batched_tokens": 33, "speculation": 2},
]


def drawn(config, name, seed=0):
    """A prefix that moves answers far."""
    generator = torch.Generator().manual_seed(len(name) + seed)
    shape = config.num_layers, LENGTHS[name], config.attention.num_kv_heads, config.attention.head_dim
    return Prefix(name, *(torch.randn(shape, generator=generator) for _ in range(2)))


class Behind:
    """Attention behind a prefix, causal but for the first `prompt` tokens."""

    def __init__(self, prefix, prompt):
        self.prefix, self.prompt = prefix, prompt

    def attend(self, layer, q_bthd, k_bthd, v_bthd, positions_bt):
        tokens, given = positions_bt.shape[1], self.prefix.tokens if self.prefix else 0
        group = q_bthd.shape[2] // k_bthd.shape[2]
        if self.prefix is not None:
            k_bthd = torch.cat((self.prefix.keys_lthd[layer][None], k_bthd), dim=1)
            v_bthd = torch.cat((self.prefix.values_lthd[layer][None], v_bthd), dim=1)
        k, v = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (k_bthd, v_bthd))
        sees = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        sees[: self.prompt, : self.prompt] = True
        mask = torch.cat((torch.ones(tokens, given, dtype=torch.bool), sees), dim=1)
        return F.scaled_dot_product_attention(q_bthd.transpose(1, 2), k, v, attn_mask=mask).transpose(1, 2)


@torch.no_grad()
def scores_behind(model, prefix, prompt, answer):
    """Of each token of an answer, by one pass over all of it."""
    tokens, end = torch.tensor([[*prompt, *answer[:-1]]]), model.config.prompt_end
    first = prompt.index(end) if end is not None else 0
    prompts = torch.full_like(tokens, first) if end is not None else None
    return model(tokens, None, Behind(prefix, first), prompts)[0, len(prompt) - 1 :]


def check(model, prefixes, each):
    expected = scores_behind(model, prefixes.get(each.adapter), each.prompt, each.token_ids).log_softmax(-1)
    for at, found in enumerate(each.logprobs):
        assert found.token == each.token_ids[at] == expected[at].argmax(), (each.adapter, len(each.prompt), at)
        assert found.logprob == pytest.approx(expected[at].max().item(), abs=1e-4)


def asked(prompts, adapters, tokens=20, params=GREEDY):
    requests = [request(prompt, tokens=tokens, params=params) for prompt in prompts for _ in adapters]
    for at, each in enumerate(requests):
        each.adapter = adapters[at % len(adapters)]
    return requests


@pytest.fixture(scope="module")
def model():
    return random_model(SMALL, None, "cpu", torch.float32)


@pytest.fixture(scope="module")
def prefixes():
    return {name: drawn(SMALL, name) for name in LENGTHS}


@KINDS
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_request_has_its_own_prefix_or_none(model, prefixes, kind, options):
    """Side by side, in any steps, and where they are computed again."""
    engine = kind(Engine(model, adapters=list(prefixes.values()), **options))
    requests = asked(PROMPTS, [None, *prefixes])
    finish(engine, requests)
    for each in requests:
        assert len(each.token_ids) == 20
        check(model, prefixes, each)
    assert (engine.stats().preemptions > 0) == ("cache_tokens" in options)


def test_the_reference_tells_prefixes_apart(model, prefixes):
    found = [scores_behind(model, prefix, PROMPTS[0], [1]) for prefix in (None, *prefixes.values())]
    for at, one in enumerate(found):
        for other in found[:at]:
            assert (one - other).abs().max() > 0.05
    torch.testing.assert_close(found[0], model(torch.tensor([PROMPTS[0]])).detach()[0, -1:])


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("latent", "sparse")])
def test_every_family(family):
    model = random_model(FAMILIES[family], None, "cpu", torch.float32)
    prefixes = {"long": drawn(FAMILIES[family], "long")}
    requests = asked(PROMPTS, ["long"], tokens=9)
    finish(Engine(model, adapters=list(prefixes.values())), requests)
    for each in requests:
        check(model, prefixes, each)


def test_latent_attention_has_no_prefixes():
    model = random_model(FAMILIES["latent"], None, "cpu", torch.float32)
    with pytest.raises(CheckpointError, match=r"^adapter long: P-Tuning prefixes are .*multi-head latent attention"):
        Engine(model, adapters=[drawn(SMALL, "long")])


@KINDS
@pytest.mark.parametrize("options", OPTIONS[1::3], ids=str)
def test_chatglm_behind_a_prefix(kind, options):
    model = random_model(CHATGLM, None, "cpu", torch.float32)
    prefixes = {name: drawn(CHATGLM, name) for name in LENGTHS}
    requests = asked(CHATGLM_PROMPTS, [*prefixes, None], tokens=14)
    finish(kind(Engine(model, adapters=list(prefixes.values()), **options)), requests)
    for each in requests:
        check(model, prefixes, each)


@pytest.mark.parametrize("name", LENGTHS)
def test_those_with_one_prefix_share_what_they_begin_with_and_others_do_not(model, prefixes, name):
    engine = Engine(model, adapters=list(prefixes.values()))
    lead = LENGTHS[name] % BLOCK
    prompt = list(range(3 * BLOCK))

    def cached(adapter):
        (each,) = asked([prompt], [adapter], tokens=4)
        finish(engine, [each])
        check(model, prefixes, each)
        return each.cached_tokens

    known = (lead + len(prompt) - 1) // BLOCK * BLOCK - lead
    assert [cached(name), cached(name), cached(None), cached(name)] == [0, known, 0, known]
    others = [other for other in LENGTHS if other != name]
    assert [cached(other) for other in others] == [0, 0]


def test_many_with_one_prefix_read_the_same_blocks_of_it(model, prefixes):
    engine = Engine(model, adapters=list(prefixes.values()))
    alone = Engine(model)
    for each, adapter in ((engine, "block"), (alone, None)):
        for one in asked([[at] for at in range(8)], [adapter]):
            each.add(one)
        each.step()
    assert engine.stats().blocks_used == alone.stats().blocks_used == 8
    # For each of sixteen sequences one more, and one for a single one of the greatest length.
    assert engine.stats().blocks == alone.stats().blocks + 16 + 1


@pytest.mark.parametrize("length", [2 * BLOCK, 2 * BLOCK - 5])
def test_a_prefix_takes_nothing_of_the_longest_sequence(model, prefixes, length):
    """Also where it ends within a block and the cache has room for one sequence alone."""
    engine = Engine(model, adapters=list(prefixes.values()), max_model_len=length, cache_tokens=2 * BLOCK)
    for adapter in prefixes:
        (each,) = asked([PROMPTS[0]], [adapter], tokens=length - len(PROMPTS[0]))
        finish(engine, [each])
        assert len(each.prompt) + len(each.token_ids) == length
        check(model, prefixes, each)


def test_memory_that_is_given_back_leaves_the_prefixes(model, prefixes):
    engine = Engine(model, adapters=list(prefixes.values()))
    for _ in range(2):
        requests = asked(PROMPTS, list(prefixes))
        finish(engine, requests)
        for each in requests:
            check(model, prefixes, each)
        engine.shrink()
        assert engine.stats().blocks_idle == 0


def test_a_step_that_fails_leaves_the_prefixes(model, prefixes, monkeypatch):
    engine = Engine(model, adapters=list(prefixes.values()))
    requests = asked(PROMPTS, list(prefixes))
    for each in requests:
        engine.add(each)
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._instance.runner, "_scores", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    finish(engine)
    for each in requests:
        check(model, prefixes, each)


def test_sleep_and_move_keep_the_prefixes(prefixes):
    model = random_model(SMALL, None, "cpu", torch.float32)
    engine = Engine(model, adapters=list(prefixes.values()), offloadable=OffloadableModel(model))
    engine.sleep()
    assert engine.stats().cache_bytes == 0
    engine.wake()
    engine.wake()
    requests = asked(PROMPTS, list(prefixes))
    for each in requests:
        engine.add(each)
    for _ in range(9):
        engine.step()
    move = EngineMigration(engine, CPU)
    move.prepare()
    while not move.copy_ahead():
        engine.step()
    move.finish()
    move.release()
    finish(engine)
    for each in requests:
        check(engine.model, prefixes, each)
    engine.sleep()
    engine.wake()
    late = asked(PROMPTS[:2], list(prefixes))
    finish(engine, late)
    for each in late:
        check(engine.model, prefixes, each)


@pytest.mark.parametrize("name", LENGTHS)
def test_a_seed_repeats_itself_behind_a_prefix(model, prefixes, name):
    found = []
    for options in ({}, {"max_num_batched_tokens": 9}, {"speculation": 4}):
        requests = asked(PROMPTS, [name], params=SEEDED)
        finish(Engine(model, adapters=list(prefixes.values()), **options), requests)
        found.append([each.token_ids for each in requests])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("auto", 1e-6), ("int8", 0.02), ("fp8", 0.1), ("int4", 0.1)])
def test_a_cache_of_any_kind_holds_what_the_prefix_is(prefixes, kv_dtype, tolerance):
    prefix = prefixes["long"]
    cache = KVCache(SMALL, 9, device=CPU, dtype=torch.float32, kv_dtype=kv_dtype)
    cache.commit(9)
    written = Prefixes([drawn(SMALL, "short"), prefix], SMALL)
    assert (written.blocks, written.longest, written.extra_blocks) == (4, 2 * BLOCK + 7, 1)
    written.write(cache, torch.float32)
    blocks, given = written.of("long")
    assert (blocks, given) == ((2, 3, 4), 2 * BLOCK + 7)
    for layer, (keys, values, key_scales, value_scales) in enumerate(cache.layers):
        table = torch.tensor(blocks)
        found = gather_cache(keys, key_scales, table, given, torch.float32)
        torch.testing.assert_close(found, prefix.keys_lthd[layer], atol=tolerance * 4, rtol=tolerance)
        found = gather_cache(values, value_scales, table, given, torch.float32)
        torch.testing.assert_close(found, prefix.values_lthd[layer], atol=tolerance * 4, rtol=tolerance)


def test_what_no_prefix_needs_is_as_without_them(model):
    assert Prefixes([], SMALL).of(None) == ((), 0)
    engine = Engine(model)
    assert engine._instance.step.positioning is None
    assert engine._memory.blocks.available == engine._memory.blocks.count - 1


def test_a_prefix_of_another_model_is_refused(model):
    other = with_traits(SMALL, num_kv_heads=1)
    with pytest.raises(CheckpointError, match=r"adapter short: .* of \[2, 3, 1, 16\], expected \[2, 3, 2, 16"):
        Engine(model, adapters=[drawn(other, "short")])


def test_a_prefix_that_is_damaged_is_refused(model):
    damaged = drawn(SMALL, "short")
    damaged.values_lthd[1, 2, 0, 3] = float("nan")
    with pytest.raises(CheckpointError, match="adapter short: its keys and values hold NaN"):
        Engine(model, adapters=[damaged])


def test_a_name_that_no_prefix_has_is_refused(model, prefixes):
    engine = Engine(model, adapters=list(prefixes.values()))
    with pytest.raises(UsageError, match="there is no adapter 'nobody'"):
        engine.add(asked([[1]], ["nobody"])[0])
    finish(engine)


def test_answers_without_a_prefix_are_those_of_an_engine_without(model, prefixes):
    requests = asked(PROMPTS, [None])
    finish(Engine(model, adapters=list(prefixes.values())), requests)
    for each in requests:
        assert_best(model, each.prompt, each.token_ids)
