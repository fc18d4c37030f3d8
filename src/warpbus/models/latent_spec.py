"""The parts of multi-head latent attention: its rows of the table of a layer (`warpbus.models.layer_spec`)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from warpbus.models.layer_spec import Axis, CacheEntry, FoldTarget, MatrixSpec


@dataclass(frozen=True)
class IndexerSpec:
    """The indexer of sparse attention (DSA; DeepSeek-V3.2-Exp, 2025), which is never quantized.

    Attributes:
        heads, head_dim: its query heads, which share a key per token, and their features.
        top_k: tokens that a token attends to at most.
        shared: the layer has no indexer, and attends to the tokens that the last layer with an indexer has selected.
    """

    heads: int
    head_dim: int
    top_k: int
    shared: bool = False

    def parameters(self, query_rank: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of its parameters by their names."""
        return {
            "attention.indexer.q.weight": (self.heads * self.head_dim, query_rank),
            "attention.indexer.k.weight": (self.head_dim, hidden_size),
            "attention.indexer.k_norm.weight": (self.head_dim,),
            "attention.indexer.k_norm.bias": (self.head_dim,),
            "attention.indexer.weights.weight": (self.heads, hidden_size),
        }


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Keys and values of all heads are projections of one latent per token. The KV cache stores the latent and one rotary
    key. With the projection absorbed into queries and outputs, attention has a single KV head, whose keys are the
    latent and the rotary key, and whose values are the latent.

    Attributes:
        num_heads: query heads.
        query_rank: features of the latent that queries are projected from; None: from the hidden states.
        kv_rank: features of the latent of keys and values.
        nope_dim, rope_dim: features of a head's query and key without and with rotary positions.
        value_dim: features of a head's value.
        norm_eps: of the RMSNorms of the latents.
        bias: whether the projections to the latents have biases.
        output_bias: whether the output projection has one.
        indexer: selects the tokens that are attended to; it needs `query_rank`. None: all tokens are.
    """

    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float
    bias: bool = False
    output_bias: bool = False
    indexer: IndexerSpec | None = None

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the absorbed form."""
        return 1

    @property
    def head_dim(self) -> int:
        """Features of a key of the absorbed form: the latent and the rotary key."""
        return self.kv_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Features of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Features of the output of all heads."""
        return self.num_heads * self.value_dim

    @property
    def cache_entry(self) -> CacheEntry:
        """The entries of one token in one layer's KV cache."""
        own = self.indexer is not None and not self.indexer.shared
        return CacheEntry(1, 1, self.head_dim, self.kv_rank, self.indexer.head_dim if self.indexer and own else 0)

    @property
    def projected(self) -> int:
        """Features per token of queries, keys and values, or of queries and outputs of the absorbed form."""
        absorbed = self.query_dim + self.head_dim + self.kv_rank
        return self.num_heads * max(2 * self.query_dim + self.value_dim, absorbed)

    def shard(self, heads: int, kv_heads: int, *, output_bias: bool) -> "LatentAttentionSpec":
        """The attention of one process with so many heads; the latents are replicated. As `AttentionSpec.shard`."""
        del kv_heads
        return replace(self, num_heads=heads, output_bias=self.output_bias and output_bias)

    def parameters(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the norms of the latents, and of an indexer's parameters, by their names."""
        found: dict[str, tuple[int, ...]] = {"attention.kv_a_norm.weight": (self.kv_rank,)}
        if self.query_rank is not None:
            found["attention.q_a_norm.weight"] = (self.query_rank,)
            if self.indexer is not None and not self.indexer.shared:
                found |= self.indexer.parameters(self.query_rank, hidden_size)
        return found

    @property
    def unquantized_readers(self) -> Mapping[str, tuple[str, ...]]:
        """See `LayerSpec.unquantized_readers`: the projections of an indexer."""
        if self.indexer is None or self.indexer.shared:
            return {}
        return {
            "attention_norm": ("attention.indexer.k.weight", "attention.indexer.weights.weight"),
            "attention.q_a_norm": ("attention.indexer.q.weight",),
        }

    def matrices(self, hidden: Axis, *, foldable: bool) -> tuple[MatrixSpec, ...]:
        """The rows of the table, in the order of the computation."""
        normed, cached = "attention.normed", Axis("latent", self.head_dim)
        queries = Axis("heads", self.num_heads, self.query_dim)
        norm, q_norm, kv_norm, values = (
            target if foldable else None
            for target in (
                FoldTarget("attention_norm"),
                FoldTarget("attention.q_a_norm"),
                FoldTarget("attention.kv_a_norm"),
                FoldTarget("attention.kv_b", 0, first=self.nope_dim),
            )
        )
        if self.query_rank is None:
            first: tuple[MatrixSpec, ...] = (
                MatrixSpec("attention.q", (queries,), hidden, reads=normed, folds_into=norm),
                MatrixSpec("attention.kv_a", (cached,), hidden, reads=normed, bias=self.bias, folds_into=norm),
            )
        else:
            latent = Axis("latent", self.query_rank)
            first = (
                MatrixSpec("attention.qkv_a", (latent, cached), hidden, reads=normed, bias=self.bias, folds_into=norm),
                MatrixSpec("attention.q_b", (queries,), latent, reads="attention.query_latent", folds_into=q_norm),
            )
        return (
            *first,
            MatrixSpec(
                "attention.kv_b",
                (Axis("heads", self.num_heads, self.nope_dim + self.value_dim),),
                Axis("latent", self.kv_rank),
                reads="attention.kv_latent",
                folds_into=kv_norm,
                dequantized=True,
            ),
            MatrixSpec(
                "attention.o",
                (hidden,),
                Axis("heads", self.num_heads, self.value_dim),
                reads="attention.attended",
                bias=self.output_bias,
                folds_into=values,
            ),
        )
