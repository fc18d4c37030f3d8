"""ChatGLM-6B in the engine: positions in two dimensions, prompts that see each other, whole and never shared.

What is compared with is the model alone, one pass over all of a sequence without a cache.
"""

from dataclasses import replace

import pytest
import torch
from dense_configs import with_traits
from engine_models import as_on_a_gpu, assert_best, finish, plain_scores

from warpbus.engine import step
from warpbus.engine.blocks import BLOCK
from warpbus.engine.engine import Engine, request
from warpbus.engine.moving import EngineMigration
from warpbus.engine.offload import OffloadableModel
from warpbus.engine.positions import rotary_columns
from warpbus.engine.sampling_params import SamplingParams
from warpbus.errors import UsageError
from warpbus.models import SHAPES, random_model
from warpbus.qtensor import Scheme

END = 290
SMALL = with_traits(SHAPES["chatglm-6b"], vocab_size=300, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4)
SMALL = with_traits(SMALL, head_dim=16, ffn_size=128, max_context=256, prompt_end=END, stop_ids=(299,))
SMALL = with_traits(SMALL, rope=replace(SMALL.rope, rotary_dim=8), normed_residual=2.0)
# Of different lengths; one that is the end alone; one with what an answer began with already, another end in it.
PROMPTS = [
    [1, 2, 3, 289, END],
    [END],
    [*(7 * at % 280 for at in range(75)), 289, END],
    [*range(30), 289, END],
    [5, 289, END, 8, 9, END, 10],
]
SEEDED = SamplingParams(seed=5, top_p=0.9, temperature=0.8)
GREEDY = SamplingParams(temperature=0)
KINDS = pytest.mark.parametrize("kind", [lambda engine: engine, as_on_a_gpu], ids=["plain", "graphs"])
OPTIONS = [
    {},
    {"max_num_seqs": 2},
    {"max_num_batched_tokens": 7},
    {"speculation": 3},
    {"cache_tokens": 5 * BLOCK, "max_model_len": 5 * BLOCK},
    {"cache_tokens": 5 * BLOCK, "max_model_len": 5 * BLOCK, "max_num_batched_tokens": 7, "speculation": 2},
]


@pytest.fixture(scope="module")
def model():
    return random_model(SMALL, None, "cpu", torch.float32)


@KINDS
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_token_is_what_the_model_alone_prefers(model, kind, options):
    """Together with prompts of other lengths, in any steps, and where it is computed again."""
    params = SamplingParams(temperature=0, logprobs=2)
    requests = [request(prompt, tokens=40, params=params) for prompt in PROMPTS]
    engine = kind(Engine(model, **options))
    finish(engine, requests)
    for each in requests:
        assert len(each.token_ids) == 40
        assert_best(model, each.prompt, each.token_ids)
        expected = plain_scores(model, each.prompt, each.token_ids).log_softmax(-1)
        for at, found in enumerate(each.logprobs):
            assert found.token == each.token_ids[at] == expected[at].argmax()
            assert found.logprob == pytest.approx(expected[at].max().item(), abs=1e-4)
        assert each.cached_tokens == 0
    assert (engine.stats().preemptions > 0) == ("cache_tokens" in options)


def test_prompts_see_each_other_in_both_directions_and_turn_in_two_dimensions(model):
    """That what the model alone prefers depends on both: otherwise this file would show nothing."""
    causal = random_model(replace(SMALL, prompt_end=None, rope=replace(SMALL.rope, two_dimensional=False)), *REST)
    one_way = random_model(replace(SMALL, rope=replace(SMALL.rope, two_dimensional=False)), *REST)
    whole = plain_scores(model, PROMPTS[2], [1])
    for other in (causal, one_way):
        assert (plain_scores(other, PROMPTS[2], [1]) - whole).abs().max() > 0.01


REST = None, "cpu", torch.float32


def test_positions_in_one_dimension_with_prompts_in_both_directions():
    model = random_model(replace(SMALL, rope=replace(SMALL.rope, two_dimensional=False)), *REST)
    for prompt, answer in zip(PROMPTS, Engine(model).decode(PROMPTS, 12), strict=True):
        assert_best(model, prompt, answer)


def test_a_quantized_model():
    model = random_model(SMALL, Scheme.parse("w4a16-g32"), "cpu", torch.float32)
    for prompt, answer in zip(PROMPTS, Engine(model).decode(PROMPTS, 12), strict=True):
        assert_best(model, prompt, answer)


@KINDS
@pytest.mark.parametrize("options", OPTIONS[1::2], ids=str)
def test_random_answers_are_the_same_alone_and_together(model, kind, options):
    alone = [request(prompt, tokens=30, params=SEEDED) for prompt in PROMPTS]
    for each in alone:
        finish(Engine(model), [each])
    together = [request(prompt, tokens=30, params=SEEDED) for prompt in PROMPTS]
    engine = kind(Engine(model, **options))
    for each in together:
        engine.add(each)
        engine.step()
    finish(engine)
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]


def test_prompts_that_would_read_much_of_the_cache_again_and_again_run_without_a_graph(model, monkeypatch):
    monkeypatch.setattr(step, "_MIXED_READ", 20 * 20 * 2 * 4 * 16 * 4)  # what 20 rows read of 20 places
    engine = as_on_a_gpu(Engine(model))
    for prompt, kinds in ((PROMPTS[0], {"mixed", "decode"}), (PROMPTS[2], {"decode"})):
        engine._instance.step._graphs.keys.clear()
        assert_best(model, prompt, engine.decode([prompt], 12)[0])
        assert {key[2] for key in engine._instance.step._graphs.keys} == kinds


def test_nothing_is_shared_between_prompts_that_begin_alike(model):
    engine = Engine(model)
    begin = list(range(2 * BLOCK + 5))
    for own in ([289, END], [289, END], [7, 289, END]):
        asked = request([*begin, *own], tokens=5)
        finish(engine, [asked])
        assert asked.cached_tokens == 0
        assert_best(model, asked.prompt, asked.token_ids)
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.blocks_idle) == (0, 0, 0)


def test_a_prompt_that_is_read_in_both_directions_has_no_logprobs(model):
    with pytest.raises(UsageError, match="prompt_logprobs: this model reads its prompt in both directions"):
        Engine(model).add(request([5, END], tokens=2, params=SamplingParams(prompt_logprobs=1)))


def test_a_prompt_without_its_end_is_refused(model):
    with pytest.raises(UsageError, match=r"the prompt lacks the token 290 \(<sop>\), .*: end it with"):
        Engine(model).add(request([1, 2, 3], tokens=5))


def test_answers_go_on_after_a_move_and_after_sleep():
    model = random_model(SMALL, *REST)
    expected = Engine(model).decode(PROMPTS, 30)
    engine = Engine(model, offloadable=OffloadableModel(model))
    asked = [request(prompt, tokens=30) for prompt in PROMPTS]
    for each in asked:
        engine.add(each)
    for _ in range(6):
        engine.step()
    move = EngineMigration(engine, torch.device("cpu"))
    move.prepare()
    while not move.copy_ahead():
        engine.step()
    _, done = move.finish()
    move.release()
    # Full blocks go ahead, though nobody else can find them.
    assert done.ahead >= 3 * engine._instance.cache.block_bytes
    finish(engine)
    assert [each.token_ids for each in asked] == expected
    engine.sleep()
    engine.wake()
    assert engine.decode(PROMPTS, 30) == expected


def test_columns_bring_the_halves_of_both_planes_together():
    found = rotary_columns(with_traits(SMALL, num_heads=1, num_kv_heads=1, head_dim=8)).tolist()
    assert found == [0, 1, 4, 5, 2, 3, 6, 7, *(8 + at for at in (0, 1, 4, 5, 2, 3, 6, 7)), *range(16, 24)]
