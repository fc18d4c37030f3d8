"""The memory contract: what a model, its cache and its working memory take on a GPU, planned before anything is loaded.

A plan is made of the config and the headers of the files alone. To fit, these are given up in this order: a context
longer than was asked for, a cache of 16 bits for one of 8, a head of 16 bits for one of 8, an embedding of 16 bits for
one of 8, an embedding on the GPU, and at last experts on the GPU: those that do not fit lie in pinned memory of the
host (`expert_memory`). An engine within a given number of bytes of the GPU's memory, the CUDA context included:

    plan = plan_memory(Stored.uniform(config, torch.float16, scheme), 4_800_000_000, max_model_len=8320, max_num_seqs=1)
    where = "cpu" if plan.embedding_on_cpu else None
    enforce(plan, device)
    model = random_model(
        config, scheme, device, torch.float16, head=plan.head, embedding=plan.embedding, embedding_device=where,
        offloaded=plan.offloaded,
    )
    engine = Engine.planned(model, plan, max_num_seqs=1)
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import torch

from warpbus.cuda.devices import free_memory
from warpbus.cuda.memory_size import gigabytes
from warpbus.engine.blocks import BLOCK
from warpbus.engine.expert_memory import OffloadableExperts
from warpbus.engine.kv_cache import chosen_dtype, stored_dtype, token_bytes
from warpbus.engine.step import batch_bucket
from warpbus.engine.step_memory import (
    PIECES,
    activation_bytes,
    expanded_bytes,
    joined_bytes,
    prompt_piece,
    read_bytes,
    selection_bytes,
    table_bytes,
)
from warpbus.errors import DeviceError, UsageError
from warpbus.formats import Checkpoint
from warpbus.formats.kv_cache import KVCacheScheme
from warpbus.kernels.ops.arguments import HALVES
from warpbus.kernels.ops.trellis_dequantize import BUFFER_BYTES
from warpbus.models import MatrixSpec, ModelConfig, quantized_parameters
from warpbus.models.cost import MemoryNeed, packed_bytes, parameter_bytes
from warpbus.models.kv_scales import kv_cache_scheme
from warpbus.models.parallel import Part
from warpbus.qtensor import Scheme

CONTEXT_BYTES = 745_000_000
"""The CUDA context with the kernels of torch and ours and the captured graphs, by the driver's account: 738 MB were the
most on an H100, 549 of them before anything was loaded."""

LIBRARY_BYTES = 75_000_000
"""What cuBLAS takes besides, where a product of several rows is not quantized: 69 MB were the most on an H100."""

PLANNED_ROWS = 256
"""Tokens of the largest graph that takes prompts: graphs keep the memory of what lies between."""

PLANNED_GRAPHS = 16
"""Graphs that are kept: each takes memory of the driver's, of which torch knows nothing."""

_SHORTEST_CONTEXT = 2048  # tokens; less is planned only where it is asked for
_OFFLOADED_CONTEXT = 8192  # tokens: the same where experts are offloaded, which then give way to a longer context
_CONTEXT_STEP = 256  # tokens
_SHARE_OF_HOST = 0.9  # of the free main memory that experts may take
_PAGE = 2**21  # bytes: the cache takes whole ones
_WORKSPACE = 64_000_000  # bytes: partial sums of the products and of attention
_LIBRARY_WORKSPACE = 2 * 2**25  # bytes: torch gives cuBLAS 32 MiB on Hopper for each stream, the graphs' own included
_GRANULARITY = 0.035  # of the weights: torch's allocator hands out memory in pieces of 2 and 20 MiB
_SUGGESTED = Scheme(4, 128)


@dataclass(frozen=True)
class Stored:
    """What a model's weights are, without reading them.

    Attributes:
        dtype: of the activations and of what is not quantized.
        quantized: the parameters whose matrices are quantized, and their schemes.
        adapters: bytes of the LoRAs beside them.
        prefix_blocks: of the cache, which prefixes take.
        kv_cache: what the checkpoint has scales of the KV cache for; None: it has none.
        gpus: that share the model, of which this is the part with most bytes. `config` and `quantized` are those of the
            part.
        head_rows: the rows of the head that the part has.
    """

    config: ModelConfig
    dtype: torch.dtype
    quantized: Mapping[str, Scheme]
    adapters: int = 0
    prefix_blocks: int = 0
    kv_cache: KVCacheScheme | None = None
    gpus: int = 1
    head_rows: int | None = None

    @classmethod
    def of_checkpoint(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        adapters: int = 0,
        prefix_blocks: int = 0,
    ) -> "Stored":
        """What a checkpoint holds, with so many bytes of LoRAs and blocks of prefixes."""
        quantized = quantized_parameters(checkpoint, config, trellises=dtype in HALVES)
        kv_cache = kv_cache_scheme(checkpoint, config)
        return cls(config, dtype, quantized, adapters, prefix_blocks, kv_cache)

    @property
    def kept_tokens(self) -> int:
        """Tokens for which the cache has room beside those of sequences: a block that is nobody's, and the prefixes."""
        return BLOCK * (1 + self.prefix_blocks)

    @classmethod
    def uniform(cls, config: ModelConfig, dtype: torch.dtype, scheme: Scheme | None) -> "Stored":
        """A model whose layers' matrices all have a scheme, such as `random_model` makes."""
        if scheme is None:
            return cls(config, dtype, {})
        fitting = cache(scheme.fitting)  # there may be tens of thousands of experts, all alike
        return cls(config, dtype, {name: fitting(matrix.columns.length) for name, matrix in _weights(config)})

    def shared(self, gpus: int, *, expert_parallel: bool = False) -> "Stored":
        """The part with most bytes if so many GPUs share the model.

        Raises:
            UsageError: it cannot be sharded over so many GPUs.
        """
        parts = [self._part(Part(self.config, rank, gpus, expert_parallel)) for rank in range(gpus)]
        return max(parts, key=lambda part: sum(part.sizes.values()))

    def _part(self, part: Part) -> "Stored":
        """What one process has of this model: smaller groups of columns where the shards do not divide into them, and
        trellises dequantized."""
        quantized = {}
        for name, scheme in self.quantized.items():
            matrix = part.config.matrix(name)
            if matrix is not None:
                scheme = scheme.fitting(matrix.columns.length)
            if part.has(name) and not scheme.is_trellis:
                quantized[name] = scheme
        rows = len(part.vocabulary[part.rank])
        return replace(self, config=part.config, quantized=quantized, gpus=part.world, head_rows=rows)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of the parameters on a GPU, by name; a tied head has none."""
        found = parameter_bytes(self.config, self.dtype, self.quantized)
        if self.head_rows is not None and "head.weight" in found:
            found["head.weight"] = found["head.weight"] * self.head_rows // self.config.vocab_size
        return found

    @property
    def head_is_quantized(self) -> bool:
        """Whether the file holds the head, or the embedding that it is tied to, quantized."""
        return ("embedding.weight" if self.config.tie_embeddings else "head.weight") in self.quantized

    @cached_property
    def offloadable(self) -> OffloadableExperts:
        """The experts that need not be on the GPU."""
        return OffloadableExperts.of(self.config, self.dtype, self.quantized, self.sizes)

    @cached_property
    def weights_use_library(self) -> bool:
        """Whether cuBLAS computes with the layers' matrices, as those of floating point, or with trellises."""
        return any(scheme.is_trellis for scheme in self.quantized.values()) or any(
            matrix.dequantized or name not in self.quantized for name, matrix in _weights(self.config)
        )


def _weights(config: ModelConfig) -> Iterator[tuple[str, MatrixSpec]]:
    """The matrices of the layers by the names of their weights."""
    return ((f"layers.{index}.{matrix.name}.weight", matrix) for index, matrix in config.matrices)


@dataclass(frozen=True)
class MemoryPlan(MemoryNeed):
    """What a model needs of a GPU's memory, laid out to stay within the `available` bytes.

    Attributes:
        context: the longest sequence, in tokens; those of a prefix are not counted.
        pool_tokens: what the cache holds beside prefixes, all sequences of a batch together.
        kv_dtype: of the cache; see `KV_DTYPES`.
        head: the scheme that the head is rounded to at load, or None.
        embedding_on_cpu: whether the embedding stays in the CPU's memory.
        prefill_tokens: how many tokens of the prompts are read at a time.
        offloaded: for each layer, how many of its experts lie in pinned memory of the host; empty: none.
        host_bytes: of these experts.
        speed: a sentence on the expected speed; empty if it is not known.
        embedding: the scheme that the embedding is rounded to at load, or None. A tied head is the same matrix.
    """

    available: int
    context: int
    pool_tokens: int
    kv_dtype: str
    head: Scheme | None
    embedding_on_cpu: bool
    prefill_tokens: int
    offloaded: tuple[int, ...] = ()
    host_bytes: int = 0
    speed: str = ""
    embedding: Scheme | None = None

    def __str__(self) -> str:
        return "\n".join([*(f"{name:<24} {gigabytes(size):>9}" for name, size in self.rows()), *self.choices()])

    def to_json(self) -> dict[str, object]:
        """The plan in plain types; sizes in bytes."""
        schemes = {"head": self.head, "embedding": self.embedding}
        named = {name: None if scheme is None else str(scheme) for name, scheme in schemes.items()}
        return {**asdict(self), "parts": dict(self.parts), **named, "total": self.total}

    def rows(self) -> list[tuple[str, int]]:
        """The parts, their sum and the limit: names and bytes."""
        return [*self.parts.items(), ("together", self.total), ("allowed", self.available)]

    def choices(self) -> list[str]:
        """What was chosen, a line each."""
        choices = [f"context {self.context:,} tokens, cache for {self.pool_tokens:,} (kv_dtype {self.kv_dtype})"]
        if self.head is not None:
            choices.append(f"head rounded to {self.head}")
        if self.embedding is not None:
            choices.append(f"embedding rounded to {self.embedding}")
        if self.embedding_on_cpu:
            choices.append("embedding on the CPU")
        if self.offloaded:
            choices.append(
                f"{sum(self.offloaded):,} experts in pinned memory of the host: {gigabytes(self.host_bytes)}"
            )
        choices.append(f"prompts read {self.prefill_tokens:,} tokens at a time")
        return choices + [self.speed] * bool(self.speed)


def plan_memory(
    stored: Stored,
    limit: int,
    *,
    max_model_len: int | None = None,
    max_num_seqs: int = 16,
    kv_dtype: str = "auto",
) -> MemoryPlan:
    """Lay a model out within `limit` bytes; see the module for what is given up to fit.

    Where several GPUs share the model, the plan is that of the GPU with most weights, and nothing is given up but
    context: engines of several GPUs are not loaded by a plan.

    Args:
        max_model_len: the context, which is then not shortened; None: as long as fits, at least 2,048 tokens.
        max_num_seqs: sequences of a batch; the cache is no larger than all of them need.
        kv_dtype: "auto" lets the plan choose, unless the checkpoint has scales of the KV cache.

    Raises:
        UsageError: it does not fit; the message says what would.
    """
    piece = prompt_piece(stored.config, stored.dtype, limit, max_model_len)
    wanted = _Wanted(stored, stored.sizes, stored.offloadable, limit, max_model_len, max_num_seqs, piece)
    options = list(_options(stored, kv_dtype))
    for option in options:
        found = _lay_out(wanted, _SHORTEST_CONTEXT, option)
        if found is not None:
            return found
    offloading = _offload(wanted, options[-1])
    if offloading is not None:
        return offloading
    raise UsageError(_refusal(stored, limit, max_model_len, max_num_seqs, kv_dtype))


class _Option(NamedTuple):
    """What is given up to fit: attributes of `MemoryPlan`."""

    kv_dtype: str
    head: Scheme | None = None
    embedding: Scheme | None = None
    embedding_on_cpu: bool = False


@dataclass(frozen=True)
class _Wanted:
    """What is to be planned: the arguments of `plan_memory`, the parameters and experts, and how prompts are read."""

    stored: Stored
    sizes: Mapping[str, int]
    experts: OffloadableExperts
    limit: int
    max_model_len: int | None
    max_num_seqs: int
    piece: int


def _lay_out(
    wanted: _Wanted,
    shortest: int,
    option: _Option,
    offloaded: tuple[int, ...] = (),
) -> MemoryPlan | None:
    """The plan with this option, if it fits with a context of `shortest` tokens where none was asked for."""
    stored, limit, asked = wanted.stored, wanted.limit, wanted.max_model_len
    config = stored.config
    least = asked or min(config.max_context, shortest)
    rows = batch_bucket(wanted.max_num_seqs)
    parts = _fixed_parts(stored, wanted.sizes, wanted.experts, rows, wanted.piece, option, offloaded)
    per_token = token_bytes(config, stored.dtype, option.kv_dtype)
    left = limit - sum(parts.values()) - _PAGE
    # Whole blocks, beside those that no sequence gets.
    reading = read_bytes(config, stored.dtype)
    unit = per_token + reading + table_bytes(config)

    def needed(tokens: int) -> int:
        longest = asked or min(max(0, tokens - stored.kept_tokens), config.max_context)
        return tokens * unit + _together_bytes(stored, wanted.piece, wanted.max_num_seqs, longest)

    answering = bisect_right(range(max(0, left) // unit + 1), left, key=needed) - 1
    # Loading stacks the experts layer by layer, which needs those of a layer twice, while nothing else is there.
    stacking = _stacking_bytes(wanted.experts, offloaded)
    loading = (left + parts["workspace"] - stacking) // (per_token + table_bytes(config))
    tokens = min(answering, loading) // BLOCK * BLOCK - stored.kept_tokens
    if tokens < least:
        return None
    context = asked or min(config.max_context, max(least, tokens // _CONTEXT_STEP * _CONTEXT_STEP))
    pool = min(tokens, -(-context // BLOCK) * BLOCK * wanted.max_num_seqs)
    cache = -(-(pool + stored.kept_tokens) * per_token // _PAGE) * _PAGE
    read = (context + stored.prefix_blocks * BLOCK) * reading
    read += _together_bytes(stored, wanted.piece, wanted.max_num_seqs, context)
    parts["workspace"] = max(parts["workspace"] + read, stacking)
    parts |= {"KV cache": cache, "rotary table": context * table_bytes(config)}
    host_bytes = wanted.experts.nbytes(offloaded)
    return MemoryPlan(
        *("GPU", parts, limit, context, pool, option.kv_dtype, option.head, option.embedding_on_cpu),
        *(wanted.piece, offloaded, host_bytes),
        embedding=option.embedding,
    )


def _offload(wanted: _Wanted, option: _Option) -> MemoryPlan | None:
    """The plan with as few offloaded experts as fit; None if none does."""
    experts = wanted.experts
    if not experts.most or wanted.stored.gpus > 1:
        return None
    # Each piece of a prompt reads all offloaded experts: a large one is worth its activations.
    large = replace(wanted, piece=max(wanted.piece, PIECES[0]))
    for each, shortest in ((large, _OFFLOADED_CONTEXT), (wanted, _OFFLOADED_CONTEXT), (wanted, _SHORTEST_CONTEXT)):

        def plan(count: int, each: _Wanted = each, shortest: int = shortest) -> MemoryPlan | None:
            return _lay_out(each, shortest, option, experts.spread(count))

        if plan(experts.most) is not None:
            return plan(1 + bisect_left(range(1, experts.most), True, key=lambda count: plan(count) is not None))
    return None


def least_memory(
    stored: Stored,
    limit: int = 0,
    *,
    max_model_len: int | None = None,
    max_num_seqs: int = 16,
    kv_dtype: str = "auto",
) -> int:
    """Bytes that a model takes with all given up that can be: `plan_memory` fits it into `limit` if it is not less.

    Arguments as of `plan_memory`; how the prompts are read depends a little on the limit.
    """
    least, fixed, per_token = _smallest(stored, limit, max_model_len, max_num_seqs, kv_dtype)
    return fixed + (-(-least // BLOCK) * BLOCK + stored.kept_tokens) * per_token + _PAGE


def enforce(plan: MemoryPlan, device: torch.device) -> None:
    """Have torch refuse what would exceed the plan, from now on and in the whole process.

    The cache is not torch's: it keeps to what is planned for it by itself.

    Raises:
        DeviceError: others hold so much of the card that the plan does not fit.
    """
    free, card = torch.cuda.mem_get_info(device)
    # The context is there by now.
    if free < plan.available - CONTEXT_BYTES:
        raise DeviceError(
            f"{device}: memory of {gigabytes(plan.available)} is planned, but {gigabytes(free)} are free: end what "
            "else uses the card, or give less"
        )
    for_torch = plan.available - plan.parts["CUDA context and kernels"] - plan.parts["KV cache"]
    torch.cuda.set_per_process_memory_fraction(for_torch / card, device)


def check_host_memory(plan: MemoryPlan) -> None:
    """Check that this machine has the main memory for the plan's offloaded experts.

    Raises:
        DeviceError: it has not; the message says what would help.
    """
    free = free_memory(torch.device("cpu"))
    if free is not None and plan.host_bytes > _SHARE_OF_HOST * free:
        raise DeviceError(
            f"{sum(plan.offloaded):,} experts do not fit on the GPU and need {gigabytes(plan.host_bytes)} of pinned "
            f"main memory; {gigabytes(free)} are free here, {_SHARE_OF_HOST:.0%} of which can be pinned: give more "
            "memory of the GPU, or free main memory"
        )


def _options(stored: Stored, kv_dtype: str) -> Iterator[_Option]:
    """What may be given up: what is best first."""
    kv_dtype = chosen_dtype(kv_dtype, stored.kv_cache)
    stored_dtype(stored.config, kv_dtype, stored.dtype)
    if stored.gpus > 1:
        yield _Option(kv_dtype)
        return
    # Latents are not rounded unasked.
    smallest = "int8" if kv_dtype == "auto" and not stored.config.attention.cache_entry.latent else kv_dtype
    yield _Option(kv_dtype)
    if smallest != kv_dtype:
        yield _Option(smallest)
    width = stored.config.hidden_size
    rounded = Scheme(8, 128 if width % 128 == 0 else None)
    head = None if stored.head_is_quantized else rounded
    embedding = None if "embedding.weight" in stored.quantized else rounded
    if stored.config.tie_embeddings:
        # One matrix, which the head reads at every step: elsewhere, the embedding would be a second one.
        if embedding is not None:
            yield _Option(smallest, head, embedding)
        return
    if head is not None:
        yield _Option(smallest, head)
    if embedding is not None:
        yield _Option(smallest, head, embedding)
    yield _Option(smallest, head, embedding_on_cpu=True)


def _fixed_parts(
    stored: Stored,
    sizes: Mapping[str, int],
    experts: OffloadableExperts,
    rows: int,
    piece: int,
    option: _Option,
    offloaded: tuple[int, ...],
) -> dict[str, int]:
    """Bytes of everything but the cache, with so many experts of each layer in the memory of the host."""
    config = stored.config
    layers = sum(size for name, size in sizes.items() if name.startswith("layers.")) - experts.nbytes(offloaded)
    ends = end_bytes(stored, option.head, option.embedding)
    embedding = 0 if option.embedding_on_cpu else ends["embedding"]
    heads = ends["head"]
    scores = rows * config.vocab_size * (stored.dtype.itemsize + 3 * torch.float32.itemsize)
    library = _uses_library(stored, rows, option.head)
    return {
        "layers": layers,
        **({"adapters": stored.adapters} if stored.adapters else {}),
        "embedding": embedding,
        "head": heads,
        "workspace": sum(activation_bytes(config, stored.dtype, tokens) for tokens in (piece, PLANNED_ROWS))
        + scores
        + _WORKSPACE
        + _dequantized_bytes(stored)
        + library * _LIBRARY_WORKSPACE,
        "allocator's granularity": int(_GRANULARITY * (layers + stored.adapters + embedding + heads)),
        "CUDA context and kernels": CONTEXT_BYTES + library * LIBRARY_BYTES,
    }


def end_bytes(stored: Stored, head: Scheme | None, embedding: Scheme | None) -> dict[str, int]:
    """Bytes of "embedding" and "head", rounded to these schemes if they are given; 0 of a head that is tied to the
    embedding and the same matrix."""
    shape, sizes = (stored.config.vocab_size, stored.config.hidden_size), stored.sizes
    own = sizes.get("head.weight", 0) if head is None else packed_bytes(head, *shape)
    return {
        "embedding": sizes["embedding.weight"] if embedding is None else packed_bytes(embedding, *shape),
        "head": 0 if stored.config.tie_embeddings and embedding is not None else own,
    }


def _together_bytes(stored: Stored, piece: int, seqs: int, context: int) -> int:
    """What `seqs` sequences of a step take beside the activations and what one of them reads of the cache."""
    config, dtype = stored.config, stored.dtype
    return (
        joined_bytes(config, dtype, seqs, context)
        + expanded_bytes(config, dtype, piece, seqs, context)
        + selection_bytes(config, batch_bucket(seqs), context)
    )


def _dequantized_bytes(stored: Stored) -> int:
    """The weights of trellises that products of many rows dequantize at a time."""
    return BUFFER_BYTES if any(scheme.is_trellis for scheme in stored.quantized.values()) else 0


def _stacking_bytes(experts: OffloadableExperts, offloaded: tuple[int, ...]) -> int:
    """What torch takes to stack the experts of a layer while the model is loaded."""
    return int((1 + _GRANULARITY) * experts.stacking_bytes(offloaded))


def _uses_library(stored: Stored, rows: int, head: Scheme | None) -> bool:
    """Whether cuBLAS is called: for matrices of floating point, but for the head with a single row, for trellises,
    and for LoRAs."""
    plain_head = head is None and not stored.head_is_quantized
    return (
        bool(stored.adapters)
        or stored.dtype not in HALVES
        or stored.weights_use_library
        or stored.config.mtp is not None
        or (plain_head and rows > 1)
    )


def _smallest(
    stored: Stored, limit: int, max_model_len: int | None, max_num_seqs: int, kv_dtype: str
) -> tuple[int, int, int]:
    """Of the layout that takes least: the shortest context, the bytes of everything but the cache, those of a token."""
    config = stored.config
    option = list(_options(stored, kv_dtype))[-1]
    piece = prompt_piece(config, stored.dtype, limit, max_model_len)
    experts = stored.offloadable
    rows = batch_bucket(max_num_seqs)
    offloaded = experts.counts if stored.gpus == 1 else ()
    parts = _fixed_parts(stored, stored.sizes, experts, rows, piece, option, offloaded)
    parts["workspace"] = max(parts["workspace"], _stacking_bytes(experts, offloaded))
    per_token = (
        token_bytes(config, stored.dtype, option.kv_dtype) + read_bytes(config, stored.dtype) + table_bytes(config)
    )
    least = max_model_len or min(config.max_context, _SHORTEST_CONTEXT)
    together = _together_bytes(stored, piece, max_num_seqs, least)
    return least, sum(parts.values()) + together, per_token


def _fitting_context(stored: Stored, limit: int, asked: int, max_num_seqs: int, kv_dtype: str) -> int:
    """The longest context of whole steps that fits and is shorter than the one that was asked for; 0: none."""

    def needed(context: int) -> int:
        return least_memory(stored, limit, max_model_len=context, max_num_seqs=max_num_seqs, kv_dtype=kv_dtype)

    return bisect_right(range(_CONTEXT_STEP, asked, _CONTEXT_STEP), limit, key=needed) * _CONTEXT_STEP


def _fitting_seqs(stored: Stored, limit: int, max_model_len: int | None, asked: int, kv_dtype: str) -> int:
    """The most sequences of a batch, fewer than were asked for, that fit; 0: not even one."""

    def needed(seqs: int) -> int:
        return least_memory(stored, limit, max_model_len=max_model_len, max_num_seqs=seqs, kv_dtype=kv_dtype)

    return bisect_right(range(1, asked), limit, key=needed)


def _refusal(stored: Stored, limit: int, max_model_len: int | None, max_num_seqs: int, kv_dtype: str) -> str:
    """Why no layout fits, and what would."""
    config = stored.config
    least = max_model_len or min(config.max_context, _SHORTEST_CONTEXT)
    need = least_memory(stored, limit, max_model_len=max_model_len, max_num_seqs=max_num_seqs, kv_dtype=kv_dtype)
    advice = [f"give memory {math.ceil(need / 1e8) / 10:.1f}GB"] + ["share it among more GPUs"] * (stored.gpus > 1)
    if max_model_len is not None and (shorter := _fitting_context(stored, limit, least, max_num_seqs, kv_dtype)):
        advice.append(f"a max_model_len of {shorter:,}")
    if fewer := _fitting_seqs(stored, limit, max_model_len, max_num_seqs, kv_dtype):
        advice.append(f"a max_num_seqs of {fewer:,}")
    if not stored.quantized:
        quantized = Stored.uniform(config, stored.dtype, _SUGGESTED).quantized
        smaller = replace(stored, quantized=quantized)
        try:
            fits = plan_memory(smaller, limit, max_num_seqs=max_num_seqs, kv_dtype=kv_dtype)
        except (UsageError, ValueError):
            fits = None
        if fits is not None:
            advice.append(f"quantize it: it fits with {_SUGGESTED} and a context of {fits.context:,}")
    if stored.gpus > 1:
        what = f"each of {stored.gpus} GPUs needs {gigabytes(need)} for a context of {least:,} tokens"
    else:
        what = f"the model needs {gigabytes(need)} for a context of {least:,} tokens, however it is laid out"
    return f"memory is {gigabytes(limit)}, but {what}: {', or '.join(advice)}"
