"""`mla`: multi-head latent attention of one new token of every sequence, beside torch's matrix products.

Both attend in the absorbed form and project the sums of latents to the heads' values. Ours reads a cache in blocks, as
the engine keeps it, in 16 bits or in FP8; torch's reads rows of 16 bits that lie in one piece. torch's fused attention
is no peer: it has no kernel for heads of 576 features, and takes 2 to 68 times as long as ours.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from warpbus.bench.cases import Benchmark, Case, PeerContender, Plot, Run, dtype_name
from warpbus.bench.ceilings import copy_bandwidth
from warpbus.bench.records import Parameter
from warpbus.bench.sparse_latents import SPARSE_CONTEXTS, SPARSE_VARIANTS, in_blocks, sparse_case
from warpbus.engine.blocks import BLOCK
from warpbus.kernels.ops.mla import mla_attention
from warpbus.kernels.reference.latent_cache import token_bytes
from warpbus.models import SHAPES, LatentAttentionSpec

_CONTEXTS = (1024, 4096, 16384)
_BATCHES = (1, 8, 32)
_MODEL = "glm-4.7-flash"
_VARIANTS = ("auto", "fp8")  # of the cache: in the dtype of the activations, or in FP8


def _cases(run: Run) -> list[Callable[[], Case]]:
    found: list[Callable[[], Case]] = []
    for variant in run.choose_variants((*_VARIANTS, *SPARSE_VARIANTS), _VARIANTS):
        sparse = variant in SPARSE_VARIANTS
        contexts, case = (SPARSE_CONTEXTS, sparse_case) if sparse else (_CONTEXTS, _case)
        for context in run.choose_sizes(contexts, contexts[1:2]):
            found += [partial(case, run, variant, context, batch) for batch in _BATCHES]
    return found


def _case(run: Run, variant: str, context: int, batch: int) -> Case:
    spec, dtype = SHAPES[_MODEL].attention, run.dtype or torch.bfloat16
    assert isinstance(spec, LatentAttentionSpec)
    scale, rank = spec.query_dim**-0.5, spec.kv_rank
    positions = torch.full((batch,), context - 1, device=run.device, dtype=torch.int32)

    def make() -> tuple[Tensor, ...]:
        """Queries `[batch, heads, rank + rope]`, the projections `kv_b`, latents `[batch, context, rank + rope]` in one
        piece, and those as a cache in blocks in no order, as after hours of serving, with its table."""

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=run.device, dtype=dtype)

        kv_b = random(spec.num_heads, spec.nope_dim + spec.value_dim, rank) * rank**-0.5
        rows = random(batch, context, spec.head_dim)
        table = torch.randperm(batch * -(-context // BLOCK), device=run.device).int().view(batch, -1)
        cache = in_blocks(rows, table, rank, coded=variant == "fp8")
        return random(batch, spec.num_heads, spec.head_dim), kv_b, rows, cache, table

    def ours(q: Tensor, kv_b: Tensor, rows: Tensor, cache: Tensor, table: Tensor) -> Tensor:
        del rows
        return mla_attention(
            q,
            positions,
            table,
            cache,
            kv_b,
            value_dim=spec.value_dim,
            scale=scale,
            limit=context,
            inputs_ready=True,
        )

    def torch_attention(q: Tensor, kv_b: Tensor, rows: Tensor, cache: Tensor, table: Tensor) -> Tensor:
        del cache, table
        weights = torch.softmax(torch.bmm(q, rows.mT) * scale, dim=-1, dtype=torch.float32)
        attended = torch.bmm(weights.to(q.dtype), rows[..., :rank])
        return torch.bmm(attended.transpose(0, 1), kv_b[:, spec.nope_dim :].mT).transpose(0, 1)

    a_token = spec.head_dim * dtype.itemsize
    if variant == "fp8":
        a_token = token_bytes(rank, spec.rope_dim, dtype)
    moved = batch * context * a_token + spec.num_heads * spec.value_dim * rank * dtype.itemsize
    moved += batch * spec.num_heads * (spec.head_dim + spec.value_dim) * dtype.itemsize
    return Case(
        parameters={
            "shape": _MODEL,
            "heads": spec.num_heads,
            "context": context,
            "batch": batch,
            "dtype": dtype_name(dtype),
            "variant": variant,
        },
        metric="time",
        work=moved,
        floor_seconds=moved / copy_bandwidth(run.device),
        make=make,
        ours=ours,
        rivals=[PeerContender("torch.bmm", torch.__version__, torch_attention)],
        touched=moved,
    )


def _of(batch: int, variant: str) -> Callable[[Mapping[str, Parameter]], bool]:
    return lambda case: (case["batch"], case["variant"]) == (batch, variant)


MLA = Benchmark(
    name="mla",
    title="Multi-head latent attention of one new token a sequence",
    cases=_cases,
    plot=Plot(x="batch", x_label="sequences", panels=("variant", "context")),
    needs_gpu=True,
    means={
        f"batch {batch}, {variant}": _of(batch, variant)
        for variant in (*_VARIANTS, *SPARSE_VARIANTS)
        for batch in _BATCHES
    },
)
