"""Generates tokens for many requests at once: continuous batching over a model and its KV cache.

Requests are added and removed between steps. A step decodes one token for each running sequence and prefills chunks of
the waiting prompts. Knows nothing of files or HTTP. A benchmark decodes token ids with it:

    engine = Engine(random_model(SHAPES["chatglm2-6b"], Scheme.parse("w4a16-g128"), "cuda", torch.float16))
    engine.warm()
    engine.add(request(prompt_ids, tokens=256))
    while engine.has_work:
        for sequence, piece in engine.step():
            ...
"""

from collections import abc
from functools import partial

import torch

from warpbus.cuda.remote import is_gpu
from warpbus.engine.adapters import BlockSalts, adapt, check_adapter, lora_numbers, readapt
from warpbus.engine.cache_memory import CacheMemory
from warpbus.engine.disk_cache import DiskSpace
from warpbus.engine.drafting import Drafting
from warpbus.engine.kv_cache import has_decode_kernels
from warpbus.engine.logprobs import check_prompt_logprobs
from warpbus.engine.mtp import check_mtp
from warpbus.engine.offload import OffloadableModel
from warpbus.engine.plan import PLANNED_GRAPHS, PLANNED_ROWS, MemoryPlan
from warpbus.engine.prefixes import Prefixes
from warpbus.engine.runner import Runner
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.scheduler import Scheduler, StepBudget
from warpbus.engine.sequence import NoText, SchedulerState, Sequence, TextPiece, unsplit_tokens
from warpbus.engine.speculation import Speculation
from warpbus.engine.stats import Stats
from warpbus.engine.step import MIXED_ROWS, StepExecutor, batch_bucket, mixed_step_rows
from warpbus.engine.step_pipeline import ModelInstance, StepPipeline
from warpbus.errors import ContextLengthError, UsageError
from warpbus.kernels.ops import cpu_library
from warpbus.models import Decoder, MoESpec
from warpbus.models.adapters import Lora, Prefix

BATCHED_TOKENS = 4096
"""The default token budget of a step of a dense model."""

EXPERTS_BATCHED_TOKENS = 8192
"""The default token budget for a mixture of experts: an expert computes only a part of the tokens."""

_WARM_PROMPTS = (4, 12, 24, 48, 100, 200, 1100)  # tokens: one for each kind of kernel that prefills prompts
_SAVE_SECONDS = 5.0  # at most, for writing blocks to the disk before the engine ends or sleeps
_WARM_LENGTHS = (512, 1024)  # tokens: lengths of sequences for which graphs are captured ahead


class Engine:
    """Generates tokens for many requests at once.

    Args:
        model: in eval mode; the engine runs on the device of its norms.
        max_model_len: the most tokens of a prompt with its answer, a prefix excluded; by default the model's context.
        max_num_seqs: the most sequences that run at once; further ones wait.
        kv_dtype: see `KV_DTYPES`. On a CPU, 8 bits and 4 take less memory, and more time.
        max_num_batched_tokens: the most tokens of a step, of prompts and of decoding sequences.
        inter_token_latency: the target of the seconds between two tokens of a sequence; see `StepBudget`. Not with
            several processes.
        cache_tokens: the most tokens in the cache, prefixes excluded. None: what `max_num_seqs` sequences need, or what
            fits the free memory. The cache allocates memory as it needs it, except on a remote device: there it
            allocates all at once, up to three quarters of what the lease has left.
        mixed_rows: the most tokens of a step that both decodes and prefills.
        most_graphs: how many CUDA graphs are kept, the last used ones; None: all.
        prefix_caching: prompts with a common prefix share the blocks of it.
        host_bytes: main memory of this process for evicted blocks; see `HostCache`. None: they are forgotten.
        disk: for them too, see `DiskCache`; not with several processes.
        speculation: the draft tokens per sequence and step: a number for n-gram lookup, "mtp:1" to "mtp:4" for the
            model's layer of multi-token prediction. With drafts, a step is launched only after the tokens of the last
            one were read.
        offloadable: the model's weights, for an engine that can sleep.
        adapters: that sequences can name.

    If several processes share the model (`Decoder.group`), each runs the same engine with the same requests. For greedy
    requests, and for seeded ones on devices of one kind, they sample the same tokens by themselves; otherwise the first
    process broadcasts its tokens in each step.

    Attributes:
        max_model_len, max_num_seqs: as given, limited by the size of the cache.
        plan: of the memory, if the engine was loaded by one.
        dtype: of the activations.

    Raises:
        UsageError: a cache of codes without kernels that read it, or a speculation that the model cannot do.
        DeviceError: no memory for a cache.
    """

    plan: MemoryPlan | None = None

    def __init__(
        self,
        model: Decoder,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        kv_dtype: str = "auto",
        max_num_batched_tokens: int | None = None,
        inter_token_latency: float | None = None,
        cache_tokens: int | None = None,
        mixed_rows: int = MIXED_ROWS,
        most_graphs: int | None = None,
        prefix_caching: bool = True,
        host_bytes: int | None = None,
        disk: DiskSpace | None = None,
        speculation: int | str = 0,
        offloadable: OffloadableModel | None = None,
        adapters: abc.Sequence[Lora | Prefix] = (),
    ) -> None:
        config, device = model.config, model.final_norm.weight.device
        self.dtype = model.final_norm.weight.dtype
        self.max_model_len = max_model_len or config.max_context
        self.max_num_seqs = max_num_seqs
        experts = any(isinstance(layer.mlp, MoESpec) for layer in config.layers)
        self._most_tokens = max_num_batched_tokens or (EXPERTS_BATCHED_TOKENS if experts else BATCHED_TOKENS)
        parsed = Speculation.parse(speculation)
        rows, drafts = parsed.rows(max_num_seqs), parsed.tokens if parsed.mtp else 0
        if drafts:
            check_mtp(config, adapters)
        self._memory = CacheMemory(
            model,
            Prefixes(adapters, config),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_dtype=kv_dtype,
            cache_tokens=cache_tokens,
            sharing=prefix_caching,
            host_bytes=host_bytes,
            disk=disk,
        )
        cache = self._memory.cache
        self.kv_kind = cache.kind
        self.max_model_len = min(self.max_model_len, self._memory.tokens)
        kernels = has_decode_kernels(config, self.dtype, device)
        step = StepExecutor(
            *(model, cache, max_num_seqs, rows, self.max_model_len),
            device=device,
            dtype=self.dtype,
            graphs=kernels and not model.waits_for_gpu,
            mixed_rows=mixed_rows,
            most_graphs=most_graphs,
            selection=adapt(model, adapters),
            prefix_length=self._memory.prefixes.longest,
            drafts=drafts,
        )
        runner = Runner(model, cache, step, batch_bucket(rows), mtp=drafts > 0)
        self._memory.begin(self.dtype, "end what else uses it, or quantize the model")
        budget = StepBudget(
            self._most_tokens,
            mixed=lambda decoding: min(mixed_step_rows(decoding), mixed_rows),
            clears_backlogs=kernels,  # elsewhere a large chunk takes seconds
            latency=inter_token_latency,
        )
        self._scheduler = Scheduler(self._memory.blocks, max_num_seqs=max_num_seqs, budget=budget)
        self.adapters = {adapter.name: adapter for adapter in adapters}
        self._salts = BlockSalts(outliving=disk is not None)
        self._pipeline = StepPipeline(
            ModelInstance(model, device, is_gpu(device), cache, step, runner, offloadable),
            self._memory,
            self._scheduler,
            budget,
            Drafting(parsed, max_num_seqs) if parsed.tokens else None,
            max_num_seqs,
            lora_numbers(adapters),
        )
        self._make_replica = partial(
            type(self),
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            kv_dtype=kv_dtype,
            max_num_batched_tokens=self._most_tokens,
            inter_token_latency=inter_token_latency,
            cache_tokens=self._memory.tokens,
            mixed_rows=mixed_rows,
            most_graphs=most_graphs,
            prefix_caching=prefix_caching,
            speculation=speculation,
            adapters=adapters,
        )

    @classmethod
    def planned(cls, model: Decoder, plan: MemoryPlan, *, max_num_seqs: int = 16) -> "Engine":
        """An engine for a model that was loaded, or made, according to a memory plan."""
        return cls(
            model,
            max_model_len=plan.context,
            max_num_seqs=max_num_seqs,
            kv_dtype=plan.kv_dtype,
            max_num_batched_tokens=plan.prefill_tokens,
            cache_tokens=plan.pool_tokens,
            mixed_rows=PLANNED_ROWS,
            most_graphs=PLANNED_GRAPHS,
        )

    @property
    def model(self) -> Decoder:
        """The model, on the device where the engine runs now."""
        return self._instance.model

    @property
    def device(self) -> torch.device:
        """The device where the engine runs now."""
        return self._instance.device

    @property
    def _instance(self) -> ModelInstance:
        return self._pipeline.instance

    @property
    def has_work(self) -> bool:
        """Requests wait or run."""
        return len(self._scheduler) > 0

    def stats(self) -> Stats:
        """Counters and gauges."""
        scheduler, blocks, host = self._scheduler, self._memory.blocks, self._memory.host
        pipeline, drafting, experts = self._pipeline, self._pipeline.drafting, self._instance.runner.experts
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            steps=pipeline.steps,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            host_hits=scheduler.host_hits,
            disk_hits=scheduler.disk_hits,
            **({} if host is None else host.stats()),
            blocks=self._memory.usable,
            blocks_used=blocks.used,
            blocks_idle=blocks.idle,
            cache_bytes=self._instance.cache.nbytes,
            **({} if drafting is None else {"drafted": drafting.drafted, "accepted": drafting.accepted}),
            **({} if experts is None else experts.stats()),
            planning=pipeline.planning,
            launching=pipeline.launching,
        )

    def add(self, sequence: Sequence) -> None:
        """Add a request to the waiting queue.

        Raises:
            ContextLengthError: the prompt with its answer is longer than `max_model_len`.
            UsageError: its parameters name a token outside the vocabulary, or ask for logprobs of a prompt that has
                none; there is no such adapter; or the prompt lacks the token that must end prompts of this model.
        """
        check_adapter(sequence.adapter, self.adapters)
        sequence.params.check_ids(self.model.config.vocab_size)
        check_prompt_logprobs(sequence, bidirectional=self.model.config.prompt_end is not None)
        length = len(sequence.prompt) + sequence.limit
        if length > self.max_model_len:
            raise ContextLengthError(
                f"a request needs {length:,} tokens, the context holds {self.max_model_len:,}: shorten it or raise "
                "max_model_len"
            )
        prefix, prefix_length = self._memory.prefixes.of(sequence.adapter)
        sequence.scheduler_state = SchedulerState(
            list(sequence.prompt),
            length,
            self._salts.of(None if sequence.adapter is None else self.adapters[sequence.adapter], sequence.cache_salt),
            unsplit_tokens(sequence.prompt, self.model.config.prompt_end),
            uncached=sequence.params.needs_whole_prompt,
            prefix=prefix,
            prefix_length=prefix_length,
        )
        self._scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Drop a request if it waits or runs: it gets no more tokens, and its memory is free."""
        self._pipeline.remove(sequence)

    def step(self) -> list[tuple[Sequence, TextPiece]]:
        """Launch a step, and read one: the new tokens of each sequence, possibly of none.

        If the next step needs nothing from the host, one step is launched before the previous one is read. If a step
        fails, or is interrupted, running sequences are computed again from the tokens that were read.

        A sequence that fails by itself ends with this step and has an `error`; the others continue. It is a
        NumericError if its logits hold NaN or infinity, an UnavailableError if there is no memory for its cache
        although nothing else runs, and another WarpbusError if its grammar or its text cannot be handled.

        Raises:
            DeviceError: the device's memory is full.
        """
        return self._pipeline.advance()

    def decode(self, prompts: abc.Sequence[list[int]], tokens: int) -> list[list[int]]:
        """Decode `tokens` tokens greedily after each prompt.

        Raises: as `step`, and the error of the first request that failed.
        """
        requests = [request(prompt, tokens=tokens) for prompt in prompts]
        for each in requests:
            self.add(each)
        while self.has_work:
            self.step()
        for each in requests:
            if each.error is not None:
                raise each.error
        return [each.token_ids for each in requests]

    def warm(self, rows: int | None = None, *, lengths: abc.Sequence[int] = ()) -> None:
        """Compile and load the kernels and capture the first graphs, so that the first requests do not wait.

        Args:
            rows: capture graphs for up to so many sequences; by default for a single one.
            lengths: expected lengths of long sequences, in tokens.
        """
        if not self._instance.on_gpu:
            cpu_library.is_available()  # compiles the kernels of the CPU
            return
        end = self.model.config.prompt_end or 0
        for length in (*_WARM_PROMPTS, self._most_tokens):
            self.decode([[*[0] * (max(1, min(length, self.max_model_len - 2)) - 1), end]], 2)
        self.add(request([end], tokens=2, params=SamplingParams(top_p=0.9, seed=0)))
        while self.has_work:
            self.step()
        for longest in (*(_WARM_LENGTHS if rows is not None else ()), *lengths):
            self._instance.step.capture(rows or 1, longest)
        if self._instance.runner.experts is not None:
            self._instance.runner.experts.restart()
        self._uncommit(self._memory.blocks.forget())

    def shrink(self, *, keep: bool = True) -> None:
        """Empty the prefix cache, except for the disk and, with `keep`, main memory, and return unused memory."""
        self._uncommit(self._memory.forget(save_seconds=1) if keep else self._memory.blocks.forget())

    def sleep(self) -> None:
        """Return the memory of weights and cache; main memory and disk keep their blocks. Does nothing while asleep.

        Raises:
            UsageError: requests wait or run, or the engine has no `offloadable`.
        """
        offloadable = self._require_offloadable()
        if self.has_work:
            raise UsageError(
                f"{len(self._scheduler)} requests are under way: let them end, or abort them, before sleep"
            )
        self._memory.forget(save_seconds=_SAVE_SECONDS)
        self._uncommit(0)
        offloadable.sleep()

    def wake(self) -> None:
        """Allocate the memory again after `sleep`. Does nothing while awake.

        Raises:
            DeviceError: other programs use the memory; `wake` can be called again.
        """
        self._require_offloadable().wake()
        self._memory.begin(self.dtype, "end what else uses it")

    def replica(self, model: Decoder, *, offloadable: OffloadableModel | None = None) -> "Engine":
        """A new engine of the same size for a copy of the model, to move to. See `warpbus.engine.moving`.

        Raises: as the constructor.
        """
        return self._make_replica(model, offloadable=offloadable)

    def use_adapters(self, adapters: abc.Sequence[Lora | Prefix]) -> list[tuple[Sequence, TextPiece]]:
        """Exchange the LoRAs; the results of the launched steps. No request may use one that is left out.

        Raises:
            UsageError: the prefixes differ, whose blocks are reserved at the start.
            CheckpointError: a LoRA does not fit the model; nothing has changed.
        """
        if [each for each in adapters if isinstance(each, Prefix)] != self._memory.prefixes.all:
            raise UsageError("a P-Tuning prefix can be loaded, or left out, at the start of the engine only")
        pieces = self.drain()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a graph may still run whose LoRAs are dropped
        self._instance.step.use_selection(readapt(self.model, adapters))
        self._memory.blocks.forget()  # an adapter may have got the name of another
        self.adapters = {adapter.name: adapter for adapter in adapters}
        self._pipeline.use_loras(lora_numbers(adapters))
        self._make_replica.keywords["adapters"] = adapters
        return pieces

    @property
    def can_sleep(self) -> bool:
        """The weights can be offloaded."""
        return self._instance.offloadable is not None

    @property
    def longest(self) -> int:
        """Cache positions of the longest running sequence."""
        states = [sequence.scheduler_state for sequence in self._scheduler.running]
        return max((state.prefix_length + state.length for state in states), default=0)

    def drain(self) -> list[tuple[Sequence, TextPiece]]:
        """Read all launched steps, and launch none. Raises: as `step`."""
        return self._pipeline.drain()

    def filled_blocks(self) -> dict[int, bytes]:
        """The full blocks, whose content does not change as long as they have the same key, with these keys."""
        filled = self._memory.blocks.keyed()
        for sequence in self._scheduler.running:
            state = sequence.scheduler_state
            filled.update(zip(state.own_blocks[: state.published], state.keys, strict=False))
        return filled

    def used_blocks(self) -> set[int]:
        """The blocks of running sequences, those of prefixes excluded."""
        return {block for sequence in self._scheduler.running for block in sequence.scheduler_state.own_blocks}

    def copy_blocks(self, blocks: abc.Sequence[int], replica: "Engine") -> int:
        """Copy blocks, as they are after the launched steps, to the same blocks of a replica's cache; the bytes copied.

        Raises:
            DeviceError: the replica's device has no memory for as many blocks as this cache has.
        """
        return self._memory.copy(blocks, replica._memory)

    def close(self) -> None:
        """Return all memory of the cache; the engine cannot be used any more."""
        if self._memory.host is not None:
            self._memory.host.close()
        self._instance.cache.close()

    def save(self) -> None:
        """Write the blocks of the prefix cache to the disk, if there is one, as far as some seconds suffice."""
        self._memory.forget(save_seconds=_SAVE_SECONDS)

    def swap_instance(self, replica: "Engine") -> None:
        """Continue on a replica's device. The replica has the content of all used and full blocks; no step is launched.

        The replica gets what this engine had on its device, for `close`; it cannot generate.
        """
        here, there = self._pipeline.instance, replica._pipeline.instance
        replica._pipeline.instance = here
        self._pipeline.use_instance(there)

    @property
    def asleep(self) -> bool:
        """The weights are not on the device."""
        return self._instance.offloadable is not None and self._instance.offloadable.asleep

    def _uncommit(self, blocks: int) -> None:
        """Return the memory of all but the first blocks."""
        self._memory.uncommit(blocks)
        # Kernels prefetch the blocks that the tables name, those of unused slots too.
        self._instance.step.blocks.zero_()
        for sequence in self._scheduler:
            sequence.runner_state.table_length = 0

    def _require_offloadable(self) -> OffloadableModel:
        if self._instance.offloadable is None:
            raise UsageError(
                "this engine cannot sleep: its weights are laid out within a planned memory, or on a remote GPU: leave "
                "that out, or give the lease back"
            )
        return self._instance.offloadable


def request(prompt: list[int], *, tokens: int, params: SamplingParams | None = None) -> Sequence:
    """A request for exactly `tokens` tokens after a prompt (no stop token ends it); greedy unless `params` is given."""
    chosen = params or SamplingParams(temperature=0)
    return Sequence(0, prompt, chosen, limit=tokens, stop_ids=frozenset(), stream=NoText())
