"""The options of a served model: of its engine, its processes and its queue.

The command line reads them, and therefore this module imports nothing that loads torch.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from warpbus.cuda.dtype_names import dtype_name, rounds_activations
from warpbus.cuda.memory_size import parse_memory
from warpbus.dist.watchdog import check_limit
from warpbus.engine.blocks import BLOCK
from warpbus.engine.speculation import Speculation
from warpbus.errors import UsageError

GenerationConfig = Literal["auto", "none"]
"""Whether the model's `generation_config.json` gives the defaults of sampling parameters."""

DISK_SIZE = "64GB"
"""The default of `kv_disk_size`."""

_TIME_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3}


@dataclass(frozen=True)
class ServiceOptions:
    """The options of a served model.

    Attributes:
        device: "auto" (GPUs if PyTorch sees one), "cpu", "cuda" or "cuda:N"; the last only for one process.
        dtype: "auto", "float32", "float16" or "bfloat16"; see `LLM`.
        max_model_len: the most tokens of a prompt with its answer; by default the model's context, or what fits
            `memory`.
        max_num_seqs: the most requests that run at once.
        max_queue: the most requests that wait besides these; further ones are refused.
        memory: the GPU memory of the engine's process: "6GB", "50%", or bytes; see `LLM`.
        kv_dtype: the storage type of the KV cache: "auto", "int8", "fp8", "int4" or "unquantized"; see `LLM`.
        activation_dtype: "fp8" (Ada, Hopper and later GPUs) or "int8" (Ampere and later): products of 512 tokens and
            more with weights of up to 4 bits round the tokens to 8 bits: prompts are read faster, see
            docs/quantized_kernels.md. "auto": nothing is rounded. Not with `memory`, whose plan has no room for the
            rounded tokens.
        cache_tokens: the size of the KV cache in tokens, rounded up to whole blocks; requests for which there is no
            block wait. None: what `max_num_seqs` requests can need, or what fits the memory.
        max_num_batched_tokens: the most tokens of a step, of prompts and of decoding requests; None: the engine's
            default.
        inter_token_latency: the target of the time between two tokens of a request: "50ms", or seconds. Steps take in
            as much of new prompts as measured steps allow. None: no target. Not with several processes, whose measured
            times would differ.
        prefix_caching: prompts with a common prefix share the blocks of it.
        kv_host_memory: main memory for blocks that are evicted from the KV cache, so that prefix caching still finds
            them: "64GB", or bytes; of all processes of the engine together. None: evicted blocks are forgotten.
        kv_disk: a directory for these blocks, where they are found again after a restart; not with several processes.
            None: none.
        kv_disk_size: the limit of the files of each engine there: "64GB", or bytes.
        speculation: the most draft tokens per request and step, proposed by n-gram lookup, up to 1,024; or "mtp:1" to
            "mtp:4" ("mtp" is "mtp:1"), proposed by the model's layer of multi-token prediction; 0: no speculation.
        max_restarts: how often the processes are restarted after deaths in a row, with less than a minute of service
            between them, before the service gives up.
        watchdog_timeout: after so many seconds without progress a living engine is killed and restarted: a process
            sends no heartbeat, or a step makes no progress (on a GPU: takes so long).
        adapters: (name, directory) of each adapter that requests can name: LoRA of PEFT's format, or P-Tuning's
            prefixes.
        generation_config: "auto" makes the sampling parameters of the model's `generation_config.json` the defaults of
            requests; "none" does not.
        tensor_parallel: over how many GPUs (or processes on the CPU) the model is sharded.
        expert_parallel: with several of them, each has whole routed experts of a mixture of experts instead of a part
            of every expert.
        cluster: "auto" or "ray://HOST:PORT": the processes run on machines of a Ray cluster, on each of which the model
            directory has the same path. None: on this machine.

    Raises:
        UsageError: a value is out of range.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_queue: int = 1024
    memory: str | int | None = None
    kv_dtype: str = "auto"
    activation_dtype: str = "auto"
    cache_tokens: int | None = None
    max_num_batched_tokens: int | None = None
    inter_token_latency: str | float | None = None
    prefix_caching: bool = True
    kv_host_memory: str | int | None = None
    kv_disk: str | None = None
    kv_disk_size: str | int = DISK_SIZE
    speculation: int | str = 0
    max_restarts: int = 5
    watchdog_timeout: float = 300.0
    adapters: tuple[tuple[str, str], ...] = ()
    generation_config: GenerationConfig = "auto"
    tensor_parallel: int = 1
    expert_parallel: bool = False
    cluster: str | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("max_num_seqs", 1),
            ("max_queue", 0),
            ("cache_tokens", 2 * BLOCK),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 2),
            ("max_restarts", 0),
            ("tensor_parallel", 1),
        ):
            _check_whole(name, getattr(self, name), least)
        if self.expert_parallel and self.tensor_parallel == 1:
            raise UsageError(
                "expert_parallel shares out experts over the GPUs of tensor_parallel, which is 1: give 2 or more, or "
                "leave it out"
            )
        Speculation.parse(self.speculation)
        if self.inter_token_latency is not None:
            self._check_latency(self.inter_token_latency)
        self._check_kept_blocks()
        if self.generation_config not in get_args(GenerationConfig):
            raise UsageError(f"generation_config is {self.generation_config!r}: give auto or none")
        check_limit("watchdog_timeout", self.watchdog_timeout)
        names = [name for name, _ in self.adapters]
        if "" in names or len(set(names)) < len(names):
            raise UsageError(f"adapters are called {', '.join(map(repr, names))}: give each a name of its own")
        self._check_memory()
        if self.dtype != "auto":
            dtype_name(self.dtype)

    def _check_latency(self, latency: str | float) -> None:
        parse_latency(latency)
        if self.tensor_parallel > 1:
            raise UsageError(
                f"inter_token_latency with tensor_parallel {self.tensor_parallel}: each process would measure "
                "other times, and plan other steps: leave one of them out"
            )

    def _check_kept_blocks(self) -> None:
        """Check where prefix caching keeps blocks that the GPU has no room for."""
        if self.kv_host_memory is not None:
            parse_memory(self.kv_host_memory, what="kv_host_memory")
            if not self.prefix_caching:
                raise UsageError("kv_host_memory keeps blocks for prefix caching, which is off: leave one of them out")
        parse_memory(self.kv_disk_size, what="kv_disk_size")
        if self.kv_disk is None:
            if self.kv_disk_size != DISK_SIZE:
                raise UsageError(
                    "kv_disk_size limits the files of kv_disk, which is not given: give kv_disk, or leave kv_disk_size "
                    "out"
                )
            return
        if not self.prefix_caching:
            raise UsageError("kv_disk keeps blocks for prefix caching, which is off: leave one of them out")
        if self.tensor_parallel > 1:
            raise UsageError(
                f"kv_disk with tensor_parallel {self.tensor_parallel}: each process would read files at its own "
                "pace, and plan other steps: leave one of them out"
            )

    def _check_memory(self) -> None:
        """Check what a memory plan decides itself, and the size of the cache."""
        if rounds_activations(self.activation_dtype) and self.memory is not None:
            raise UsageError("memory plans activations of 16 bits: leave out either memory or activation_dtype")
        if self.cache_tokens is None:
            return
        if self.memory is not None:
            raise UsageError("memory plans the cache too: leave out either memory or cache_tokens")
        if self.max_model_len is not None and self.cache_tokens < self.max_model_len:
            raise UsageError(
                f"cache_tokens is {self.cache_tokens}: give at least max_model_len, which is {self.max_model_len}"
            )


@dataclass(frozen=True)
class ReplicaOptions:
    """How many engines a model has, each with the processes, the queue and the memory that `ServiceOptions` give.

    Attributes:
        data_parallel: engines on this machine.
        replicas: engines on a cluster at the start; by default `min_replicas`.
        min_replicas, max_replicas: limits of their number, which follows the length of their queues; by default
            `replicas`.

    Raises:
        UsageError: a value is out of range.
    """

    data_parallel: int = 1
    replicas: int | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None

    def __post_init__(self) -> None:
        for name in ("data_parallel", "replicas", "min_replicas", "max_replicas"):
            _check_whole(name, getattr(self, name), 1)
        if self.on_cluster and self.data_parallel > 1:
            raise UsageError(f"data_parallel is for this machine, {self.asked} for a cluster: leave one of them out")
        if not self.fewest <= self.count <= self.most:
            raise UsageError(
                f"replicas is {self.count}, min_replicas {self.fewest}, max_replicas {self.most}: give them in order"
            )

    @property
    def on_cluster(self) -> bool:
        """They need a cluster."""
        return (self.replicas, self.min_replicas, self.max_replicas) != (None, None, None)

    @property
    def asked(self) -> str:
        """The options for a cluster that are given, such as `replicas=2, max_replicas=4`."""
        names = "replicas", "min_replicas", "max_replicas"
        return ", ".join(f"{name}={value}" for name in names if (value := getattr(self, name)) is not None)

    @property
    def count(self) -> int:
        """Engines at the start."""
        return self.replicas or self.min_replicas or self.data_parallel

    @property
    def fewest(self) -> int:
        """The fewest engines."""
        return self.min_replicas or self.count

    @property
    def most(self) -> int:
        """The most engines."""
        return self.max_replicas or self.count


def _check_whole(name: str, value: object, least: int) -> None:
    if value is not None and (type(value) is not int or value < least):
        raise UsageError(f"{name} is {value!r}: give a whole number, {least} or more")


def parse_latency(value: str | float) -> float:
    """Seconds from "50ms", "0.05s" or a number of seconds.

    Raises:
        UsageError: anything else, or a value that is not positive and finite.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*(m?s|)\s*", str(value))
    seconds = float(found[1]) * _TIME_UNITS[found[2]] if found and not isinstance(value, bool) else 0.0
    if not 0 < seconds < math.inf:
        raise UsageError(f"inter_token_latency is {value!r}: give a time such as 50ms or 0.05s")
    return seconds
