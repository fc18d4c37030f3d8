"""The engine on a GPU: a step ahead of what is read, in CUDA graphs, over a cache that grows, it answers as the model.

In 16 bits rounding decides where two scores are equal: answers are compared with the model's own scores of them.
"""

import gc
import random
from dataclasses import replace

import pytest
import torch
from dense_configs import with_traits
from gpu_engine_models import GPU, PROMPTS, SMALL, TOLERANCES, W4, assert_best, finish, model_of, plain_scores

from warpbus.cuda.vmm import mapped_bytes
from warpbus.engine import kv_cache
from warpbus.engine.blocks import BLOCK
from warpbus.engine.engine import Engine, request
from warpbus.engine.offload import OffloadableModel
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.step import StepExecutor
from warpbus.errors import NumericError, UsageError
from warpbus.formats.kv_cache import KVCacheScheme
from warpbus.kernels.ops import workspace
from warpbus.models import random_model
from warpbus.models.kv_scales import KVScales
from warpbus.models.layers import CausalAttention
from warpbus.qtensor import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MiB = 2**20
SEEDED = SamplingParams(seed=5, top_p=0.9, temperature=0.8)


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture
def small_growth(monkeypatch):
    """The cache grows by pages, not by 128 MiB."""
    monkeypatch.setattr(kv_cache, "_GROWTH", 1)


def used():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(GPU)
    return total - free


def drawn_prompts(count, longest, seed):
    dice = random.Random(seed)
    return [dice.choices(range(1000), k=dice.randrange(1, longest)) for _ in range(count)]


@pytest.mark.parametrize("max_num_batched_tokens", [None, 48])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("scheme", [None, W4])
def test_prompts_and_steps(max_num_batched_tokens, num_kv_heads, dtype, scheme):
    model = model_of(with_traits(SMALL, num_kv_heads=num_kv_heads), scheme, dtype)
    engine = Engine(model, max_model_len=200, max_num_batched_tokens=max_num_batched_tokens)
    for prompt, answer in zip(PROMPTS, engine.decode(PROMPTS, 12), strict=True):
        assert_best(model, prompt, answer, TOLERANCES[dtype])


@pytest.mark.parametrize("changes", [{"qk_norm": True}, {"output_norms": True}, {"tie_embeddings": True}])
def test_other_families(changes):
    model = model_of(with_traits(SMALL, **changes))
    for prompt, answer in zip(PROMPTS, Engine(model).decode(PROMPTS, 8), strict=True):
        assert_best(model, prompt, answer)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("int8", 0.1), ("fp8", 0.5), ("int4", 1.0)])
@pytest.mark.parametrize("speculation", [0, 3])
def test_caches_of_codes(model, kv_dtype, tolerance, speculation):
    engine = Engine(model, kv_dtype=kv_dtype, max_num_batched_tokens=64, speculation=speculation)
    for prompt, answer in zip(PROMPTS, engine.decode(PROMPTS, 30), strict=True):
        assert_best(model, prompt, answer, tolerance)


def test_heads_that_4_bit_kernels_do_not_take_are_refused():
    with pytest.raises(UsageError, match="for heads of a multiple of 32 dimensions, and this model's have 80"):
        Engine(model_of(with_traits(SMALL, head_dim=80)), kv_dtype="int4")
    with pytest.raises(UsageError, match=r"no kernels for it for this model in torch\.float32"):
        Engine(model_of(dtype=torch.float32), kv_dtype="int4")


@pytest.mark.parametrize(("dtype", "tolerance"), [("int8", 0.2), ("fp8", 0.7)])
@pytest.mark.parametrize("speculation", [0, 3])
def test_scales_of_the_checkpoint(dtype, tolerance, speculation):
    """By default; single tokens, drafts and prompts are stored with them, in graphs too."""
    model = model_of()
    layers, largest = len(model.layers), {"int8": 127, "fp8": 448}[dtype]
    found = [[torch.zeros(model.config.attention.num_kv_heads) for _ in range(layers)] for _ in range(2)]

    def look(layer, *both):
        for of_layers, x in zip(found, both, strict=True):
            of_layers[layer] = torch.maximum(of_layers[layer], x.abs().amax((0, 1, 3)).float().cpu())
        return both

    context = CausalAttention()
    context.stored = look
    with torch.no_grad():
        for prompt in PROMPTS:
            model.hidden(torch.tensor([prompt], device=GPU), context=context)
    scales = [tuple(each / largest for each in of_layers) for of_layers in found]
    model.kv_scales = KVScales(KVCacheScheme(dtype, per_head=True), *scales)
    engine = Engine(model, max_num_batched_tokens=64, speculation=speculation)
    assert engine.kv_kind == f"{dtype} with the checkpoint's scales"
    for prompt, answer in zip(PROMPTS, engine.decode(PROMPTS, 30), strict=True):
        assert_best(model, prompt, answer, tolerance)
    cache = engine._instance.cache
    for layer, stored in enumerate(cache.layers):
        for written, own in zip(stored[2:], cache.fixed_scales[layer], strict=True):
            by_head = written[: cache.committed].transpose(0, 1).flatten(1)  # [kv_heads, tokens]
            assert ((by_head == 0) | (by_head == own[:, None])).all()
            assert (by_head != 0).any()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 17, 33])
def test_graphs_of_every_kind_of_bucket(model, rows):
    """Rows that fill a graph up take nothing from the others; all prompts come in the same step."""
    prompts = drawn_prompts(rows, 80, rows)
    engine = Engine(model, max_num_seqs=rows)
    for prompt, answer in zip(prompts, engine.decode(prompts, 10), strict=True):
        assert_best(model, prompt, answer)


def test_a_sequence_outgrows_its_graph(model):
    for length in (500, 1020):
        prompt = [token % 1000 for token in range(length)]
        assert_best(model, prompt, Engine(model).decode([prompt], 40)[0])


@pytest.mark.parametrize("alone", [True, False])
def test_long_prompts_by_themselves_and_beside_those_that_decode(model, alone):
    """More tokens than a graph takes, and pieces of them in graphs."""
    engine = Engine(model, max_num_batched_tokens=1500)
    dice = random.Random(3)
    short, long = request(PROMPTS[1], tokens=60), request(dice.choices(range(1000), k=1700), tokens=10)
    for each in (long, short) if alone else (short, long):
        engine.add(each)
        for _ in range(8):
            engine.step()
    finish(engine)
    for each in (short, long):
        assert_best(model, each.prompt, each.token_ids)


@pytest.mark.parametrize("params", [None, SEEDED, SamplingParams(temperature=0, repetition_penalty=1.5)])
@pytest.mark.parametrize("most", [2, 5])
def test_the_same_requests_get_the_same_in_the_same_order(params, most):
    """What steps ahead leave on the device is the only difference there could be."""
    model = model_of(dtype=torch.float32, scheme=None)
    prompts = drawn_prompts(9, 60, most)
    found = []
    for ahead in (True, False):
        engine = Engine(model, max_num_seqs=most)
        if not ahead:
            engine._pipeline._runs_ahead = lambda: False
        requests = [request(prompt, tokens=5 + 7 * at, params=params) for at, prompt in enumerate(prompts)]
        for each in requests:
            engine.add(each)
            engine.step()
        finish(engine)
        found.append([each.token_ids for each in requests])
    for prompt, one, other in zip(prompts, *found, strict=True):
        assert len(one) == len(other)
        if params is None:
            assert_best(model, prompt, one, TOLERANCES[torch.float32])
            assert_best(model, prompt, other, TOLERANCES[torch.float32])
        else:
            assert one == other


def test_rows_leave_and_come_while_steps_are_under_way(model):
    engine = Engine(model, max_num_seqs=3)
    requests = [request(prompt, tokens=30) for prompt in drawn_prompts(8, 100, 1)]
    for each in requests:
        engine.add(each)
    for at in range(12):
        engine.step()
        if at == 6:
            engine.abort(requests[1])
    kept = list(requests[1].token_ids)
    finish(engine)
    assert requests[1].token_ids == kept
    for each in requests:
        if each is not requests[1]:
            assert len(each.token_ids) == 30
        if each.token_ids:
            assert_best(model, each.prompt, each.token_ids)


def test_stop_tokens_end_an_answer_whose_next_step_is_under_way(model):
    whole = Engine(model).decode([PROMPTS[0]], 30)[0]
    params = SamplingParams(temperature=0, stop_token_ids=(whole[12],))
    each = request(PROMPTS[0], tokens=30, params=params)
    finish(Engine(model), [each])
    assert each.token_ids[-1] == whole[12]
    assert whole[12] not in each.token_ids[:-1]
    assert_best(model, PROMPTS[0], each.token_ids)


@pytest.mark.usefixtures("small_growth")
def test_graphs_stay_valid_while_the_cache_grows_and_shrinks():
    model = model_of(with_traits(SMALL, num_kv_heads=8))
    engine = Engine(model, max_num_seqs=8)
    first = request(PROMPTS[1], tokens=400)
    engine.add(first)
    for _ in range(20):
        engine.step()
    before = engine.stats().cache_bytes
    graphs = dict(engine._instance.step._graphs._captured)
    others = [request(prompt, tokens=100) for prompt in drawn_prompts(7, 900, 2)]
    finish(engine, others)
    assert engine.stats().cache_bytes > before
    for key, graph in graphs.items():
        assert engine._instance.step._graphs._captured[key] is graph
    for each in (first, *others):
        assert_best(model, each.prompt, each.token_ids)
    engine.shrink()
    again = engine.decode([PROMPTS[1]], 400)[0]
    assert_best(model, PROMPTS[1], again)


@pytest.mark.usefixtures("small_growth")
def test_memory_returns_by_the_drivers_account():
    model = model_of(with_traits(SMALL, num_layers=8, num_kv_heads=8))
    engine = Engine(model, max_num_seqs=16)
    prompts = drawn_prompts(16, 1900, 4)
    engine.decode(prompts, 20)  # captures what is needed
    engine.shrink()
    start, mapped = used(), mapped_bytes(GPU)
    for _ in range(2):
        engine.decode(prompts, 20)
        assert mapped_bytes(GPU) - mapped > 100 * MiB
        assert used() - start > 100 * MiB
        engine.shrink()
        assert mapped_bytes(GPU) == mapped
        assert abs(used() - start) <= 32 * MiB


@pytest.mark.parametrize("options", [{}, {"speculation": 3}, {"kv_dtype": "int8"}, {"kv_dtype": "int4"}], ids=str)
def test_requests_give_way_where_the_cache_is_small(model, options):
    engine = Engine(model, cache_tokens=8 * BLOCK, max_model_len=7 * BLOCK, **options)
    requests = [request(prompt, tokens=100) for prompt in PROMPTS * 2]
    finish(engine, requests)
    assert engine.stats().preemptions > 0
    tolerance = {"int8": 0.15, "int4": 1.0}.get(options.get("kv_dtype"), 0.03)
    for each in requests:
        assert len(each.token_ids) == 100
        assert_best(model, each.prompt, each.token_ids, tolerance)


def test_beginnings_that_are_known_are_not_computed_again(model):
    engine = Engine(model)
    prompt = drawn_prompts(1, 1000, 5)[0] + list(range(300))
    known = (len(prompt) - 1) // BLOCK * BLOCK
    for expected in (0, known):
        each = request(prompt, tokens=20)
        finish(engine, [each])
        assert each.cached_tokens == expected
        assert_best(model, prompt, each.token_ids)
    many = [request([*prompt, token], tokens=10) for token in range(8)]
    engine.shrink()
    finish(engine, many)
    assert [each.cached_tokens for each in many] == [0] + [len(prompt) // BLOCK * BLOCK] * 7
    for each in many:
        assert_best(model, each.prompt, each.token_ids)


def test_speculation(model):
    prompts = [*PROMPTS, [1, 2, 3, 4] * 20]
    engine = Engine(model, speculation=4)
    for prompt, answer in zip(prompts, engine.decode(prompts, 200), strict=True):
        assert len(answer) == 200
        assert_best(model, prompt, answer)
    stats = engine.stats()
    assert 0 < stats.accepted <= stats.drafted


@pytest.mark.parametrize("speculation", [0, 3])
def test_logprobs_are_the_models(model, speculation):
    params = SamplingParams(seed=2, temperature=0.7, logprobs=2)
    requests = [request(prompt, tokens=20, params=params) for prompt in PROMPTS]
    finish(Engine(model, speculation=speculation), requests)
    for each in requests:
        expected = plain_scores(model, each.prompt, each.token_ids).log_softmax(-1)
        assert len(each.logprobs) == 20
        for at, (token, found) in enumerate(zip(each.token_ids, each.logprobs, strict=True)):
            assert found.token == token
            assert abs(found.logprob - expected[at, token].item()) < 0.05
            assert abs(found.top[0][1] - expected[at].max().item()) < 0.05


@pytest.mark.parametrize("speculation", [0, 3])
def test_the_embedding_may_lie_on_the_cpu(speculation):
    model = model_of(embedding_device="cpu", head=Scheme.parse("w8a16"))
    assert model.embedding.weight.device.type == "cpu"
    engine = Engine(model, speculation=speculation, max_num_batched_tokens=50)
    for prompt, answer in zip(PROMPTS, engine.decode(PROMPTS, 40), strict=True):
        assert_best(model, prompt, answer)


@pytest.mark.parametrize("speculation", [0, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("where", [None, "cpu"])
def test_the_embedding_may_be_rounded(where, tied, speculation):
    """On the GPU it is looked up in graphs, and a tied head has the same tensors."""
    config = replace(SMALL, tie_embeddings=tied)
    model = random_model(config, W4, GPU, torch.float16, embedding=Scheme.parse("w8a16-g128"), embedding_device=where)
    assert model.embedding.device == torch.device(where or GPU)
    if tied:
        assert (model.head.form is model.embedding.form) == (where is None)
    engine = Engine(model, speculation=speculation, max_num_batched_tokens=50)
    for prompt, answer in zip(PROMPTS, engine.decode(PROMPTS, 40), strict=True):
        assert_best(model, prompt, answer)


def test_a_rounded_embedding_sleeps_and_wakes():
    config = replace(SMALL, tie_embeddings=True)
    model = random_model(config, W4, GPU, torch.float16, embedding=Scheme.parse("w8a16-g128"))
    engine = Engine(model, offloadable=OffloadableModel(model))
    expected = engine.decode(PROMPTS, 20)
    engine.sleep()
    engine.wake()
    assert engine.decode(PROMPTS, 20) == expected


def test_sleep_leaves_graphs_valid_and_no_memory():
    model = model_of(with_traits(SMALL, num_layers=6, hidden_size=512, ffn_size=1408))
    engine = Engine(model, offloadable=OffloadableModel(model))
    prompts = drawn_prompts(5, 400, 6)
    for prompt, answer in zip(prompts, engine.decode(prompts, 20), strict=True):
        assert_best(model, prompt, answer)
    graphs = set(engine._instance.step._graphs._captured)
    awake, mapped = used(), mapped_bytes(GPU)
    for _ in range(2):
        engine.sleep()
        gone = mapped - mapped_bytes(GPU)
        assert engine.stats().cache_bytes == 0
        assert gone >= engine._instance.offloadable.nbytes
        assert abs(awake - used() - gone) <= 32 * MiB
        other = torch.full((gone // 4,), 0x7FC00000, dtype=torch.int32, device=GPU)  # NaN, where it was
        del other
        torch.cuda.empty_cache()
        engine.wake()
        for prompt, answer in zip(prompts, engine.decode(prompts, 20), strict=True):
            assert_best(model, prompt, answer)
    assert graphs <= set(engine._instance.step._graphs._captured)


def test_an_engine_that_is_warm_captures_nothing_more_for_ordinary_requests(model):
    engine = Engine(model, max_num_seqs=4)
    engine.warm(rows=4)
    graphs = set(engine._instance.step._graphs._captured)
    for prompt, answer in zip(PROMPTS, engine.decode(PROMPTS, 20), strict=True):
        assert_best(model, prompt, answer)
    assert set(engine._instance.step._graphs._captured) == graphs


class Litter:
    """Something that the garbage collector alone finds, and an engine that goes with it."""

    def __init__(self, engine):
        self.itself = self
        self.engine = engine


def test_what_is_left_of_an_engine_does_not_disturb_the_captures_of_the_next(model, monkeypatch):
    earlier = [Engine(model) for _ in range(2)]
    for engine in earlier:
        engine.decode(PROMPTS, 3)
    del engine
    compute = StepExecutor._compute

    def littering(step, key):
        if earlier and torch.cuda.is_current_stream_capturing():
            Litter(earlier.pop())
            kept = [[] for _ in range(3 * gc.get_threshold()[0])]  # more than it lets pass without a look
            del kept
        return compute(step, key)

    monkeypatch.setattr(StepExecutor, "_compute", littering)
    engine = Engine(model)
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[:2]):  # graphs of their own for each
        for prompt, answer in zip(prompts, engine.decode(prompts, 20), strict=True):
            assert_best(model, prompt, answer)
    assert not earlier


def test_an_engine_that_nobody_needs_leaves_no_memory(model):
    Engine(model).decode(PROMPTS, 5)
    start, mapped = used(), mapped_bytes(GPU)
    gc.disable()
    try:
        for _ in range(3):
            Engine(model).decode(PROMPTS, 5)
            assert mapped_bytes(GPU) == mapped
    finally:
        gc.enable()
    assert abs(used() - start) <= 32 * MiB


def test_graphs_count_in_the_engines_own_memory(model):
    Engine(model).decode(PROMPTS[:1], 2)
    before = {device: reserve.numel() for device, reserve in workspace._reserves.items()}
    engine = Engine(model, max_num_seqs=8)
    prompts = drawn_prompts(8, 1900, 9)
    answers = engine.decode(prompts, 20)
    # Nothing was taken of a reserve; a kernel outside of graphs may have been the first to need one.
    left = {device: reserve.numel() for device, reserve in workspace._reserves.items()}
    assert left == {device: before.get(device, workspace._RESERVE) for device in left}
    assert not engine._instance.step._counters.any()
    for prompt, answer in zip(prompts, answers, strict=True):  # this takes memory of the reserve
        assert_best(model, prompt, answer)


def test_an_engine_that_keeps_few_graphs_answers_as_others(model):
    engine = Engine(model, max_num_seqs=8, most_graphs=2)
    for rows in (8, 1, 3, 8, 2):
        prompts = drawn_prompts(rows, 300, rows)
        for prompt, answer in zip(prompts, engine.decode(prompts, 12), strict=True):
            assert_best(model, prompt, answer)
        assert len(engine._instance.step._graphs._captured) <= 2


def test_scores_that_are_no_numbers_end_their_request_and_no_other():
    model = model_of()
    engine = Engine(model)
    first, later = request(PROMPTS[0], tokens=40), request(PROMPTS[0], tokens=40)
    engine.add(first)
    for _ in range(5):
        engine.step()
    weight = model.final_norm.weight
    kept = weight[3].item()
    weight[3] = float("nan")
    while first.error is None:
        engine.step()
    assert isinstance(first.error, NumericError)
    weight[3] = kept
    finish(engine, [later])
    assert len(later.token_ids) == 40
    assert_best(model, PROMPTS[0], later.token_ids)


@pytest.mark.parametrize("options", [{}, {"speculation": 2}, {"kv_dtype": "int8"}], ids=str)
def test_hundreds_of_requests_come_and_go(model, options):
    dice = random.Random(len(options))
    engine = Engine(model, max_num_seqs=12, cache_tokens=30 * BLOCK, max_model_len=20 * BLOCK, **options)
    requests, aborted = [], set()
    while len(requests) < 300 or engine.has_work:
        if len(requests) < 300 and dice.random() < 0.5:
            prompt = [*dice.choice(PROMPTS), *dice.choices(range(1000), k=dice.choice([1, 5, 60, 300]))]
            params = SamplingParams(
                temperature=dice.choice([0.0, 0.0, 0.0, 0.9]),
                seed=dice.randrange(9),
                stop_token_ids=tuple(dice.sample(range(1000), 5)),
                repetition_penalty=dice.choice([1.0] * 20 + [1.2]),
            )
            requests.append(request(prompt, tokens=dice.choice([1, 10, 60, 200]), params=params))
            engine.add(requests[-1])
        if requests and dice.random() < 0.02:
            gone = dice.choice(requests)
            if gone.finish_reason is None:
                aborted.add(gone)
            engine.abort(gone)
        if dice.random() < 0.01:
            engine.shrink()
        engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.preemptions > 0
    tolerance = 0.15 if "kv_dtype" in options else 0.03
    for at, each in enumerate(requests):
        assert (each.finish_reason is None) == (each in aborted), at
        if each.token_ids and each.params.greedy and each.params.repetition_penalty == 1.0:
            assert_best(model, each.prompt, each.token_ids, tolerance)
