"""Prompts in pieces and steps in CUDA graphs choose on a GPU what the model prefers without a cache."""

from dataclasses import replace

import pytest
import torch

from warpbus.engine.engine import Engine, request
from warpbus.engine.sequence import SamplingParams
from warpbus.models import SHAPES, random_model
from warpbus.qtensor import Scheme

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GPU = torch.device("cuda", 0)
W4 = Scheme.parse("w4a16-g32")
SMALL = replace(
    SHAPES["chatglm2-6b"], vocab_size=1000, hidden_size=256, num_layers=3, num_heads=8, head_dim=64, ffn_size=352
)
SMALL = replace(SMALL, rope=replace(SMALL.rope, rotary_dim=32), max_context=2048)
PROMPTS = [list(range(5, 75)), [20, 21], list(range(100, 133)), list(range(300, 309))]
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.15}  # of scores that spread by about 1


def model_of(config=SMALL, scheme=W4, dtype=torch.float16, **options):
    return random_model(config, scheme, GPU, dtype, **options)


@torch.no_grad()
def assert_best(model, prompt, answer, tolerance):
    """Each token of the answer is the likeliest one, but for rounding, by the model alone and without a cache."""
    scores = model(torch.tensor([[*prompt, *answer[:-1]]], device=GPU))[0, len(prompt) - 1 :].float()
    chosen = scores.gather(1, torch.tensor(answer, device=GPU)[:, None])[:, 0]
    assert (scores.amax(-1) - chosen).max() <= tolerance


@pytest.mark.parametrize("piece", [4096, 48])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("scheme", [None, W4])
def test_prompts_and_steps(piece, num_kv_heads, dtype, scheme):
    model = model_of(replace(SMALL, num_kv_heads=num_kv_heads), scheme, dtype)
    engine = Engine(model, max_model_len=200, prefill_tokens=piece)
    for prompt, answer in zip(PROMPTS, engine.decode(PROMPTS, 12), strict=True):
        assert_best(model, prompt, answer, TOLERANCES[dtype])


@pytest.mark.parametrize("changes", [{"qk_norm": True}, {"output_norms": True}, {"tie_embeddings": True}])
def test_other_families(changes):
    model = model_of(replace(SMALL, **changes))
    for prompt, answer in zip(PROMPTS, Engine(model).decode(PROMPTS, 8), strict=True):
        assert_best(model, prompt, answer, 0.03)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("int8", 0.1), ("fp8", 0.5)])
def test_caches_of_8_bits(kv_dtype, tolerance):
    model = model_of()
    engine = Engine(model, kv_dtype=kv_dtype, prefill_tokens=64)
    for prompt, answer in zip(PROMPTS, engine.decode(PROMPTS, 12), strict=True):
        assert_best(model, prompt, answer, tolerance)


def test_a_sequence_outgrows_its_graph():
    model = model_of()
    prompt = [token % 1000 for token in range(500)]
    answer = Engine(model).decode([prompt], 40)[0]
    assert_best(model, prompt, answer, 0.03)


def tokens_of(engine, requests, steps, eager=False):
    """What a batch chooses in some steps, with the steps in graphs or not."""
    with engine.batch(requests) as runner:
        graphs = runner._step._graphs
        if eager:
            runner._step._graphs = None
        runner.start()
        found = [runner.read()]
        for _ in range(steps):
            runner.launch()
            found.append(runner.read())
        runner._step._graphs = graphs
    return found


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"seed": 1, "top_p": 0.9},
        {"seed": 2, "top_k": 7, "temperature": 0.7},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"seed": 3, "repetition_penalty": 1.2},
    ],
)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_graph_gives_what_its_kernels_give(params, batch):
    engine = Engine(model_of(head=Scheme.parse("w8a16")), max_model_len=200)

    def requests():
        return [request(prompt, tokens=30, params=SamplingParams(**params)) for prompt in PROMPTS[:batch]]

    graphs = tokens_of(engine, requests(), 20)
    assert graphs == tokens_of(engine, requests(), 20, eager=True)
    assert graphs == tokens_of(engine, requests(), 20)


def test_rows_leave_while_a_step_is_under_way():
    model = model_of()
    engine = Engine(model, max_model_len=300)
    answers = {row: [] for row in range(4)}
    with engine.batch([request(prompt, tokens=30) for prompt in PROMPTS]) as runner:
        runner.start()
        rows = list(range(4))
        for step in range(20):
            assert runner.ahead
            runner.launch()
            for row, token in zip(rows, runner.read(), strict=True):
                answers[row].append(token)
            if step in (3, 9, 10):
                kept = {3: [0, 2, 3], 9: [1, 2], 10: [1]}[step]
                rows = [rows[at] for at in kept]
                runner.keep(kept)
    assert [len(answers[row]) for row in range(4)] == [10, 4, 11, 20]
    for row, prompt in enumerate(PROMPTS):
        assert_best(model, prompt, answers[row], 0.03)


def test_the_embedding_may_lie_on_the_cpu():
    here, there = model_of(), model_of(embedding="cpu")
    assert there.embedding.weight.device.type == "cpu"
    assert Engine(here).decode(PROMPTS, 10) == Engine(there).decode(PROMPTS, 10)


def test_the_pool_is_shared_and_grows():
    engine = Engine(model_of(), max_model_len=2048)
    alone = engine.decode([PROMPTS[0]], 6)
    with engine.batch([request(PROMPTS[1], tokens=4)]) as runner:
        runner.start()
        assert engine.decode([PROMPTS[0]], 6) == alone
    engine.decode(PROMPTS * 4, 3)
    assert engine.decode([PROMPTS[0]], 6) == alone
