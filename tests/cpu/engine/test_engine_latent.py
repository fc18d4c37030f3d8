"""Multi-head latent attention in the engine: one KV head of latents, however prompts and tokens are computed."""

from functools import cache

import pytest
import torch
from engine_models import LATENT, PROMPTS, SPARSE, as_on_a_gpu, assert_best, finish

from warpbus.engine import attention
from warpbus.engine.attention import PositionedAttention
from warpbus.engine.blocks import BLOCK
from warpbus.engine.engine import Engine, request
from warpbus.engine.kv_cache import KVCache, token_bytes
from warpbus.engine.plan import LIBRARY_BYTES, Stored, plan_memory
from warpbus.engine.positions import RopeAngles, RowPositions, identity_rope
from warpbus.engine.sampling_params import SamplingParams
from warpbus.errors import UsageError
from warpbus.models import SHAPES, random_model
from warpbus.models.layers import rotate
from warpbus.qtensor import Scheme

CPU = torch.device("cpu")
GB = 10**9
GREEDY = SamplingParams(temperature=0)
FLASH = Stored.uniform(SHAPES["glm-4.7-flash"], torch.bfloat16, Scheme.parse("w4a16-g128"))


@pytest.fixture(scope="module", params=[LATENT, SPARSE], ids=["latent", "sparse"])
def model(request):
    return random_model(request.param, None, "cpu", torch.float32)


def answers(engine, prompts=PROMPTS):
    requests = [request(prompt, tokens=20, params=GREEDY) for prompt in prompts]
    finish(engine, requests)
    return [each.token_ids for each in requests]


@cache
def alone(model, kv_dtype="auto"):
    return [answers(Engine(model, kv_dtype=kv_dtype), [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("kind", [lambda engine: engine, as_on_a_gpu], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 5},
        {"prefix_caching": False},
        {"speculation": 4},
        {"cache_tokens": 5 * BLOCK, "max_model_len": 5 * BLOCK, "speculation": 3, "max_num_batched_tokens": 33},
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_the_answers_are_the_same_alone_and_together_however_they_are_computed(model, kind, options, kv_dtype):
    """With pieces of prompts, with drafts, with prompts among the rows of a graph, and after preemption."""
    found = answers(kind(Engine(model, kv_dtype=kv_dtype, **options)))
    assert found == alone(model, kv_dtype)
    if kv_dtype == "auto":
        for prompt, answer in zip(PROMPTS, found, strict=True):
            assert_best(model, prompt, answer)


@pytest.mark.parametrize("most_tokens", [None, 33])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@torch.no_grad()
def test_prompts_attend_to_slots_as_to_a_mask(monkeypatch, most_tokens, kv_dtype):
    """What prompts do where there are kernels, here by their references: whole, in chunks, and in small pieces."""
    model = random_model(SPARSE, None, "cpu", torch.float32)
    expected = alone(model, kv_dtype)
    monkeypatch.setattr(attention, "_has_sparse_kernels", lambda *_: True)
    monkeypatch.setattr(attention, "_SCORES_AT_ONCE", 600)
    monkeypatch.setattr(attention, "_LISTED_ROWS", 7)
    listed = []
    attend = attention._attend_listed
    monkeypatch.setattr(attention, "_attend_listed", lambda *given: listed.append(given) or attend(*given))
    assert answers(Engine(model, kv_dtype=kv_dtype, max_num_batched_tokens=most_tokens)) == expected
    assert listed


@torch.no_grad()
def test_decoding_attends_to_the_selected_slots_alone(monkeypatch):
    """With more tokens than are selected, attention gets lists; and the layer that shares a selection the same one."""
    model, given = random_model(SPARSE, None, "cpu", torch.float32), []
    attend = attention.mla_attention

    def seen(q, positions, blocks, *others, **options):
        given.append((blocks, positions, options["listed"]))
        return attend(q, positions, blocks, *others, **options)

    monkeypatch.setattr(attention, "mla_attention", seen)
    answers(Engine(model), [PROMPTS[2]])
    top_k = SPARSE.attention.indexer.top_k
    assert given
    assert all(listed and blocks.shape[1] == top_k for blocks, _, listed in given)
    assert all(positions.max() == top_k - 1 for _, positions, _ in given)
    assert all(first[0] is second[0] for first, second in zip(given[::2], given[1::2], strict=True))


@torch.no_grad()
def test_logits_with_an_fp8_cache_are_close_to_those_of_the_model(model):
    if model.config is SPARSE:
        pytest.skip("rounding changes which tokens are selected")
    engine, params = Engine(model, kv_dtype="fp8"), SamplingParams(temperature=0, logprobs=1)
    requests = [request(prompt, tokens=20, params=params) for prompt in PROMPTS]
    finish(engine, requests)
    errors = []
    for each in requests:
        row = torch.tensor([[*each.prompt, *each.token_ids[:-1]]])
        exact = model(row)[0, len(each.prompt) - 1 :].log_softmax(-1)
        chosen = exact.gather(1, torch.tensor(each.token_ids)[:, None])[:, 0]
        errors.append((torch.tensor([logprob.logprob for logprob in each.logprobs]) - chosen).abs())
    assert 0 < torch.cat(errors).mean() < 0.05
    assert torch.cat(errors).max() < 0.3


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_a_cached_beginning_is_not_computed_again(model, kv_dtype):
    engine, prompt = Engine(model, kv_dtype=kv_dtype), PROMPTS[2]  # two blocks and eleven tokens
    first = answers(engine, [prompt])
    again = request(prompt, tokens=20, params=GREEDY)
    finish(engine, [again])
    assert again.cached_tokens == 2 * BLOCK
    assert [again.token_ids] == first


def test_the_cache_holds_latents_once():
    spec = LATENT.attention
    assert token_bytes(LATENT, torch.float16, "auto") == LATENT.num_layers * (64 + 8) * 2
    cache = KVCache(LATENT, 6, device=CPU, dtype=torch.float16)
    assert cache.block_bytes == BLOCK * token_bytes(LATENT, torch.float16, "auto")
    cache.commit(6)
    for keys, values, *scales in cache.layers:
        assert keys.shape == (6, 1, BLOCK, spec.head_dim)
        assert values.shape == (6, 1, BLOCK, spec.kv_rank)
        assert values.data_ptr() == keys.data_ptr()
        assert scales == [None, None]
    contents = [part.fill_(index) for index, (part, *_) in enumerate(cache.layers, start=1)]
    assert [float(part.float().mean()) for part in contents] == [1, 2]
    other = KVCache(LATENT, 6, device=CPU, dtype=torch.float16)
    other.commit(6)
    other.store([4], cache.fetch([2]))
    assert torch.equal(other.layers[1][0][4], cache.layers[1][0][2])
    assert not other.layers[1][0][3].any()


@pytest.mark.parametrize("config", [LATENT, SPARSE], ids=["latent", "sparse"])
def test_an_fp8_cache_holds_rows_of_codes_scales_and_rotary_keys(config):
    a_layer = 64 + 16 + 16  # codes, a scale and padding, eight numbers in 16 bits
    indexers = 16 * 2 if config is SPARSE else 0
    assert token_bytes(config, torch.float16, "fp8") == config.num_layers * a_layer + indexers
    cache = KVCache(config, 6, device=CPU, dtype=torch.float16, kv_dtype="fp8")
    assert cache.kind == "fp8"
    assert cache.block_bytes == BLOCK * token_bytes(config, torch.float16, "fp8")
    cache.commit(6)
    assert cache.block_bytes * 6 <= cache.nbytes
    for keys, values, *scales in cache.layers:
        assert keys.shape == (6, 1, BLOCK, a_layer)
        assert keys.dtype == torch.float8_e4m3fn
        assert values.data_ptr() == keys.data_ptr()
        assert scales == [None, None]
        assert not keys.view(torch.uint8).any()
    for index, (keys, *_) in enumerate(cache.layers, start=1):
        keys.view(torch.uint8).fill_(index)
    other = KVCache(config, 6, device=CPU, dtype=torch.float16, kv_dtype="fp8")
    other.commit(6)
    other.store([4], cache.fetch([2]))
    other.copy(4, 1)
    for at in (1, 4):
        assert (other.layers[1][0][at].view(torch.uint8) == 2).all()
    assert not other.layers[1][0][3].view(torch.uint8).any()


def test_a_plan_with_an_fp8_cache_has_room_for_more_tokens():
    plain = plan_memory(FLASH, 20 * GB, max_num_seqs=1)
    plan = plan_memory(FLASH, 20 * GB, max_num_seqs=1, kv_dtype="fp8")
    assert plan.kv_dtype == "fp8"
    assert 0 <= plan.parts["KV cache"] - (plan.pool_tokens + BLOCK) * 47 * 656 < 2**21
    assert plan.pool_tokens > 1.3 * plain.pool_tokens
    assert plan.total <= 20 * GB


def test_the_plan_counts_latents_and_the_dequantized_projection():
    plan = plan_memory(FLASH, 24 * GB, max_num_seqs=1, max_model_len=60_000)
    tokens = plan.pool_tokens + BLOCK
    assert 0 <= plan.parts["KV cache"] - tokens * 47 * 576 * 2 < 2**21
    assert plan.kv_dtype == "auto"
    kv_b = 47 * 20 * (192 + 256) * 512 * 2
    assert sum(size for name, size in FLASH.sizes.items() if "kv_b" in name) == kv_b
    assert 15.4 * GB < plan.parts["layers"] < 16.5 * GB
    assert plan.parts["CUDA context and kernels"] > LIBRARY_BYTES
    assert plan.context == 60_000


def test_no_plan_rounds_latents_unasked():
    """Where grouped queries would get a cache of 8 bits, the embedding is moved instead."""
    limit = 18 * GB
    plan = plan_memory(FLASH, limit, max_num_seqs=1)
    assert plan.kv_dtype == "auto"
    assert plan.total <= limit
    for kv_dtype in ("int8", "int4"):
        with pytest.raises(UsageError, match=rf"^kv_dtype is '{kv_dtype}': the latents .* give auto or fp8$"):
            plan_memory(FLASH, limit, kv_dtype=kv_dtype)


def test_the_cache_holds_the_keys_of_indexers():
    own = LATENT.num_layers * (64 + 8) + 16  # the second layer has no indexer
    assert token_bytes(SPARSE, torch.float16, "auto") == own * 2
    cache = KVCache(SPARSE, 6, device=CPU, dtype=torch.float16)
    assert cache.block_bytes == BLOCK * own * 2
    cache.commit(6)
    keys, none = cache.index_keys
    assert keys.shape == (6, 1, BLOCK, 16)
    assert none is None
    keys[2] = 3
    cache.copy(2, 5)
    assert (keys[5] == 3).all()
    assert not keys[4].any()


@torch.no_grad()
def test_rows_with_positions_of_their_own_attend_as_far_as_they_see():
    """Rotary angles of position 5, stored in slot 7 after two latents of a prefix, and slot 8 is not visible."""
    model = random_model(LATENT, None, "cpu", torch.float32)
    attention, generator = model.layers[0].attention, torch.Generator().manual_seed(1)
    spec = attention.spec
    q, latents = torch.randn(4, 20, generator=generator), torch.randn(9, 72, generator=generator)
    cache = KVCache(LATENT, 3, device=CPU, dtype=torch.float32)
    cache.commit(3)
    cache.layers[0][0][2, 0, :9] = latents
    rows = RowPositions(
        RopeAngles(model.rotary.table(16, CPU), torch.tensor([5], dtype=torch.int32)),
        slot_mapping=torch.tensor([2 * BLOCK + 7]),
        last_visible=torch.tensor([7], dtype=torch.int32),
        identity=identity_rope(16, CPU),
    )
    blocks = torch.tensor([[2, 1]], dtype=torch.int32)
    context = PositionedAttention(LATENT, rows, cache, blocks, 2 * BLOCK)
    found = context.attend_latent(0, attention, q[None, None], latents[7][None, None], None)

    angles = model.rotary(torch.tensor([[5]]), torch.float32)
    rotated = [
        rotate(each[None, None], angles, LATENT.rope.interleaved)[0, 0] for each in (q[:, 12:], latents[7:8, 64:])
    ]
    seen = latents[:8].clone()
    seen[7] = torch.cat((attention.kv_a_norm(latents[7, :64]), rotated[1][0]))
    assert torch.allclose(cache.layers[0][0][2, 0, 7], seen[7])
    scores = attention.absorb(torch.cat((q[:, :12], rotated[0]), dim=-1)[None])[0] @ seen.T * spec.query_dim**-0.5
    expected = attention.outputs((scores.softmax(-1) @ seen[:, :64])[None]).flatten(-2)
    torch.testing.assert_close(found[0], expected)
