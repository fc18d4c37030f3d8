"""Evicted blocks in main memory: they are found again, with the same bits, and within their limit."""

import asyncio
import random

import pytest
import torch
from engine_models import FAMILIES, LATENT, SMALL, as_on_a_gpu, finish, random_lora
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from warpbus.engine import host_cache
from warpbus.engine.blocks import BLOCK, BlockAllocator, block_keys
from warpbus.engine.engine import Engine, request
from warpbus.engine.host_blocks import HostBlocks
from warpbus.engine.options import ServiceOptions
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.service import Service
from warpbus.errors import DeviceError, NumericError, UsageError
from warpbus.models import random_model

SCORED = SamplingParams(temperature=0, logprobs=3)
PLENTY = 1 << 24


@pytest.fixture(scope="module")
def model():
    return random_model(SMALL, None, "cpu", torch.float32)


def prompt(seed, length):
    return random.Random(seed).choices(range(SMALL.vocab_size), k=length)


def ask(engine, ids, tokens=6, params=SCORED):
    asked = request(ids, tokens=tokens, params=params)
    finish(engine, [asked])
    return asked


def said(sequence):
    return sequence.token_ids, [(one.logprob, one.top) for one in sequence.logprobs], sequence.cached_tokens


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [("glm", "auto"), ("latent", "auto"), ("latent", "fp8"), ("sparse", "auto"), ("sparse", "fp8"), ("qwen3", "auto")],
)
def test_answers_have_the_same_bits_as_with_a_cache_that_holds_everything(family, kv_dtype):
    """Prompts that share prefixes, in an order in which a small cache has always evicted what the next one needs."""
    model = random_model(FAMILIES[family], None, "cpu", torch.float32)
    first, second = prompt(1, 5 * BLOCK + 3), prompt(2, 4 * BLOCK)
    prompts = [first, second, [*first, 7, 8], prompt(3, 6 * BLOCK), [*second, 9], first[: 3 * BLOCK + 5], first]
    large = Engine(model, kv_dtype=kv_dtype)
    small = Engine(model, max_model_len=8 * BLOCK, cache_tokens=8 * BLOCK, host_bytes=PLENTY, kv_dtype=kv_dtype)
    without = Engine(model, max_model_len=8 * BLOCK, cache_tokens=8 * BLOCK, kv_dtype=kv_dtype)
    expected = [said(ask(large, each)) for each in prompts]
    assert [said(ask(small, each)) for each in prompts] == expected
    assert sum(cached for _, _, cached in expected) > sum(ask(without, each).cached_tokens for each in prompts)
    stats = small.stats()
    assert stats.prefix_hits == large.stats().prefix_hits == sum(cached for _, _, cached in expected)
    assert 0 < stats.host_hits <= stats.prefix_hits
    assert large.stats().host_hits == large.stats().host_bytes == 0
    block = small._instance.cache.block_bytes
    assert stats.host_loaded_bytes == stats.host_hits // BLOCK * block
    assert 0 < stats.host_bytes <= stats.host_stored_bytes
    assert stats.host_bytes % block == 0


@pytest.mark.parametrize("loads_per_step", [1, 3, 1000])
def test_many_requests_at_once_with_preemptions(model, loads_per_step):
    """Some prompts wait for their blocks while others decode; the little memory is always full."""
    draw = random.Random(4)
    heads = [prompt(seed, 3 * BLOCK) for seed in range(3)]
    prompts = [[*draw.choice(heads), *prompt(50 + at, draw.randint(1, 40))] for at in range(24)]
    greedy = SamplingParams(temperature=0)
    expected = [Engine(model).decode([each], 50)[0] for each in prompts]
    engine = Engine(
        model, max_model_len=8 * BLOCK, max_num_seqs=6, cache_tokens=14 * BLOCK, max_num_batched_tokens=64,
        host_bytes=PLENTY,
    )  # fmt: skip
    engine._memory.host.blocks._loads_per_step = loads_per_step
    requests = [request(each, tokens=50, params=greedy) for each in prompts]
    finish(engine, requests)
    assert [each.token_ids for each in requests] == expected
    assert engine.stats().preemptions > 0
    assert engine.stats().host_hits > 0


def test_a_prompt_waits_for_its_blocks_only_while_others_go_on(model):
    engine = Engine(model, max_num_seqs=2, cache_tokens=12 * BLOCK, max_model_len=10 * BLOCK, host_bytes=PLENTY)
    long = prompt(1, 8 * BLOCK + 1)
    ask(engine, long)
    ask(engine, prompt(2, 9 * BLOCK))  # evicts it
    engine._memory.host.blocks._loads_per_step = 2
    running, waiting = request(prompt(3, 5), tokens=30), request(long, tokens=5)
    engine.add(running)
    engine.step()
    engine.add(waiting)
    steps = 0
    while not waiting.token_ids:
        before = len(running.token_ids)
        engine.step()
        assert len(running.token_ids) == before + 1
        steps += 1
    loaded = engine.stats().host_hits // BLOCK
    assert loaded >= 4
    assert steps == loaded // 2 + 1
    finish(engine)
    # Alone it does not wait.
    ask(engine, prompt(2, 9 * BLOCK))
    again = request(long, tokens=5)
    engine.add(again)
    engine.step()
    assert len(again.token_ids) == 1
    assert engine.stats().host_hits // BLOCK > loaded
    finish(engine)


def test_launching_ahead_and_speculation(model):
    first, second = prompt(1, 4 * BLOCK + 3), prompt(2, 6 * BLOCK)
    expected = Engine(model).decode([first], 30)[0]
    for options in ({}, {"speculation": 3}):
        engine = as_on_a_gpu(
            Engine(model, max_model_len=8 * BLOCK, cache_tokens=8 * BLOCK, host_bytes=PLENTY, **options)
        )
        for each in (first, second, first, second, first):
            answer = engine.decode([each], 30)[0]
            assert each is second or answer == expected
        assert engine.stats().host_hits > 0


def test_the_limit_is_kept_and_the_last_used_stay(model):
    block = Engine(model)._instance.cache.block_bytes
    engine = Engine(model, max_model_len=6 * BLOCK, cache_tokens=6 * BLOCK, host_bytes=7 * block + 1)
    prompts = [prompt(seed, 5 * BLOCK + 1) for seed in range(4)]
    for each in prompts:
        ask(engine, each, tokens=2)
        assert engine.stats().host_bytes <= 7 * block
    assert engine.stats().host_bytes == 7 * block
    hits = [ask(engine, each, tokens=2).cached_tokens for each in (prompts[2], prompts[0])]
    assert hits == [5 * BLOCK, 0]
    with pytest.raises(UsageError, match="a block of the cache has"):
        Engine(model, host_bytes=block - 1)
    with pytest.raises(DeviceError, match="of main memory"):
        Engine(model, host_bytes=1 << 60)


def test_it_survives_sleep_and_idle_time_but_not_other_adapters(model):
    engine = Engine(model, host_bytes=PLENTY)
    asked = prompt(1, 4 * BLOCK + 3)
    expected = said(ask(engine, asked))
    engine.shrink()
    assert engine.stats().blocks_idle == 0
    assert said(ask(engine, asked))[:2] != ()
    again = ask(engine, asked)
    assert again.cached_tokens == 4 * BLOCK
    assert again.token_ids == expected[0]
    engine.shrink()
    assert engine.stats().host_bytes > 0
    assert engine.use_adapters([random_lora(model, "other", 4)]) == []
    assert engine.stats().host_bytes == 0
    assert ask(engine, asked).cached_tokens == 0
    engine.use_adapters([])


def test_a_request_that_fails_leaves_nothing_in_main_memory(model, monkeypatch):
    engine = Engine(model, max_num_seqs=2, max_model_len=8 * BLOCK, cache_tokens=8 * BLOCK, host_bytes=PLENTY)
    bad = request(prompt(1, 3 * BLOCK + 1), tokens=40)
    engine.add(bad)
    engine.step()
    keys = list(bad.scheduler_state.keys)
    engine._scheduler._preempt(bad)
    ask_other = request(prompt(2, 7 * BLOCK), tokens=3)
    bad.scheduler_state.status = "waiting"
    engine._scheduler.waiting.remove(bad)
    bad.scheduler_state.status = "new"
    finish(engine, [ask_other])  # evicts the blocks of the first one
    assert all(key in engine._memory.host.blocks for key in keys)
    engine.add(bad)
    engine.step()
    bad.fail(NumericError("NaN: give another adapter"))
    engine.abort(bad)
    assert not any(key in engine._memory.host.blocks for key in keys)


def test_an_error_in_a_step_empties_it(model, monkeypatch):
    engine = Engine(model, max_model_len=6 * BLOCK, cache_tokens=6 * BLOCK, host_bytes=PLENTY)
    for seed in range(3):
        ask(engine, prompt(seed, 5 * BLOCK))
    assert engine.stats().host_bytes > 0
    asked = request(prompt(0, 5 * BLOCK), tokens=3)
    engine.add(asked)
    with monkeypatch.context() as patch:
        patch.setattr(engine._instance.runner, "launch", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.stats().host_bytes == 0
    finish(engine)
    assert asked.token_ids == Engine(model).decode([asked.prompt], 3)[0]


def test_options():
    assert ServiceOptions(kv_host_memory="64GB").kv_host_memory == "64GB"
    with pytest.raises(UsageError, match="kv_host_memory is 'much'"):
        ServiceOptions(kv_host_memory="much")
    with pytest.raises(UsageError, match="prefix caching, which is off"):
        ServiceOptions(kv_host_memory="1GB", prefix_caching=False)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_service_with_a_model_in_one_or_two_processes(tiny_glm, processes):
    """Each process has its part of every block, and all of them load the same ones."""
    prompts = [random.Random(seed).choices(range(10, 400), k=3 * BLOCK + 1) for seed in range(3)]

    async def run():
        service = await Service.start(
            tiny_glm,
            ServiceOptions(
                device="cpu", max_model_len=5 * BLOCK, cache_tokens=5 * BLOCK, kv_host_memory="10MB",
                tensor_parallel=processes,
            ),
        )  # fmt: skip
        answers = []
        for each in (*prompts, *prompts):
            pieces = [piece async for piece in service.generate(each, SamplingParams(max_tokens=8, temperature=0))]
            answers.append(([token for piece in pieces for token in piece.token_ids], pieces[-1].cached_tokens))
        stats = await service.stats()
        await service.close()
        return answers, stats

    answers, stats = asyncio.run(run())
    assert [said for said, _ in answers[:3]] == [said for said, _ in answers[3:]]
    assert [cached for _, cached in answers] == [0] * 3 + [3 * BLOCK] * 3
    assert stats.host_hits >= 3 * 2 * BLOCK


class Memory(RuleBasedStateMachine):
    """The index against a dictionary of contents: what is loaded is what was stored under the key."""

    @initialize(slots=st.integers(1, 6), count=st.integers(3, 9))
    def begin(self, slots, count):
        self.host = HostBlocks(slots, 2)
        self.slots = slots
        self.blocks = BlockAllocator(count, host=self.host)
        self.device = {}  # of each block: the key of its content
        self.memory = {}  # of each slot
        self.held = []
        self.waiting = {}  # blocks whose content is on its way

    @rule(seed=st.integers(0, 5), length=st.integers(1, 4))
    def admit(self, seed, length):
        keys = block_keys([seed % 2] * BLOCK + [seed] * (BLOCK * (length - 1)))
        shared = self.blocks.share(keys)
        assert [self.device[block] for block in shared] == keys[: len(shared)]
        rest = keys[len(shared) :]
        self.blocks.hold(rest)
        taken = self.blocks.take(len(rest))
        if taken is None:
            self.blocks.release(shared)
            return
        count, steps = self.blocks.restore(rest, taken)
        assert steps == count // 2
        self.copy()
        assert [self.device[block] for block in taken[:count]] == rest[:count]
        for key, block in zip(rest[count:], taken[count:], strict=True):
            self.device[block] = key
            self.blocks.publish(block, key)
        self.held.append([*shared, *taken])

    def copy(self):
        copies = self.host.take_copies()
        for block, slot in copies.stores:
            assert 0 <= slot < self.slots
            self.memory[slot] = self.device[block]
        for slot, block in copies.loads:
            self.device[block] = self.memory[slot]

    @rule(which=st.integers(0, 9))
    def release(self, which):
        if self.held:
            self.blocks.release(self.held.pop(which % len(self.held)))

    @rule(which=st.integers(0, 9))
    def fail(self, which):
        if self.held:
            blocks = self.held.pop(which % len(self.held))
            self.blocks.unpublish(blocks)
            self.blocks.release(blocks)

    @rule(keep=st.booleans())
    def forget(self, keep):
        self.blocks.forget(keep=keep)
        self.copy()
        assert keep or not len(self.host)

    @invariant()
    def the_index_is_right(self):
        assert len(self.host) <= self.slots
        assert len({*self.host._slots.values()}) == len(self.host)
        for key, slot in self.host._slots.items():
            assert self.memory[slot] == key


Memory.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMemory = Memory.TestCase


def test_chunks_of_memory(monkeypatch):
    """Slots lie in several allocations."""
    monkeypatch.setattr(host_cache, "_CHUNK", 3 * 2**14)
    model = random_model(LATENT, None, "cpu", torch.float32)
    engine = Engine(model, max_model_len=6 * BLOCK, cache_tokens=6 * BLOCK, host_bytes=PLENTY)
    assert len(engine._memory.host._memory) > 3
    asked = [prompt(seed, 5 * BLOCK) for seed in range(6)]
    expected = [Engine(model).decode([each], 4)[0] for each in asked]
    for _ in range(2):
        assert [engine.decode([each], 4)[0] for each in asked] == expected
    assert engine.stats().host_hits >= 6 * 4 * BLOCK
