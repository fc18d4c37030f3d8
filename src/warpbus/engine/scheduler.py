"""Chooses the tokens of the next step: continuous batching with chunked prefill, prefix caching and preemption.

Knows no tensors, no text and no device: token ids, lengths and blocks. A sequence waits, runs, or is removed. A running
sequence owns blocks for all tokens whose keys and values are computed. A step computes keys and values of some tokens
of a sequence; if these include its last token, the step also samples the next one. So prefill and decode are the same
operation with different numbers of tokens.

Steps are launched before the tokens of the previous step are known. Therefore the scheduler counts tokens
(`SchedulerState.length`); token ids (`SchedulerState.ids`), which prefix caching needs, arrive later.

`StepBudget` limits the prompt tokens of a step, because sequences that decode wait for these before they get their next
token.

A prefix of keys and values without tokens (P-Tuning v2) precedes the tokens of a sequence. Its blocks are written once
and read by all sequences that have the prefix.
"""

import math
from collections import abc, deque
from collections.abc import Callable
from dataclasses import dataclass

from warpbus.engine.blocks import BLOCK, BlockAllocator, block_keys, blocks_for
from warpbus.engine.sequence import SchedulerState, Sequence

BACKLOG = 4
"""Mixed steps that a backlog takes at least: with fewer, prompts are prefilled soon enough beside those that decode."""

_LEAST = 16  # prompt tokens of a step, so that prompts are prefilled whatever the target
_FIRST = 64  # tokens with which measuring begins
_WEIGHT = 0.25  # of a measured step in moving averages
_LARGEST_FACTOR = 2.0  # by which one measured step may change the number of tokens


@dataclass(frozen=True)
class PromptChunk:
    """Tokens `start` to `end - 1` of a sequence, prefilled in one step; after its last chunk a token is sampled."""

    sequence: Sequence
    start: int
    end: int
    is_last: bool


@dataclass(frozen=True)
class StepPlan:
    """The work of one step.

    Attributes:
        decoding: the sequences that decode, oldest first: their last token is computed and the next one sampled.
        draft_limits: for each of these, how many draft tokens the step may verify.
        chunks: the chunks of prompts to prefill.
    """

    decoding: list[Sequence]
    draft_limits: list[int]
    chunks: list[PromptChunk]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    def __bool__(self) -> bool:
        return bool(self.decoding or self.chunks)


class StepBudget:
    """The token budget of each step.

    Args:
        most: tokens of a step, those of decoding sequences included. A step with decoding sequences prefills at least
            one token.
        mixed: maps the number of decoding tokens to the token budget of a mixed step, decoding tokens included; it
            limits how long decoding sequences wait for prompts. None: the budget is `most`.
        clears_backlogs: with much more waiting than a mixed step prefills, its budget is `most`: all sequences end
            earlier, though those that decode wait longer for a token.
        latency: the target of the seconds between two tokens of a sequence. If given, measured steps alone decide how
            much is prefilled beside decoding sequences: 16 tokens at least. Processes that share a model would
            measure different times, and schedule different steps.
    """

    def __init__(
        self,
        most: int,
        *,
        mixed: Callable[[int], int] | None = None,
        clears_backlogs: bool = False,
        latency: float | None = None,
    ) -> None:
        self._most = most
        self._mixed = mixed
        self._clears_backlogs = clears_backlogs
        self._target = None if latency is None else _LatencyTarget(latency, most)

    def prompt_tokens(self, decoding: int, waits: Callable[[int], bool]) -> int:
        """The most prompt tokens of a step.

        Args:
            decoding: tokens of its decoding sequences, drafts included.
            waits: whether more prompt tokens than a number wait to be prefilled.
        """
        if not decoding:
            return self._most
        room = max(1, self._most - decoding)
        if self._target is not None:
            return min(room, self._target.tokens)
        if self._mixed is None:
            return room
        mixed = max(1, min(room, self._mixed(decoding) - decoding))
        return room if self._clears_backlogs and waits(BACKLOG * mixed) else mixed

    def record(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Record how long a step with decoding sequences took."""
        if self._target is not None and decoding:
            self._target.record(decoding, prompt_tokens, seconds)


class _LatencyTarget:
    """Adapts the prompt tokens of a step so that measured steps take the seconds of a target.

    What a step takes beyond a step that only decodes is in proportion to its prompt tokens, roughly: their number is
    multiplied by the seconds that are free for prompts over those that they took.

    Attributes:
        tokens: prompt tokens of the next step.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._tokens = float(min(_FIRST, most))
        self._decoding: dict[int, float] = {}  # seconds of steps that only decode, by the bits of the tokens' number

    @property
    def tokens(self) -> int:
        return int(self._tokens)

    def record(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Record a step."""
        size = decoding.bit_length()
        base = self._decoding.get(size)
        if not prompt_tokens:
            self._decoding[size] = seconds if base is None else base + _WEIGHT * (seconds - base)
            return
        free, spent = self._seconds - (base or 0.0), seconds - (base or 0.0)
        factor = 0.0 if free <= 0 else math.inf if spent <= 0 else free / spent
        if factor > 1 and prompt_tokens < self.tokens:
            return  # a smaller chunk than allowed says nothing about a larger one
        wanted = prompt_tokens * min(max(factor, 1 / _LARGEST_FACTOR), _LARGEST_FACTOR)
        self._tokens = min(max(self._tokens + _WEIGHT * (wanted - self._tokens), _LEAST), self._most)


class Scheduler:
    """Admits sequences by priority, equal ones first come, first served, and preempts the youngest one when memory runs
    out.

    Args:
        blocks: of the cache; enough for one sequence of the maximum length.
        max_num_seqs: the most sequences that run at once.
        budget: the prompt tokens of each step. An `unsplit` prompt that is longer is prefilled alone.

    Attributes:
        waiting: the sequences in the order in which they are admitted: those that were preempted, then by priority.
        running: the sequences, oldest first.
        preemptions: how often a sequence was preempted.
        prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache, and found there.
        host_hits: those of the found tokens whose blocks were in main memory.
        disk_hits: those that were on the disk.
    """

    def __init__(self, blocks: BlockAllocator, *, max_num_seqs: int, budget: StepBudget) -> None:
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._budget = budget
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.host_hits = 0
        self.disk_hits = 0

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def __iter__(self) -> abc.Iterator[Sequence]:
        """All sequences that run or wait."""
        yield from self.running
        yield from self.waiting

    @property
    def fetching(self) -> bool:
        """Whether a waiting sequence waits for blocks from the disk."""
        return any(each.scheduler_state.fetch is not None and each.scheduler_state.fetch.left for each in self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the waiting queue, behind all that have waited longer and are not less urgent."""
        sequence.scheduler_state.status = "waiting"
        at = len(self.waiting)
        while at and self.waiting[at - 1].params.priority > sequence.params.priority:
            at -= 1
        self.waiting.insert(at, sequence)

    def remove(self, sequence: Sequence, *, unshare: bool = False) -> None:
        """Drop a sequence that runs or waits, and release its blocks; does nothing if it does neither.

        Args:
            unshare: remove its blocks from the prefix cache, too.
        """
        state = sequence.scheduler_state
        if unshare:
            self._blocks.unpublish(state.own_blocks)
        if state.status == "running":
            self.running.remove(sequence)
        elif state.status == "waiting":
            self.waiting.remove(sequence)
        self._release(state)
        state.status = "removed"

    def plan(self, drafts: int = 0, lookahead: int = 0) -> StepPlan:
        """Choose the work of the next step and record it as launched.

        Args:
            drafts: the most draft tokens per sequence. If there are any, `append_tokens` must be called with the tokens
                of a step before the next plan.
            lookahead: of each sequence that samples a token, have blocks for so many tokens behind it and its drafts,
                if there are enough blocks.
        """
        preempted: set[Sequence] = set()
        decoding, draft_limits = self._decoding(drafts, preempted)
        budget = self._budget.prompt_tokens(len(decoding) + sum(draft_limits), self._waits)
        chunks = self._chunks(budget, admit=not preempted, busy=bool(decoding))
        if lookahead:
            for sequence, most in zip(decoding, draft_limits, strict=True):
                self._look_ahead(sequence.scheduler_state, most + lookahead)
            for chunk in chunks:
                if chunk.is_last:
                    self._look_ahead(chunk.sequence.scheduler_state, lookahead)
        return StepPlan(decoding, draft_limits, chunks)

    def _waits(self, tokens: int) -> bool:
        """Whether more prompt tokens than `tokens` wait to be prefilled; prefixes that are cached count too."""
        for sequence in self:
            state = sequence.scheduler_state
            tokens -= 0 if state.decoding else state.length - state.computed
            if tokens < 0:
                return True
        return False

    def append_tokens(self, sequence: Sequence, token_ids: abc.Sequence[int]) -> None:
        """Record the tokens that a step sampled for a sequence: one, plus one for each accepted draft."""
        state = sequence.scheduler_state
        state.ids += token_ids
        accepted = len(token_ids) - 1
        state.computed += accepted
        state.length += accepted
        if state.blocks:  # else it was preempted after the step was launched
            self._publish(state)

    def restart(self) -> None:
        """Forget launched steps, whose results are unknown after an error.

        All running sequences are preempted, to be computed again from the known ids, and the prefix cache is emptied.
        """
        while self.running:
            self._preempt(self.running[-1])
        for sequence in self.waiting:
            sequence.scheduler_state.length = len(sequence.scheduler_state.ids)
        self._blocks.forget()

    def _decoding(self, drafts: int, preempted: set[Sequence]) -> tuple[list[Sequence], list[int]]:
        """The sequences that decode, with blocks for the next token, and their draft limits."""
        chosen: list[Sequence] = []
        draft_limits: list[int] = []
        for sequence in list(self.running):
            state = sequence.scheduler_state
            if not state.decoding or state.length >= state.limit or sequence in preempted:
                continue
            while not self._reserve(state, state.length):
                # Never one that is already chosen: those are older.
                youngest = self.running[-1]
                self._preempt(youngest)
                preempted.add(youngest)
                if youngest is sequence:
                    break
            else:
                most = min(drafts, state.limit - state.length - 1) if drafts else 0
                draft_limits.append(most if not most or self._reserve(state, state.length + most) else 0)
                chosen.append(sequence)
                state.computed += 1
                state.length += 1
        return chosen, draft_limits

    def _chunks(self, budget: int, *, admit: bool, busy: bool) -> list[PromptChunk]:
        """The chunks of a step.

        Args:
            budget: their tokens.
            admit: waiting sequences may be admitted.
            busy: other sequences decode in the step.
        """
        chunks: list[PromptChunk] = []
        prefilling = [each for each in self.running if not each.scheduler_state.decoding]
        busy = busy or not all(each.scheduler_state.restoring for each in prefilling)
        for sequence in prefilling:
            if budget and not self._restores(sequence.scheduler_state, busy=busy):
                chunks.append(self._chunk(sequence, budget))
                budget -= chunks[-1].end - chunks[-1].start
        while admit and budget and len(self.running) < self._max_num_seqs:
            first = next((each for each in self.waiting if not self._fetches(each.scheduler_state)), None)
            if first is None:
                break
            sequence, unsplit = first, first.scheduler_state.unsplit
            if (chunks and unsplit > budget) or not self._admit(sequence.scheduler_state):
                break
            self.waiting.remove(sequence)
            sequence.scheduler_state.status = "running"
            self.running.append(sequence)
            if self._restores(sequence.scheduler_state, busy=busy or bool(chunks)):
                continue
            chunks.append(self._chunk(sequence, max(budget, unsplit)))
            budget = max(0, budget - chunks[-1].end + chunks[-1].start)
        return chunks

    def _fetches(self, state: SchedulerState) -> bool:
        """Whether a sequence waits for blocks from the disk; others are admitted before it meanwhile."""
        if state.fetch is None:
            state.fetch = self._blocks.fetch(self._keys_to_find(state))
        return state.fetch.left > 0

    def _restores(self, state: SchedulerState, *, busy: bool) -> bool:
        """Whether a sequence waits in this step for its blocks from main memory: only while other work goes on."""
        waits = busy and state.restoring > 0
        state.restoring = state.restoring - 1 if waits else 0
        return waits

    def _chunk(self, sequence: Sequence, budget: int) -> PromptChunk:
        state = sequence.scheduler_state
        end = min(state.length, state.computed + budget)
        chunk = PromptChunk(sequence, state.computed, end, end == state.length)
        state.computed = end
        # Already now: later sequences of the same step may share the blocks, since each layer stores the keys and
        # values of all tokens before any of them attends.
        self._publish(state)
        state.length += chunk.is_last
        state.decoding = chunk.is_last
        return chunk

    def _admit(self, state: SchedulerState) -> bool:
        """Give a waiting sequence a block table for all of its tokens: cached blocks first, then fresh ones.

        Fresh blocks whose content is in main memory are loaded from there.
        """
        keys = self._keys_to_find(state)
        shared = self._blocks.share(keys)
        keys = keys[len(shared) :]
        self._blocks.hold(keys)
        fresh = blocks_for(state.prefix_tail + state.length) - len(shared)
        # Each running sequence may soon need one more block.
        spare = len(self.running)
        taken = self._blocks.take(fresh) if fresh + spare <= self._blocks.available else None
        if taken is None:
            self._blocks.release(shared)
            return False
        restored, state.restoring = self._blocks.restore(keys, taken)
        state.blocks = [*state.prefix[: state.full_prefix_blocks], *shared, *taken]
        state.published = len(shared) + restored
        state.computed = max(0, state.published * BLOCK - state.prefix_tail)
        if not state.preemptions:
            state.cached_tokens = state.computed
            self.prefix_queries += 0 if state.unsplit else state.length
            self.prefix_hits += state.computed
            restored_tokens = state.computed - max(0, len(shared) * BLOCK - state.prefix_tail)
            fetched = () if state.fetch is None else state.fetch.keys
            from_disk = min(restored_tokens, BLOCK * sum(key in fetched for key in keys[:restored]))
            self.disk_hits += from_disk
            self.host_hits += restored_tokens - from_disk
        return True

    def _keys_to_find(self, state: SchedulerState) -> list[bytes]:
        """The keys of the blocks of a sequence that may be cached."""
        if state.unsplit or state.uncached:
            return []
        state.keys = block_keys(state.ids, state.keys, salt=state.salt, offset=state.prefix_tail)
        # The last token is always computed, because its logits are needed.
        return state.keys[: (state.prefix_tail + state.length - 1) // BLOCK]

    def _reserve(self, state: SchedulerState, tokens: int) -> bool:
        """Extend the block table to `tokens` tokens; False if there are not enough blocks."""
        missing = state.prefix_length + tokens - BLOCK * len(state.blocks)
        if missing <= 0:
            return True
        taken = self._blocks.take(blocks_for(missing))
        if taken is None:
            return False
        state.blocks += taken
        return True

    def _look_ahead(self, state: SchedulerState, tokens: int) -> None:
        """Extend the block table of a sequence to so many tokens more than are computed, if there are enough blocks."""
        self._reserve(state, min(state.limit, state.computed + tokens))

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks; it waits first in the queue, to be computed again from its prompt on."""
        state = sequence.scheduler_state
        self.running.remove(sequence)
        self._release(state)
        state.preemptions += 1
        state.status = "waiting"
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, state: SchedulerState) -> None:
        self._blocks.release(state.own_blocks)
        state.blocks = []
        state.computed = 0
        state.restoring = 0
        state.fetch = None
        state.decoding = False

    def _publish(self, state: SchedulerState) -> None:
        """Register the blocks of a sequence that are full and whose token ids are known in the prefix cache."""
        full = (state.prefix_tail + min(state.computed, len(state.ids))) // BLOCK
        if full <= state.published:
            return
        if full > len(state.keys):
            state.keys = block_keys(state.ids, state.keys, salt=state.salt, offset=state.prefix_tail)
        for index in () if state.unsplit else range(state.published, full):
            self._blocks.publish(state.blocks[state.full_prefix_blocks + index], state.keys[index])
        state.published = full
