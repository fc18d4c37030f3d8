"""The sampler on a GPU: chooses as on the CPU, waits for nothing, and fits into a graph where it is plain."""

import json
import random
from pathlib import Path

import pytest
import torch

import warpbus.demo
from warpbus.engine.grammar import GrammarCompiler
from warpbus.engine.readback import Readback
from warpbus.engine.sampler import Sampler
from warpbus.engine.sampling_params import Grammar, SamplingParams
from warpbus.engine.sequence import Sequence
from warpbus.models.tokenizers import StreamDecoder, load_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

POET = Path(warpbus.demo.__file__).parent / "glm-poet"
GPU = torch.device("cuda")
VOCABULARY = 8000
STOPS = frozenset((1, 5, 7))
MIX = [
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.2, "repetition_penalty": 1.3},
    {"temperature": 0, "logit_bias": {3: 20.0, 9: -5.0}, "logprobs": 3},
    {"temperature": 0, "min_tokens": 9, "stop_token_ids": tuple(range(100, 164))},
    {"top_k": 1, "logprobs": 0, "frequency_penalty": 2.0},
    {"temperature": 0, "grammar": Grammar("choice", json.dumps(["春眠不觉晓", "处处闻啼鸟", "夜来风雨声"]))},
    {"seed": 1, "top_p": 0.9, "min_p": 0.01},
    {"seed": 2, "grammar": Grammar("regex", "[0-9]{20}"), "repetition_penalty": 1.1, "logprobs": 20},
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(POET)


def requests(tokenizer):
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCABULARY, stop_ids=STOPS)
    return [
        Sequence(
            index,
            [index, 50, 51],
            SamplingParams(**params),
            limit=100,
            stop_ids=STOPS,
            stream=StreamDecoder(tokenizer),
            matcher=compiler.compile(params["grammar"]) if "grammar" in params else None,
        )
        for index, params in enumerate(MIX)
    ]


def run(tokenizer, device, steps=8):
    """Tokens and logprobs of requests that join and leave, the same on every device."""
    chance = random.Random(0)
    each = requests(tokenizer)
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(16, VOCABULARY, device)
    logprobs = []
    for _ in range(steps):
        running = [one for one in each if one.finish_reason is None and chance.random() < 0.8] or each[:1]
        sampler.arrange(running)
        sampler.draw()
        scores = torch.randn(len(running), VOCABULARY, generator=generator) * 3
        tokens, best = sampler.choose(scores.to(device))
        sampler.saw(tokens)
        assert torch.equal(best.cpu(), scores.amax(-1))
        found = sampler.logprobs()
        logprobs.append({} if found is None else found.read())
        for one, token in zip(running, tokens.tolist(), strict=True):
            one.append(token)
    return [one.token_ids for one in each], logprobs


def test_chooses_as_on_the_cpu(tokenizer):
    expected, expected_logprobs = run(tokenizer, torch.device("cpu"))
    found, logprobs = run(tokenizer, GPU)
    assert found == expected
    for ours, theirs in zip(logprobs, expected_logprobs, strict=True):
        assert ours.keys() == theirs.keys()
        for row, one in ours.items():
            assert one.token == theirs[row].token
            assert one.logprob == pytest.approx(theirs[row].logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in theirs[row].top]


def test_waits_for_nothing(tokenizer):
    each = requests(tokenizer)
    sampler = Sampler(16, VOCABULARY, GPU)
    logits = torch.randn(16, VOCABULARY, device=GPU).half()

    def step(running, drafts):
        sampler.arrange(running, drafts)
        sampler.draw()
        tokens, _ = sampler.choose(logits)
        sampler.saw(tokens)
        Readback(sampler.logprobs().tensors)

    step(each, None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(each, None)
        step(each[::-1], [[60]] * len(each))
        step(each[2:5], [[60], [], [61, 62]])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_plain_choice_in_a_graph_follows_another_arrangement(tokenizer):
    sampler, alone = Sampler(4, VOCABULARY, GPU), Sampler(4, VOCABULARY, GPU)
    logits = torch.randn(4, VOCABULARY, device=GPU) * 3

    def batch(seed):
        each = [{"seed": seed, "top_p": 0.9}, {"seed": seed + 1, "min_p": 0.2}, {"temperature": 0}, {"seed": 9}]
        stream = StreamDecoder(tokenizer)
        return [
            Sequence(0, [1], SamplingParams(**params), limit=9, stop_ids=STOPS, stream=stream)
            for params in each[seed % 3 :]
        ]

    sampler.arrange(batch(0))
    sampler.draw()
    sampler.choose(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = sampler.choose(logits)
    for seed in range(6):
        sampler.arrange(batch(seed))
        alone.arrange(batch(seed))
        for _ in range(3):
            sampler.draw()
            alone.draw()
            graph.replay()
            rows = 4 - seed % 3
            assert torch.equal(tokens[:rows], alone.choose(logits[:rows])[0])
