"""The parts of a decoder layer: a table of its matrices, and everything that follows from the table.

Loading, tensor parallelism, calibration, folding, memory estimates, LoRA and conversion are loops over this table.
No other module of the package knows what the matrices of a layer are called or how they hang together.

A layer is two sublayers, attention and MLP. Each norms the residual stream and has two stages, named by what they
produce:

    attention.normed    the normed hidden states          read by  attention.qkv
    attention.attended  the output of all heads           read by  attention.o
    mlp.normed          the normed hidden states          read by  mlp.gate_up (mlp.up without a gate)
    mlp.inner           the activated inner features      read by  mlp.down

In multi-head latent attention (MLA) attention.normed is read by attention.qkv_a, and two stages follow it:

    attention.query_latent    the normed latent of queries              read by  attention.q_b
    attention.kv_latent       the normed latent of keys and values      read by  attention.kv_b

In a mixture of experts the MLP has these two stages per expert, over the tokens that are routed to it, and two for the
shared expert, over all tokens: `mlp.experts.3.normed`, `mlp.experts.3.inner`, `mlp.shared.normed`, `mlp.shared.inner`.
Each expert's matrices are rows of the table, so that each has its own scheme, calibration statistics and place. With
expert parallelism the table of a process has the rows of its own experts only.

The matrices of a branch's last stage write to the residual stream; a sublayer without experts is one branch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from warpbus.models.latent_spec import LatentAttentionSpec

FLOAT32_PARAMETERS = ("mlp.router.bias",)
"""Endings of the parameters that stay in float32 whatever the dtype of the model."""

AxisName = Literal["hidden", "latent", "heads", "kv_heads", "ffn", "expert_ffn"]

_REPLICATED = ("hidden", "latent")


@dataclass(frozen=True)
class Axis:
    """Consecutive rows or columns of a matrix that stand for the same thing.

    Attributes:
        name: the counted thing, which also decides how tensor parallelism shards it (`warpbus.models.parallel`):
            "hidden": replicated; "latent": features of a latent of MLA, replicated; "heads": query heads, sharded with
            the KV heads they attend to; "kv_heads": sharded, or replicated where there are fewer than processes;
            "ffn": sharded evenly in whole quantization groups; "expert_ffn": inner features of a routed expert, sharded
            like "ffn", or with expert parallelism whole.
        count: how many of them there are.
        size: rows or columns of each: the features of a head, otherwise 1.
    """

    name: AxisName
    count: int
    size: int = 1

    @property
    def length(self) -> int:
        """Rows or columns of the whole axis."""
        return self.count * self.size


@dataclass(frozen=True)
class FoldTarget:
    """The operation before a matrix that can absorb the inverse of factors on its input channels.

    Attributes:
        name: a norm of the layer ("mlp_norm") or one of its matrices ("mlp.gate_up").
        part: for a matrix, the index of the axis in its `rows` that produces the channels; None for a norm.
        first: the first row of each unit of that axis (of each head) that produces channels; all rows before it produce
            something else.
    """

    name: str
    part: int | None = None
    first: int = 0


@dataclass(frozen=True)
class MatrixSpec:
    """One matrix of a layer, `[rows, columns]`.

    Attributes:
        name: within the layer, for instance "mlp.down".
        rows: the axes that are fused along the rows, in order: queries, keys and values, or gate and up.
        columns: the input features.
        reads: the stage whose output enters it.
        bias: whether a bias `[rows]` is added.
        folds_into: see `FoldTarget`; None if the layer's function does not allow it.
        expert: the number of the routed expert that it belongs to; None if all tokens pass through it.
        dequantized: it is dequantized when a decoder is loaded, because attention multiplies by its transpose too.
    """

    name: str
    rows: tuple[Axis, ...]
    columns: Axis
    reads: str
    bias: bool = False
    folds_into: FoldTarget | None = None
    expert: int | None = None
    dequantized: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """`(rows, columns)`."""
        return sum(axis.length for axis in self.rows), self.columns.length

    @property
    def num_weights(self) -> int:
        """Elements, without the bias."""
        return math.prod(self.shape)

    @property
    def is_row_parallel(self) -> bool:
        """Whether tensor parallelism shards the columns, so that the results are summed over the processes."""
        return self.columns.name not in _REPLICATED

    def part_rows(self, count: int) -> list[int]:
        """Rows of each of the `count` tensors of a file that are stacked to make the matrix."""
        if count == len(self.rows):
            return [axis.length for axis in self.rows]
        return [self.shape[0] // count] * count

    def part_start(self, part: int) -> int:
        """The first row of the axis `rows[part]`."""
        return sum(axis.length for axis in self.rows[:part])


@dataclass(frozen=True)
class NormSpec:
    """The norms of a model.

    Attributes:
        eps: added to the mean square, or to the variance.
        kind: "rms" (RMSNorm), or "layer" (LayerNorm, which has a bias).
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"

    def parameters(self, name: str, size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a norm's parameters by their names."""
        return {f"{name}.{leaf}": (size,) for leaf in (("weight", "bias") if self.kind == "layer" else ("weight",))}


@dataclass(frozen=True)
class CacheEntry:
    """The entries of one token in one layer's KV cache.

    Attributes:
        vectors: 2: keys and values; 1: keys, whose first `value_dim` features are also the values (MLA).
        heads: KV heads.
        key_dim, value_dim: features of a head's key and value.
        index_dim: features of the indexer's key; 0 without an indexer.
    """

    vectors: Literal[1, 2]
    heads: int
    key_dim: int
    value_dim: int
    index_dim: int = 0

    @property
    def size(self) -> int:
        """Stored numbers."""
        return self.vectors * self.heads * self.key_dim + self.index_dim

    @property
    def latent(self) -> bool:
        """Whether it is a latent with a rotary key (MLA)."""
        return self.vectors == 1


@dataclass(frozen=True)
class AttentionSpec:
    """Attention with grouped queries.

    Attributes:
        num_heads, num_kv_heads: query heads, and the KV heads that they share.
        head_dim: features of a head.
        qkv_bias, output_bias: whether the projections have biases.
        qk_norm: queries and keys are normed per head (Qwen 3).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False

    @property
    def width(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of the keys, and of the values, of a token."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of the query, key and value parts of the fused projection."""
        return self.width, self.kv_width, self.kv_width

    @property
    def cache_entry(self) -> CacheEntry:
        """The entries of one token in one layer's KV cache."""
        return CacheEntry(2, self.num_kv_heads, self.head_dim, self.head_dim)

    @property
    def projected(self) -> int:
        """Features per token of queries, keys and values."""
        return sum(self.qkv_rows)

    def shard(self, heads: int, kv_heads: int, *, output_bias: bool) -> "AttentionSpec":
        """The attention of one process with so many heads; `output_bias`: whether the process adds that bias."""
        return replace(self, num_heads=heads, num_kv_heads=kv_heads, output_bias=self.output_bias and output_bias)

    def parameters(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the norms of queries and keys by their names."""
        del hidden_size
        return {f"attention.{part}_norm.weight": (self.head_dim,) for part in "qk"} if self.qk_norm else {}

    @property
    def unquantized_readers(self) -> Mapping[str, tuple[str, ...]]:
        """See `LayerSpec.unquantized_readers`."""
        return {}

    def matrices(self, hidden: Axis, *, foldable: bool) -> tuple[MatrixSpec, ...]:
        """The rows of the table, in the order of the computation."""
        heads = Axis("heads", self.num_heads, self.head_dim)
        keys = Axis("kv_heads", self.num_kv_heads, self.head_dim)
        qkv, values = "attention.qkv", 2
        return (
            MatrixSpec(
                qkv,
                (heads, keys, keys),
                hidden,
                reads="attention.normed",
                bias=self.qkv_bias,
                folds_into=FoldTarget("attention_norm") if foldable else None,
            ),
            MatrixSpec(
                "attention.o",
                (hidden,),
                heads,
                reads="attention.attended",
                bias=self.output_bias,
                folds_into=FoldTarget(qkv, values) if foldable else None,
            ),
        )


@dataclass(frozen=True)
class MLPSpec:
    """A dense MLP.

    Attributes:
        ffn_size: inner features.
        gated: SwiGLU of two fused projections; otherwise GELU of one.
        bias, output_bias: whether the first projection and the one back to the residual stream have biases.
    """

    ffn_size: int
    gated: bool = True
    bias: bool = False
    output_bias: bool = False

    def matrices(
        self, hidden: Axis, *, foldable: bool, prefix: str = "mlp", expert: int | None = None
    ) -> tuple[MatrixSpec, ...]:
        """The rows of the table, in the order of the computation.

        Args:
            hidden: the residual stream.
            foldable: factors on the inputs of both matrices can be moved into what precedes them.
            prefix: of the names of matrices and stages.
            expert: see `MatrixSpec`.
        """
        ffn = Axis("ffn" if expert is None else "expert_ffn", self.ffn_size)
        name, rows = (f"{prefix}.gate_up", (ffn, ffn)) if self.gated else (f"{prefix}.up", (ffn,))
        return (
            MatrixSpec(
                name,
                rows,
                hidden,
                reads=f"{prefix}.normed",
                bias=self.bias,
                folds_into=FoldTarget("mlp_norm") if foldable and self.gated else None,
                expert=expert,
            ),
            MatrixSpec(
                f"{prefix}.down",
                (hidden,),
                ffn,
                reads=f"{prefix}.inner",
                bias=self.output_bias,
                # silu(gate) * up is linear in up; GELU is not linear in what enters it.
                folds_into=FoldTarget(name, len(rows) - 1) if foldable and self.gated else None,
                expert=expert,
            ),
        )

    @property
    def unquantized_readers(self) -> Mapping[str, tuple[str, ...]]:
        """See `LayerSpec.unquantized_readers`."""
        return {}

    @property
    def widened(self) -> int:
        """Features per token that the first projections produce."""
        return self.ffn_size * (2 if self.gated else 1)

    @property
    def inner(self) -> int:
        """Features per token that enter the last projections."""
        return self.ffn_size

    @property
    def expert_rows(self) -> int:
        """Rows per token that are sorted by expert."""
        return 0

    @property
    def idle_share(self) -> float:
        """The share of the MLP's weights that a token does not use."""
        return 0.0


@dataclass(frozen=True)
class RouterSpec:
    """How a token chooses its experts.

    Attributes:
        experts: number of routed experts.
        top_k: experts per token.
        scoring: "sigmoid": each expert's score by itself (GLM-4.5); "softmax": over all experts (Qwen 3).
        normalized: the weights of a token's experts are divided by their sum.
        scale: the weights are multiplied by this (`routed_scaling_factor`).
        groups, top_groups: experts form `groups` groups of consecutive experts; only experts of the `top_groups` best
            groups are chosen, a group's score being the sum of its two best experts' scores.
        bias: a float32 correction is added to the scores for the choice, not for the weights.
    """

    experts: int
    top_k: int
    scoring: Literal["sigmoid", "softmax"]
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    bias: bool = False


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts in place of the MLP: routed experts, and an expert that all tokens share.

    Attributes:
        router: chooses the experts. It is never quantized.
        expert: a routed expert.
        shared: the shared expert; None if there is none.
        own: with expert parallelism the numbers of the routed experts that this process has, at least one; None: all.
    """

    router: RouterSpec
    expert: MLPSpec
    shared: MLPSpec | None = None
    own: range | None = None

    @property
    def numbers(self) -> range:
        """The numbers of the routed experts whose matrices are in the table."""
        return range(self.router.experts) if self.own is None else self.own

    def matrices(self, hidden: Axis, *, foldable: bool) -> tuple[MatrixSpec, ...]:
        """The rows of the table, expert by expert, each in the order of the computation."""
        routed = (
            matrix
            for index in self.numbers
            for matrix in self.expert.matrices(hidden, foldable=foldable, prefix=f"mlp.experts.{index}", expert=index)
        )
        shared = () if self.shared is None else self.shared.matrices(hidden, foldable=foldable, prefix="mlp.shared")
        return (*routed, *shared)

    @property
    def unquantized_readers(self) -> Mapping[str, tuple[str, ...]]:
        """See `LayerSpec.unquantized_readers`."""
        return {"mlp_norm": ("mlp.router.weight",)}

    def parameters(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the router's parameters by their names."""
        found: dict[str, tuple[int, ...]] = {"mlp.router.weight": (self.router.experts, hidden_size)}
        return found | ({"mlp.router.bias": (self.router.experts,)} if self.router.bias else {})

    @property
    def widened(self) -> int:
        """Features per token that the first projections produce."""
        return self.router.top_k * self.expert.widened + (0 if self.shared is None else self.shared.widened)

    @property
    def inner(self) -> int:
        """Features per token that enter the last projections."""
        return self.router.top_k * self.expert.inner + (0 if self.shared is None else self.shared.inner)

    @property
    def expert_rows(self) -> int:
        """Rows per token that are sorted by expert."""
        return self.router.top_k + (self.shared is not None)

    @property
    def idle_share(self) -> float:
        """The share of the MLP's weights that a token does not use, if it chooses all experts equally often."""
        shared = 0 if self.shared is None else self.shared.inner
        routed = len(self.numbers) * self.expert.inner
        return 1 - (routed * self.router.top_k / self.router.experts + shared) / (routed + shared)


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer.

    Attributes:
        hidden_size: features of the residual stream.
        attention, mlp: its sublayers.
        norm: of its norms.
        output_norms: each sublayer's output is normed before it is added (GLM-4-0414).
        normed_residual: a sublayer's output is added to its *normed* input times this (ChatGLM-6B); 0 is the usual
            residual, the input itself.
        predicts: it is the layer of multi-token prediction (MTP; DeepSeek-V3, arXiv:2412.19437, section 2.2). Its input
            is a projection of a token's embedding and of the hidden state of the token before; both are normed first.
            The projection is never quantized.
    """

    hidden_size: int
    attention: "AttentionSpec | LatentAttentionSpec"
    mlp: MLPSpec | MoESpec
    norm: NormSpec
    output_norms: bool = False
    normed_residual: float = 0.0
    predicts: bool = False

    @cached_property
    def matrices(self) -> tuple[MatrixSpec, ...]:
        """All matrices, in the order in which activations meet them."""
        hidden = Axis("hidden", self.hidden_size)
        # A norm's output is also the residual where the residual is normed: dividing it would change the residual.
        foldable = not self.normed_residual
        return (*self.attention.matrices(hidden, foldable=foldable), *self.mlp.matrices(hidden, foldable=foldable))

    @cached_property
    def by_name(self) -> Mapping[str, MatrixSpec]:
        """All matrices by their names."""
        return {matrix.name: matrix for matrix in self.matrices}

    def matrix(self, name: str) -> MatrixSpec:
        """The matrix of that name. Raises KeyError."""
        return self.by_name[name]

    @cached_property
    def num_weights(self) -> int:
        """Elements of all matrices."""
        return sum(matrix.num_weights for matrix in self.matrices)

    @cached_property
    def active_weights(self) -> int:
        """Elements of the matrices that a token is multiplied with."""
        mlp = sum(matrix.num_weights for matrix in self.matrices if matrix.name.startswith("mlp."))
        return self.num_weights - round(mlp * self.mlp.idle_share)

    def unquantized_readers(self, norm: str) -> tuple[str, ...]:
        """The parameters `[any, features]` that are never quantized and multiply what a norm gives."""
        return {**self.attention.unquantized_readers, **self.mlp.unquantized_readers}.get(norm, ())

    def shared_norm(self, matrix: MatrixSpec) -> str | None:
        """The norm that a matrix' factors are folded into, if something else reads it too."""
        target = matrix.folds_into
        if target is None or target.part is not None:
            return None
        alone = len(self.folding_into(target.name)) == 1 and not self.unquantized_readers(target.name)
        return None if alone else target.name

    def folding_into(self, norm: str) -> tuple[MatrixSpec, ...]:
        """The matrices whose factors are folded into a norm."""
        return self._folding.get(FoldTarget(norm), ())

    @cached_property
    def _folding(self) -> Mapping[FoldTarget | None, tuple[MatrixSpec, ...]]:
        found: dict[FoldTarget | None, list[MatrixSpec]] = {}
        for matrix in self.matrices:
            found.setdefault(matrix.folds_into, []).append(matrix)
        return {target: tuple(matrices) for target, matrices in found.items()}

    def reading(self, stage: str) -> tuple[MatrixSpec, ...]:
        """The matrices that a stage's output enters."""
        return self._readers.get(stage, ())

    @cached_property
    def _readers(self) -> Mapping[str, tuple[MatrixSpec, ...]]:
        found: dict[str, tuple[MatrixSpec, ...]] = {}
        for matrix in self.matrices:
            found[matrix.reads] = (*found.get(matrix.reads, ()), matrix)
        return found

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages in the order of the computation."""
        return tuple(self._readers)

    @cached_property
    def branches(self) -> Mapping[str, tuple[tuple[str, ...], ...]]:
        """Of each sublayer its branches, whose outputs are added; each branch as its stages."""
        found: dict[str, dict[str, list[str]]] = {"attention": {}, "mlp": {}}
        for stage in self.stages:
            branch = stage.rpartition(".")[0]
            found[branch.partition(".")[0]].setdefault(branch, []).append(stage)
        return {sublayer: tuple(map(tuple, branches.values())) for sublayer, branches in found.items()}

    @cached_property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters by their names within the layer."""
        found: dict[str, tuple[int, ...]] = {}
        for sublayer in ("attention", "mlp"):
            found |= self.norm.parameters(f"{sublayer}_norm", self.hidden_size)
            if self.output_norms:
                found |= self.norm.parameters(f"{sublayer}_output_norm", self.hidden_size)
        for matrix in self.matrices:
            found[f"{matrix.name}.weight"] = matrix.shape
            if matrix.bias:
                found[f"{matrix.name}.bias"] = matrix.shape[:1]
        found |= self.attention.parameters(self.hidden_size)
        if isinstance(self.mlp, MoESpec):
            found |= self.mlp.parameters(self.hidden_size)
        if self.predicts:
            for name in ("embedding_norm", "hidden_norm", "output_norm"):
                found |= self.norm.parameters(name, self.hidden_size)
            found["projection.weight"] = (self.hidden_size, 2 * self.hidden_size)
        return found
