"""Steps as they are launched: what the runner tells the device, and what it brings back."""

import pytest
import torch
from engine_models import PROMPTS, SMALL, assert_best, plain_scores

from warpbus.engine.blocks import BLOCK, BlockAllocator
from warpbus.engine.engine import Engine, request
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.runner import Row, Runner
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.scheduler import Request, Scheduler
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
        cache.back(blocks)
        self.step = StepExecutor(model, cache, 4, 16, 300, graphs=False, **PLACE)
        self.runner = Runner(model, cache, self.step, 16)
        self.scheduler = Scheduler(BlockAllocator(blocks), max_num_seqs=4, prefill_tokens=1000)
        self.rows = {}
        for slot, prompt in enumerate(prompts):
            asked = request(prompt, tokens=200, params=params)
            self.rows[Request(list(prompt), 300)] = Row(asked, None, slot)
        for each, row in self.rows.items():
            row.request = each
            self.scheduler.add(each)

    def launch(self, drafts=None):
        """A step; its tokens, row by row."""
        plan = self.scheduler.plan(0 if drafts is None else 4)
        decoding = [self.rows[each] for each in plan.decoding]
        pieces = [(self.rows[piece.request], piece) for piece in plan.pieces]
        chosen = self.runner.launch(decoding, pieces, drafts)
        found = [(row.slot, token) for row, token, _ in chosen.read()]
        if drafts is None:
            for row, token, logprob in chosen.read():
                row.sequence.append(token, logprob)
                self.scheduler.read(row.request, [token])
        return found


def test_a_token_for_each_row_that_decodes_and_for_each_prompt_that_ends(model):
    driven = Driven(model, PROMPTS[:4])
    assert sorted(slot for slot, _ in driven.launch()) == [0, 1, 2, 3]
    for _ in range(5):
        assert [slot for slot, _ in driven.launch()] == [0, 1, 2, 3]
    for row in driven.rows.values():
        assert len(row.sequence.token_ids) == 6
        assert_best(model, row.sequence.prompt, row.sequence.token_ids)


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
    for each, row in driven.rows.items():
        assert driven.step.last[row.slot] == row.sequence.token_ids[-1]
        assert driven.step.positions[row.slot] == len(each.ids) - 1
        assert driven.step.blocks[row.slot, : len(each.blocks)].tolist() == each.blocks


def test_a_row_whose_blocks_were_taken_is_told_its_new_ones(model):
    driven = Driven(model, [PROMPTS[2], PROMPTS[4]], blocks=1 + 7)
    while not driven.scheduler.preemptions:
        driven.launch()
    other, victim = driven.rows
    driven.scheduler.remove(other)
    for _ in range(3):
        driven.launch()
    row = driven.rows[victim]
    assert driven.step.blocks[row.slot, : len(victim.blocks)].tolist() == victim.blocks
    assert_best(model, row.sequence.prompt, row.sequence.token_ids)


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
    first = next(iter(driven.rows.values()))
    first.sequence = request(PROMPTS[0], tokens=9, params=SamplingParams(temperature=0, logprobs=0))
    for _ in range(3):
        driven.launch()
    expected = plain_scores(model, PROMPTS[0], first.sequence.token_ids).log_softmax(-1)
    for at, found in enumerate(first.sequence.logprobs):
        assert (found.token, found.top) == (first.sequence.token_ids[at], ())
        assert found.logprob == pytest.approx(expected[at].max().item(), abs=1e-4)


def test_the_embedding_may_be_looked_up_by_the_host(model):
    expected = Engine(model).decode(PROMPTS, 20)
    engine = Engine(model)
    engine._step.host_embedding = True
    engine._step._embedded = torch.zeros(len(engine._step._slots), 1, SMALL.hidden_size)
    assert engine.decode(PROMPTS, 20) == expected


def test_a_row_whose_scores_are_no_numbers_has_no_token_and_the_others_have_theirs(model):
    expected = Driven(model, PROMPTS[:3])
    expected.launch()
    driven = Driven(model, PROMPTS[:3])
    driven.launch()
    which = list(driven.rows)[1]
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
