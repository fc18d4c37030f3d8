"""Answers requests of token ids: continuous batching over a model and its cache.

Requests come and go between steps. In a step all that run get one token, and pieces of the prompts of those that come
are read. Knows nothing of files or HTTP. A benchmark decodes token ids with it:

    engine = Engine(random_model(SHAPES["chatglm2-6b"], Scheme.parse("w4a16-g128"), "cuda", torch.float16))
    engine.warm()
    engine.add(request(prompt_ids, tokens=256))
    while engine.has_work:
        for sequence, piece in engine.step():
            ...

and within so many bytes of the GPU's memory, the process's own context included:

    plan = plan_memory(Stored.uniform(config, torch.float16, scheme), 4_800_000_000, max_model_len=8320, max_num_seqs=1)
    where = "cpu" if plan.embedding_on_cpu else None
    enforce(plan, device)
    model = random_model(config, scheme, device, torch.float16, head=plan.head, embedding=where)
    engine = Engine.planned(model, plan, max_num_seqs=1)
"""

import time
from collections import abc, deque
from functools import partial

from warpbus.cuda.devices import free_memory
from warpbus.cuda.lent import is_gpu, lent
from warpbus.dist import Group
from warpbus.engine.adapters import adapt, check_adapter, salt_of
from warpbus.engine.blocks import BLOCK, BlockAllocator
from warpbus.engine.kv_cache import KVCache, stored_dtype, token_bytes
from warpbus.engine.logits import LogitsRow
from warpbus.engine.offload import OffloadableModel
from warpbus.engine.plan import PLANNED_GRAPHS, PLANNED_ROWS, MemoryPlan
from warpbus.engine.prefixes import Prefixes
from warpbus.engine.runner import Row, Runner, SampledTokens
from warpbus.engine.sampling_params import SamplingParams
from warpbus.engine.scheduler import Request, Scheduler, StepPlan
from warpbus.engine.sequence import Sequence, TextPiece
from warpbus.engine.speculation import NgramIndex
from warpbus.engine.stats import Stats
from warpbus.engine.step import MIXED_ROWS, StepExecutor, batch_bucket, rows_beside
from warpbus.errors import ContextLengthError, DeviceError, UnavailableError, UsageError
from warpbus.kernels.ops.attention import has_kernel
from warpbus.models import Decoder, ModelConfig
from warpbus.models.adapters import Lora, Prefix

PREFILL_TOKENS = 2048
"""Tokens of prompts that are read in a step in which nobody waits for the next token."""

_WARM_PROMPTS = (4, 12, 24, 48, 100, 200)  # tokens: one for each kind of kernel that prompts are read with
_WARM_LENGTHS = (512, 1024)  # tokens: sequences for which graphs are captured ahead
_KEPT_FREE = 0.1  # of the memory that is free when the engine starts: for activations and whoever else needs some
_KEPT_FREE_LENT = 0.25  # the same on a lent device, where the cache takes its memory at once and for good


_Launched = tuple[SampledTokens, list[list[int]] | None]
"""A step: its tokens, and the drafts of the rows that decode."""


class Engine:
    """Answers many requests at once.

    Args:
        model: in eval mode; where its norms lie, it is computed.
        max_model_len: the longest prompt with its answer, in tokens, those of a prefix not counted; what the model
            allows by default.
        max_num_seqs: the most sequences that run at once; more wait.
        kv_dtype: see `KV_DTYPES`; other than "auto" on a GPU alone.
        prefill_tokens: of prompts, read in a step.
        cache_tokens: the most that the cache holds, beside prefixes. None: what all sequences need, or what the memory
            that is free now allows. The cache takes no more of it than it needs, but for a lent device: there it takes
            all at once, up to three quarters of what the lease has left.
        mixed_rows: the most tokens of a step in which some decode and prompts are read.
        most_graphs: CUDA graphs that are kept, those used last; None: all.
        prefix_caching: prompts that begin alike share what is computed of them.
        speculation: the most tokens that are guessed for a sequence in a step, by what followed the same tokens before.
            With any, a step waits for the tokens of the last.
        offloadable: the model's weights, for an engine that can sleep.
        adapters: that sequences can name.

    Where several processes share the model (`Decoder.group`), each runs the same engine with the same requests. They
    choose the same tokens by themselves where requests are greedy, or have seeds and the devices are of one kind; else
    the first one's count, which takes an exchange a step.

    Raises:
        UsageError: a cache of 8 bits where no kernels read it.
        DeviceError: no room for a cache.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        kv_dtype: str = "auto",
        prefill_tokens: int | None = None,
        cache_tokens: int | None = None,
        mixed_rows: int = MIXED_ROWS,
        most_graphs: int | None = None,
        prefix_caching: bool = True,
        speculation: int = 0,
        offloadable: OffloadableModel | None = None,
        adapters: abc.Sequence[Lora | Prefix] = (),
    ) -> None:
        weight, config = model.final_norm.weight, model.config
        self.model = model
        self.device, self.dtype = weight.device, weight.dtype
        self.max_model_len = max_model_len or config.max_context
        self.max_num_seqs = max_num_seqs
        kernels = has_kernel(self.dtype, config.attention.head_dim, self.device)
        if stored_dtype(kv_dtype, self.dtype) != self.dtype and not kernels:
            raise UsageError(
                f"kv_dtype is {kv_dtype!r}, but there are no kernels for it for this model in {self.dtype} on "
                f"{self.device}: give auto, or float16 or bfloat16 on a GPU"
            )
        self._prefill_tokens = prefill_tokens or PREFILL_TOKENS
        self._prefixes = Prefixes(adapters, config)
        blocks = self._cache_blocks(config, kv_dtype) if cache_tokens is None else cache_tokens // BLOCK
        if model.group is not None:
            blocks = model.group.smallest(blocks)
        if blocks * BLOCK < (max_model_len or 2 * BLOCK):
            raise DeviceError(
                f"{self.device}: there is room for a cache of {max(0, blocks) * BLOCK:,} tokens, "
                f"{max_model_len or 2 * BLOCK:,} are needed: end what else uses its memory, lower max_model_len, "
                "quantize the model, or give kv_dtype int8"
            )
        self.max_model_len = min(self.max_model_len, blocks * BLOCK)
        count = 1 + self._prefixes.blocks + blocks + self._prefixes.lead
        self._cache = KVCache(config, count, device=self.device, dtype=self.dtype, kv_dtype=kv_dtype)
        back = partial(_back, self._cache, model.group)
        self._blocks = BlockAllocator(count, back=back, sharing=prefix_caching, kept=self._prefixes.blocks)
        self._begin_cache("end what else uses it, or quantize the model")
        self._scheduler = Scheduler(
            self._blocks,
            max_num_seqs=max_num_seqs,
            prefill_tokens=self._prefill_tokens,
            mixed_tokens=lambda decoding: min(rows_beside(decoding), mixed_rows),
        )
        self._speculation = speculation
        self._most_rows = max_num_seqs + speculation
        self._step = StepExecutor(
            *(model, self._cache, max_num_seqs, self._most_rows, self.max_model_len),
            device=self.device,
            dtype=self.dtype,
            graphs=kernels,
            mixed_rows=mixed_rows,
            most_graphs=most_graphs,
            selection=adapt(model, adapters),
            given=self._prefixes.longest,
        )
        self._runner = Runner(model, self._cache, self._step, batch_bucket(self._most_rows))
        self._rows: dict[Request, Row] = {}
        self._requests: dict[Sequence, Request] = {}
        self._sequences: dict[Request, Sequence] = {}
        self._arrived: dict[Request, float] = {}  # of those that wait
        self._slots = list(range(max_num_seqs))[::-1]
        self._launched: deque[_Launched] = deque()
        self._steps = 0
        self._indexes: dict[Request, NgramIndex] = {}
        self._drafted = 0
        self._accepted = 0
        self._planning = 0.0
        self._launching = 0.0
        self._offloadable = offloadable
        self._adapters = {adapter.name: adapter for adapter in adapters}
        loras = [adapter.name for adapter in adapters if isinstance(adapter, Lora)]
        self._loras: dict[str | None, int] = {name: number for number, name in enumerate(loras, start=1)}
        self._like_this = partial(
            type(self),
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            kv_dtype=kv_dtype,
            prefill_tokens=self._prefill_tokens,
            cache_tokens=blocks * BLOCK,
            mixed_rows=mixed_rows,
            most_graphs=most_graphs,
            prefix_caching=prefix_caching,
            speculation=speculation,
            adapters=adapters,
        )

    @classmethod
    def planned(cls, model: Decoder, plan: MemoryPlan, *, max_num_seqs: int = 16) -> "Engine":
        """An engine for a model that was loaded, or made, as a plan says."""
        return cls(
            model,
            max_model_len=plan.context,
            max_num_seqs=max_num_seqs,
            kv_dtype=plan.kv_dtype,
            prefill_tokens=plan.prefill_tokens,
            cache_tokens=plan.pool_tokens,
            mixed_rows=PLANNED_ROWS,
            most_graphs=PLANNED_GRAPHS,
        )

    @property
    def has_work(self) -> bool:
        """Requests wait or run."""
        return bool(self._requests)

    def stats(self) -> Stats:
        """What it is doing now."""
        scheduler, blocks = self._scheduler, self._blocks
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            steps=self._steps,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.queried,
            prefix_hits=scheduler.found,
            blocks=blocks.count - 1 - self._prefixes.blocks,
            blocks_used=blocks.used,
            blocks_idle=blocks.idle,
            cache_bytes=self._cache.nbytes,
            drafted=self._drafted,
            accepted=self._accepted,
            planning=self._planning,
            launching=self._launching,
        )

    def add(self, sequence: Sequence) -> None:
        """Take a request on.

        Raises:
            ContextLengthError: the prompt with its answer is longer than `max_model_len`.
            UsageError: its parameters name a token that the vocabulary lacks, there is no such adapter, or the prompt
                lacks the token that prompts of the model end with.
        """
        check_adapter(sequence.adapter, self._adapters)
        sequence.params.check_ids(self.model.config.vocab_size)
        length = len(sequence.prompt) + sequence.limit
        if length > self.max_model_len:
            raise ContextLengthError(
                f"a request needs {length:,} tokens, the context holds {self.max_model_len:,}: shorten it or raise "
                "max_model_len"
            )
        prefix, given = self._prefixes.of(sequence.adapter)
        salt = salt_of(sequence.adapter, sequence.cache_salt)
        request = Request(
            *(list(sequence.prompt), length, salt, self._whole(sequence.prompt)),
            prefix=prefix,
            given=given,
        )
        self._requests[sequence] = request
        self._sequences[request] = sequence
        self._arrived[request] = time.perf_counter()
        self._scheduler.add(request)

    def abort(self, sequence: Sequence) -> None:
        """Drop a request, if it is still there: it gets no more tokens, and its memory is free."""
        request = self._requests.pop(sequence, None)
        if request is not None:
            del self._sequences[request]
            self._arrived.pop(request, None)
            # What is stored of a request that failed may be what made it fail.
            self._scheduler.remove(request, unshare=sequence.error is not None)
            self._indexes.pop(request, None)
            row = self._rows.pop(request, None)
            if row is not None:
                self._slots.append(row.slot)

    def step(self) -> list[tuple[Sequence, TextPiece]]:
        """Launch a step, and read one: what each sequence has got, which may be nothing for anybody.

        Where all that the next step needs stays on the device, the one launched is a step ahead of the one read.
        If it fails, or is interrupted, what runs is computed again from the tokens that were read.

        A sequence that fails by itself ends with this step and has an `error`; the others go on. It is a NumericError
        where its scores hold NaN or infinity, an UnavailableError where there is no memory for its cache though nothing
        else runs, and another WarpbusError where its grammar or its text cannot be handled.

        Raises:
            DeviceError: the device's memory is full.
        """
        try:
            return self._step_on()
        except BaseException:
            self._restart()
            raise

    def _step_on(self) -> list[tuple[Sequence, TextPiece]]:
        ahead = self._runs_ahead()
        if not ahead and self._launched:
            return self._read()
        started = time.perf_counter()
        plan = self._scheduler.plan(self._speculation)
        planned = time.perf_counter()
        self._planning += planned - started
        if plan:
            self._steps += 1
            rows = [self._rows[request] for request in plan.decoding]
            drafts = self._drafts(rows, plan) if self._speculation else None
            pieces = [(self._row(piece.request), piece) for piece in plan.pieces]
            self._launched.append((self._runner.launch(rows, pieces, drafts), drafts))
            self._launching += time.perf_counter() - planned
        elif not self._launched and self._scheduler.waiting:
            return [self._refuse_first()]
        return self._read() if self._launched and (not ahead or not plan or len(self._launched) > 1) else []

    def decode(self, prompts: abc.Sequence[list[int]], tokens: int) -> list[list[int]]:
        """The `tokens` likeliest tokens, one after the other, after each prompt.

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
            rows: capture graphs for up to so many sequences; by default a single one.
            lengths: tokens of long sequences that are expected.
        """
        if not is_gpu(self.device):
            return
        end = self.model.config.prompt_end or 0
        for length in (*_WARM_PROMPTS, self._prefill_tokens):
            self.decode([[*[0] * (max(1, min(length, self.max_model_len - 2)) - 1), end]], 2)
        self.add(request([end], tokens=2, params=SamplingParams(top_p=0.9, seed=0)))
        while self.has_work:
            self.step()
        for longest in (*(_WARM_LENGTHS if rows is not None else ()), *lengths):
            self._step.capture(rows or 1, longest)
        self.shrink()

    def shrink(self) -> None:
        """Return the memory of the cache that no sequence needs; what it held of earlier prompts is forgotten."""
        self._forget(self._blocks.forget())

    def sleep(self) -> None:
        """Return the memory of weights and cache; what the cache held is forgotten. Does nothing while asleep.

        Raises:
            UsageError: requests are under way, or the engine has no `offloadable`.
        """
        offloadable = self._able_to_sleep()
        if self.has_work:
            raise UsageError(f"{len(self._requests)} requests are under way: let them end, or abort them, before sleep")
        self._blocks.forget()
        self._forget(0)
        offloadable.sleep()

    def wake(self) -> None:
        """Go on after `sleep`. Does nothing while awake.

        Raises:
            DeviceError: others have the memory; it can be tried again.
        """
        self._able_to_sleep().wake()
        if self._blocks.backed <= self._prefixes.blocks:
            self._begin_cache("end what else uses it")

    def twin(self, model: Decoder, *, offloadable: OffloadableModel | None = None) -> "Engine":
        """An engine like this one for another copy of the model, to move to. See `warpbus.engine.moving`.

        Raises: as the constructor.
        """
        return self._like_this(model, offloadable=offloadable)

    @property
    def can_sleep(self) -> bool:
        """There is a `offloadable`."""
        return self._offloadable is not None

    @property
    def longest(self) -> int:
        """Cache positions of the cache that the longest sequence that runs needs."""
        return max((request.given + request.length for request in self._scheduler.running), default=0)

    def drain(self) -> list[tuple[Sequence, TextPiece]]:
        """Read the steps that are under way, and launch none. Raises: as `step`."""
        pieces: list[tuple[Sequence, TextPiece]] = []
        try:
            while self._launched:
                pieces += self._read()
        except BaseException:
            self._restart()
            raise
        return pieces

    def filled_blocks(self) -> dict[int, bytes]:
        """The blocks whose content stays as it is while they have it, and its key."""
        filled = self._blocks.keyed()
        for request in self._scheduler.running:
            filled.update(zip(request.blocks[request.lent :][: request.published], request.keys, strict=False))
        return filled

    def used_blocks(self) -> set[int]:
        """The blocks that sequences use, but for those of prefixes."""
        return {block for request in self._scheduler.running for block in request.blocks[request.lent :]}

    def copy_blocks(self, blocks: abc.Sequence[int], twin: "Engine") -> int:
        """Copy blocks of the cache, as they are after the steps under way, to the same place in a twin's; their bytes.

        Raises:
            DeviceError: the twin's device has no memory for as many blocks as this cache has.
        """
        if twin._cache.back(self._blocks.backed) < self._blocks.backed:
            raise DeviceError(
                f"{twin.device}: out of memory for the cache of the engine on {self.device}: end what else uses it"
            )
        if blocks:
            twin._cache.store(blocks, self._cache.fetch(blocks))
        return len(blocks) * self._cache.block_bytes

    def close(self) -> None:
        """Give all memory back; for an engine that is not used any more."""
        self._cache.close()

    def become(self, twin: "Engine") -> None:
        """Go on where a twin is, which has the content of all blocks that are used or filled; nothing is under way.

        The twin must not be used any more: it has what was this engine's.
        """
        twin._step.place([(row.slot, row.request.ids[-1], row.request.computed) for row in self._rows.values()])
        for name in ("model", "device", "_cache", "_step", "_runner", "_offloadable"):
            ours, theirs = getattr(self, name), getattr(twin, name)
            setattr(self, name, theirs)
            setattr(twin, name, ours)
        self._runner.restart()
        self._blocks.rest_on(partial(_back, self._cache, self.model.group), self._cache.backed)
        for row in self._rows.values():
            row.tabled = 0

    @property
    def asleep(self) -> bool:
        """Its weights are not on the device."""
        return self._offloadable is not None and self._offloadable.asleep

    def _forget(self, blocks: int) -> None:
        """Return the memory of all but the first blocks."""
        self._cache.shrink(blocks)
        self._blocks.unback(self._cache.backed)
        # Kernels prefetch what the tables name, also where nobody's tokens are any more.
        self._step.blocks.zero_()
        for row in self._rows.values():
            row.tabled = 0

    def _begin_cache(self, advice: str) -> None:
        """Take memory for the first blocks, and write the prefixes."""
        first = 1 + self._prefixes.blocks
        if self._cache.back(first) < first:
            raise DeviceError(f"{self.device}: out of memory for a cache: {advice}")
        self._blocks.backed = self._cache.backed
        self._prefixes.write(self._cache, self.dtype)

    def _whole(self, prompt: list[int]) -> int:
        """How many tokens of a prompt have to be read in one piece: see `Request`."""
        end = self.model.config.prompt_end
        if end is None:
            return 0
        if end not in prompt:
            raise UsageError(
                f"the prompt lacks the token {end} (<sop>), behind which the model answers: end it with [gMASK] <sop>, "
                "as chats and prompts of text do by themselves"
            )
        return prompt.index(end) + 1

    def _able_to_sleep(self) -> OffloadableModel:
        if self._offloadable is None:
            raise UsageError(
                "this engine cannot sleep: its weights are laid out within a planned memory, or on a lent GPU: leave "
                "that out, or give the lease back"
            )
        return self._offloadable

    def _runs_ahead(self) -> bool:
        """A step can be launched before the tokens of the last one are read."""
        return (
            is_gpu(self.device)
            and not self._step.host_embedding
            and not self._speculation
            and all(_is_plain(row.sequence) for row in self._rows.values())
        )

    def _restart(self) -> None:
        """Rely on nothing but the tokens that were read."""
        self._launched.clear()
        for sequence in self._requests:
            sequence.rewind()
        self._scheduler.restart()
        self._runner.restart()

    def _row(self, request: Request) -> Row:
        if request not in self._rows:
            sequence = self._sequences[request]
            sequence.cached_tokens = request.shared
            sequence.queue_seconds = time.perf_counter() - self._arrived.pop(request)
            self._rows[request] = Row(sequence, request, self._slots.pop(), self._loras.get(sequence.adapter, 0))
        return self._rows[request]

    def _drafts(self, rows: abc.Sequence[Row], plan: StepPlan) -> list[list[int]]:
        """Guesses for the rows that decode, as long as there are places for them."""
        # A prompt that ends gets a token too.
        places = self._most_rows - len(rows) - sum(piece.is_last for piece in plan.pieces)
        drafts: list[list[int]] = []
        for row, most in zip(rows, plan.drafts, strict=True):
            index = self._indexes.setdefault(row.request, NgramIndex())
            index.extend(row.request.ids[len(index) :])
            found = index.propose(min(most, places)) if most and places else []
            places -= len(found)
            drafts.append(found)
        self._drafted += sum(map(len, drafts))
        return drafts

    def _read(self) -> list[tuple[Sequence, TextPiece]]:
        """The tokens of the earliest step that was not read."""
        pieces: list[tuple[Sequence, TextPiece]] = []
        chosen, drafts = self._launched.popleft()
        found = chosen.read()
        at = 0
        # The rows that decode come first, each with as many tokens more as it has drafts.
        while at < len(found):
            guess = drafts.pop(0) if drafts else []
            own = found[at : at + len(guess) + 1]
            at += len(own)
            sequence = own[0][0].sequence
            # Else it ended with the step before, or was dropped.
            if sequence in self._requests:
                with sequence.contain_faults():
                    kept = sequence.extend(guess, [(token, logprob) for _, token, logprob in own])
                    self._accepted += len(kept) - 1
                    self._scheduler.read(self._requests[sequence], kept)
                if sequence.ended:
                    self.abort(sequence)
                pieces.append((sequence, sequence.take()))
        if not self._requests:
            self._launched.clear()
        return pieces

    def _refuse_first(self) -> tuple[Sequence, TextPiece]:
        """End the first request that waits: nothing runs, and there still is no room for its cache."""
        request = self._scheduler.waiting[0]
        sequence = self._sequences[request]
        sequence.fail(
            UnavailableError(
                f"{self.device}: out of memory for the cache of this request alone, of {request.length:,} tokens: end "
                "what else uses the device, or lower max_model_len, and send it again"
            )
        )
        self.abort(sequence)
        return sequence, sequence.take()

    def _cache_blocks(self, config: ModelConfig, kv_dtype: str) -> int:
        """What all sequences can need, as far as there is memory for it."""
        each = -(-self.max_model_len // BLOCK) + self._prefixes.lead
        free = free_memory(self.device)
        if free is None:
            return self.max_num_seqs * each
        block = BLOCK * token_bytes(config, self.dtype, kv_dtype)
        kept = _KEPT_FREE if lent(self.device) is None else _KEPT_FREE_LENT
        own = 1 + self._prefixes.blocks + self._prefixes.lead
        return min(self.max_num_seqs * each, int(free * (1 - kept)) // block - own)


def _back(cache: KVCache, group: Group | None, blocks: int) -> int:
    """Give the first blocks memory; how many have it. No method: an engine that nobody needs has to go at once."""
    backed = cache.back(blocks)
    if backed < blocks and group is not None and group.world > 1:
        # Alone, it would go on with the memory it has; but the others may have more, and have to do the same.
        raise DeviceError(f"{group.device}: out of memory for the cache: end what else uses it")
    return backed


class _NoText:
    """For requests whose text nobody wants."""

    def push(self, token: int, /) -> str:
        del token
        return ""

    def flush(self) -> str:
        return ""


def _is_plain(sequence: Sequence) -> bool:
    """Its next token can be chosen before the host knows its last one."""
    params = sequence.params
    return not (LogitsRow(sequence).penalized or params.logit_bias or params.min_tokens or sequence.matcher)


def request(prompt: list[int], *, tokens: int, params: SamplingParams | None = None) -> Sequence:
    """A request for `tokens` tokens after a prompt, whatever they are; greedy unless `params` say otherwise."""
    chosen = params or SamplingParams(temperature=0)
    return Sequence(0, prompt, chosen, limit=tokens, stop_ids=frozenset(), stream=_NoText())
