"""Quantizes one decoder layer and computes the inputs of the next layer.

True sequential order, as in GPTQ's code for LLaMA: a matrix is calibrated on the outputs of the quantized matrices
before it, including those of the same layer. If a method needs the drift, the unquantized layer runs too, so that a
matrix can compensate for its changed inputs.

Rows of a matrix are independent, so they are divided among the processes: a matrix is split into `dist.SHARES` parts
with the same number of rows, each process solves its own, and the quantized parts are gathered. The result of a part
does not depend on the process that computes it.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from warpbus.dist import SHARES, Group
from warpbus.models import DecoderLayer
from warpbus.models.layer_spec import AttentionSpec
from warpbus.models.layers import CausalAttention, MoE
from warpbus.qtensor import QTensor
from warpbus.quantization.algorithms.factored import stacked
from warpbus.quantization.algorithms.weights import relative
from warpbus.quantization.expert_inputs import ExpertInputs
from warpbus.quantization.folding import divide_preceding, fold_shared
from warpbus.quantization.preflight import Matrix
from warpbus.quantization.report import LayerResult
from warpbus.quantization.states import States
from warpbus.quantization.statistics import DRIFT, Collector, KVRange, Statistics
from warpbus.quantization.stopwatch import Stopwatch

if TYPE_CHECKING:
    from warpbus.quantization.methods import Method, Solved

Solve = Callable[[str, Statistics], Tensor | None]
"""Called with a matrix' name (`MatrixSpec.name`) and the statistics of its inputs; it may replace the weight. It
returns the factors `[in]` that it has folded into what precedes the matrix, or None. Folded inputs are computed again,
not divided, since what precedes was rounded to the dtype that it is stored in."""

SolveAlike = Callable[[Sequence[str], Sequence[Statistics]], Sequence[Tensor | None]]
"""As `Solve`, for matrices of several experts that have one shape and scheme."""

_Inputs = tuple[int, Tensor, Tensor | None]
"""The inputs of a stage: the share of all tokens, `[tokens, features]`, and those of the first of these tokens in the
unquantized layer."""

FoldNorm = Callable[[str], None]
"""Called with the name of a norm that several parameters read, before the first matrix that reads it is solved. It may
call `LayerQuantization.fold_norm`."""


class LayerQuantization:
    """A layer, the states that pass through it, and the results of its matrices.

    Args:
        layer: the layer; it is changed.
        index: the layer's number.
        states: those of this process's shares; they become the outputs of the layer.
        needed: the statistics to collect.
        group: the processes of the run.
        watch: records the time of each stage.
        keep: keep the inputs of the last matrix while it is solved, instead of computing them again.
        matrices: the matrices to quantize, by their names in the layer; for `quantize`.
        scale_dtype: the dtype of their scales.
        damping: see `algorithms.factored`.
        tell: called with the result of each matrix.
        watch_kv: find `largest_kv`.

    Attributes:
        matrices: the matrices to quantize, by their names in the layer.
        quantized: the matrices that are done, by their names in the layer.
        changed: the parameters of the layer that were folded into and are not quantized, by their names.
        results: of the matrices that are done.
        largest_kv: the largest magnitudes of the keys and of the values of all tokens, float32 `[kv_heads]` each, in
            the quantized layer; None unless asked for.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        index: int,
        states: Sequence[States],
        needed: frozenset[str],
        *,
        group: Group,
        watch: Stopwatch,
        keep: bool = True,
        matrices: Mapping[str, Matrix] | None = None,
        scale_dtype: torch.dtype = torch.float32,
        damping: float = 0.01,
        tell: Callable[[LayerResult], None] = lambda result: None,
        watch_kv: bool = False,
    ) -> None:
        self.layer = layer
        self.group = group
        self.watch = watch
        self.scale_dtype = scale_dtype
        self.damping = damping
        self.matrices = matrices or {}
        self.quantized: dict[str, QTensor] = {}
        self.changed: dict[str, Tensor] = {}
        self.results: list[LayerResult] = []
        self.largest_kv: tuple[Tensor, Tensor] | None = None
        self._index = index
        self._states = states
        self._needed = needed
        self._keep = keep
        self._tell = tell
        self._watch_kv = watch_kv
        self._started = time.perf_counter()
        self._unquantized = copy.deepcopy(layer) if DRIFT in needed else None
        self._experts: ExpertInputs | None = None  # while the tokens are in a mixture of experts
        self._visited: set[str] = set()  # norms that several parameters read

    def quantize(self, method: "Method") -> None:
        """Quantize the matrices in order with a method, and replace the states by the outputs of the layer."""

        def solve_alike(linears: Sequence[str], statistics: Sequence[Statistics]) -> list[Tensor | None]:
            return self._replace(method, [self.matrices[linear] for linear in linears], statistics)

        self.visit(
            lambda linear, statistics: solve_alike([linear], [statistics])[0],
            fold_norm=partial(method.fold_norm, self),
            solve_alike=solve_alike,
            at_once=lambda linear: method.at_once(self.matrices[linear]),
        )

    @torch.no_grad()
    def visit(
        self,
        solve: Solve,
        *,
        fold_norm: FoldNorm = lambda norm: None,
        solve_alike: SolveAlike | None = None,
        at_once: Callable[[str], int] = lambda linear: 1,
    ) -> None:
        """Call `solve` for each matrix in the order of the computation, then replace the states by the outputs of the
        layer.

        Each sublayer without experts is computed once, except its norm: `solve` gets the inputs of a stage's matrices,
        and the inputs of the last stage are kept until its matrix is quantized. They are computed again if factors were
        folded into the preceding parameters, or if there is not enough memory for them.

        Args:
            solve: see `Solve`.
            fold_norm: see `FoldNorm`.
            solve_alike: called for experts in place of `solve`.
            at_once: with how many experts, by the name of the matrix of one of them.
        """

        def one_by_one(linears: Sequence[str], statistics: Sequence[Statistics]) -> list[Tensor | None]:
            return [solve(*each) for each in zip(linears, statistics, strict=True)]

        for sublayer, branches in self.layer.spec.branches.items():
            if sublayer == "mlp" and isinstance(self.layer.mlp, MoE):
                self._visit_experts(branches, solve_alike or one_by_one, fold_norm, at_once)
                continue
            for *earlier, last in branches:
                for stage in earlier:
                    self._fold_before(stage, fold_norm)
                    self._solve(stage, self.inputs(stage, self._needed), solve)
                self._finish(sublayer, last, solve)
        self.watch.lap("forward")

    @torch.no_grad()
    def skip(self, restore: Callable[[], None]) -> None:
        """Load the weights of an earlier run into the layer by `restore`, and replace the states by the outputs of the
        layer."""
        restore()
        experts = isinstance(self.layer.mlp, MoE)
        move = self._attended if experts else self._moved
        for state in self._states:
            if self._unquantized is not None and state.original is not None:
                state.original = move(self._unquantized, state.original, state)
            state.x = move(self.layer, state.x, state)
        if experts:  # as `_visit_experts`, so that the bits are the same
            ExpertInputs.route(self.layer, self._unquantized, self._states, self.group).move()
        self.watch.lap("forward")

    def weight(self, matrix: Matrix) -> Tensor:
        """A matrix of the layer, `[out, in]`; a method must not change it."""
        module = self.layer.get_submodule(matrix.linear)
        assert isinstance(module, nn.Linear)
        return module.weight.data

    def parts(self, weight: Tensor, multiple: int = 1) -> Tensor:
        """This process's parts `[parts, rows, in]` of a matrix `[out, in]`; the last part is padded with zeros.

        Args:
            multiple: the rows of a part are a multiple of it.
        """
        own, height = self.group.shares(), -(-len(weight) // (SHARES * multiple)) * multiple
        rows = weight[own.start * height : own.stop * height]
        return F.pad(rows, (0, 0, 0, len(own) * height - len(rows))).view(len(own), height, -1)

    def by_rows(
        self,
        weights: Sequence[Tensor],
        quantize: Callable[[Tensor], list[tuple[QTensor, Tensor]]],
        *,
        multiple: int = 1,
    ) -> list[tuple[QTensor, float]]:
        """Have each process quantize its rows of some matrices, and gather them.

        Args:
            weights: `[out, in]` each, of one shape, or what is to be quantized in their places.
            quantize: from `[matrices, parts, rows, in]`, for each matrix, to the quantized `[parts * rows, in]`, and to
                what was lost and the whole of each part, float64 `[parts, 2]`: see `squared_loss`.
            multiple: the rows of a part are a multiple of it.

        Returns:
            for each matrix the quantized one, and its relative error.
        """
        group, parts = self.group, stacked([self.parts(weight, multiple) for weight in weights])
        height = parts.shape[2]
        quantized = quantize(parts)
        self.watch.lap("solve")
        lengths = [len(group.shares(rank)) for rank in range(group.world)]
        heights = [length * height for length in lengths]
        gather = partial(group.gather_each, lengths=heights)
        codes = gather([part.qweight for part, _ in quantized])
        scales = gather([part.scales for part, _ in quantized])
        there = [part.zeros for part, _ in quantized if part.zeros is not None]
        zeros: Sequence[Tensor | None] = gather(there) if there else [None] * len(quantized)
        losses = torch.stack(group.gather_each([lost for _, lost in quantized], lengths)).sum(1).tolist()
        found = []
        for index, (weight, (lost, total)) in enumerate(zip(weights, losses, strict=True)):
            part, _ = quantized[index]
            shape = (sum(heights), part.shape[1])
            whole = QTensor(part.scheme, codes[index], scales[index], zeros[index], shape)
            found.append((whole.rows(0, len(weight)), relative(lost, total)))
        self.watch.lap("communication")
        return found

    def summed(self, weight: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum over all parts of a matrix of what each process computes for its own: `[parts, n]` to `[n]`."""
        lengths = [len(self.group.shares(rank)) for rank in range(self.group.world)]
        return self.group.gather(compute(self.parts(weight)), lengths).sum(0)

    def inputs(self, stage: str, needed: frozenset[str], *, every_token: bool = False) -> Statistics:
        """The statistics of the inputs of the matrices that read a stage.

        Args:
            stage: of the layer.
            needed: which statistics.
            every_token: use all tokens. Otherwise the statistics of an expert are those of the tokens that
                `ExpertInputs.of` gives it.
        """
        if not every_token and self.layer.spec.reading(stage)[0].expert is not None:
            return self.expert_inputs([stage], needed)[0]
        collector = self._collector([stage], needed)
        for share, x, original in self._every_token(stage, needed):
            self.watch.lap("forward")
            collector.add(x, original, share=share)
            self.watch.lap("statistics")
        return self._total(collector)[0]

    def expert_inputs(self, stages: Sequence[str], needed: frozenset[str]) -> list[Statistics]:
        """The statistics of the inputs of several experts: those of the tokens that `ExpertInputs.of` gives each.

        Args:
            stages: of the layer, all of one kind.
            needed: which statistics.
        """
        assert self._experts is not None
        collector = self._collector(stages, needed)
        for inputs in self._experts.of(stages, drift=DRIFT in needed):
            self.watch.lap("forward")
            for each in inputs:
                collector.add(each.x, each.original, share=each.share, layer=each.stage)
            self.watch.lap("statistics")
        return self._total(collector)

    def routed_tokens(self, linear: str) -> int | None:
        """The tokens that the router sends to a matrix' expert; None if it belongs to none."""
        expert = self.layer.spec.matrix(linear).expert
        return None if expert is None or self._experts is None else self._experts.routed[expert]

    def fold_norm(self, norm: str, scale: Tensor) -> None:
        """Fold powers of two `[features]` into a norm that several parameters read: see `folding.fold_shared`."""
        first, *_ = self.layer.spec.folding_into(norm)
        self.changed |= fold_shared(self.layer, norm, scale, stored=self.matrices[first.name].dtype)
        if self._unquantized is not None:  # so that the inputs of both can be compared
            fold_shared(self._unquantized, norm, scale)

    def _replace(
        self, method: "Method", matrices: Sequence[Matrix], statistics: Sequence[Statistics]
    ) -> list[Tensor | None]:
        """Quantize matrices and put their rounded weights into the layer; gives what was folded, see `Solve`."""
        solved = method.solve_alike(self, matrices, statistics)
        started, self._started = self._started, time.perf_counter()
        seconds = (self._started - started) / len(matrices)
        for matrix, found in zip(matrices, solved, strict=True):
            self._put(matrix, found)
            tokens = self.routed_tokens(matrix.linear)
            result = LayerResult(
                matrix.layer, matrix.linear, str(matrix.scheme), found.error, seconds, routed_tokens=tokens
            )
            self.results.append(result)
            self._tell(result)
        self.watch.lap("solve")
        return [found.folded for found in solved]

    def _put(self, matrix: Matrix, solved: "Solved") -> None:
        """Put the rounded weights of a matrix, and what was folded, into the layer."""
        weight, spec = self.weight(matrix), self.layer.spec
        self.quantized[matrix.linear] = solved.weight
        weight.copy_(solved.weight.dequantize(weight.dtype))
        for parameter, tensor in solved.changed.items():
            owner = parameter.removesuffix(".weight")
            if owner in self.quantized:  # its rows were divided: so are the scales that it is stored with
                assert solved.folded is not None
                divided = divide_preceding(spec, spec.matrix(matrix.linear), self.quantized[owner], solved.folded)
                self.quantized[owner] = divided
                tensor.copy_(divided.dequantize(tensor.dtype))
            else:
                self.changed[parameter] = tensor

    def _visit_experts(
        self,
        branches: Sequence[Sequence[str]],
        solve: SolveAlike,
        fold_norm: FoldNorm,
        at_once: Callable[[str], int],
    ) -> None:
        """Visit the matrices of a mixture of experts: those of the first stage of all experts, then of the second one.

        The sublayer is then computed again to move the states.
        """
        self._experts = ExpertInputs.route(self.layer, self._unquantized, self._states, self.group)
        for stages in zip(*branches, strict=True):
            self._fold_before(stages[0], fold_norm)
            for chunk in self._chunks(stages, at_once):
                shared = self.layer.spec.matrix(next(iter(chunk))).expert is None
                if shared:
                    statistics = [self.inputs(stage, self._needed) for stage in chunk.values()]
                else:
                    statistics = self.expert_inputs(list(chunk.values()), self._needed)
                solve(list(chunk), statistics)
        self._experts.move()
        self._experts = None

    def _finish(self, sublayer: str, stage: str, solve: Solve) -> None:
        """Visit the matrix of the last stage of a sublayer, then move the states past the sublayer."""
        layer, unquantized = self.layer, self._unquantized
        # Attention takes longest to compute again, and its output is no larger than the states.
        keep = self._keep or sublayer == "attention"
        kept: list[Tensor | None] = []
        collector = self._collector([stage], self._needed)
        for state in self._states:
            inputs, original = self._entering(layer, stage, state.x, state), None
            if unquantized is not None and state.original is not None:
                original = self._entering(unquantized, stage, state.original, state)
                state.original = unquantized.leave(sublayer, state.original, original)
            kept.append(inputs if keep else None)
            self.watch.lap("forward")
            collector.add(state.tokens(inputs), None if original is None else state.tokens(original), share=state.share)
            self.watch.lap("statistics")
            del inputs, original
        (statistics,) = self._total(collector)
        changed = self._solve(stage, statistics, solve)
        if self._watch_kv and sublayer == "attention":
            # Of the layer as it is going to be: factors may have been folded into the values.
            self.largest_kv = self._find_largest_kv(stage)
        for index, state in enumerate(self._states):
            found, kept[index] = kept[index], None  # given back as soon as it is used
            if found is None or changed:
                found = self._entering(layer, stage, state.x, state)
            state.x = layer.leave(sublayer, state.x, found)

    def _find_largest_kv(self, stage: str) -> tuple[Tensor, Tensor]:
        """See `largest_kv`; the same whatever the number of processes."""
        attention = self.layer.spec.attention
        assert isinstance(attention, AttentionSpec)
        largest = torch.zeros(2, attention.num_kv_heads, device=self.group.device)
        for state in self._states:
            looking = KVRange(state.tokens)
            self.layer.enter(stage, state.x, self._index, state.positions, state.angles, looking)
            largest = torch.maximum(largest, looking.largest)
        keys, values = self.group.gather(largest[None]).amax(0)
        return keys, values

    def _fold_before(self, stage: str, fold_norm: FoldNorm) -> None:
        """Fold into the norm before a stage, once, if several parameters read it."""
        spec = self.layer.spec
        norm = spec.shared_norm(spec.reading(stage)[0])
        if norm is not None and norm not in self._visited:
            self._visited.add(norm)
            fold_norm(norm)

    def _chunks(self, stages: Sequence[str], at_once: Callable[[str], int]) -> Iterator[dict[str, str]]:
        """Which matrices of experts are solved at once, and the stages that they read."""
        chunk: dict[str, str] = {}
        for stage in stages:
            (matrix,) = self.layer.spec.reading(stage)
            first = next(iter(chunk), None)
            if first is not None and (len(chunk) == at_once(first) or not self._alike(first, matrix.name)):
                yield chunk
                chunk = {}
            chunk[matrix.name] = stage
        yield chunk

    def _alike(self, one: str, other: str) -> bool:
        """Whether two matrices of experts have one shape and scheme; both are routed experts', or neither."""
        first, second = self.matrices[one], self.matrices[other]
        kinds = [(each.rows, each.columns, each.scheme, each.experts) for each in (first, second)]
        return kinds[0] == kinds[1]

    def _every_token(self, stage: str, needed: frozenset[str]) -> Iterator[_Inputs]:
        """The inputs of a stage, of all tokens."""
        for state in self._states:
            original = None
            if DRIFT in needed and self._unquantized is not None and state.original is not None:
                original = state.tokens(self._entering(self._unquantized, stage, state.original, state))
            yield state.share, state.tokens(self._entering(self.layer, stage, state.x, state)), original

    def _collector(self, stages: Sequence[str], needed: frozenset[str]) -> Collector:
        readers = [self.layer.spec.reading(stage)[0] for stage in stages]
        names = [f"layers.{self._index}.{reader.name}" for reader in readers]
        return Collector(readers[0].columns.length, needed, group=self.group, names=names)

    def _total(self, collector: Collector) -> list[Statistics]:
        found = collector.total()
        self.watch.lap("communication")
        return found

    def _solve(self, stage: str, statistics: Statistics, solve: Solve) -> bool:
        """Have the matrices that read a stage quantized; gives whether their inputs are others now."""
        changes = [solve(matrix.name, statistics) for matrix in self.layer.spec.reading(stage)]
        return any(change is not None for change in changes)

    def _entering(self, layer: DecoderLayer, stage: str, x: Tensor, state: States) -> Tensor:
        return layer.enter(stage, x, self._index, state.positions, state.angles, self._context(layer, state))

    def _moved(self, layer: DecoderLayer, x: Tensor, state: States) -> Tensor:
        return layer(x, self._index, state.positions, state.angles, self._context(layer, state))

    def _attended(self, layer: DecoderLayer, x: Tensor, state: States) -> Tensor:
        """The output of the attention sublayer."""
        stage = self.layer.spec.branches["attention"][-1][-1]
        return layer.leave("attention", x, self._entering(layer, stage, x, state))

    def _context(self, layer: DecoderLayer, state: States) -> CausalAttention:
        return state.original_context if layer is self._unquantized else state.context
