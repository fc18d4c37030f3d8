"""The algorithms of a run: the statistics that each needs, and how it quantizes a matrix."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from warpbus.cuda.graphs import Replayed
from warpbus.dist import SHARES, Group
from warpbus.kernels.ops.gptq import LARGEST_BLOCK
from warpbus.models import ModelConfig
from warpbus.qtensor import QTensor, Scheme
from warpbus.qtensor.trellis import TILE
from warpbus.quantization.algorithms import awq, linear_algebra, rtn, smoothing
from warpbus.quantization.algorithms.factored import corrected_target, factored, factored_stack, stacked
from warpbus.quantization.algorithms.gptq import SPAN, call_for, gptq_matrices, gptq_rows
from warpbus.quantization.algorithms.gptq_trellis import rotated_moments
from warpbus.quantization.algorithms.weights import check_weight, check_weights, squared_loss
from warpbus.quantization.folding import can_fold, fold, powers_of_two, rescaled, tie
from warpbus.quantization.layerwise import LayerQuantization
from warpbus.quantization.preflight import Matrix
from warpbus.quantization.statistics import DRIFT, MAX_ABS, MEAN_ABS, MOMENTS, Statistics

_EXPERT_BYTES = 6 * 2**30
"""Bytes for the experts that are solved at once."""

EXPERT_SQUARES = 10
"""Float32 matrices `[in, in]` of an expert that is solved with others: both moments, their factors, and copies of these
for the solve and in its CUDA graph."""

SOLVE_ROWS = 7
"""Float32 matrices `[in, rows]` of a matrix that is solved."""


@dataclass(frozen=True)
class Solved:
    """The result for a matrix.

    Attributes:
        weight: quantized.
        error: see `LayerResult`.
        folded: `[in]`, the factors that were folded into preceding parameters: the matrix's inputs are divided by them.
        changed: the parameters of the layer that folding changed, by their names.
    """

    weight: QTensor
    error: float
    folded: Tensor | None = None
    changed: Mapping[str, Tensor] = field(default_factory=dict)


class Method(ABC):
    """An algorithm that is calibrated.

    Attributes:
        needed: the names of the statistics that it needs, see `Statistics`.
        folds: it folds factors into preceding parameters, which not every model allows (see `can_fold`).
    """

    needed: frozenset[str]
    folds = False

    def prepare(
        self, matrices: Sequence[Matrix], group: Group, *, scale_dtype: torch.dtype, dtype: torch.dtype
    ) -> None:
        """Prepare the solves before the first matrix is loaded.

        Args:
            matrices: one of each shape and scheme.
            group: the processes that do them together.
            scale_dtype: of their scales.
            dtype: of their weights as they are loaded.
        """
        del matrices, group, scale_dtype, dtype

    @abstractmethod
    def solve(self, layer: LayerQuantization, matrix: Matrix, statistics: Statistics) -> Solved:
        """Quantize a matrix. It may change preceding parameters of the layer, but not the matrix.

        Raises:
            NumericError: the matrix cannot be quantized; the message names it.
        """

    def at_once(self, matrix: Matrix) -> int:
        """The number of matrices like this one, of the experts of a layer, that are solved at once; it divides their
        number."""
        del matrix
        return 1

    def solve_alike(
        self, layer: LayerQuantization, matrices: Sequence[Matrix], statistics: Sequence[Statistics]
    ) -> list[Solved]:
        """Quantize up to `at_once` matrices of one shape and scheme: as `solve` does each of them."""
        return [self.solve(layer, *each) for each in zip(matrices, statistics, strict=True)]

    def fold_norm(self, layer: LayerQuantization, norm: str) -> None:
        """Fold factors into a norm that several parameters read (`LayerQuantization.fold_norm`), before any matrix
        that reads it is solved. By default nothing is folded."""
        del layer, norm

    @classmethod
    @abstractmethod
    def fits(cls, scheme: Scheme) -> bool:
        """Whether the algorithm can quantize to a scheme."""


class Gptq(Method):
    """Rounds columns one after the other, with the outputs of the unquantized model as the target: see
    `algorithms.gptq`."""

    needed = frozenset({MOMENTS, DRIFT})

    def __init__(self) -> None:
        self._run = Replayed()

    @classmethod
    def fits(cls, scheme: Scheme) -> bool:
        return scheme.activations is None

    def prepare(
        self, matrices: Sequence[Matrix], group: Group, *, scale_dtype: torch.dtype, dtype: torch.dtype
    ) -> None:
        """Capture the graphs of the solves, which takes as long as launching their kernels from Python."""
        if group.device.type != "cuda":
            return
        parts = len(group.shares())
        matrices = [matrix for matrix in matrices if matrix.scheme.element is None]  # others are solved without graphs
        for scheme in {matrix.scheme for matrix in matrices}:
            solve_small(scheme, dtype, scale_dtype, group.device)
        for columns in {matrix.columns for matrix in matrices}:
            self._run.prepare(linear_algebra.call_for(columns, group.device))
        for matrix in matrices:
            shape = (self.at_once(matrix), parts, -(-sum(matrix.rows) // SHARES), matrix.columns)
            self._run.prepare(call_for(shape, dtype, matrix.scheme, scale_dtype=scale_dtype, device=group.device))

    def at_once(self, matrix: Matrix) -> int:
        return solved_at_once(matrix)

    def solve(self, layer: LayerQuantization, matrix: Matrix, statistics: Statistics) -> Solved:
        (solved,) = self.solve_alike(layer, [matrix], [statistics])
        return solved

    def solve_alike(
        self, layer: LayerQuantization, matrices: Sequence[Matrix], statistics: Sequence[Statistics]
    ) -> list[Solved]:
        names, trellis = [matrix.name for matrix in matrices], matrices[0].scheme.is_trellis
        weights = [layer.weight(matrix) for matrix in matrices]
        check_weights(weights, names)
        moments = [_there(found.moments) for found in statistics]
        hessians = factored_stack(
            [rotated_moments(each) for each in moments] if trellis else moments,
            damping=layer.damping,
            activation_order=not trellis,
            run=self._run,
            names=names,
        )
        layer.watch.lap("factorization")
        drift = None
        if statistics[0].drift is not None:
            drifts = [_there(found.drift) for found in statistics]
            drift = stacked([rotated_moments(each) for each in drifts] if trellis else drifts)

        def quantize(parts: Tensor) -> list[tuple[QTensor, Tensor]]:
            return gptq_matrices(
                parts,
                hessians,
                matrices[0].scheme,
                scale_dtype=layer.scale_dtype,
                drift=drift,
                run=self._run,
                names=names,
            )

        return [Solved(*each) for each in layer.by_rows(weights, quantize, multiple=TILE if trellis else 1)]


class FoldingMethod(Method):
    """Multiplies the columns of a matrix by factors, which are folded into preceding parameters, and rounds the matrix.

    All matrices that read one norm get the same factors: those with the least sum of squared errors in the outputs of
    all of them. The error of an expert covers the tokens that are routed to it.
    """

    folds = True

    def solve(self, layer: LayerQuantization, matrix: Matrix, statistics: Statistics) -> Solved:
        check_weight(layer.weight(matrix), matrix.name)
        moments, spec = _there(statistics.moments), layer.layer.spec
        if spec.shared_norm(spec.matrix(matrix.linear)) is not None:
            return Solved(*_rounded(layer, matrix, layer.weight(matrix), moments, statistics.drift))
        trials = self.candidates(layer, matrix, statistics, layer.weight(matrix).abs().amax(0).float())
        best = int(self.losses(layer, matrix, moments, trials).argmin()) if len(trials) > 1 else 0
        layer.watch.lap("solve")
        folded = fold(layer.layer, matrix.linear, trials[best], stored=matrix.dtype)
        scale = folded.scale.float()
        drift = None if statistics.drift is None else rescaled(statistics.drift, scale)
        rounded = _rounded(layer, matrix, folded.weight, rescaled(moments, scale), drift)
        return Solved(*rounded, folded.scale, folded.changed)

    def fold_norm(self, layer: LayerQuantization, norm: str) -> None:
        spec = layer.layer.spec
        readers = spec.folding_into(norm)
        matrices = {reader.name: layer.matrices[reader.name] for reader in readers}
        for matrix in matrices.values():
            check_weight(layer.weight(matrix), matrix.name)
        absmax = torch.stack([layer.weight(matrix).abs().amax(0).float() for matrix in matrices.values()]).amax(0)
        inputs = layer.inputs(readers[0].reads, self.needed - {MOMENTS, DRIFT}, every_token=True)
        trials = powers_of_two(self.candidates(layer, matrices[readers[0].name], inputs, absmax))
        lost = torch.zeros(len(trials), dtype=torch.float64, device=trials.device)
        for stage in dict.fromkeys(reader.reads for reader in readers) if len(trials) > 1 else ():
            found = layer.inputs(stage, frozenset({MOMENTS}))
            for reader in spec.reading(stage):
                tokens = layer.routed_tokens(reader.name)
                losses = self.losses(layer, matrices[reader.name], _there(found.moments), trials)
                lost += losses * (found.tokens if tokens is None else tokens)
            layer.watch.lap("solve")
        layer.fold_norm(norm, trials[int(lost.argmin())])

    @abstractmethod
    def candidates(
        self, layer: LayerQuantization, matrix: Matrix, statistics: Statistics, weight_absmax: Tensor
    ) -> Tensor:
        """The factors to choose from, positive float32 `[trials, in]`.

        Args:
            layer: of the matrix.
            matrix: any of those that get the same factors.
            statistics: of their inputs.
            weight_absmax: float32 `[in]`, the greatest |w| of each of their columns.
        """

    def losses(self, layer: LayerQuantization, matrix: Matrix, moments: Tensor, trials: Tensor) -> Tensor:
        """The loss of a matrix for each candidate, in the same unit for all matrices of a layer: `[trials]`.

        Args:
            layer, matrix: the matrix.
            moments: float32 `[in, in]`, of its inputs.
            trials: at least two of `candidates`.
        """
        raise NotImplementedError


class Awq(FoldingMethod):
    """Scales up channels with large inputs before rounding: see `algorithms.awq` and `corrected_target`."""

    needed = frozenset({MOMENTS, DRIFT, MEAN_ABS})

    @classmethod
    def fits(cls, scheme: Scheme) -> bool:
        return scheme.activations is None and scheme.element is None

    def candidates(
        self, layer: LayerQuantization, matrix: Matrix, statistics: Statistics, weight_absmax: Tensor
    ) -> Tensor:
        del weight_absmax
        return awq.candidates(_tied(layer, matrix, _there(statistics.mean_abs)))

    def losses(self, layer: LayerQuantization, matrix: Matrix, moments: Tensor, trials: Tensor) -> Tensor:
        def lose(parts: Tensor) -> Tensor:
            return awq.losses(parts, moments, trials, matrix.scheme, scale_dtype=layer.scale_dtype).double()

        return layer.summed(layer.weight(matrix), lose)


class SmoothQuant(FoldingMethod):
    """Moves outliers of the inputs into the weights, for 8-bit activations: see `algorithms.smoothquant`."""

    needed = frozenset({MOMENTS, MAX_ABS})

    @classmethod
    def fits(cls, scheme: Scheme) -> bool:
        return scheme.activations is not None

    def candidates(
        self, layer: LayerQuantization, matrix: Matrix, statistics: Statistics, weight_absmax: Tensor
    ) -> Tensor:
        return _tied(layer, matrix, smoothing(_there(statistics.max_abs), weight_absmax))[None]


def solve_small(scheme: Scheme, dtype: torch.dtype, scale_dtype: torch.dtype, device: torch.device) -> None:
    """Solve a small matrix, so that all kernels and libraries of a solve are loaded."""
    size = SPAN + LARGEST_BLOCK
    weight, moments = torch.ones(1, 32, size, dtype=dtype, device=device), torch.eye(size, device=device)
    hessian = factored(moments, name="small")
    gptq_rows(weight, hessian, scheme, scale_dtype=scale_dtype, drift=torch.zeros_like(moments), name="small")


def solved_at_once(matrix: Matrix) -> int:
    """The number of matrices like this one, of the experts of a layer, that gptq solves at once: as many as fit into
    `_EXPERT_BYTES`.

    It divides the number of experts, so that one CUDA graph serves all of them.
    """
    each = 4 * matrix.columns * (EXPERT_SQUARES * matrix.columns + SOLVE_ROWS * sum(matrix.rows))
    most = max(1, _EXPERT_BYTES // each)
    return max(count for count in range(1, matrix.experts + 1) if count <= most and matrix.experts % count == 0)


METHODS: Mapping[str, type[Method]] = {"gptq": Gptq, "awq": Awq, "smoothquant": SmoothQuant}
"""The algorithms that are calibrated, by their names. A run makes its own method, which is for its process alone."""


def fitting_algorithms(scheme: Scheme) -> list[str]:
    """The algorithms that can quantize to a scheme, "rtn" included."""
    calibrated = [name for name, method in METHODS.items() if method.fits(scheme)]
    return calibrated if scheme.is_trellis else [*calibrated, "rtn"]


def suits(algorithm: str, config: ModelConfig) -> bool:
    """Whether an algorithm, "rtn" included, can quantize a model of this shape."""
    return algorithm not in METHODS or not METHODS[algorithm].folds or can_fold(config)


def _rounded(
    layer: LayerQuantization, matrix: Matrix, weight: Tensor, moments: Tensor, drift: Tensor | None
) -> tuple[QTensor, float]:
    """Round a matrix, scaled as its inputs are; ranges are clipped where activations stay in 16 bits.

    With the drift of the inputs, `corrected_target` is rounded.
    """
    hessian = None
    if drift is not None:
        hessian = factored(moments, damping=layer.damping, activation_order=False, name=matrix.name)
        layer.watch.lap("factorization")

    def quantize(matrices: Tensor) -> list[tuple[QTensor, Tensor]]:
        (parts,) = matrices
        height = parts.shape[1]
        if hessian is not None and drift is not None:
            # One product a part, whatever the number of parts: so the bits do not depend on how many there are.
            wide = parts.float()
            parts = torch.stack([corrected_target(part.T.contiguous(), hessian, drift).T for part in wide])
        losses = torch.zeros(len(parts), 2, dtype=torch.float64, device=parts.device)
        rounded = rtn(
            parts.flatten(0, 1),
            matrix.scheme,
            scale_dtype=layer.scale_dtype,
            importance=moments.diagonal().contiguous(),
            name=matrix.name,
        )
        for index, part in enumerate(parts):
            quantized = rounded.rows(index * height, (index + 1) * height)
            losses[index] = torch.tensor(squared_loss(part, quantized, moments), dtype=torch.float64)
        return [(rounded, losses)]

    (found,) = layer.by_rows([weight], quantize)
    return found


def _tied(layer: LayerQuantization, matrix: Matrix, channels: Tensor) -> Tensor:
    """The tensors of the inputs of a matrix, equal where the same rows make them."""
    spec = layer.layer.spec
    return tie(spec, spec.matrix(matrix.linear), channels)


def _there(statistic: Tensor | None) -> Tensor:
    assert statistic is not None
    return statistic
