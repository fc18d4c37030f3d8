"""Tensor parallelism (Shoeybi et al., 2019): which rows and columns of a decoder's matrices each process holds.

Each axis of a matrix is sharded by what it counts (`warpbus.models.layer_spec.Axis`):

    heads, kv_heads  by KV heads, each with its queries     ffn     evenly, in whole groups of scales
    vocabulary       the head's rows, by tokens             hidden, latent  replicated
    expert_ffn       as ffn; with expert parallelism not at all

Matrices whose columns are sharded produce partial sums, which an all-reduce adds up; everything else is replicated.
A layer therefore has two all-reduces (`warpbus.models.layers.parallel`) and no other communication.

Heads. If there are at least as many KV heads as processes, each process holds whole KV heads with all their queries.
Otherwise the query heads are divided and the KV heads are replicated: each of ChatGLM2's two KV heads is on two of
four processes, with 8 query heads. The attention kernels need the same number of query heads for each KV head. A
process whose KV heads have unequal numbers of queries (3 processes, 2 KV heads) is padded with zero heads: zero rows in
qkv, zero columns in o.

Multi-head latent attention has one KV head, the latents, which every process computes and caches.

Expert parallelism (Lepikhin et al., 2020, GShard) shares out whole routed experts instead of their inner features: each
process has the matrices of consecutive experts, nearly as many as every other one, and everything else as above. Every
process routes all tokens and computes its own experts for them; a layer has the same two all-reduces.

The FFN is sharded in whole quantization groups if that keeps the processes balanced, otherwise in halves or quarters of
groups, whose scales and zero points are repeated. No weight changes: of 13696 = 107 * 128 columns, two processes have
54 * 128 and 53 * 128. With a w8a8 scheme each process computes the activation scales of o and down from its own
columns, so that results differ from those of one process in the last of their 8 bits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from warpbus.dist import Group
from warpbus.errors import UsageError
from warpbus.models.config import ModelConfig
from warpbus.models.decoder import Decoder
from warpbus.models.layer_spec import Axis, LayerSpec, MLPSpec, MoESpec
from warpbus.models.layers.parallel import RowParallel, VocabularyParallel
from warpbus.models.padding import blank_matrix, slices
from warpbus.qtensor import QTensor
from warpbus.qtensor.scheme import GROUP_SIZES

_UNITS = tuple(sorted(GROUP_SIZES, reverse=True))  # columns that the FFN is sharded in, preferred first
_SLACK = 1.02  # a process may have this multiple of its even share of the FFN if a larger unit needs it
_VOCABULARY_UNIT = 8

Put = Callable[[Tensor, Tensor], object]
"""Copies the second tensor, which is on the CPU, to the first."""


@dataclass(frozen=True)
class Span:
    """The rows or columns `[start, stop)` of a whole matrix, followed by `zeros` rows or columns of zeros."""

    start: int
    stop: int
    zeros: int = 0

    @property
    def size(self) -> int:
        return self.stop - self.start + self.zeros

    def times(self, size: int) -> "Span":
        """The span in units of `size` rows or columns."""
        return Span(self.start * size, self.stop * size, self.zeros * size)

    def after(self, offset: int) -> "Span":
        """The span moved by `offset` rows or columns."""
        return Span(self.start + offset, self.stop + offset, self.zeros)


Spans = tuple[Span, ...]
"""The rows or columns of one axis of a matrix that a process holds, in this order."""


@dataclass(frozen=True)
class Part:
    """One process's part of a decoder.

    Attributes:
        whole: the config of the whole decoder.
        rank: the process, from 0.
        world: the number of processes.
        expert_parallel: routed experts are not sharded, but shared out.

    Raises:
        UsageError: the model cannot be sharded over so many processes, or has no experts to share out.
    """

    whole: ModelConfig
    rank: int
    world: int
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        whole, finest = self.whole, min(_UNITS)
        heads = whole.attention.num_heads
        if self.expert_parallel:
            self._check_experts()
        names = ("ffn",) if self.expert_parallel else ("ffn", "expert_ffn")
        widths = [axis.length for name in names for axis in _axes(whole, name)]
        most = min([heads, whole.vocab_size, *(-(-width // finest) for width in widths)])
        if self.world > most:
            sharded = f" and an FFN of {min(widths)}, sharded in multiples of {finest}" if widths else ""
            raise UsageError(f"{self.world} GPUs: the model has {heads} heads{sharded}: use at most {most} GPUs")

    def _check_experts(self) -> None:
        counts = [layer.mlp.router.experts for layer in self.whole.all_layers if isinstance(layer.mlp, MoESpec)]
        if not counts:
            raise UsageError(
                "expert parallelism shares out the experts of a mixture of experts, and this model has none: leave it "
                "out"
            )
        if self.world > min(counts):
            raise UsageError(
                f"{self.world} GPUs: the model has {min(counts)} experts per layer, and expert parallelism gives each "
                f"GPU one or more: use at most {min(counts)} GPUs"
            )

    @cached_property
    def config(self) -> ModelConfig:
        """The config of this part: its own heads, KV heads, FFN and experts, and all else of the whole model."""
        mtp = None if self.whole.mtp is None else self._layer(self.whole.mtp)
        return replace(self.whole, layers=tuple(map(self._layer, self.whole.layers)), mtp=mtp)

    def _layer(self, whole: LayerSpec) -> LayerSpec:
        attention = whole.attention.shard(
            sum(span.size for span in self._queries),
            len(self._queries),
            output_bias=self.rank == 0,  # the all-reduce adds that of every process
        )
        if isinstance(whole.mlp, MLPSpec):
            return replace(whole, attention=attention, mlp=self._mlp(whole.mlp))
        shared = None if whole.mlp.shared is None else self._mlp(whole.mlp.shared)
        if self.expert_parallel:
            mlp = replace(whole.mlp, shared=shared, own=self.experts(whole.mlp))
        else:
            mlp = replace(whole.mlp, expert=self._mlp(whole.mlp.expert), shared=shared)
        return replace(whole, attention=attention, mlp=mlp)

    def experts(self, whole: MoESpec) -> range:
        """The numbers of the routed experts of a layer of which this part has matrices, or shards of them."""
        if not self.expert_parallel:
            return whole.numbers
        bounds = _even(whole.router.experts, 1, self.world)
        return range(bounds[self.rank], bounds[self.rank + 1])

    def _mlp(self, whole: MLPSpec) -> MLPSpec:
        """This part's shard of a dense MLP or of a sharded expert."""
        size = sum(span.size for span in self._shard(whole.ffn_size))
        return replace(whole, ffn_size=size, output_bias=whole.output_bias and self.rank == 0)

    @cached_property
    def vocabulary(self) -> tuple[range, ...]:
        """The range of token ids whose logits each process computes."""
        size = self.whole.vocab_size
        unit = _VOCABULARY_UNIT if size >= _VOCABULARY_UNIT * self.world else 1
        return tuple(range(start, stop) for start, stop in pairwise(_even(size, unit, self.world)))

    def has(self, parameter: str) -> bool:
        """Whether this part holds a shard of a parameter of the decoder."""
        if self.whole.matrix(parameter) is None:
            return True
        matrix = self.config.matrix(parameter)
        return matrix is not None and (matrix.bias or not parameter.endswith(".bias"))

    def rows(self, parameter: str, total: int) -> tuple[tuple[int, Spans], ...]:
        """The rows of a parameter that this part holds.

        Args:
            parameter: of the decoder, for instance `layers.0.mlp_norm.weight`.
            total: rows of this part's own parameter.

        Returns:
            for each of the fused matrices its rows in the whole decoder, and the spans of them that this part holds.
        """
        if parameter == "head.weight":
            own = self.vocabulary[self.rank]
            return ((self.whole.vocab_size, (Span(own.start, own.stop),)),)
        matrix = self.whole.matrix(parameter)
        if matrix is None:
            return ((total, (Span(0, total),)),)
        return tuple((axis.length, self.spans(axis)) for axis in matrix.rows)

    def columns(self, parameter: str, total: int) -> tuple[int, Spans]:
        """The columns of a parameter in the whole decoder, and the spans that this part holds; arguments as `rows`."""
        matrix = self.whole.matrix(parameter)
        if matrix is None:
            return total, (Span(0, total),)
        return matrix.columns.length, _merged(self.spans(matrix.columns))

    @property
    def kv_spans(self) -> Spans:
        """The features of a token's keys (and equally of its values) that this part holds."""
        attention = self.whole.attention
        return self.spans(Axis("kv_heads", attention.num_kv_heads, attention.head_dim))

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """The numbers of the KV heads that this part holds, in their order."""
        return tuple(self._kv_heads)

    def spans(self, axis: Axis) -> Spans:
        """The rows or columns of an axis that this part holds."""
        if axis.name == "heads":
            return tuple(span.times(axis.size) for span in self._queries)
        if axis.name == "kv_heads":
            return tuple(Span(head, head + 1).times(axis.size) for head in self._kv_heads)
        if axis.name == "ffn" or (axis.name == "expert_ffn" and not self.expert_parallel):
            return self._shard(axis.length)
        return (Span(0, axis.length),)

    def narrow(self, model: Decoder) -> None:
        """Replace the head of a decoder of `config`, on the device "meta", by one with this part's rows."""
        rows = len(self.vocabulary[self.rank])
        model.add_module("head", nn.Linear(self.whole.hidden_size, rows, bias=False, device="meta"))

    def tied_head(self, embedding: Tensor) -> nn.Parameter:
        """This part's rows of an embedding that is tied to the head (a view)."""
        own = self.vocabulary[self.rank]
        return nn.Parameter(embedding.detach()[own.start : own.stop], requires_grad=False)

    def join(self, model: Decoder, group: Group) -> None:
        """Add the collectives to a loaded decoder of this part, so that `group` together computes the whole decoder."""
        group = model.group = group.linked()
        for layer, spec in zip(model.layers, self.whole.all_layers, strict=True):
            for path in _reduced(spec):
                parent, _, name = path.rpartition(".")
                owner = layer.get_submodule(parent)
                owner.add_module(name, RowParallel(owner.get_submodule(name), group))
        scoring = [len(tokens) for tokens in self.vocabulary]
        model.add_module("head", VocabularyParallel(model.head, group, scoring))

    @cached_property
    def _kv_heads(self) -> tuple[int, ...]:
        whole = self.whole.attention
        grouped = whole.num_heads // whole.num_kv_heads
        if whole.num_kv_heads >= self.world:
            bounds = _even(whole.num_kv_heads, 1, self.world)
            return tuple(range(bounds[self.rank], bounds[self.rank + 1]))
        first, last = self._heads.start, self._heads.stop - 1
        return tuple(range(first // grouped, last // grouped + 1))

    @property
    def _heads(self) -> range:
        """The query heads of this process if there are more processes than KV heads."""
        bounds = _even(self.whole.attention.num_heads, 1, self.world)
        return range(bounds[self.rank], bounds[self.rank + 1])

    @cached_property
    def _queries(self) -> Spans:
        """The query heads of each KV head, padded to the same number."""
        whole = self.whole.attention
        grouped = whole.num_heads // whole.num_kv_heads
        spans = [Span(head * grouped, (head + 1) * grouped) for head in self._kv_heads]
        if whole.num_kv_heads < self.world:
            spans = [Span(max(s.start, self._heads.start), min(s.stop, self._heads.stop)) for s in spans]
        most = max(span.size for span in spans)
        return tuple(replace(span, zeros=most - span.size) for span in spans)

    def _shard(self, size: int) -> Spans:
        """This part's shard of the `size` inner features of an MLP."""
        for unit in _UNITS:
            bounds = _even(size, unit, self.world)
            widths = [stop - start for start, stop in pairwise(bounds)]
            if min(widths) > 0 and max(widths) * self.world <= _SLACK * size:
                break
        return (Span(bounds[self.rank], bounds[self.rank + 1]),)


def _reduced(spec: LayerSpec) -> list[str]:
    """The modules of a layer whose outputs are partial sums: of experts only the sum of all."""
    routed = isinstance(spec.mlp, MoESpec)
    found = [
        matrix.name
        for matrix in spec.matrices
        if matrix.is_row_parallel and not (routed and matrix.name.startswith("mlp."))
    ]
    return found + (["mlp.output"] if routed else [])


def _axes(config: ModelConfig, name: str) -> Iterator[Axis]:
    """The column axes called `name` of all matrices of a model."""
    return (matrix.columns for _, matrix in config.matrices if matrix.columns.name == name)


def joined(matrices: Sequence[tuple[int, Spans]]) -> tuple[int, Spans]:
    """Combine the spans of matrices that one tensor of a file stacks along its rows.

    Args:
        matrices: for each, its number of rows, and the spans of them that a part has.

    Returns:
        the rows of the tensor, and the spans of them that the part has.
    """
    total, spans = 0, []
    for rows, own in matrices:
        spans += [span.after(total) for span in own]
        total += rows
    return total, tuple(spans)


def copy_spans(
    target: Tensor, source: Tensor, rows: Spans, columns: Spans | None, at_once: int, put: Put = Tensor.copy_
) -> None:
    """Copy rows and columns of a tensor and convert them, at most `at_once` elements (or one row) at a time.

    Args:
        target: `[rows]` or `[rows, columns]`, of any floating dtype, on any device.
        source: the whole tensor, on the CPU.
        columns: None for all.
        put: see `Put`.
    """
    height = max(1, at_once * len(source) // max(1, source.numel()))
    done = 0
    for span in rows:
        for start in range(span.start, span.stop, height):
            piece = source[start : min(start + height, span.stop)]
            _copy_columns(target[done : done + len(piece)], piece, columns, put)
            done += len(piece)
        target[done : done + span.zeros] = 0
        done += span.zeros


def quantized_rows(weight: QTensor, spans: Spans) -> list[QTensor]:
    """The row blocks of a quantized matrix, on the CPU, that are stacked in a part."""
    pieces = []
    for span in spans:
        if span.stop > span.start:
            pieces.append(weight.rows(span.start, span.stop))
        if span.zeros:
            pieces.append(blank_matrix(weight.scheme, span.zeros, weight.shape[1], weight.scales.dtype))
    return pieces


def quantized_columns(weight: QTensor, spans: Spans, name: str) -> QTensor:
    """The columns of a quantized matrix, on the CPU, that a part holds. Groups are split where a span ends inside one.

    Args:
        name: of the matrix, for messages.

    Raises:
        UsageError: a span begins or ends inside a group of the smallest size.
    """
    if spans == (Span(0, weight.shape[1]),):
        return weight
    return QTensor.concatenate([_columns(piece, spans, name) for piece in slices(weight)])


def _columns(weight: QTensor, spans: Spans, name: str) -> QTensor:
    scheme = weight.scheme
    if scheme.group_size is not None:
        size = _group_size(scheme.group_size, spans, weight.shape[1], name)
        weight = weight.regrouped(size)
        scheme = weight.scheme
    pieces = []
    for span in spans:
        if span.stop > span.start:
            pieces.append(weight.columns(span.start, span.stop))
        if span.zeros:
            pieces.append(_zero_columns(weight, span.zeros))
    return pieces[0] if len(pieces) == 1 else QTensor.side_by_side(pieces)


def _zero_columns(weight: QTensor, columns: int) -> QTensor:
    """Columns of zeros to append to a matrix; with one scale per row, they share the scales of the matrix."""
    scheme = weight.scheme
    blank = blank_matrix(scheme, weight.shape[0], columns, weight.scales.dtype)
    if scheme.group_size is not None:
        return blank
    if scheme.activations is not None:
        return QTensor.from_values(scheme, blank.qweight, weight.scales)
    zeros = torch.full_like(weight.scales, scheme.middle_code, dtype=torch.uint8)
    codes = (zeros if weight.zeros is None else weight.zeros).expand(-1, columns)
    return QTensor.from_codes(scheme, codes, weight.scales, weight.zeros)


def _group_size(size: int, spans: Spans, width: int, name: str) -> int:
    """The largest group size up to `size` that divides every span."""
    edges = [edge for span in spans for edge in (span.start, span.stop, span.zeros)]
    for finer in _UNITS:
        if finer <= size and all(edge % finer == 0 or edge == width for edge in edges):
            return finer
    raise UsageError(
        f"{name}: groups of {size} columns cannot be sharded over so many GPUs: a GPU has columns "
        f"{', '.join(f'{span.start} to {span.stop - 1}' for span in spans)}, expected multiples of {min(_UNITS)}: use "
        "fewer GPUs, or a number that divides the heads"
    )


def _copy_columns(target: Tensor, source: Tensor, columns: Spans | None, put: Put) -> None:
    if columns is None:
        put(target, source)
        return
    done = 0
    for span in columns:
        width = span.stop - span.start
        put(target[:, done : done + width], source[:, span.start : span.stop])
        target[:, done + width : done + span.size] = 0
        done += span.size


def _merged(spans: Sequence[Span]) -> Spans:
    """Merge adjacent spans, so that contiguous columns are copied at once."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].zeros == 0 and found[-1].stop == span.start:
            found[-1] = replace(span, start=found[-1].start)
        else:
            found.append(span)
    return tuple(found)


def _even(size: int, unit: int, parts: int) -> list[int]:
    """The `parts + 1` bounds of parts of `size`, as even as multiples of `unit` allow."""
    units = -(-size // unit)
    return [min(size, units * part // parts * unit) for part in range(parts + 1)]
