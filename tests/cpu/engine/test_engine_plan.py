import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warpbus.cuda.memory_size import parse_memory
from warpbus.engine.blocks import BLOCK
from warpbus.engine.kv_cache import token_bytes
from warpbus.engine.plan import (
    CONTEXT_BYTES,
    LIBRARY_BYTES,
    MemoryPlan,
    Stored,
    least_memory,
    plan_memory,
)
from warpbus.errors import UsageError
from warpbus.formats import Checkpoint
from warpbus.language import in_language, translated
from warpbus.models import SHAPES, IndexerSpec, read_config
from warpbus.models.cost import packed_bytes
from warpbus.models.parallel import Part
from warpbus.qtensor import Scheme

GB = 10**9
W4 = Scheme.parse("w4a16-g128")
W8 = Scheme.parse("w8a16-g128")
SHAPE = SHAPES["chatglm2-6b"]
CHATGLM2 = Stored.uniform(SHAPE, torch.float16, W4)


def test_layers_of_different_schemes_are_counted_one_by_one():
    names = [name for name in CHATGLM2.quantized if "mlp.down" in name]
    mixed = replace(CHATGLM2, quantized={**CHATGLM2.quantized, **dict.fromkeys(names, Scheme.parse("w8a8-int8"))})
    n, k = SHAPE.hidden_size, SHAPE.layers[0].mlp.ffn_size
    more = n * k + 4 * n - packed_bytes(W4, n, k)
    assert sum(mixed.sizes.values()) == sum(CHATGLM2.sizes.values()) + SHAPE.num_layers * more


def test_adapters_have_a_place_in_the_plan():
    """And the library that multiplies by them."""
    size = 300_000_000
    plain, adapted = (
        plan_memory(each, 6 * GB, max_num_seqs=1) for each in (CHATGLM2, replace(CHATGLM2, adapters=size))
    )
    assert "adapters" not in plain.parts
    assert adapted.parts["adapters"] == size
    assert adapted.pool_tokens < plain.pool_tokens
    assert plain.parts["CUDA context and kernels"] == CONTEXT_BYTES
    assert adapted.parts["CUDA context and kernels"] == CONTEXT_BYTES + LIBRARY_BYTES
    least = [least_memory(replace(CHATGLM2, adapters=each), max_num_seqs=1) for each in (0, 10 * size)]
    assert least[1] - least[0] > 10 * size
    assert adapted.total <= 6 * GB


def test_chatglm2_in_six_gigabytes_gives_up_an_eighth_of_its_context():
    plan = plan_memory(CHATGLM2, 6 * GB, max_num_seqs=1)
    assert (plan.kv_dtype, plan.head, plan.embedding_on_cpu, plan.context) == ("auto", None, False, 28 * 1024)
    assert plan_memory(CHATGLM2, int(6.2 * GB), max_num_seqs=1).context == SHAPE.max_context
    assert plan.parts["embedding"] == plan.parts["head"] == 65024 * 4096 * 2
    assert 2.93 * GB < plan.parts["layers"] < 2.96 * GB
    assert token_bytes(SHAPE, torch.float16, "auto") == 28 * 1024


def test_chatglm2_generates_8192_tokens_in_less_than_official_int4():
    plan = plan_memory(CHATGLM2, 5 * GB, max_model_len=8192 + 128)
    assert (plan.kv_dtype, str(plan.head), plan.embedding_on_cpu) == ("int8", "w8a16-g128", False)


@pytest.mark.parametrize(
    ("stored", "seqs", "called"),
    [
        (CHATGLM2, 1, False),
        (CHATGLM2, 2, True),
        (replace(CHATGLM2, quantized={**CHATGLM2.quantized, "head.weight": W4}), 16, False),
        (replace(CHATGLM2, dtype=torch.float32), 1, True),
        (Stored.uniform(SHAPE, torch.float16, None), 1, True),
    ],
)
def test_cublas_is_counted_where_it_is_called(stored, seqs, called):
    parts = plan_memory(stored, 40 * GB, max_num_seqs=seqs).parts
    assert parts["CUDA context and kernels"] == CONTEXT_BYTES + called * LIBRARY_BYTES


def test_what_is_read_of_the_cache_with_a_long_prompt_is_counted():
    short, long = (plan_memory(CHATGLM2, 6 * GB, max_model_len=length, max_num_seqs=1) for length in (2048, 32768))
    vectors = 2 * SHAPE.attention.num_kv_heads * SHAPE.attention.head_dim * 2
    assert long.parts["workspace"] - short.parts["workspace"] == (32768 - 2048) * vectors


@pytest.mark.parametrize(("seqs", "context"), [(1, 2048), (2, 2048), (4, 2048), (16, 2048), (16, 8192), (16, 12_288)])
def test_what_chunks_of_several_sequences_read_together_is_counted(seqs, context):
    """Keys and values of 8,192 tokens, the values twice while they are joined, or those of one sequence."""
    plan = plan_memory(CHATGLM2, 40 * GB, max_model_len=context, max_num_seqs=seqs)
    vectors = 2 * SHAPE.attention.num_kv_heads * SHAPE.attention.head_dim * 2
    without = plan_memory(CHATGLM2, 40 * GB, max_model_len=32_768, max_num_seqs=seqs)
    joined = 3 * min(seqs * context, 8192) // 2 if seqs > 1 else 0
    assert without.parts["workspace"] - plan.parts["workspace"] == (32_768 - max(context, joined)) * vectors


def test_the_scores_and_selections_of_indexers_are_counted():
    """Of all sequences of a batch, and only for contexts longer than a selection."""
    indexer = IndexerSpec(heads=32, head_dim=128, top_k=2048)
    flash = SHAPES["glm-4.7-flash"]
    indexed = tuple(replace(layer, attention=replace(layer.attention, indexer=indexer)) for layer in flash.layers)
    stored = Stored.uniform(replace(flash, layers=indexed), torch.float16, W4)

    def workspace(seqs, context):
        return plan_memory(stored, 80 * GB, max_model_len=context, max_num_seqs=seqs).parts["workspace"]

    rows, logits = 16 - 1, flash.vocab_size * (2 + 3 * 4)
    expanded = (32_768 - 2048) * 2 * (512 + 64 + 128 + 20 * (192 + 256 + 256))
    assert workspace(16, 2048) - workspace(1, 2048) == rows * logits + expanded
    assert workspace(16, 32_769) - workspace(1, 32_769) == rows * (logits + 4 * 32_772 + 2 * 4 * 2048)


@pytest.mark.parametrize(("heads", "masks"), [(32, 0), (16, 2048 * 65_536 * (1 + 2))])
def test_masks_of_long_prompts_are_counted_where_no_kernel_attends_to_a_list(heads, masks):
    """32 heads of an indexer have kernels, 16 have none; the context is twice what is expanded."""
    flash = SHAPES["glm-4.7-flash"]

    def workspace(context):
        spec = replace(flash.attention, indexer=IndexerSpec(heads=heads, head_dim=128, top_k=2048))
        layers = tuple(replace(layer, attention=spec) for layer in flash.layers)
        stored = Stored.uniform(replace(flash, layers=layers), torch.bfloat16, W4)
        return plan_memory(stored, 80 * GB, max_model_len=context, max_num_seqs=1).parts["workspace"]

    scores_and_cached = 32_768 * (4 + 2 * (512 + 64 + 128))
    assert workspace(65_536) - workspace(32_768) == masks + scores_and_cached


def test_options_are_given_up_in_their_order():
    """As memory shrinks: first the context, then the cache's dtype, the head's, the embedding's, and its place."""
    found = []
    for limit in range(int(6.5 * GB), int(4 * GB), -GB // 50):
        try:
            plan = plan_memory(CHATGLM2, limit)
        except UsageError:
            break
        found.append(
            (plan.kv_dtype != "auto", plan.head is not None, plan.embedding is not None, plan.embedding_on_cpu)
        )
    assert list(dict.fromkeys(found)) == [
        (False, False, False, False),
        (True, False, False, False),
        (True, True, False, False),
        (True, True, True, False),
        (True, True, False, True),
    ]


def test_a_rounded_embedding_takes_half_of_its_bytes():
    """With groups of 128: 8 bits a weight, and a scale of 16 bits a group."""
    limit = next(limit for limit in range(6 * GB, 4 * GB, -GB // 50) if plan_memory(CHATGLM2, limit).embedding)
    plan = plan_memory(CHATGLM2, limit)
    assert str(plan.embedding) == "w8a16-g128"
    assert plan.parts["embedding"] == plan.parts["head"] == 65024 * (4096 + 2 * 4096 // 128)
    assert "embedding rounded to w8a16-g128" in plan.choices()
    assert json.loads(json.dumps(plan.to_json()))["embedding"] == "w8a16-g128"


def test_what_the_file_has_quantized_is_not_rounded():
    quantized = CHATGLM2.quantized | {"embedding.weight": W4, "head.weight": W4}
    stored = replace(CHATGLM2, quantized=quantized)
    for limit in range(5 * GB, int(3.5 * GB), -GB // 20):
        try:
            plan = plan_memory(stored, limit)
        except UsageError:
            break
        assert (plan.head, plan.embedding) == (None, None)
        assert plan.parts["embedding"] in (0, stored.sizes["embedding.weight"])
    assert plan.embedding_on_cpu
    assert stored.sizes["embedding.weight"] < 65024 * 4096 * 0.6


@pytest.mark.parametrize("seqs", [1, 16])
def test_a_head_tied_to_a_quantized_embedding_takes_nothing_and_needs_no_library(seqs):
    tied = Stored.uniform(replace(SHAPE, tie_embeddings=True), torch.float16, W4)
    plan = plan_memory(replace(tied, quantized=tied.quantized | {"embedding.weight": W4}), 6 * GB, max_num_seqs=seqs)
    assert plan.parts["head"] == 0
    assert plan.parts["CUDA context and kernels"] == CONTEXT_BYTES


def test_a_tied_head_is_rounded_with_the_embedding_and_is_one_matrix():
    tied = Stored.uniform(replace(SHAPE, tie_embeddings=True), torch.float16, W4)
    assert plan_memory(tied, 6 * GB).parts["head"] == 0
    plans = []
    for limit in range(5 * GB, 3 * GB, -GB // 50):
        try:
            plans.append(plan_memory(tied, limit))
        except UsageError:
            break
    assert {(plan.head, plan.embedding) for plan in plans} == {(None, None), (W8, W8)}
    assert not any(plan.embedding_on_cpu or plan.parts["head"] for plan in plans)
    assert plans[-1].parts["embedding"] == 65024 * (4096 + 2 * 4096 // 128)


sizes = st.integers(min_value=4 * GB, max_value=80 * GB)


@settings(max_examples=60, deadline=None)
@given(
    limit=sizes,
    context=st.none() | st.integers(2, 32768),
    seqs=st.integers(1, 40),
    kv=st.sampled_from(["auto", "int8", "fp8", "int4"]),
    quantized=st.booleans(),
)
def test_a_plan_never_exceeds_its_limit_and_holds_what_was_asked_for(limit, context, seqs, kv, quantized):
    stored = Stored.uniform(SHAPE, torch.float16, W4 if quantized else None)
    try:
        plan = plan_memory(stored, limit, max_model_len=context, max_num_seqs=seqs, kv_dtype=kv)
    except UsageError:
        return
    assert plan.total <= limit
    assert plan.pool_tokens >= plan.context
    assert plan.context == context or (context is None and 2048 <= plan.context <= SHAPE.max_context)
    assert kv == "auto" or plan.kv_dtype == kv


@pytest.mark.parametrize("seqs", [1, 3, 16])
@pytest.mark.parametrize("context", [100, 2048, 8320])
def test_the_cache_is_planned_in_whole_blocks_beside_one_that_is_nobodys(seqs, context):
    plan = plan_memory(CHATGLM2, 6 * GB, max_model_len=context, max_num_seqs=seqs)
    assert plan.pool_tokens % BLOCK == 0
    assert context <= plan.pool_tokens <= -(-context // BLOCK) * BLOCK * seqs
    per_token = token_bytes(SHAPE, torch.float16, plan.kv_dtype)
    assert 0 <= plan.parts["KV cache"] - (plan.pool_tokens + BLOCK) * per_token < 2**21
    if seqs == 1:
        assert plan.pool_tokens == -(-context // BLOCK) * BLOCK


@settings(max_examples=40, deadline=None)
@given(limit=sizes, more=st.integers(0, 10 * GB), context=st.integers(2, 32768))
def test_what_fits_fits_in_more(limit, more, context):
    try:
        plan_memory(CHATGLM2, limit, max_model_len=context)
    except UsageError:
        return
    plan_memory(CHATGLM2, limit + more, max_model_len=context)


def test_a_refusal_says_what_would_fit():
    with pytest.raises(UsageError, match=r"memory is 3\.00 GB, but the model needs 4\.\d\d GB .* give memory 4\.\dGB$"):
        plan_memory(CHATGLM2, 3 * GB)
    unquantized = Stored.uniform(SHAPE, torch.float16, None)
    with pytest.raises(UsageError, match=r"or quantize it: it fits with w4a16-g128 and a context of 32,768$"):
        plan_memory(unquantized, 7 * GB)
    with pytest.raises(UsageError, match=r"for a context of 32,000 tokens, .* or a max_model_len of \d+,\d+$"):
        plan_memory(CHATGLM2, int(4.4 * GB), max_model_len=32000)


def advised(error, pattern):
    return re.search(pattern, str(error.value))[1].replace(",", "")


@pytest.mark.parametrize(("limit", "seqs"), [(80 * GB, 100_000), (int(4.6 * GB), 2_000)])
def test_the_advice_on_sequences_holds(limit, seqs):
    """That so many sequences need the memory is said, whatever else would help."""
    with pytest.raises(UsageError) as error:
        plan_memory(CHATGLM2, limit, max_num_seqs=seqs)
    most = int(advised(error, r"max_num_seqs of ([\d,]+)"))
    assert plan_memory(CHATGLM2, limit, max_num_seqs=most).total <= limit
    with pytest.raises(UsageError):
        plan_memory(CHATGLM2, limit, max_num_seqs=2 * most)


def test_the_advice_holds():
    with pytest.raises(UsageError) as error:
        plan_memory(CHATGLM2, int(4.4 * GB), max_model_len=32000)
    plan_memory(CHATGLM2, int(4.4 * GB), max_model_len=int(advised(error, r"max_model_len of ([\d,]+)")))
    plan_memory(CHATGLM2, parse_memory(advised(error, r"memory (\S+),"), 80 * GB), max_model_len=32000)


@pytest.mark.parametrize(
    ("limit", "seqs", "advice"),
    [
        (8 * GB, 4, r"give memory .*, or share it .*, or quantize"),
        (16 * GB, 100_000, r"give memory .*, or share it .*, or a max_num_seqs"),
        (int(14.6 * GB), 16, r"give memory .*, or share it .*, or a max_model_len of .*, or quantize"),
    ],
)
def test_all_advice_is_translated(limit, seqs, advice):
    plain = replace(Stored.uniform(SHAPE, torch.float16, None), gpus=2)
    with pytest.raises(UsageError, match=advice) as error:
        plan_memory(plain, limit, max_model_len=32_768, max_num_seqs=seqs)
    with in_language("zh"):
        assert not re.search(r"\b(or|give|share|quantize|of|fits)\b", translated(str(error.value)))


@pytest.mark.parametrize("stored", [CHATGLM2, Stored.uniform(SHAPE, torch.float16, None)])
@pytest.mark.parametrize("limit", [3 * GB, 5 * GB, 16 * GB])
def test_the_least_memory_is_what_a_plan_needs(stored, limit):
    least = least_memory(stored, limit)
    if least > limit:
        with pytest.raises(UsageError, match="the model needs"):
            plan_memory(stored, limit)
    else:
        assert plan_memory(stored, limit).total <= limit
    assert least_memory(stored) <= least


def test_a_checkpoint_is_planned_without_being_read(tiny_glm):
    checkpoint = Checkpoint(tiny_glm)
    stored = Stored.of_checkpoint(checkpoint, read_config(checkpoint), torch.float16)
    assert stored.quantized == {}
    assert sum(stored.sizes.values()) == stored.config.num_parameters * 2
    assert plan_memory(stored, GB).context == 512


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize(("shape", "gpus"), [("glm-4.5-air", 3), ("glm-4.7-flash", 5), ("qwen3-30b-a3b", 4)])
def test_the_plan_of_gpus_that_share_a_model_is_of_the_largest_part(shape, gpus, expert_parallel):
    """Its parameters are those that a process has, and no process has more."""
    whole = Stored.uniform(SHAPES[shape], torch.bfloat16, Scheme.parse("w4a16-g128"))
    part = whole.shared(gpus, expert_parallel=expert_parallel)
    processes = [Part(whole.config, rank, gpus, expert_parallel) for rank in range(gpus)]
    (own, *_) = [each for each in processes if each.config == part.config]
    assert part.sizes.keys() == {name for name in whole.sizes if own.has(name)}
    assert own.config.num_parameters == max(each.config.num_parameters for each in processes)
    assert sum(part.sizes.values()) < 1.3 * sum(whole.sizes.values()) / gpus + part.sizes["embedding.weight"]
    # Nothing is offloaded, rounded or elsewhere, and what is said to be enough is.
    with pytest.raises(UsageError, match=f"each of {gpus} GPUs needs") as refusal:
        plan_memory(part, 3 * GB)
    plan = plan_memory(part, parse_memory(re.search(r"give memory (\S+GB)", str(refusal.value))[1]) + GB)
    assert (plan.offloaded, plan.head, plan.embedding_on_cpu) == ((), None, False)


def test_a_plan_can_be_shown():
    plan = plan_memory(CHATGLM2, 5 * GB)
    assert isinstance(plan, MemoryPlan)
    shown = json.loads(json.dumps(plan.to_json()))
    assert (shown["total"], shown["context"]) == (plan.total, plan.context)
    for text in ("KV cache", "5.00 GB", f"{plan.context:,}"):
        assert text in str(plan)


CHATGLM = SHAPES["chatglm-6b"]


def test_chatglm_in_six_gigabytes():
    """Its cache takes 16 times what ChatGLM2-6B's does, and its prompts are read whole."""
    assert token_bytes(CHATGLM, torch.float16, "auto") == 448 * 1024
    plan = plan_memory(Stored.uniform(CHATGLM, torch.float16, W4), 6 * GB, max_num_seqs=1)
    assert (plan.context, plan.kv_dtype, plan.head, plan.embedding_on_cpu) == (2048, "int8", None, False)
    assert plan.prefill_tokens == 2048
    shorter = plan_memory(Stored.uniform(CHATGLM, torch.float16, W4), 6 * GB, max_model_len=1024, max_num_seqs=1)
    assert (shorter.context, shorter.kv_dtype, shorter.prefill_tokens) == (1024, "auto", 1024)


@pytest.mark.parametrize("blocks", [1, 5, 40])
def test_prefixes_have_room_beside_all_that_sequences_need(blocks):
    behind = replace(CHATGLM2, prefix_blocks=blocks)
    plain, plan = (plan_memory(stored, 6 * GB, max_model_len=4096, max_num_seqs=1) for stored in (CHATGLM2, behind))
    assert (plan.context, plan.pool_tokens) == (plain.context, plain.pool_tokens) == (4096, 4096)
    more = blocks * BLOCK * token_bytes(SHAPE, torch.float16, "auto")
    assert abs(plan.parts["KV cache"] - plain.parts["KV cache"] - more) < 2**21  # whole pages
    assert plan.parts["workspace"] > plain.parts["workspace"]
    least = least_memory(behind, 6 * GB, max_model_len=4096, max_num_seqs=1)
    assert plan_memory(behind, least, max_model_len=4096, max_num_seqs=1).total <= least
    assert least > least_memory(CHATGLM2, 6 * GB, max_model_len=4096, max_num_seqs=1) + more // 2  # of 8 bits
