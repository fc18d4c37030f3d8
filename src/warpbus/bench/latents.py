"""`mla`: multi-head latent attention of one new token of every sequence, beside torch's matrix products.

Both attend in the absorbed form and project the sums of latents to the heads' values. Ours reads a cache in blocks, as
the engine keeps it, in 16 bits or in FP8; torch's reads rows of 16 bits that lie in one piece. torch's fused attention
is no peer: it has no kernel for heads of 576 features, and takes 2 to 68 times as long as ours.

The variants `sparse` are sparse attention (DSA) of GLM-5. Ours scores the cached keys of the indexer, selects tokens
and attends to these; torch does the same by matrix products, `topk` and a gather. Neither makes the indexer's queries
and keys.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from warpbus.bench.attention import in_blocks
from warpbus.bench.cases import Benchmark, Case, PeerContender, Plot, Run
from warpbus.bench.ceilings import copy_bandwidth
from warpbus.bench.records import Parameter
from warpbus.bench.timing import Call
from warpbus.cuda.dtype_names import short_name
from warpbus.engine.blocks import BLOCK
from warpbus.kernels.ops.dsa import index_scores, index_select
from warpbus.kernels.ops.mla import mla_attention
from warpbus.kernels.reference.latent_cache import LATENT_CODES, quantize, token_bytes
from warpbus.models import SHAPES, IndexerSpec, LatentAttentionSpec

_BATCHES = (1, 8, 32)
# With a cache of latents in the dtype of the activations, or in FP8.
_DENSE_VARIANTS = ("auto", "fp8")
_DENSE_CONTEXTS = (1024, 4096, 16_384)
_DENSE_MODEL = "glm-4.7-flash"
_SPARSE_VARIANTS = ("sparse", "sparse-fp8")
_SPARSE_CONTEXTS = (4096, 32_768, 131_072)
_SPARSE_MODEL = "glm-5"
_INDEXER = IndexerSpec(heads=32, head_dim=128, top_k=2048)
_SPARSE = LatentAttentionSpec(
    64, query_rank=2048, kv_rank=512, nope_dim=192, rope_dim=64, value_dim=256, norm_eps=1e-5, indexer=_INDEXER
)
_ROUNDED_AT_ONCE = 2**16  # tokens, which take some hundred bytes each meanwhile


def _cases(run: Run) -> list[Callable[[], Case]]:
    found: list[Callable[[], Case]] = []
    for variant in run.choose_variants((*_DENSE_VARIANTS, *_SPARSE_VARIANTS), _DENSE_VARIANTS):
        sparse = variant in _SPARSE_VARIANTS
        contexts, case = (_SPARSE_CONTEXTS, _sparse_case) if sparse else (_DENSE_CONTEXTS, _dense_case)
        for context in run.choose_sizes(contexts, contexts[1:2]):
            found += [partial(case, run, variant, context, batch) for batch in _BATCHES]
    return found


@dataclass(frozen=True)
class _Decoding:
    """One new token of each of `batch` sequences of `context` tokens: what dense and sparse attention share.

    Attributes:
        shape: the name of the model whose attention `spec` is.
    """

    device: torch.device
    dtype: torch.dtype
    shape: str
    spec: LatentAttentionSpec
    variant: str
    context: int
    batch: int

    @property
    def coded(self) -> bool:
        """Whether the cache of latents is in FP8."""
        return self.variant in (_DENSE_VARIANTS[1], _SPARSE_VARIANTS[1])

    @property
    def scale(self) -> float:
        return self.spec.query_dim**-0.5

    def positions(self, last: int) -> Tensor:
        """int32 `[batch]`, all `last`."""
        return torch.full((self.batch,), last, device=self.device, dtype=torch.int32)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def make(self) -> tuple[Tensor, ...]:
        """Queries `[batch, heads, rank + rope]`, the projections `kv_b`, latents `[batch, context, rank + rope]` in one
        piece, and those as a cache in blocks in no order, as after hours of serving, with its table."""
        spec = self.spec
        kv_b = self.random(spec.num_heads, spec.nope_dim + spec.value_dim, spec.kv_rank) * spec.kv_rank**-0.5
        rows = self.random(self.batch, self.context, spec.head_dim)
        table = torch.randperm(self.batch * -(-self.context // BLOCK), device=self.device).int().view(self.batch, -1)
        return self.random(self.batch, spec.num_heads, spec.head_dim), kv_b, rows, self._cache(rows, table), table

    def _cache(self, rows: Tensor, table: Tensor) -> Tensor:
        """Latents as the blocks that the table names, `[blocks, 1, BLOCK, ...]`."""
        if not self.coded:
            return in_blocks(rows[:, None], table)
        parts = [quantize(part, self.spec.kv_rank) for part in rows.flatten(0, 1).split(_ROUNDED_AT_ONCE)]
        return in_blocks(torch.cat(parts).view(self.batch, 1, self.context, -1), table).view(LATENT_CODES)

    def by_torch(self, q: Tensor, kv_b: Tensor, rows: Tensor) -> Tensor:
        """Attention to all of `rows`, `[batch, tokens, rank + rope]`, by matrix products."""
        weights = torch.softmax(torch.bmm(q, rows.mT) * self.scale, dim=-1, dtype=torch.float32)
        attended = torch.bmm(weights.to(q.dtype), rows[..., : self.spec.kv_rank])
        return torch.bmm(attended.transpose(0, 1), kv_b[:, self.spec.nope_dim :].mT).transpose(0, 1)

    def case(
        self,
        make: Callable[[], tuple[Tensor, ...]],
        ours: Call,
        rival: Call,
        *,
        latents: int,
        others: int = 0,
    ) -> Case:
        """The case of these calls, which read so many latents of each sequence, and `others` bytes of it besides."""
        spec, dtype = self.spec, self.dtype
        of_latent = spec.head_dim * dtype.itemsize
        if self.coded:
            of_latent = token_bytes(spec.kv_rank, spec.rope_dim, dtype)
        moved = (
            self.batch * (latents * of_latent + others)
            + spec.num_heads * spec.value_dim * spec.kv_rank * dtype.itemsize
        )
        moved += self.batch * spec.num_heads * (spec.head_dim + spec.value_dim) * dtype.itemsize
        return Case(
            parameters={
                "shape": self.shape,
                "heads": spec.num_heads,
                "context": self.context,
                "batch": self.batch,
                "dtype": short_name(dtype),
                "variant": self.variant,
            },
            metric="time",
            work=moved,
            floor_seconds=moved / copy_bandwidth(self.device),
            make=make,
            ours=ours,
            rivals=[PeerContender("torch.bmm", torch.__version__, rival)],
            touched=moved,
        )


def _dense_case(run: Run, variant: str, context: int, batch: int) -> Case:
    spec = SHAPES[_DENSE_MODEL].attention
    assert isinstance(spec, LatentAttentionSpec)
    decoding = _Decoding(run.device, run.dtype or torch.bfloat16, _DENSE_MODEL, spec, variant, context, batch)
    positions = decoding.positions(context - 1)

    def ours(q: Tensor, kv_b: Tensor, rows: Tensor, cache: Tensor, table: Tensor) -> Tensor:
        del rows
        value_dim, scale = spec.value_dim, decoding.scale
        return mla_attention(
            q, positions, table, cache, kv_b, value_dim=value_dim, scale=scale, limit=context, inputs_ready=True
        )

    def torch_attention(q: Tensor, kv_b: Tensor, rows: Tensor, *cache: Tensor) -> Tensor:
        del cache
        return decoding.by_torch(q, kv_b, rows)

    return decoding.case(decoding.make, ours, torch_attention, latents=context)


def _sparse_case(run: Run, variant: str, context: int, batch: int) -> Case:
    spec, dtype = _SPARSE, run.dtype or torch.bfloat16
    decoding = _Decoding(run.device, dtype, _SPARSE_MODEL, spec, variant, context, batch)
    top_k = min(_INDEXER.top_k, context)
    positions, last_selected = decoding.positions(context - 1), decoding.positions(top_k - 1)

    def make() -> tuple[Tensor, ...]:
        """As `_Decoding.make`; then the indexer's queries `[batch, 32, 128]` and float32 weights of its heads, its keys
        `[batch, context, 128]` in one piece, and those in blocks of the same table."""
        q, kv_b, rows, cache, table = decoding.make()
        keys = decoding.random(batch, context, _INDEXER.head_dim)
        index_q = decoding.random(batch, _INDEXER.heads, _INDEXER.head_dim)
        weights = torch.randn(batch, _INDEXER.heads, device=run.device)
        return q, kv_b, rows, cache, table, index_q, weights, keys, in_blocks(keys[:, None], table)

    def ours(q: Tensor, kv_b: Tensor, rows: Tensor, cache: Tensor, table: Tensor, *indexer: Tensor) -> Tensor:
        index_q, weights, _, keys = indexer
        scores = index_scores(index_q, weights, positions, table, keys, limit=context)
        slots = index_select(scores, positions, table, top_k=top_k, block=BLOCK)
        value_dim, scale = spec.value_dim, decoding.scale
        return mla_attention(
            q, last_selected, slots, cache, kv_b, value_dim=value_dim, scale=scale, limit=top_k, listed=True
        )

    def torch_attention(q: Tensor, kv_b: Tensor, rows: Tensor, *others: Tensor) -> Tensor:
        _, _, index_q, weights, keys, _ = others
        products = torch.bmm(index_q, keys.mT).relu_()
        scores = torch.bmm(weights.to(dtype)[:, None], products)[:, 0]
        best = scores.topk(top_k, sorted=False).indices
        return decoding.by_torch(q, kv_b, rows.gather(1, best[..., None].expand(-1, -1, rows.shape[2])))

    keys_read = context * _INDEXER.head_dim * dtype.itemsize
    return decoding.case(make, ours, torch_attention, latents=top_k, others=keys_read)


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
        for variant in (*_DENSE_VARIANTS, *_SPARSE_VARIANTS)
        for batch in _BATCHES
    },
)
