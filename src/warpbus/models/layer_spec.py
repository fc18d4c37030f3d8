"""What a decoder layer consists of: a table of its matrices, and everything that follows from the table.

Loading, tensor parallelism, calibration, folding, memory estimates, LoRA and conversion are loops over this table.
No other module of the package knows what the matrices of a layer are called or how they hang together.

A layer is two sublayers, attention and MLP. Each norms the residual stream and has two stages, named by what they
produce:

    attention.normed    the normed hidden states          read by  attention.qkv
    attention.attended  the output of all heads           read by  attention.o
    mlp.normed          the normed hidden states          read by  mlp.gate_up (mlp.up without a gate)
    mlp.inner           the activated inner features      read by  mlp.down

The matrices of a sublayer's last stage write to the residual stream.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

AxisName = Literal["hidden", "heads", "kv_heads", "ffn"]


@dataclass(frozen=True)
class Axis:
    """Consecutive rows or columns of a matrix that stand for the same thing.

    Attributes:
        name: what is counted, which also says how tensor parallelism shards it (`warpbus.models.parallel`):
            "hidden": replicated; "heads": query heads, sharded with the KV heads they attend to; "kv_heads": sharded,
            or replicated where there are fewer than processes; "ffn": sharded evenly in whole quantization groups.
        count: how many of them there are.
        size: rows or columns of each: `head_dim` for heads, otherwise 1.
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
    """What precedes a matrix and can absorb the inverse of factors on its input channels.

    Attributes:
        name: a norm of the layer ("mlp_norm") or one of its matrices ("mlp.gate_up").
        part: for a matrix, the index of the axis in its `rows` that produces the channels; None for a norm.
    """

    name: str
    part: int | None = None


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
        copies: how many matrices of this shape are stacked on a leading axis (experts).
    """

    name: str
    rows: tuple[Axis, ...]
    columns: Axis
    reads: str
    bias: bool = False
    folds_into: FoldTarget | None = None
    copies: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """`(rows, columns)` of each copy."""
        return sum(axis.length for axis in self.rows), self.columns.length

    @property
    def num_weights(self) -> int:
        """Elements of all copies, without the bias."""
        rows, columns = self.shape
        return self.copies * rows * columns

    @property
    def is_row_parallel(self) -> bool:
        """Whether tensor parallelism shards the columns, so that the results are summed over the processes."""
        return self.columns.name != "hidden"

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

    def matrices(self, hidden: Axis, *, foldable: bool) -> tuple[MatrixSpec, ...]:
        """The rows of the table, in the order of the computation."""
        ffn = Axis("ffn", self.ffn_size)
        # silu(gate) * up is linear in up; GELU is not linear in what enters it.
        foldable = foldable and self.gated
        name, rows = ("mlp.gate_up", (ffn, ffn)) if self.gated else ("mlp.up", (ffn,))
        return (
            MatrixSpec(
                name,
                rows,
                hidden,
                reads="mlp.normed",
                bias=self.bias,
                folds_into=FoldTarget("mlp_norm") if foldable else None,
            ),
            MatrixSpec(
                "mlp.down",
                (hidden,),
                ffn,
                reads="mlp.inner",
                bias=self.output_bias,
                folds_into=FoldTarget(name, len(rows) - 1) if foldable else None,
            ),
        )


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
    """

    hidden_size: int
    attention: AttentionSpec
    mlp: MLPSpec
    norm: NormSpec
    output_norms: bool = False
    normed_residual: float = 0.0

    @cached_property
    def matrices(self) -> tuple[MatrixSpec, ...]:
        """All matrices, in the order in which activations meet them."""
        hidden = Axis("hidden", self.hidden_size)
        # What a norm gives is also carried on where the residual is normed: dividing it would change the residual.
        foldable = not self.normed_residual
        return (*self.attention.matrices(hidden, foldable=foldable), *self.mlp.matrices(hidden, foldable=foldable))

    def matrix(self, name: str) -> MatrixSpec:
        """The matrix of that name. Raises KeyError."""
        found = next((matrix for matrix in self.matrices if matrix.name == name), None)
        if found is None:
            raise KeyError(name)
        return found

    @property
    def num_weights(self) -> int:
        """Elements of all matrices."""
        return sum(matrix.num_weights for matrix in self.matrices)

    def reading(self, stage: str) -> tuple[MatrixSpec, ...]:
        """The matrices that a stage's output enters."""
        return tuple(matrix for matrix in self.matrices if matrix.reads == stage)

    @cached_property
    def stages(self) -> tuple[str, ...]:
        """The stages in the order of the computation."""
        return tuple(dict.fromkeys(matrix.reads for matrix in self.matrices))

    @cached_property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters by their names within the layer."""
        found: dict[str, tuple[int, ...]] = {}
        for sublayer in ("attention", "mlp"):
            found |= self.norm.parameters(f"{sublayer}_norm", self.hidden_size)
            if self.output_norms:
                found |= self.norm.parameters(f"{sublayer}_output_norm", self.hidden_size)
        for matrix in self.matrices:
            leading = (matrix.copies,) if matrix.copies > 1 else ()
            found[f"{matrix.name}.weight"] = (*leading, *matrix.shape)
            if matrix.bias:
                found[f"{matrix.name}.bias"] = (*leading, matrix.shape[0])
        if self.attention.qk_norm:
            found |= {f"attention.{part}_norm.weight": (self.attention.head_dim,) for part in "qk"}
        return found


def sublayer_of(stage: str) -> str:
    """The sublayer that a stage belongs to: "attention" or "mlp"."""
    return stage.partition(".")[0]


def stages_by_sublayer(spec: LayerSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each sublayer and its stages, in the order of the computation."""
    for sublayer in dict.fromkeys(map(sublayer_of, spec.stages)):
        yield sublayer, tuple(stage for stage in spec.stages if sublayer_of(stage) == sublayer)
