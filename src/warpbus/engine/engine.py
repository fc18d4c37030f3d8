"""A model on its device, and what decoding keeps from one batch to the next: the cache's memory and captured graphs.

Knows nothing of text. A benchmark decodes token ids with it:

    engine = Engine(random_model(SHAPES["chatglm2-6b"], Scheme.parse("w4a16-g128"), "cuda", torch.float16))
    engine.warm()
    with engine.batch([request(prompt_ids, tokens=256)]) as runner:
        runner.start()      # reads the prompt, chooses the first token
        runner.read()
        runner.launch()     # a step: time many of these, up to 255, and read each
        runner.read()

and within so many bytes of the GPU's memory, the process's own context included:

    plan = plan_memory(Stored.uniform(config, torch.float16, scheme), 4_800_000_000, max_model_len=8320, max_num_seqs=1)
    where = "cpu" if plan.embedding_on_cpu else None
    enforce(plan, device)
    model = random_model(config, scheme, device, torch.float16, head=plan.head, embedding=where)
    engine = Engine.planned(model, plan, max_num_seqs=1)
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from warpbus.engine.kv_cache import KVCache, KVPool, stored_dtype, token_bytes
from warpbus.engine.plan import MemoryPlan
from warpbus.engine.runner import Runner
from warpbus.engine.sequence import SamplingParams
from warpbus.engine.sequence import Sequence as Request
from warpbus.engine.step import Step, batch_bucket
from warpbus.errors import ContextLengthError, DeviceError, UsageError
from warpbus.kernels.ops.arguments import HALVES
from warpbus.models import Decoder, ModelConfig
from warpbus.models.layers.fusion import gpu_has_kernels

PREFILL_TOKENS = {"cpu": 4096, "cuda": 2048}
"""In a piece of the prompts: a GPU is busy with fewer, and its memory is dearer."""

_SMALLEST_POOL = 4096  # tokens a row: smaller ones are cheap, but would be outgrown by the next conversation
_WARM_PROMPTS = (4, 12, 24, 48, 100, 200)  # tokens: one for each kind of kernel that prompts are read with


class Engine:
    """Decodes batches of token ids.

    Args:
        model: in eval mode; where its norms lie, it is computed.
        max_model_len: the longest prompt with its answer, in tokens; what the model allows by default.
        max_num_seqs: the most sequences of a batch.
        kv_dtype: see `KV_DTYPES`; other than "auto" on a GPU alone.
        prefill_tokens: of all rows together, read at a time.
        pool_tokens: what the cache of all rows of a batch together holds; it is taken at once and never grows. None:
            it grows with what is asked for.

    Raises:
        UsageError: a cache of 8 bits where no kernels read it.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        kv_dtype: str = "auto",
        prefill_tokens: int | None = None,
        pool_tokens: int | None = None,
    ) -> None:
        weight = model.final_norm.weight
        self.model = model
        self.device, self.dtype = weight.device, weight.dtype
        self.max_model_len = max_model_len or model.config.max_context
        self.max_num_seqs = max_num_seqs
        self._kv_dtype = kv_dtype
        self._prefill_tokens = prefill_tokens or PREFILL_TOKENS[self.device.type]
        self._pool_tokens = pool_tokens
        self._fused = gpu_has_kernels(self.device) and self.dtype in HALVES and _heads_have_kernels(model.config)
        if stored_dtype(kv_dtype, self.dtype) != self.dtype and not self._fused:
            raise UsageError(
                f"kv_dtype is {kv_dtype!r}, but there are no kernels for it for this model in {self.dtype} on "
                f"{self.device}: give auto, or float16 or bfloat16 on a GPU"
            )
        self._lock = threading.Lock()
        self._idle = None if pool_tokens is None or not self._fused else self._room(pool_tokens)

    @classmethod
    def planned(cls, model: Decoder, plan: MemoryPlan, *, max_num_seqs: int = 16) -> "Engine":
        """An engine for a model that was loaded, or made, as a plan says."""
        return cls(
            model,
            max_model_len=plan.context,
            max_num_seqs=max_num_seqs,
            kv_dtype=plan.kv_dtype,
            prefill_tokens=plan.prefill_tokens,
            pool_tokens=plan.pool_tokens,
        )

    def fitting(self, requests: Sequence[Request]) -> int:
        """How many of the first requests can be answered in one batch; at least one."""
        most = min(len(requests), self.max_num_seqs)
        if self._pool_tokens is None:
            return most
        for count in range(most, 1, -1):
            if batch_bucket(count) * _longest(requests[:count]) <= self._pool_tokens:
                return count
        return 1

    @contextmanager
    def batch(self, requests: Sequence[Request]) -> Iterator[Runner]:
        """A runner for some requests, as many as are `fitting`; it must not be used afterwards.

        Raises:
            ContextLengthError: a prompt with its answer is longer than `max_model_len`.
            UsageError: the memory is planned, and another batch has it.
            DeviceError: the device's memory is full.
        """
        count, longest = len(requests), _longest(requests)
        if longest > self.max_model_len:
            raise ContextLengthError(
                f"a request needs {longest:,} tokens, the context holds {self.max_model_len:,}: shorten it or raise "
                "max_model_len"
            )
        if not self._fused:
            step = Step(self.model, count, self.max_model_len, device=self.device, dtype=self.dtype)
            cache = KVCache(self.model.config, count, longest, device=self.device, dtype=self.dtype)
            yield Runner(self.model, step, cache, requests, prefill_tokens=self._prefill_tokens)
            return
        rows = batch_bucket(count)
        room = self._take(rows, longest)
        try:
            cut = room.pool.rows(rows)
            yield Runner(self.model, room.step, cut, requests, prefill_tokens=self._prefill_tokens)
        finally:
            self._idle = room

    def decode(self, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """The `tokens` likeliest tokens, one after the other, after each prompt of one batch."""
        answers: list[list[int]] = [[] for _ in prompts]
        with self.batch([request(prompt, tokens=tokens) for prompt in prompts]) as runner:
            runner.start()
            for left in range(tokens - 1, -1, -1):
                if runner.ahead and left:
                    runner.launch()
                for answer, token in zip(answers, runner.read(), strict=True):
                    answer.append(token)
                if left and not runner.ahead:
                    runner.launch()
        return answers

    def warm(self) -> None:
        """Compile and load the kernels and capture the first graphs, so that the first request does not wait."""
        if self.device.type != "cuda":
            return
        for length in (*_WARM_PROMPTS, self._prefill_tokens):
            self.decode([[0] * max(1, min(length, self.max_model_len - 2))], 2)
        with self.batch([request([0], tokens=2, params=SamplingParams(top_p=0.9, seed=0))]) as runner:
            runner.start()
            runner.launch()

    def _take(self, rows: int, longest: int) -> "_Room":
        """Memory for a batch, which nobody else has until it is given back."""
        with self._lock:
            room, self._idle = self._idle, None
        if self._pool_tokens is None:
            if room is None or room.pool.tokens < rows * longest:
                del room  # before more is taken
                per_row = min(max(_SMALLEST_POOL, batch_bucket(longest)), self.max_model_len)
                return self._room(rows * per_row)
        elif room is None:
            raise UsageError(
                "another answer is being generated in the memory that was planned: take it to its end, or close it"
            )
        return room

    def _room(self, tokens: int) -> "_Room":
        config, device, dtype = self.model.config, self.device, self.dtype
        rows = batch_bucket(self.max_num_seqs)
        try:
            step = Step(self.model, rows, self.max_model_len, device=device, dtype=dtype)
            pool = KVPool(config, tokens, device=device, dtype=dtype, kv_dtype=self._kv_dtype)
        except torch.OutOfMemoryError as error:
            size = tokens * token_bytes(config, dtype, self._kv_dtype)
            raise DeviceError(
                f"{device}: out of memory for a cache of {tokens:,} tokens ({size / 1e9:.2f} GB): lower "
                "max_num_seqs or max_model_len, or give kv_dtype int8"
            ) from error
        return _Room(pool, step)


@dataclass(frozen=True)
class _Room:
    """What one batch at a time has to itself."""

    pool: KVPool
    step: Step


class _NoText:
    """For requests whose text nobody wants."""

    def push(self, token: int, /) -> str:
        del token
        return ""

    def flush(self) -> str:
        return ""


def request(prompt: list[int], *, tokens: int, params: SamplingParams | None = None) -> Request:
    """A request for `tokens` tokens after a prompt, whatever they are; greedy unless `params` say otherwise."""
    chosen = params or SamplingParams(temperature=0)
    return Request(0, prompt, chosen, limit=tokens, stop_ids=frozenset(), stream=_NoText())


def _heads_have_kernels(config: ModelConfig) -> bool:
    """Whether `decode_attention` takes heads such as these."""
    return (
        config.head_dim % 16 == 0
        and config.head_dim <= 256
        and config.num_heads // config.num_kv_heads <= (64 if config.head_dim <= 128 else 32)
    )


def _longest(requests: Sequence[Request]) -> int:
    return max(len(each.prompt) + each.limit for each in requests)
