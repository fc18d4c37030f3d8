"""Mixed precision: chooses the bits of each matrix of a model for a given average.

Calibration data passes through the unquantized model once. In each layer, each matrix is rounded to each scheme in turn
(clipped by the diagonal of its inputs' moments) while the others are unchanged. Its loss is the mean over the tokens of
|error|^2 / |output|^2 of the layer's outputs. Errors of different matrices are nearly independent, so their squares add
up; relative to the output, they have the same unit in all layers.

Choosing one scheme for each matrix is then a multiple-choice knapsack (Dudzinski and Walukiewicz, 1987), solved by
dynamic programming over the choices that no other beats in both bytes and loss. What is computed as one matrix (q, k
and v; gate and up) is one matrix here.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from warpbus.cuda.devices import default_dtype, resolve_device
from warpbus.dist import Group
from warpbus.errors import NumericError, SchemeError, UsageError
from warpbus.models import DecoderLayer
from warpbus.qtensor import Scheme, Schemes
from warpbus.quantization import unquantized
from warpbus.quantization.algorithms import rtn
from warpbus.quantization.calibration import Calibration
from warpbus.quantization.driver import read_data
from warpbus.quantization.layerwise import LayerQuantization
from warpbus.quantization.options import QuantizationOptions
from warpbus.quantization.preflight import Matrix, Plan, prepare
from warpbus.quantization.states import States
from warpbus.quantization.statistics import MOMENTS, Statistics
from warpbus.quantization.stopwatch import Stopwatch

# Partial choices that are kept after each matrix. Below that the result is exact. Layers of one shape need few: their
# bytes add up to the same sums in many ways.
KEPT = 2**14


@dataclass(frozen=True)
class Cost:
    """The loss and the size of a matrix in a scheme.

    Attributes:
        loss: its share of what is to be kept small; shares are added up, so they have to be in one unit.
        nbytes: of codes, scales and zero points.
    """

    loss: float
    nbytes: int


def choose(matrices: Mapping[str, Mapping[Scheme, Cost]], budget_bytes: int) -> dict[str, Scheme]:
    """The scheme of each matrix with the least sum of losses among those within the budget.

    Args:
        matrices: by name, what each costs in the schemes that it may have.
        budget_bytes: of all matrices together.

    Returns:
        by name; the same for the same arguments. With more than `KEPT` partial choices that none beats, only the best
        of each of so many equal ranges of bytes goes on: within the budget still, but then there may be a better one.

    Raises:
        UsageError: if a matrix has no scheme to choose, or even the smallest ones do not fit the budget.
        NumericError: if a loss is NaN or infinite; the message names the matrix.
    """
    for name, costs in matrices.items():
        if not costs:
            raise UsageError(f"{name}: no scheme to choose from: give at least one")
        for scheme, cost in costs.items():
            if not abs(cost.loss) < float("inf"):
                raise NumericError(f"{name}: its loss in {scheme} is {cost.loss}: expected a finite number")
    smallest = [min(cost.nbytes for cost in costs.values()) for costs in matrices.values()]
    room = budget_bytes - sum(smallest)
    if room < 0:
        raise UsageError(
            f"a budget of {budget_bytes} bytes is too small: the matrices take {sum(smallest)} bytes in the "
            "smallest of the schemes to choose from: allow more, or schemes of fewer bits"
        )
    # Bytes beyond the smallest scheme of each matrix so far, rising, and the losses that go with them, falling.
    extra, loss = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    steps: list[Tensor] = []
    for costs, least in zip(matrices.values(), smallest, strict=True):
        more = torch.tensor([cost.nbytes - least for cost in costs.values()], dtype=torch.int64)
        added = torch.tensor([cost.loss for cost in costs.values()], dtype=torch.float64)
        extra, loss = (extra[:, None] + more).flatten(), (loss[:, None] + added).flatten()
        kept = _unbeaten(extra, loss, room)
        extra, loss = extra[kept], loss[kept]
        steps.append(kept)
    chosen: dict[str, Scheme] = {}
    state = len(extra) - 1
    for (name, costs), kept in zip(reversed(list(matrices.items())), reversed(steps), strict=True):
        state, option = divmod(int(kept[state]), len(costs))
        chosen[name] = list(costs)[option]
    return {name: chosen[name] for name in matrices}


def _unbeaten(nbytes: Tensor, loss: Tensor, room: int) -> Tensor:
    """Indexes of the pairs within `room` that no other beats in both, in order of bytes; at most about `KEPT`."""
    order = torch.argsort(loss, stable=True)
    order = order[torch.argsort(nbytes[order], stable=True)]
    order = order[nbytes[order] <= room]
    least = loss[order].cummin(0).values
    better = torch.ones(len(order), dtype=torch.bool)
    better[1:] = least[1:] < least[:-1]
    order = order[better]
    if len(order) > KEPT:
        reach = nbytes[order]
        ranges = (reach - reach[0]) * KEPT // (reach[-1] - reach[0] + 1)
        last = torch.ones(len(order), dtype=torch.bool)
        last[:-1] = ranges[1:] != ranges[:-1]
        last[0] = True  # whatever follows, the smallest fits
        order = order[last]
    return order


BITS = (2, 3, 4, 8)

_SEQUENCES = 16
_GROUPS = (128, 64, 32)


def mixed_schemes(
    model: str | Path,
    bits: float,
    *,
    calibration: str | Path | Calibration,
    options: QuantizationOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Schemes:
    """Choose the scheme of each matrix.

    Args:
        model: a model directory, not quantized.
        bits: average bits per weight, including scales; embedding and head are not quantized and not counted.
        calibration: as for `quantize`; this pass uses fewer sequences.
        options: as for `quantize`, of which `format`, `samples`, `tokens`, `seqlen` and `seed` apply, and `device`, a
            single one.
        progress: called with the number of finished layers and their total.

    Returns:
        The most frequent scheme, and the matrices with other schemes.

    Raises:
        UsageError: if there are fewer bits than the smallest scheme takes, or more than the largest.
        SchemeError: if the format holds fewer than two of the schemes.
        WarpbusError: as `quantize`.
    """
    device = resolve_device(options.device)
    plans = _plans(Path(model), options.format)
    plan = plans[0]
    dtype = default_dtype(device, plan.dtype)
    weights = sum(sum(matrix.rows) * matrix.columns for matrix in plan.matrices)
    sizes = [8 * each.bytes_quantized / weights for each in plans]
    if not min(sizes) <= bits <= max(sizes):  # NaN is not between them either
        raise UsageError(
            f"bits is {bits}: expected from {min(sizes):.3f} to {max(sizes):.3f} bits per weight, scales included, "
            f"as {plans[0].schemes} and {plans[-1].schemes} take"
        )
    data = read_data(plan, calibration, options)
    data = Calibration(data.sequences[:_SEQUENCES])
    costs: dict[str, dict[Scheme, Cost]] = {}
    last = len(plan.config.all_layers) - 1
    for index, layer, (states,) in unquantized.layers(plan, data, device=device, dtype=dtype, last=last):
        moments = _importance(layer, index, states, Group(0, 1, device))
        expected = [unquantized.output(layer, index, state) for state in states]
        for each in plans:
            for linear, matrix in each.layer(index).items():
                loss = _loss(layer, matrix, moments[linear], states, expected, plan.scale_dtype)
                costs.setdefault(matrix.name, {})[matrix.scheme] = Cost(loss, _nbytes(matrix, plan.scale_dtype))
        progress(index + 1, last + 1)
    chosen = choose(costs, int(bits * weights / 8))
    default = Counter(chosen.values()).most_common(1)[0][0]
    exceptions = {
        source.removesuffix(".weight"): chosen[matrix.name]
        for matrix in plan.matrices
        if chosen[matrix.name] != default
        for source in matrix.sources
    }
    return Schemes(default, exceptions)


def _plans(model: Path, format: str) -> list[Plan]:
    """A plan for each number of bits, with the largest groups that fit the model and the format."""
    found = []
    for bits in BITS:
        for group in (*_GROUPS, None):
            try:
                found.append(prepare(model, None, Scheme(bits, group), format))
                break
            except SchemeError as error:
                refused = error
    if len(found) < 2:
        raise refused
    return found


def _importance(layer: DecoderLayer, index: int, states: list[States], group: Group) -> dict[str, Tensor]:
    """The mean squares of the inputs of each matrix, by its name in the layer."""
    found: dict[str, Tensor] = {}

    def look(linear: str, statistics: Statistics) -> None:
        assert statistics.moments is not None
        found[linear] = statistics.moments.diagonal().contiguous()

    own = [replace(each, original=None) for each in states]
    LayerQuantization(layer, index, own, frozenset({MOMENTS}), group=group, watch=Stopwatch(group.device)).visit(look)
    return found


@torch.no_grad()
def _loss(
    layer: DecoderLayer,
    matrix: Matrix,
    importance: Tensor,
    states: list[States],
    expected: list[Tensor],
    scale_dtype: torch.dtype,
) -> float:
    """The effect of rounding one matrix on the layer's outputs."""
    module = layer.get_submodule(matrix.linear)
    assert isinstance(module, nn.Linear)
    weight = module.weight.data
    rounded = rtn(weight, matrix.scheme, scale_dtype=scale_dtype, importance=importance, name=matrix.name)
    module.weight.data = rounded.dequantize(weight.dtype)
    try:
        outputs = [unquantized.output(layer, matrix.layer, state) for state in states]
    finally:
        module.weight.data = weight
    return unquantized.squared_error(outputs, expected, states)


def _nbytes(matrix: Matrix, scale_dtype: torch.dtype) -> int:
    size = sum(matrix.rows) * matrix.columns
    return int(size * matrix.scheme.bits_per_weight(matrix.columns, scale_dtype.itemsize * 8) / 8)
