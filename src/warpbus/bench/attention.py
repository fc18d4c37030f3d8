"""`attention`: one new token of every sequence against its cache, beside torch's fused attention.

Ours reads a cache in blocks, as the engine keeps it; torch's reads rows that lie in one piece.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.bench.cases import Benchmark, Case, PeerContender, Plot, Run, normal
from warpbus.bench.ceilings import copy_bandwidth
from warpbus.bench.records import Parameter
from warpbus.cuda.dtype_names import short_name
from warpbus.engine.blocks import BLOCK
from warpbus.kernels.ops.attention import decode_attention
from warpbus.kernels.ops.rope import rope_and_cache
from warpbus.kernels.reference.cache import INT4, stored_length

_HEAD_DIM = 128
_CONTEXTS = (1024, 4096, 16384)
_BATCHES = (1, 8, 32)
_SCALE_BYTES = 4

# The dtypes of the cache: that of the activations, or 8 or 4 bits per element with a float32 scale per vector.
_CACHES = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": INT4}


@dataclass(frozen=True)
class _Shape:
    """Attention of a model. The first `rotary_dim` elements of a head are rotated."""

    heads: int
    kv_heads: int
    rotary_dim: int
    interleaved: bool
    contexts: tuple[int, ...]


_SHAPES = (
    _Shape(32, 2, _HEAD_DIM // 2, True, _CONTEXTS),  # ChatGLM2-6B, GLM-4-9B
    _Shape(32, 8, _HEAD_DIM, False, (4096,)),  # Llama-3-8B
)


@dataclass(frozen=True)
class _Cache:
    """Keys and values `[blocks, kv_heads, BLOCK, head_dim]`, their scales if they have some, and whose blocks they are.

    Attributes:
        table: int32 `[batch, blocks of a sequence]`, in no order, as after hours of serving.
        slots: int64 `[batch]`, where the last token of each sequence is.
    """

    table: Tensor
    slots: Tensor
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None


def _cases(run: Run) -> list[Callable[[], Case]]:
    variants = run.choose_variants(tuple(_CACHES), ("auto",) if run.quick else tuple(_CACHES))
    return [
        partial(_case, run, shape, variant, context, batch)
        for variant in variants
        for shape in (_SHAPES[:1] if run.quick else _SHAPES)
        for context in run.choose_sizes(shape.contexts, shape.contexts[:2])
        for batch in _BATCHES
    ]


def _case(run: Run, shape: _Shape, variant: str, context: int, batch: int) -> Case:
    dtype = run.dtype or torch.float16
    width = (shape.heads + 2 * shape.kv_heads) * _HEAD_DIM
    table = _rotary_table(context, shape.rotary_dim, run.device)
    positions = torch.full((batch,), context - 1, device=run.device, dtype=torch.int32)

    def make() -> tuple[Tensor, Tensor, _Cache, Tensor, Tensor]:
        keys, values = (
            torch.randn(batch, shape.kv_heads, context, _HEAD_DIM, device=run.device, dtype=dtype) for _ in range(2)
        )
        q = torch.randn(batch, shape.heads, 1, _HEAD_DIM, device=run.device, dtype=dtype)
        return normal(batch, width, run.device, dtype), q, _cache(keys, values, _CACHES[variant]), keys, values

    stores_first = _CACHES[variant] == INT4  # by a kernel of its own, as in the engine

    def ours(qkv: Tensor, q: Tensor, cache: _Cache, keys: Tensor, values: Tensor) -> Tensor:
        of_cache = cache.keys, cache.values, cache.key_scales, cache.value_scales
        heads, interleaved = shape.heads, shape.interleaved
        if stores_first:
            rope_and_cache(qkv, table, positions, cache.slots, *of_cache, heads=heads, interleaved=interleaved)
        return decode_attention(
            qkv,
            table,
            positions,
            cache.table,
            *of_cache,
            heads=heads,
            interleaved=interleaved,
            limit=context,
            stored=stores_first,
            inputs_ready=not stores_first,
        )

    def torch_attention(qkv: Tensor, q: Tensor, cache: _Cache, keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    stored = _CACHES[variant]
    a_vector = _HEAD_DIM * dtype.itemsize
    if stored is not None:
        a_vector = stored_length(_HEAD_DIM, stored) * stored.itemsize + _SCALE_BYTES
    moved = 2 * batch * shape.kv_heads * context * a_vector
    moved += batch * (width + shape.heads * _HEAD_DIM) * dtype.itemsize
    return Case(
        parameters={
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "context": context,
            "batch": batch,
            "dtype": short_name(dtype),
            "variant": variant,
        },
        metric="time",
        work=moved,
        floor_seconds=moved / copy_bandwidth(run.device),
        make=make,
        ours=ours,
        rivals=[PeerContender("SDPA", torch.__version__, torch_attention)],
        touched=moved,
    )


def _cache(keys: Tensor, values: Tensor, stored: torch.dtype | None) -> _Cache:
    """Keys and values `[batch, kv_heads, context, head_dim]` in blocks; in their place random codes of `stored`."""
    batch, kv_heads, context, head_dim = keys.shape
    count = -(-context // BLOCK)
    table = torch.randperm(batch * count, device=keys.device).int().view(batch, count)
    slots = table[:, -1].long() * BLOCK + (context - 1) % BLOCK
    if stored is None:
        return _Cache(table, slots, in_blocks(keys, table), in_blocks(values, table), None, None)
    shape = (batch * count, kv_heads, BLOCK)
    if stored == INT4:
        packed = [torch.randint(256, (*shape, head_dim // 2), device=keys.device).to(INT4) for _ in range(2)]
        return _Cache(table, slots, *packed, *(torch.rand(shape, device=keys.device).add_(0.5) for _ in range(2)))
    largest = 127.0 if stored == torch.int8 else torch.finfo(stored).max
    # Of normal numbers the largest of a vector is about 3 deviations.
    codes = [
        torch.randn(*shape, head_dim, device=keys.device).mul_(largest / 3).clamp_(-largest, largest).to(stored)
        for _ in range(2)
    ]
    scales = [torch.rand(shape, device=keys.device).add_(0.5).mul_(3 / largest) for _ in range(2)]
    return _Cache(table, slots, *codes, *scales)


def in_blocks(vectors: Tensor, table: Tensor) -> Tensor:
    """`[batch, kv_heads, context, head_dim]` as the blocks that the table names, the last ones filled up with zeros."""
    count = table.shape[1]
    padded = F.pad(vectors, (0, 0, 0, count * BLOCK - vectors.shape[2]))
    blocks = padded.unflatten(2, (count, BLOCK)).transpose(1, 2).flatten(0, 1)
    return torch.empty_like(blocks).index_copy_(0, table.flatten().long(), blocks)


def _rotary_table(positions: int, rotary_dim: int, device: torch.device) -> Tensor:
    """float32 `[positions, rotary_dim]`: cosines, then sines."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, device=device) / rotary_dim)
    angles = torch.arange(positions, device=device)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def _of_batch(batch: int) -> Callable[[Mapping[str, Parameter]], bool]:
    return lambda case: case["batch"] == batch


ATTENTION = Benchmark(
    name="attention",
    title="Attention of one new token a sequence",
    cases=_cases,
    plot=Plot(x="batch", x_label="sequences", panels=("kv_heads", "context")),
    needs_gpu=True,
    means={f"batch {batch}": _of_batch(batch) for batch in _BATCHES},
)
