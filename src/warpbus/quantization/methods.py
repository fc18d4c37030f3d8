"""The algorithms as a run uses them: what each needs to know of a matrix' inputs, and what it makes of the matrix."""

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
from warpbus.quantization.algorithms import awq, cholesky, rtn, smoothing
from warpbus.quantization.algorithms.aim import aim
from warpbus.quantization.algorithms.descent import SPAN
from warpbus.quantization.algorithms.factored import factored
from warpbus.quantization.algorithms.gptq import call_for, gptq_rows
from warpbus.quantization.algorithms.grid import check_weight
from warpbus.quantization.folding import Folded, can_fold, fold, rescaled, tie
from warpbus.quantization.layerwise import LayerQuantization
from warpbus.quantization.loss import squared_loss
from warpbus.quantization.preflight import Matrix
from warpbus.quantization.statistics import DRIFT, MAX_ABS, MEAN_ABS, MOMENTS, Statistics


@dataclass(frozen=True)
class Solved:
    """What became of a matrix.

    Attributes:
        weight: quantized.
        error: see `LayerResult`.
        folded: `[in]`, what was folded into what precedes the matrix: its inputs are divided by that from now on.
        changed: the parameters of the layer that were changed by it, by their names.
    """

    weight: QTensor
    error: float
    folded: Tensor | None = None
    changed: Mapping[str, Tensor] = field(default_factory=dict)


class Method(ABC):
    """An algorithm that is calibrated.

    Attributes:
        needed: the names of the statistics it asks for, see `Statistics`.
        folds: it moves factors into what precedes a matrix, which not every model allows (see `can_fold`).
    """

    needed: frozenset[str]
    folds = False

    def prepare(
        self, matrices: Sequence[Matrix], group: Group, *, scale_dtype: torch.dtype, dtype: torch.dtype
    ) -> None:
        """Do what can be done for matrices before there is anything of them.

        Args:
            matrices: one of each shape and scheme.
            group: the processes that do them together.
            scale_dtype: of their scales.
            dtype: of their weights as they are loaded.
        """
        del matrices, group, scale_dtype, dtype

    @abstractmethod
    def solve(self, layer: LayerQuantization, matrix: Matrix, statistics: Statistics) -> Solved:
        """Quantize a matrix. It may change what precedes the matrix in the layer, but not the matrix.

        Raises:
            NumericError: if that cannot be done; the message names the matrix.
        """

    @classmethod
    @abstractmethod
    def fits(cls, scheme: Scheme) -> bool:
        """Whether the algorithm can quantize to a scheme."""


class Gptq(Method):
    """Columns one after the other, aimed at what the unquantized model gives: see `algorithms.gptq`."""

    needed = frozenset({MOMENTS, DRIFT})

    def __init__(self) -> None:
        self._run = Replayed()

    @classmethod
    def fits(cls, scheme: Scheme) -> bool:
        return scheme.activations is None

    def prepare(
        self, matrices: Sequence[Matrix], group: Group, *, scale_dtype: torch.dtype, dtype: torch.dtype
    ) -> None:
        """Capture the graphs of the solves, which takes Python as long as to launch what is in them."""
        if group.device.type != "cuda":
            return
        parts = len(group.shares())
        for scheme in {matrix.scheme for matrix in matrices}:
            solve_small(scheme, dtype, scale_dtype, group.device)
        for columns in {matrix.columns for matrix in matrices}:
            self._run.prepare(cholesky.call_for(columns, group.device))
        for matrix in matrices:
            shape = (parts, -(-sum(matrix.rows) // SHARES), matrix.columns)
            self._run.prepare(call_for(shape, dtype, matrix.scheme, scale_dtype=scale_dtype, device=group.device))

    def solve(self, layer: LayerQuantization, matrix: Matrix, statistics: Statistics) -> Solved:
        check_weight(layer.weight(matrix), matrix.name)
        hessian = factored(_there(statistics.moments), damping=layer.damping, run=self._run, name=matrix.name)
        layer.watch.lap("factorization")

        def quantize(parts: Tensor) -> tuple[QTensor, Tensor]:
            return gptq_rows(
                parts,
                hessian,
                matrix.scheme,
                scale_dtype=layer.scale_dtype,
                drift=statistics.drift,
                run=self._run,
                name=matrix.name,
            )

        return Solved(*layer.by_rows(layer.weight(matrix), quantize))


class Awq(Method):
    """Channels with large inputs scaled up before what is then aimed at is rounded: see `algorithms.awq` and `aim`."""

    needed = frozenset({MOMENTS, DRIFT, MEAN_ABS})
    folds = True

    @classmethod
    def fits(cls, scheme: Scheme) -> bool:
        return scheme.activations is None

    def solve(self, layer: LayerQuantization, matrix: Matrix, statistics: Statistics) -> Solved:
        check_weight(layer.weight(matrix), matrix.name)
        moments = _there(statistics.moments)
        trials = awq.candidates(_tied(layer, matrix, _there(statistics.mean_abs)))

        def lose(parts: Tensor) -> Tensor:
            found = [awq.losses(part, moments, trials, matrix.scheme, scale_dtype=layer.scale_dtype) for part in parts]
            return torch.stack(found).double()

        best = int(layer.summed(layer.weight(matrix), lose).argmin())
        layer.watch.lap("solve")
        folded = fold(layer.layer, matrix.linear, trials[best], stored=matrix.dtype)
        return _rounded(layer, matrix, folded, moments, statistics.drift)


class SmoothQuant(Method):
    """Outliers of the inputs moved into the weights, for activations of 8 bits: see `algorithms.smoothquant`."""

    needed = frozenset({MOMENTS, MAX_ABS})
    folds = True

    @classmethod
    def fits(cls, scheme: Scheme) -> bool:
        return scheme.activations is not None

    def solve(self, layer: LayerQuantization, matrix: Matrix, statistics: Statistics) -> Solved:
        check_weight(layer.weight(matrix), matrix.name)
        weights = layer.weight(matrix).abs().amax(0).float()
        scale = _tied(layer, matrix, smoothing(_there(statistics.max_abs), weights))
        folded = fold(layer.layer, matrix.linear, scale, stored=matrix.dtype)
        return _rounded(layer, matrix, folded, _there(statistics.moments))


def solve_small(scheme: Scheme, dtype: torch.dtype, scale_dtype: torch.dtype, device: torch.device) -> None:
    """Solve for a small matrix, so that all kernels and libraries of a solve are loaded."""
    size = SPAN + LARGEST_BLOCK
    weight, moments = torch.ones(1, 32, size, dtype=dtype, device=device), torch.eye(size, device=device)
    hessian = factored(moments, name="small")
    gptq_rows(weight, hessian, scheme, scale_dtype=scale_dtype, drift=torch.zeros_like(moments), name="small")


METHODS: Mapping[str, type[Method]] = {"gptq": Gptq, "awq": Awq, "smoothquant": SmoothQuant}
"""The algorithms that are calibrated, by their names. A run makes its own method, which is for its process alone."""


def suits(algorithm: str, config: ModelConfig) -> bool:
    """Whether an algorithm, "rtn" included, can quantize a model of this shape."""
    return algorithm not in METHODS or not METHODS[algorithm].folds or can_fold(config)


def _rounded(
    layer: LayerQuantization, matrix: Matrix, folded: Folded, moments: Tensor, drift: Tensor | None = None
) -> Solved:
    """Round a matrix after its inputs were scaled; ranges are clipped where activations stay in 16 bits.

    With the drift of the inputs, as they were before, what is rounded is what `aim` gives.
    """
    moments = rescaled(moments, folded.scale.float())
    hessian = None
    if drift is not None:
        hessian = factored(moments, damping=layer.damping, activation_order=False, name=matrix.name)
        drift = rescaled(drift, folded.scale.float())
        layer.watch.lap("factorization")

    def quantize(parts: Tensor) -> tuple[QTensor, Tensor]:
        height = parts.shape[1]
        if hessian is not None and drift is not None:
            # One product a part, whatever the number of parts: so the bits do not depend on how many there are.
            parts = torch.stack([aim(part.T.contiguous(), hessian, drift).T for part in parts])
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
        return rounded, losses

    return Solved(*layer.by_rows(folded.weight, quantize), folded.scale, folded.changed)


def _tied(layer: LayerQuantization, matrix: Matrix, channels: Tensor) -> Tensor:
    """What belongs to the inputs of a matrix, alike where they are made by the same rows."""
    spec = layer.layer.spec
    return tie(spec, spec.matrix(matrix.linear), channels)


def _there(statistic: Tensor | None) -> Tensor:
    assert statistic is not None
    return statistic
