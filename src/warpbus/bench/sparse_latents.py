"""The variants `sparse` of `mla`: sparse attention (DSA) of GLM-5, one new token of every sequence, beside torch.

Ours scores the cached keys of the indexer, selects tokens and attends to these, from a cache in blocks, as the engine
keeps it. torch does the same by matrix products, `topk` and a gather, from rows that lie in one piece. Neither makes
the indexer's queries and keys.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from warpbus.bench.cases import Case, PeerContender, Run, dtype_name
from warpbus.bench.ceilings import copy_bandwidth
from warpbus.engine.blocks import BLOCK
from warpbus.kernels.ops.dsa import index_scores, index_select
from warpbus.kernels.ops.mla import mla_attention
from warpbus.kernels.reference.latent_cache import LATENT_CODES, quantize, token_bytes
from warpbus.models import IndexerSpec, LatentAttentionSpec

SPARSE_VARIANTS = ("sparse", "sparse-fp8")
"""With a cache of latents in the dtype of the activations, or in FP8."""

SPARSE_CONTEXTS = (4096, 32_768, 131_072)

_ROUNDED_AT_ONCE = 2**16  # tokens, which take some hundred bytes each meanwhile
_MODEL = "glm-5"
_INDEXER = IndexerSpec(heads=32, head_dim=128, top_k=2048)
_SPEC = LatentAttentionSpec(
    64, query_rank=2048, kv_rank=512, nope_dim=192, rope_dim=64, value_dim=256, norm_eps=1e-5, indexer=_INDEXER
)


def sparse_case(run: Run, variant: str, context: int, batch: int) -> Case:
    """So many sequences of `context` tokens each."""
    spec, dtype, coded = _SPEC, run.dtype or torch.bfloat16, variant == SPARSE_VARIANTS[1]
    scale, rank, top_k = spec.query_dim**-0.5, spec.kv_rank, min(_INDEXER.top_k, context)
    positions = torch.full((batch,), context - 1, device=run.device, dtype=torch.int32)
    last = positions.clamp(max=top_k - 1)

    def make() -> tuple[Tensor, ...]:
        """Queries `[batch, heads, rank + rope]`, the projections `kv_b`, the indexer's queries `[batch, 32, 128]` and
        float32 weights of its heads; latents and the indexer's keys `[batch, context, features]` in one piece, and
        those as caches in blocks in no order, as after hours of serving, with their table."""

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=run.device, dtype=dtype)

        kv_b = random(spec.num_heads, spec.nope_dim + spec.value_dim, rank) * rank**-0.5
        weights = torch.randn(batch, _INDEXER.heads, device=run.device)
        rows, keys = random(batch, context, spec.head_dim), random(batch, context, _INDEXER.head_dim)
        table = torch.randperm(batch * -(-context // BLOCK), device=run.device).int().view(batch, -1)
        caches = in_blocks(rows, table, rank, coded=coded), in_blocks(keys, table, rank, coded=False)
        q, own = random(batch, spec.num_heads, spec.head_dim), random(batch, _INDEXER.heads, _INDEXER.head_dim)
        return q, kv_b, own, weights, rows, keys, *caches, table

    def ours(q: Tensor, kv_b: Tensor, own: Tensor, weights: Tensor, *caches: Tensor) -> Tensor:
        _, _, cache, keys, table = caches
        scores = index_scores(own, weights, positions, table, keys, limit=context)
        slots = index_select(scores, positions, table, top_k=top_k, block=BLOCK)
        sizes = {"value_dim": spec.value_dim, "scale": scale, "limit": top_k}
        return mla_attention(q, last, slots, cache, kv_b, **sizes, listed=True)

    def torch_attention(q: Tensor, kv_b: Tensor, own: Tensor, weights: Tensor, *caches: Tensor) -> Tensor:
        rows, keys = caches[:2]
        products = torch.bmm(own, keys.mT).relu_()
        scores = torch.bmm(weights.to(dtype)[:, None], products)[:, 0]
        best = scores.topk(top_k, sorted=False).indices
        chosen = rows.gather(1, best[..., None].expand(-1, -1, rows.shape[2]))
        shares = torch.softmax(torch.bmm(q, chosen.mT) * scale, dim=-1, dtype=torch.float32)
        attended = torch.bmm(shares.to(q.dtype), chosen[..., :rank])
        return torch.bmm(attended.transpose(0, 1), kv_b[:, spec.nope_dim :].mT).transpose(0, 1)

    a_token = token_bytes(rank, spec.rope_dim, dtype) if coded else spec.head_dim * dtype.itemsize
    moved = batch * (context * _INDEXER.head_dim * dtype.itemsize + top_k * a_token)
    moved += spec.num_heads * spec.value_dim * rank * dtype.itemsize
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


def in_blocks(rows: Tensor, table: Tensor, rank: int, *, coded: bool) -> Tensor:
    """`[batch, context, features]` as the blocks that the table names, `[blocks, 1, BLOCK, ...]`, the last ones filled
    up with zeros; latents of `rank` features in FP8 if they are `coded`."""
    count = table.shape[1]
    padded = F.pad(rows, (0, 0, 0, count * BLOCK - rows.shape[1])).flatten(0, 1)
    if coded:
        padded = torch.cat([quantize(part, rank) for part in padded.split(_ROUNDED_AT_ONCE)])
    blocks = padded.view(table.numel(), 1, BLOCK, -1)
    cache = torch.empty_like(blocks).index_copy_(0, table.flatten().long(), blocks)
    return cache.view(LATENT_CODES) if coded else cache
