"""The matrices of a decoder layer quantized one after the other, as `LayerPass` asks for it."""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from warpbus.dist import Group
from warpbus.models import DecoderLayer
from warpbus.qtensor import QTensor
from warpbus.quantization.folding import divide_preceding
from warpbus.quantization.methods import Method, Task
from warpbus.quantization.preflight import Matrix
from warpbus.quantization.report import LayerResult
from warpbus.quantization.statistics import Statistics
from warpbus.quantization.stopwatch import Stopwatch


class LayerSolver:
    """What `LayerPass` calls: each matrix by a method, and its rounded weights in the layer.

    Args:
        layer: is changed.
        matrices: of the layer, by their names in it.
        method: what quantizes them.
        scale_dtype: of their scales.
        damping: see `algorithms.factored`.
        group: the processes that do it together.
        watch: told what takes the time.
        tell: called with what became of each matrix.

    Attributes:
        quantized: the matrices that are done, by their names in the layer.
        changed: the parameters of the layer that were folded into and are not quantized, by their names.
        results: of the matrices that are done.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        matrices: Mapping[str, Matrix],
        method: Method,
        *,
        scale_dtype: torch.dtype,
        damping: float,
        group: Group,
        watch: Stopwatch,
        tell: Callable[[LayerResult], None] = lambda result: None,
    ) -> None:
        self._layer = layer
        self._matrices = matrices
        self._method = method
        self._scale_dtype = scale_dtype
        self._damping = damping
        self._group = group
        self._watch = watch
        self._tell = tell
        self._started = time.perf_counter()
        self.quantized: dict[str, QTensor] = {}
        self.changed: dict[str, Tensor] = {}
        self.results: list[LayerResult] = []

    def __call__(self, linear: str, statistics: Statistics) -> Tensor | None:
        """See `layerwise.Solve`."""
        matrix = self._matrices[linear]
        task = Task(
            layer=self._layer,
            linear=linear,
            name=matrix.name,
            scheme=matrix.scheme,
            scale_dtype=self._scale_dtype,
            stored=matrix.dtype,
            damping=self._damping,
            group=self._group,
            watch=self._watch,
        )
        solved = self._method.solve(task, statistics)
        self.quantized[linear] = solved.weight
        task.weight.copy_(solved.weight.dequantize(task.weight.dtype))
        for parameter, tensor in solved.changed.items():
            owner = parameter.removesuffix(".weight")
            if owner in self.quantized:  # its rows were divided: so are the scales that it is stored with
                assert solved.folded is not None
                spec = self._layer.spec
                divided = divide_preceding(spec, spec.matrix(linear), self.quantized[owner], solved.folded)
                self.quantized[owner] = divided
                tensor.copy_(divided.dequantize(tensor.dtype))
            else:
                self.changed[parameter] = tensor
        now = time.perf_counter()
        self.results.append(LayerResult(matrix.layer, linear, str(matrix.scheme), solved.error, now - self._started))
        self._started = now
        self._tell(self.results[-1])
        self._watch.lap("solve")
        return solved.folded
