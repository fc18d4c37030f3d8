"""Launches the steps of an engine and reads their tokens; on a GPU one step is launched before the last one is read.

It gives each sequence its slot on the device. Knows nothing of how a request is checked, of how memory is committed, or
of what a migration copies.
"""

import time
from collections import deque
from dataclasses import dataclass, field

import torch

from warpbus.engine.cache_memory import CacheMemory
from warpbus.engine.drafting import Drafting
from warpbus.engine.kv_cache import KVCache
from warpbus.engine.offload import OffloadableModel
from warpbus.engine.runner import Runner, SampledTokens
from warpbus.engine.scheduler import Scheduler, StepBudget, StepPlan
from warpbus.engine.sequence import RunnerState, Sequence, TextPiece
from warpbus.engine.step import StepExecutor
from warpbus.errors import UnavailableError
from warpbus.models import Decoder


@dataclass(frozen=True)
class ModelInstance:
    """The state of an engine on one device; a migration to another device replaces all of it.

    Attributes:
        on_gpu: the device computes on a GPU, of this machine or remote.
        offloadable: the model's weights, if they can be offloaded; else None.
    """

    model: Decoder
    device: torch.device
    on_gpu: bool
    cache: KVCache
    step: StepExecutor
    runner: Runner
    offloadable: OffloadableModel | None


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose tokens are still to be read.

    Attributes:
        sampled: the tokens.
        drafts: of its decoding sequences.
        plan: its work.
        time: when it was launched, by `time.perf_counter`.
    """

    sampled: SampledTokens
    drafts: list[list[int]] | None
    plan: StepPlan
    time: float


@dataclass(eq=False)
class StepPipeline:
    """Plans, launches and reads steps, and knows those that are launched and not read yet.

    Args:
        instance: computes the steps.
        memory: of the cache.
        scheduler: plans the steps.
        budget: of the scheduler; it receives the durations of steps.
        drafting: proposes draft tokens; None: without speculation. With drafts, a step is launched only after the
            tokens of the last one were read.
        max_num_seqs: the slots on the device.
        lora_numbers: by the names of the adapters; see `warpbus.engine.adapters.lora_numbers`.

    Attributes:
        slots: those that no sequence has.
        launched: steps whose tokens are still to be read, earliest first.
        steps: how many were launched in all.
        planning, launching: see `Stats`.
    """

    instance: ModelInstance
    memory: CacheMemory
    scheduler: Scheduler
    budget: StepBudget
    drafting: Drafting | None
    max_num_seqs: int
    lora_numbers: dict[str | None, int]
    slots: list[int] = field(init=False)
    launched: deque[LaunchedStep] = field(init=False, default_factory=deque)
    steps: int = field(init=False, default=0)
    planning: float = field(init=False, default=0.0)
    launching: float = field(init=False, default=0.0)
    _read_time: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.slots = list(range(self.max_num_seqs))[::-1]

    def advance(self) -> list[tuple[Sequence, TextPiece]]:
        """Launch a step, and read one; as `Engine.step`."""
        try:
            return self._launch_and_read()
        except BaseException:
            self._restart()
            raise

    def drain(self) -> list[tuple[Sequence, TextPiece]]:
        """Read all launched steps, and launch none. Raises: as `Engine.step`."""
        pieces: list[tuple[Sequence, TextPiece]] = []
        try:
            while self.launched:
                pieces += self._read()
        except BaseException:
            self._restart()
            raise
        return pieces

    def remove(self, sequence: Sequence) -> None:
        """Drop a sequence if it waits or runs: it gets no more tokens, and its memory and its slot are free."""
        if not sequence.scheduler_state.active:
            return
        # The blocks of a request that failed may hold the cause of the failure.
        self.scheduler.remove(sequence, unshare=sequence.error is not None)
        if sequence.runner_state.slot >= 0:
            self.slots.append(sequence.runner_state.slot)
        sequence.runner_state = RunnerState()

    def use_loras(self, numbers: dict[str | None, int]) -> None:
        """Give all sequences the LoRAs of new numbers; no step is launched."""
        self.lora_numbers = numbers
        for sequence in self.scheduler:
            sequence.runner_state.adapter = numbers.get(sequence.adapter, 0)

    def use_instance(self, instance: ModelInstance) -> None:
        """Compute the further steps on another device, whose cache has the same blocks; no step is launched."""
        self.instance = instance
        self.memory.use_cache(instance.cache, instance.model.group)
        placed = [sequence for sequence in self.scheduler if sequence.runner_state.slot >= 0]
        states = [(sequence.runner_state.slot, sequence.scheduler_state) for sequence in placed]
        instance.step.load([(slot, state.ids[-1], state.computed) for slot, state in states])
        instance.runner.restart()
        for sequence in placed:
            sequence.runner_state.table_length = 0

    def _launch_and_read(self) -> list[tuple[Sequence, TextPiece]]:
        ahead = self._runs_ahead()
        if not ahead and self.launched:
            return self._read()
        started = time.perf_counter()
        drafting, host = self.drafting, self.memory.host
        if host is not None:
            host.poll()
        plan = self.scheduler.plan() if drafting is None else drafting.plan(self.scheduler, ahead=ahead)
        planned = time.perf_counter()
        self.planning += planned - started
        if plan:
            self.steps += 1
            drafts, propose = (None, 0) if drafting is None else drafting.drafts(plan, ahead=ahead)
            for chunk in plan.chunks:
                self._assign_slot(chunk.sequence)
            if host is not None:
                host.begin_step([*plan.decoding, *(chunk.sequence for chunk in plan.chunks)])
            sampled = self.instance.runner.launch(plan.decoding, plan.chunks, drafts, propose)
            self.launched.append(LaunchedStep(sampled, drafts, plan, planned))
            self.launching += time.perf_counter() - planned
        elif not self.launched and self.scheduler.waiting:
            if host is None or not self.scheduler.fetching:
                return [self._refuse_first()]
            host.wait_for_disk()
        return self._read() if self.launched and (not ahead or not plan or len(self.launched) > 1) else []

    def _runs_ahead(self) -> bool:
        """A step can be launched before the tokens of the last one are read."""
        return (
            self.instance.on_gpu
            and not self.instance.step.host_embedding
            and not (self.drafting is not None and self.drafting.needs_host(self.scheduler))
            and self._samples_without_host()
        )

    def _samples_without_host(self) -> bool:
        """The next token of every running sequence can be sampled before the host knows its last one."""
        return not any(each.needs_host for each in self.scheduler if each.runner_state.slot >= 0)

    def _restart(self) -> None:
        """Forget launched steps: rely on the tokens that were read, and nothing else."""
        self.launched.clear()
        for sequence in self.scheduler:
            sequence.rewind()
        self.scheduler.restart()
        if self.drafting is not None:
            self.drafting.restart()
        self.instance.runner.restart()

    def _assign_slot(self, sequence: Sequence) -> None:
        """Give a sequence that is computed for the first time its slot on the device."""
        if sequence.runner_state.slot < 0:
            state = sequence.scheduler_state
            sequence.cached_tokens = state.cached_tokens
            sequence.queue_seconds = time.perf_counter() - state.arrived
            sequence.runner_state = RunnerState(self.slots.pop(), self.lora_numbers.get(sequence.adapter, 0))

    def _read(self) -> list[tuple[Sequence, TextPiece]]:
        """Read the tokens of the earliest launched step."""
        pieces: list[tuple[Sequence, TextPiece]] = []
        launched = self.launched.popleft()
        found, drafts = launched.sampled.read(), launched.drafts
        # A step that was launched early begins when the last one ends.
        before, self._read_time = self._read_time, time.perf_counter()
        rows = len(launched.plan.decoding) + sum(map(len, drafts or ()))
        self.budget.record(rows, launched.plan.prompt_tokens, self._read_time - max(before, launched.time))
        at = 0
        # The decoding sequences come first, each with one token more than it has drafts.
        while at < len(found):
            guess = drafts.pop(0) if drafts else []
            own = found[at : at + len(guess) + 1]
            at += len(own)
            sequence = own[0][0]
            if sequence.scheduler_state.active:  # else it ended with the step before, or was aborted
                with sequence.contain_faults():
                    kept = sequence.extend(guess, [(token, logprob) for _, token, logprob in own])
                    if self.drafting is not None:
                        self.drafting.record(len(guess), len(kept) - 1)
                    self.scheduler.append_tokens(sequence, kept)
                if sequence.ended:
                    self.remove(sequence)
                pieces.append((sequence, sequence.take()))
        if not len(self.scheduler):
            self.launched.clear()
        return pieces

    def _refuse_first(self) -> tuple[Sequence, TextPiece]:
        """End the first waiting request: nothing runs, and there still is no memory for its cache."""
        sequence = self.scheduler.waiting[0]
        sequence.fail(
            UnavailableError(
                f"{self.instance.device}: out of memory for the cache of this request alone, of "
                f"{sequence.scheduler_state.length:,} tokens: end what else uses the device, or lower max_model_len, "
                "and send it again"
            )
        )
        self.remove(sequence)
        return sequence, sequence.take()
