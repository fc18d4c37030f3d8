"""The scheduler by itself, against a machine that does what it says and looks whether every token finds the right ones.

The machine's cache holds for each place a digest of all tokens up to the one stored there. So whoever attends checks
with one comparison that what it reads was computed, of the same tokens, and was not written over.
"""

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from warpbus.engine.blocks import BLOCK, BlockAllocator
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.scheduler import Scheduler, StepBudget
from warpbus.engine.sequence import SchedulerState, Sequence

LONGEST = 5 * BLOCK
BASES = [[(at * at + base) % 5 for at in range(LONGEST)] for base in (0, 1)]  # what prompts begin with
PREFIXES = {b"p": 3, b"q": BLOCK, b"r": 2 * BLOCK + 7}  # by their salts, the places that they take


def digest(before, token):
    return hash((before, token))


def sequence(ids, limit, salt=b"", unsplit=0, **prefix):
    """A sequence that the engine would have added with this state."""
    made = Sequence(0, list(ids), SamplingParams(), limit=limit, stop_ids=frozenset(), stream=None)
    made.scheduler_state = SchedulerState(list(ids), limit, salt, unsplit, **prefix)
    return made


class Answer:
    """A request, as the one who asked it and the machine see it."""

    def __init__(self, number, prompt, limit, stop, salt, whole, prefix):
        self.number, self.salt = number, salt
        given = PREFIXES.get(salt, 0)
        self.request = sequence(prompt, limit, salt, whole, prefix=tuple(prefix), prefix_length=given)
        self.state = self.request.scheduler_state
        self.stop = stop  # tokens after which it ends by itself
        self.tokens = list(prompt)  # those of steps under way included
        self.digests = []
        self.computed = None  # position that is to be computed next; None where it has no blocks
        self.preemptions = 0

    def digest_at(self, position):
        while len(self.digests) <= position:
            at, whole = len(self.digests), self.state.unsplit
            # Those of a beginning that is read whole depend on all of it.
            first = hash((self.state.salt, tuple(self.tokens[:whole])))
            self.digests.append(digest(self.digests[-1] if at else first, self.tokens[at]))
        return self.digests[position]

    def next_token(self):
        """What the model gives it; repeats itself often, as answers do."""
        return self.digest_at(len(self.tokens) - 1) % 3


class Machine:
    """Runs what a scheduler plans, and reads it at once, or a step later."""

    def __init__(self, blocks, *, most, budget, mixed=None, drafts=0, lag=0, sharing=True, memory=None):
        self.prefixes, kept = {}, 0
        for salt, given in PREFIXES.items():
            count = -(-given // BLOCK)
            self.prefixes[salt] = range(1 + kept, 1 + kept + count)
            kept += count
        self.reserved = kept
        self.memory = (memory or blocks) + kept
        self.blocks = BlockAllocator(blocks + kept, commit=lambda _: self.memory, sharing=sharing, reserved=kept)
        self.blocks.committed = 1 + kept
        mixed_tokens = None if mixed is None else lambda rows: mixed + rows // 4
        self.scheduler = Scheduler(self.blocks, max_num_seqs=most, budget=StepBudget(budget, mixed=mixed_tokens))
        self.most, self.budget, self.mixed, self.drafts, self.lag = most, budget, mixed_tokens, drafts, lag
        self.cells = {}
        self.write_prefixes()
        self.writers = {}
        self.answers = {}  # of requests that are under way
        self.under_way = deque()
        self.number = 0
        self.all = []
        self.ended = []

    def write_prefixes(self):
        """Once: no step may write there."""
        for salt, given in PREFIXES.items():
            for place in range(given):
                self.cells[self.prefixes[salt][place // BLOCK], place % BLOCK] = salt, place

    def add(self, prompt, limit, stop=LONGEST, salt=b"", whole=0):
        answer = Answer(self.number, prompt, limit, stop, salt, whole, self.prefixes.get(salt, ()))
        self.number += 1
        self.answers[answer.request] = answer
        self.all.append(answer)
        self.scheduler.add(answer.request)
        return answer

    def abort(self, answer):
        del self.answers[answer.request]
        self.scheduler.remove(answer.request)

    def step(self):
        """As the engine does; whether there was anything to do."""
        if self.under_way and not self.lag:
            self.read()
        plan = self.scheduler.plan(self.drafts)
        if plan:
            self.launch(plan)
        if self.under_way and (not self.lag or not plan or len(self.under_way) > 1):
            self.read()
            return True
        return bool(plan)

    def launch(self, plan):
        read = sum(piece.end - piece.start for piece in plan.chunks)
        budget = self.budget
        if plan.decoding and self.mixed is not None:
            rows = len(plan.decoding) + sum(plan.draft_limits)
            budget = min(budget, max(1, self.mixed(rows) - rows))
        if read > budget:
            (alone,) = plan.chunks
            assert (alone.start, alone.end) == (0, alone.sequence.scheduler_state.unsplit)
        assert len(plan.draft_limits) == len(plan.decoding) <= len(self.scheduler.running) <= self.most
        reported = [*plan.decoding, *(piece.sequence for piece in plan.chunks)]
        assert len(set(reported)) == len(reported)
        assert set(reported) <= set(self.scheduler.running)
        given = []
        for request, most in zip(plan.decoding, plan.draft_limits, strict=True):
            given.append(self.decode(self.answers[request], most))
        # All are stored before any attends.
        for piece in plan.chunks:
            self.admitted_or_going_on(piece)
            self.write(self.answers[piece.sequence], piece.start, piece.end)
        for piece in plan.chunks:
            answer = self.answers[piece.sequence]
            self.attend(answer, piece.end)
            assert piece.is_last == (piece.end == len(answer.tokens))
            if piece.is_last:
                token = answer.next_token()
                answer.tokens.append(token)
                given.append((answer, [token]))
        self.under_way.append(given)

    def admitted_or_going_on(self, piece):
        answer = self.answers[piece.sequence]
        assert piece.start < piece.end
        if answer.preemptions != answer.state.preemptions:
            answer.preemptions, answer.computed = answer.state.preemptions, None
        if answer.computed is None:
            state = answer.state
            assert piece.start == 0 or (state.prefix_length + piece.start) % BLOCK == 0
            assert piece.end >= state.unsplit
            if piece.start == 0:  # the end of a prefix that does not fill its block
                own = state.blocks[state.full_prefix_blocks]
                for place in range(state.full_prefix_blocks * BLOCK, state.prefix_length):
                    self.cells[own, place % BLOCK] = self.cells[state.prefix[-1], place % BLOCK]
            if not answer.preemptions:
                assert answer.state.cached_tokens == piece.start
            answer.computed = piece.start
        assert answer.computed == piece.start
        answer.computed = piece.end

    def decode(self, answer, most):
        """A token after the last one, and one after each guess: these are sometimes right."""
        request = answer.request
        position = request.scheduler_state.computed - 1
        assert answer.computed == position == len(answer.tokens) - 1
        assert len(answer.tokens) < request.scheduler_state.limit
        assert most <= self.drafts
        self.write(answer, position, position + 1)
        self.attend(answer, position + 1)
        tokens = [answer.next_token()]
        for guess in range(most):
            assert position + 1 + guess + 1 < request.scheduler_state.limit
            answer.tokens.append(tokens[-1])
            self.write(answer, position + 1 + guess, position + 2 + guess)
            if (position + guess) % 4 == 3:  # a wrong guess: what was stored of it is to be written over
                self.spoil(answer, position + 1 + guess)
                answer.tokens.pop()
                break
            self.attend(answer, position + 2 + guess)
            tokens.append(answer.next_token())
        del answer.tokens[position + 1 :]
        answer.tokens += tokens
        answer.computed += len(tokens)
        return answer, tokens

    def write(self, answer, start, end):
        request = answer.request
        for position in range(start, end):
            block, place = self.place(answer, position)
            assert self.reserved < block < self.blocks.committed
            # Who was preempted since, and finds what another stores there now, is no writer any more.
            writer, preemptions = self.writers.get(block, (request, request.scheduler_state.preemptions))
            assert (
                writer is request
                or writer.scheduler_state.preemptions != preemptions
                or block not in writer.scheduler_state.blocks
            ), "two requests write to a block"
            self.writers[block] = request, request.scheduler_state.preemptions
            self.cells[block, place] = answer.digest_at(position)

    def place(self, answer, position):
        at = answer.state.prefix_length + position
        return answer.state.blocks[at // BLOCK], at % BLOCK

    def spoil(self, answer, position):
        self.cells[self.place(answer, position)] = None

    def attend(self, answer, tokens):
        for position in range(-answer.state.prefix_length, 0):
            wanted = answer.salt, answer.state.prefix_length + position
            assert self.cells[self.place(answer, position)] == wanted
        for position in range(tokens):
            assert self.cells[self.place(answer, position)] == answer.digest_at(position)

    def read(self):
        for answer, tokens in self.under_way.popleft():
            request = answer.request
            if request not in self.answers:
                continue
            kept = tokens[: answer.stop - len(request.scheduler_state.ids)]
            self.scheduler.append_tokens(request, kept)
            assert request.scheduler_state.ids == answer.tokens[: len(request.scheduler_state.ids)]
            if len(request.scheduler_state.ids) >= min(answer.stop, request.scheduler_state.limit):
                self.abort(answer)
                self.ended.append(answer)

    def shrink(self):
        needed = self.blocks.forget()
        self.blocks.uncommit(needed)
        self.cells = {place: cell for place, cell in self.cells.items() if place[0] < needed}
        self.memory = max(self.memory, needed)

    def fail(self):
        """Nothing is left of the steps under way, nor of what is stored."""
        self.under_way.clear()
        self.cells.clear()
        self.write_prefixes()
        self.scheduler.restart()
        for request, answer in self.answers.items():
            del answer.tokens[len(request.scheduler_state.ids) :]
            del answer.digests[len(request.scheduler_state.ids) :]

    def run(self):
        """To the end, which comes."""
        steps = 0
        while self.answers:
            assert self.step(), "nothing happens, though there is room"
            steps += 1
            assert steps < 20_000
        return steps

    def check(self):
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        order = [self.answers[request].number for request in [*running, *waiting]]
        assert order == sorted(order)
        assert len(order) == len(self.answers)
        assert len(running) <= self.most
        assert all(not request.scheduler_state.blocks and not request.scheduler_state.computed for request in waiting)
        places = {}
        for request in running:
            state = request.scheduler_state
            assert len(set(state.blocks)) == len(state.blocks)
            assert state.blocks[: state.full_prefix_blocks] == list(state.prefix[: state.full_prefix_blocks])
            for index, block in enumerate(state.own_blocks, state.full_prefix_blocks):
                assert block > self.reserved
                places.setdefault(block, []).append((request, index))
        assert self.blocks.used == len(places)
        assert self.blocks.used + self.blocks.available == self.blocks.count - 1 - self.reserved
        for block, users in places.items():
            assert block < self.blocks.committed
            for (one, at), (other, there) in pairwise(users):
                assert at == there
                assert one.scheduler_state.salt == other.scheduler_state.salt
                assert not one.scheduler_state.unsplit
                assert not other.scheduler_state.unsplit
                end = (at + 1) * BLOCK - one.scheduler_state.prefix_length
                assert one.scheduler_state.ids[:end] == other.scheduler_state.ids[:end]
                assert len(one.scheduler_state.ids) >= end
        asked = [answer.request for answer in self.all]
        assert self.scheduler.preemptions == sum(request.scheduler_state.preemptions for request in asked)
        assert self.scheduler.prefix_hits == sum(request.scheduler_state.cached_tokens for request in asked)
        assert self.scheduler.prefix_hits <= self.scheduler.prefix_queries


def pieces_of(plan):
    return [(piece.start, piece.end, piece.is_last) for piece in plan.chunks]


def test_prompts_are_read_in_their_order_within_the_budget():
    scheduler = Scheduler(BlockAllocator(100), max_num_seqs=4, budget=StepBudget(10))
    first, second, third = requests = [sequence([base] * 8, 20) for base in range(3)]
    for request in requests:
        scheduler.add(request)
    plan = scheduler.plan()
    assert pieces_of(plan) == [(0, 8, True), (0, 2, False)]
    assert (scheduler.running, list(scheduler.waiting)) == ([first, second], [third])
    scheduler.append_tokens(first, [7])
    plan = scheduler.plan()
    assert plan.decoding == [first]
    assert pieces_of(plan) == [(2, 8, True), (0, 3, False)]


@pytest.mark.parametrize(("mixed", "piece"), [(5, 4), (100, 9), (1, 1), (None, 9)])
def test_where_some_decode_less_of_a_prompt_is_read(mixed, piece):
    scheduler = Scheduler(BlockAllocator(100), max_num_seqs=4, budget=StepBudget(10, mixed=mixed and (lambda _: mixed)))
    first = sequence([1], 20)
    scheduler.add(first)
    assert pieces_of(scheduler.plan()) == [(0, 1, True)]
    scheduler.append_tokens(first, [7])
    scheduler.add(sequence([2] * 30, 40))
    plan = scheduler.plan()
    assert (plan.decoding, pieces_of(plan)) == ([first], [(0, piece, False)])


@pytest.mark.parametrize("prompt", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1])
@pytest.mark.parametrize("budget", [1, BLOCK, BLOCK - 1, 3 * BLOCK])
def test_a_prompt_of_any_length_in_pieces_of_any_size(prompt, budget):
    machine = Machine(9, most=2, budget=budget)
    answers = [machine.add(BASES[0][:prompt], prompt + 5) for _ in range(2)]
    machine.run()
    assert [len(answer.state.ids) for answer in answers] == [prompt + 5] * 2
    assert machine.blocks.used == 0


def test_requests_of_one_step_share_what_the_first_of_them_computes():
    machine = Machine(40, most=8, budget=1000)
    answers = [machine.add(BASES[0][: 2 * BLOCK + 5], LONGEST, stop=2 * BLOCK + 9) for _ in range(4)]
    machine.step()
    assert [answer.state.cached_tokens for answer in answers] == [0] + [2 * BLOCK] * 3
    assert machine.blocks.used == 2 + 4
    assert (machine.scheduler.prefix_queries, machine.scheduler.prefix_hits) == (4 * (2 * BLOCK + 5), 6 * BLOCK)
    machine.check()
    machine.run()


def test_a_prompt_that_is_known_to_its_end_computes_its_last_block_again():
    """The scores of its last token are wanted."""
    machine = Machine(40, most=8, budget=1000)
    for shared in (0, BLOCK):
        answer = machine.add(BASES[0][: 2 * BLOCK], LONGEST, stop=2 * BLOCK + 3)
        machine.run()
        assert answer.state.cached_tokens == shared


def test_the_youngest_gives_way_and_comes_back_first():
    machine = Machine(1 + 7, most=4, budget=1000, sharing=False)
    answers = [machine.add(BASES[0][: BLOCK - 2], 3 * BLOCK) for _ in range(3)]
    late = machine.add([1], 2)
    while not machine.scheduler.preemptions:
        machine.step()
        machine.check()
    assert [answer.state.preemptions for answer in answers] == [0, 0, 1]
    assert list(machine.scheduler.waiting) == [answers[2].request]
    assert machine.ended == [late]
    newcomer = machine.add([1], 2)
    machine.step()
    assert list(machine.scheduler.waiting) == [answers[2].request, newcomer.request]
    machine.run()
    assert machine.ended.index(newcomer) > machine.ended.index(answers[0])


def test_who_gave_way_stands_before_those_who_waited():
    machine = Machine(1 + 4, most=3, budget=1000, sharing=False)
    for _ in range(2):
        machine.add(BASES[0][: BLOCK - 2], 4 * BLOCK)
    while not machine.scheduler.preemptions:
        machine.step()
        if len(machine.all) == 2:
            machine.add(BASES[0][: 3 * BLOCK], 4 * BLOCK)
    machine.check()
    assert [machine.answers[request].number for request in machine.scheduler.waiting] == [1, 2]
    machine.run()


def test_a_request_that_is_preempted_with_a_step_under_way_goes_on_with_its_token():
    machine = Machine(1 + 4, most=4, budget=1000, lag=1, sharing=False)
    answers = [machine.add(BASES[0][: BLOCK - 2], 3 * BLOCK) for _ in range(2)]
    machine.run()
    assert machine.scheduler.preemptions
    for answer in answers:
        assert answer.state.ids == answer.tokens[: 3 * BLOCK]


def test_lower_priorities_are_admitted_first():
    scheduler = Scheduler(BlockAllocator(64), max_num_seqs=2, budget=StepBudget(100))
    added = {}
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1), ("e", 5)):
        added[name] = sequence([1, 2], 4)
        added[name].params = SamplingParams(priority=priority)
        scheduler.add(added[name])
    assert [name for one in scheduler.waiting for name in added if added[name] is one] == list("dacbe")
    assert [chunk.sequence for chunk in scheduler.plan().chunks] == [added["d"], added["a"]]
    assert list(scheduler.waiting) == [added["c"], added["b"], added["e"]]


def test_nobody_overtakes_who_does_not_fit():
    machine = Machine(1 + 4, most=4, budget=1000)
    machine.add(BASES[0][:BLOCK], 3 * BLOCK)
    machine.add(BASES[1][: 4 * BLOCK - 3], 4 * BLOCK)
    machine.add([1], 2)
    machine.step()
    assert len(machine.scheduler.running) == 1
    machine.run()
    assert [answer.number for answer in machine.ended] == [0, 1, 2]


def test_without_memory_for_one_nothing_is_planned():
    machine = Machine(20, most=4, budget=1000, memory=2)
    machine.add(BASES[0][: BLOCK - 2], 3 * BLOCK)
    while machine.step():
        pass
    assert (len(machine.scheduler.waiting), machine.blocks.used) == (1, 0)
    machine.memory = machine.blocks.count
    machine.run()


def test_what_is_gone_can_be_removed_again():
    machine = Machine(20, most=1, budget=10)
    running, waiting = (machine.add(BASES[at], LONGEST) for at in range(2))
    machine.step()
    for answer in (running, waiting):
        machine.abort(answer)
        machine.scheduler.remove(answer.request)
    assert (machine.blocks.used, machine.scheduler.running, len(machine.scheduler.waiting)) == (0, [], 0)


@pytest.mark.parametrize(("waiting", "piece"), [(12, 3), (13, 20)])
@pytest.mark.parametrize("clears", [False, True])
def test_a_backlog_is_prefilled_in_large_chunks(waiting, piece, clears):
    """One sequence decodes and 3 tokens fit beside it: up to 12 that wait are no backlog."""
    scheduler = Scheduler(
        BlockAllocator(100), max_num_seqs=4, budget=StepBudget(20, mixed=lambda _: 4, clears_backlogs=clears)
    )
    scheduler.add(sequence([1, 2], 10))
    scheduler.plan()
    scheduler.add(sequence(list(range(waiting)), 10))
    plan = scheduler.plan()
    assert len(plan.decoding) == 1
    assert sum(chunk.end - chunk.start for chunk in plan.chunks) == (min(piece, waiting) if clears else 3)


@pytest.mark.parametrize("mixed", [None, 6])
def test_a_beginning_that_may_not_be_cut_waits_until_it_can_be_read_alone(mixed):
    scheduler = Scheduler(BlockAllocator(100), max_num_seqs=4, budget=StepBudget(10, mixed=mixed and (lambda _: mixed)))
    first, second = sequence([1] * 8, 40), sequence([2] * 30, 40, unsplit=25)
    for request in (first, second):
        scheduler.add(request)
    assert pieces_of(scheduler.plan()) == [(0, 8, True)]
    scheduler.append_tokens(first, [7])
    plan = scheduler.plan()
    assert (plan.decoding, pieces_of(plan)) == ([first], [(0, 25, False)])
    scheduler.append_tokens(first, [7])
    assert pieces_of(scheduler.plan()) == [(25, 30, True)]


def test_beginnings_that_may_not_be_cut_are_read_together_where_they_fit():
    scheduler = Scheduler(BlockAllocator(100), max_num_seqs=4, budget=StepBudget(10))
    for length in (4, 4, 4):
        scheduler.add(sequence([1] * length, 20, unsplit=length))
    assert pieces_of(scheduler.plan()) == [(0, 4, True)] * 2


def test_who_computes_all_again_may_share_a_block_that_it_wrote_itself_before():
    machine = Machine(7, most=2, budget=1000)
    answers = [machine.add(BASES[0][:31], 90) for _ in range(2)]
    for _ in range(40):
        machine.step()
    first, second = ([*answer.state.blocks] for answer in answers)
    assert not set(first) & set(second)
    machine.fail()
    machine.step()
    shared = set(answers[0].state.blocks) & set(answers[1].state.blocks)
    assert shared & set(second)
    machine.check()
    machine.run()


def test_a_beginning_that_is_computed_again_is_read_whole_and_the_rest_in_pieces():
    machine = Machine(1 + 7, most=4, budget=10)
    answers = [machine.add(BASES[0][: BLOCK - 2], 3 * BLOCK, whole=BLOCK - 2) for _ in range(3)]
    machine.run()
    assert answers[2].state.preemptions == 1
    assert machine.scheduler.prefix_hits == machine.scheduler.prefix_queries == 0


@pytest.mark.parametrize("salt", PREFIXES)
def test_those_with_a_prefix_share_its_blocks_and_those_of_equal_beginnings(salt):
    machine = Machine(40, most=8, budget=1000)
    given = PREFIXES[salt]
    answers = [machine.add(BASES[0][:LONGEST], LONGEST + 2, stop=LONGEST + 2, salt=salt) for _ in range(4)]
    machine.step()
    shared = (given + LONGEST - 1) // BLOCK - given // BLOCK
    assert [answer.state.cached_tokens for answer in answers] == [0] + [shared * BLOCK - given % BLOCK] * 3
    assert machine.blocks.used == shared + 4 * (-(-(given + LONGEST) // BLOCK) - given // BLOCK - shared)
    machine.check()
    machine.run()
    assert machine.blocks.used == 0
    assert machine.blocks.forget() == 1 + machine.reserved


def test_a_prefix_and_a_beginning_that_may_not_be_cut():
    machine = Machine(40, most=8, budget=7)
    for salt in PREFIXES:
        for whole in (1, 30, 64):
            machine.add(BASES[1][:64], 90, salt=salt, whole=whole)
    machine.run()
    assert machine.scheduler.prefix_hits == 0


class Traffic(RuleBasedStateMachine):
    """Requests that come, are called off and end, steps that are read late, and memory that comes and goes."""

    @initialize(
        blocks=st.sampled_from([2 + LONGEST // BLOCK, 8, 12, 30]),  # the end of a prefix may take a block more
        most=st.integers(1, 6),
        budget=st.sampled_from([1, 7, BLOCK, 50, 1000]),
        mixed=st.sampled_from([None, 1, 40]),
        kind=st.sampled_from([(0, 0), (0, 1), (1, 0), (4, 0)]),
        sharing=st.booleans(),
    )
    def begin(self, blocks, most, budget, mixed, kind, sharing):
        drafts, lag = kind
        self.machine = Machine(blocks, most=most, budget=budget, mixed=mixed, drafts=drafts, lag=lag, sharing=sharing)

    @rule(
        base=st.sampled_from(BASES),
        own=st.lists(st.integers(0, 1), max_size=2),
        length=st.sampled_from([1, 20, 31, 32, 33, 64, 70, 100, 129]),
        more=st.integers(1, LONGEST),
        stop=st.integers(1, LONGEST),
        salt=st.sampled_from([b"", b"", b"s", *PREFIXES]),
        whole=st.sampled_from([0, 0, 0, 1, 9, LONGEST]),
        copies=st.integers(1, 6),
    )
    def add(self, base, own, length, more, stop, salt, whole, copies):
        prompt = base[:length] + own
        for _ in range(copies):
            limit = min(len(prompt) + more, LONGEST)
            self.machine.add(prompt, limit, len(prompt) + stop, salt, min(whole, len(prompt)))

    @precondition(lambda self: self.machine.answers)
    @rule(data=st.data())
    def abort(self, data):
        index = data.draw(st.integers(0, len(self.machine.answers) - 1))
        self.machine.abort(list(self.machine.answers.values())[index])

    @rule(count=st.sampled_from([1, 2, 5, 40]))
    def steps(self, count):
        for _ in range(count):
            self.machine.step()
            self.machine.check()

    @rule(memory=st.integers(1, 30))
    def memory(self, memory):
        self.machine.memory = min(memory + self.machine.reserved, self.machine.blocks.count)

    @rule()
    def shrink(self):
        self.machine.shrink()

    @rule()
    def fail(self):
        self.machine.fail()

    @invariant()
    def all_is_well(self):
        if hasattr(self, "machine"):
            self.machine.check()

    def teardown(self):
        if hasattr(self, "machine"):
            self.machine.memory = self.machine.blocks.count
            self.machine.run()
            assert self.machine.blocks.used == 0
            event(f"preemptions {min(self.machine.scheduler.preemptions, 3)}")
            asked = [len(answer.tokens) for answer in self.machine.ended]
            assert all(length <= LONGEST + 1 for length in asked)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
