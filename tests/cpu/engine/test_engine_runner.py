"""Steps as they are launched: what the runner tells the device, and what it brings back."""

import pytest
import torch
from engine_models import PROMPTS, SMALL, assert_best, plain_scores

from warpbus.engine.blocks import BLOCK, BlockAllocator
from warpbus.engine.engine import Engine, request
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.runner import Runner
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.scheduler import Scheduler, StepBudget
from warpbus.engine.sequence import RunnerState, SchedulerState
from warpbus.engine.step import StepExecutor
from warpbus.models import random_model

PLACE = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.fixture(scope="module")
def model():
    return random_model(SMALL, None, "cpu", torch.float32)


class Driven:
    """A runner, and a scheduler that says what it runs."""

    def __init__(self, model, prompts, params=None, blocks=40):
        cache = KVCache(model.config, blocks, **PLACE)
        cache.commit(blocks)
        self.step = StepExecutor(model, cache, 4, 16, 300, graphs=False, **PLACE)
        self.runner = Runner(model, cache, self.step, 16)
        self.scheduler = Scheduler(BlockAllocator(blocks), max_num_seqs=4, budget=StepBudget(1000))
        self.sequences = []
        for slot, prompt in enumerate(prompts):
            each = request(prompt, tokens=200, params=params)
            each.scheduler_state = SchedulerState(list(prompt), 300)
            each.runner_state = RunnerState(slot)
            self.sequences.append(each)
            self.scheduler.add(each)

    def launch(self, drafts=None):
        """A step; its tokens, row by row."""
        plan = self.scheduler.plan(0 if drafts is None else 4)
        sampled = self.runner.launch(plan.decoding, plan.chunks, drafts)
        found = [(sequence.runner_state.slot, token) for sequence, token, _ in sampled.read()]
        if drafts is None:
            for sequence, token, logprob in sampled.read():
                sequence.append(token, logprob)
                self.scheduler.append_tokens(sequence, [token])
        return found


def test_a_token_for_each_row_that_decodes_and_for_each_prompt_that_ends(model):
    driven = Driven(model, PROMPTS[:4])
    assert sorted(slot for slot, _ in driven.launch()) == [0, 1, 2, 3]
    for _ in range(5):
        assert [slot for slot, _ in driven.launch()] == [0, 1, 2, 3]
    for each in driven.sequences:
        assert len(each.token_ids) == 6
        assert_best(model, each.prompt, each.token_ids)


class Others:
    """Stands for a group of two processes, and counts what they exchange to agree on tokens."""

    world = 2

    def __init__(self, alike):
        self.alike = lambda: alike
        self.broadcasts = 0

    def broadcast(self, tokens):
        self.broadcasts += 1
        return tokens


@pytest.mark.parametrize(
    ("params", "alike", "exchanged"),
    [
        ({"temperature": 0}, True, 0),
        ({"temperature": 0, "repetition_penalty": 1.2}, False, 0),
        ({"seed": 3}, True, 0),
        ({"seed": 3}, False, 3),
        ({}, True, 3),
        ({}, False, 3),
    ],
)
def test_processes_exchange_tokens_only_where_they_could_differ(model, monkeypatch, params, alike, exchanged):
    others = Others(alike)
    monkeypatch.setattr(model, "group", others)
    driven = Driven(model, PROMPTS[:2], SamplingParams(**params))
    for _ in range(3):
        driven.launch()
    assert others.broadcasts == exchanged


def test_what_the_device_keeps_of_a_row(model):
    driven = Driven(model, PROMPTS[2:4])
    for _ in range(3):
        driven.launch()
    for each in driven.sequences:
        slot, state = each.runner_state.slot, each.scheduler_state
        assert driven.step.last[slot] == each.token_ids[-1]
        assert driven.step.positions[slot] == len(state.ids) - 1
        assert driven.step.blocks[slot, : len(state.blocks)].tolist() == state.blocks


def test_a_row_whose_blocks_were_taken_is_reported_its_new_ones(model):
    driven = Driven(model, [PROMPTS[2], PROMPTS[4]], blocks=1 + 7)
    while not driven.scheduler.preemptions:
        driven.launch()
    other, victim = driven.sequences
    driven.scheduler.remove(other)
    for _ in range(3):
        driven.launch()
    blocks = victim.scheduler_state.blocks
    assert driven.step.blocks[victim.runner_state.slot, : len(blocks)].tolist() == blocks
    assert_best(model, victim.prompt, victim.token_ids)


def test_guesses_get_a_token_each(model):
    """After guesses that are right come those that steps of one token would have chosen."""
    driven = Driven(model, PROMPTS[:2])
    driven.launch()
    expected = Engine(model).decode(PROMPTS[:2], 7)
    right, wrong = expected[0][1:4], [(expected[1][1] + 1) % 300, 5]
    found = driven.launch([right, wrong])
    assert [token for slot, token in found if slot == 0] == expected[0][1:5]
    others = [token for slot, token in found if slot == 1]
    assert others[0] == expected[1][1]
    assert_best(model, [*PROMPTS[1], expected[1][0], wrong[0]], others[1:2])
    assert_best(model, [*PROMPTS[1], expected[1][0], *wrong], others[2:3])


def test_logprobs_come_with_the_tokens_of_the_rows_that_ask(model):
    driven = Driven(model, PROMPTS[:2])
    first = driven.sequences[0]
    first.params, first.logprobs = SamplingParams(temperature=0, logprobs=0), []
    for _ in range(3):
        driven.launch()
    expected = plain_scores(model, PROMPTS[0], first.token_ids).log_softmax(-1)
    for at, found in enumerate(first.logprobs):
        assert (found.token, found.top) == (first.token_ids[at], ())
        assert found.logprob == pytest.approx(expected[at].max().item(), abs=1e-4)


def test_the_embedding_may_be_looked_up_by_the_host(model):
    expected = Engine(model).decode(PROMPTS, 20)
    engine = Engine(model)
    engine._instance.step.host_embedding = True
    engine._instance.step._embedded = torch.zeros(len(engine._instance.step._slots), 1, SMALL.hidden_size)
    assert engine.decode(PROMPTS, 20) == expected


def test_a_row_whose_scores_are_no_numbers_has_no_token_and_the_others_have_theirs(model):
    expected = Driven(model, PROMPTS[:3])
    expected.launch()
    driven = Driven(model, PROMPTS[:3])
    driven.launch()
    which = driven.sequences[1].scheduler_state
    for keys, _, _, _ in driven.runner._cache.layers:
        keys[which.blocks[0]] = float("inf")
    found = driven.launch([(), (), ()])
    tokens = dict(expected.launch([(), (), ()]))
    assert found == [(0, tokens[0]), (1, None), (2, tokens[2])]


def test_sequences_up_to_the_last_token_of_their_last_block(model):
    prompt = PROMPTS[2][: 2 * BLOCK]
    engine = Engine(model, max_model_len=3 * BLOCK, cache_tokens=3 * BLOCK)
    answer = engine.decode([prompt], BLOCK)[0]
    assert len(answer) == BLOCK
    assert_best(model, prompt, answer)
