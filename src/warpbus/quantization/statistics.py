"""Statistics over all calibration tokens of all processes: of the inputs of a linear layer, and of keys and values."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from warpbus.dist import Group, TreeSum
from warpbus.errors import NumericError
from warpbus.formats.kv_cache import KVCacheScheme
from warpbus.kernels.reference.grid import LARGEST
from warpbus.quantization.algorithms.linear_algebra import add_product

# Columns of a panel. Of a symmetric product only the panels' parts on and below the diagonal are computed, added up and
# exchanged, which for inputs of 4096 columns is 5/8 of the whole.
_PANEL = 1024

MOMENTS, DRIFT, MEAN_ABS, MAX_ABS = "moments", "drift", "mean_abs", "max_abs"

ALONE = Group(0, 1, torch.device("cpu"))
"""The group of a process that works by itself on the CPU."""


@dataclass(frozen=True)
class Statistics:
    """Means and maxima over the input tokens x of a linear layer; `None` if a statistic was not requested.

    Attributes:
        tokens: the number of tokens.
        moments: the mean of x x^T, float32 `[in, in]`; GPTQ's Hessian up to a factor.
        drift: the mean of (o - x) x^T, float32 `[in, in]`, where o is what enters the same layer of the unquantized
            model for the same token.
        mean_abs, max_abs: of |x|, float32 `[in]`.
    """

    tokens: int
    moments: Tensor | None = None
    drift: Tensor | None = None
    mean_abs: Tensor | None = None
    max_abs: Tensor | None = None


class Collector:
    """Adds up the statistics of the inputs of a layer, or of several layers with as many features, such as experts.

    Tokens belong to shares (see `dist.SHARES`). A process sums its own shares, and the shares are summed in a fixed
    order, so the result has the same bits for any number of processes.

    Args:
        columns: features of the input.
        needed: which statistics, by the names of `Statistics`.
        group: the processes; each makes its own collector and calls `total`.
        names: the layers, for messages.
    """

    def __init__(
        self,
        columns: int,
        needed: frozenset[str],
        *,
        group: Group = ALONE,
        names: Sequence[str] = ("layer",),
    ) -> None:
        self._names = names
        self._group = group
        self._needed = needed
        self._share = -1
        self._columns = columns
        count = len(names)
        packed = sum(map(math.prod, _panel_shapes(columns)))
        shapes = {MOMENTS: (count, packed), DRIFT: (count, columns, columns), MEAN_ABS: (count, columns)}
        self._shapes: dict[str, tuple[int, ...]] = {key: shape for key, shape in shapes.items() if key in needed}
        self._sums = {key: TreeSum(group, shape) for key, shape in self._shapes.items()}
        self._open: dict[str, Tensor] = {}
        self._panels: list[list[tuple[int, Tensor]]] = []  # of the open moments of each layer
        self._largest = torch.zeros(count, columns, device=group.device)
        self._counts = [[0, 0] for _ in names]  # tokens, and those that are compared

    def add(self, x: Tensor, original: Tensor | None = None, *, share: int = 0, layer: int = 0) -> None:
        """Add tokens, without padding.

        On a GPU, 16-bit inputs are multiplied in 16 bits and summed in float32; everything else is computed in float32.

        Args:
            x: floating `[tokens, columns]`, what enters the layer.
            original: the same in the unquantized model, of the first tokens. The drift is the mean over these.
            share: the share that the tokens belong to; shares come in rising order.
            layer: which of the layers they enter.
        """
        if len(x) == 0:
            return
        if share != self._share:
            self._close()
            self._share = share
            self._open = {key: torch.zeros(shape, device=x.device) for key, shape in self._shapes.items()}
            if MOMENTS in self._open:
                self._panels = [list(_panels(packed, self._columns)) for packed in self._open[MOMENTS]]
        self._counts[layer][0] += len(x)
        # Few and large steps: the host has many thousands of these for the experts of a layer.
        wide = x.float() if x.device.type == "cpu" or x.dtype not in (torch.float16, torch.bfloat16) else x
        turned = wide.T
        if MOMENTS in self._open:
            for start, panel in self._panels[layer]:
                add_product(panel, turned[start:], wide[:, start : start + panel.shape[1]])
        if DRIFT in self._open and original is not None:
            count = len(original)
            self._counts[layer][1] += count
            moved = (original - x[:count]).to(wide.dtype)
            add_product(self._open[DRIFT][layer], moved.T, wide[:count])
        if MEAN_ABS in self._open:
            self._open[MEAN_ABS][layer] += x.abs().sum(0, dtype=torch.float32)
        if MAX_ABS in self._needed:
            largest = self._largest[layer]
            torch.maximum(largest, x.abs().amax(0).float(), out=largest)

    def total(self) -> list[Statistics]:
        """The statistics of all tokens of all processes, layer by layer.

        Raises:
            NumericError: if there was no token, or one had NaN or infinity; the message names the layer.
        """
        self._close()
        counts = self._group.sum(torch.tensor(self._counts, device=self._group.device))
        found = {key: total.total() for key, total in self._sums.items()}
        if MAX_ABS in self._needed:
            found[MAX_ABS] = self._group.gather(self._largest[None]).amax(0)
        for key in self._sums:
            # An expert may be reached only by tokens that are not compared: nothing is known of its drift.
            tokens = counts[:, int(key == DRIFT)].clamp_min(1)
            found[key] /= tokens.float().view(-1, *[1] * (found[key].ndim - 1))
        finite = [value.flatten(1).sum(1).isfinite().long() for value in found.values()]
        seen, *good = torch.stack([counts[:, 0], *finite]).tolist()
        for index, name in enumerate(self._names):
            if not seen[index]:
                raise NumericError(f"{name}: no token entered it: give calibration data")
            if not all(each[index] for each in good):
                remedy = "use an undamaged checkpoint"
                if self._group.device.type != "cpu":
                    remedy = "try --device cpu, which computes in float32"
                raise NumericError(
                    f"{name}: NaN or infinity entered it during calibration: the checkpoint overflows "
                    f"in this dtype or is damaged: {remedy}"
                )
        if MOMENTS in found:
            found[MOMENTS] = _whole(found[MOMENTS], self._columns)
        return [
            Statistics(seen[index], **{key: value[index] for key, value in found.items()})
            for index, _ in enumerate(self._names)
        ]

    def _close(self) -> None:
        """Hand the share that is complete over."""
        for key, tensor in self._open.items():
            self._sums[key].add(self._share, tensor)
        self._open, self._panels = {}, []


def _whole(packed: Tensor, columns: int) -> Tensor:
    """The symmetric matrices `[n, columns, columns]` of which the panels `[n, ...]` hold what is on and below the
    diagonal."""
    whole = packed.new_empty(len(packed), columns, columns)
    for own, panels in zip(whole, packed, strict=True):
        for start, panel in _panels(panels, columns):
            stop = start + panel.shape[1]
            own[start:, start:stop] = panel
            own[start:stop, stop:] = panel[stop - start :].T
    return whole


def _panels(packed: Tensor, columns: int) -> Iterator[tuple[int, Tensor]]:
    """The panels that lie one after the other in `packed`, each with the number of its first column and row."""
    shapes = _panel_shapes(columns)
    for shape, panel in zip(shapes, packed.split([*map(math.prod, shapes)]), strict=True):
        yield columns - shape[0], panel.view(shape)


def _panel_shapes(columns: int) -> list[tuple[int, int]]:
    return [(columns - start, min(_PANEL, columns - start)) for start in range(0, columns, _PANEL)]


class KVRange:
    """An attention context that records the ranges of keys and values and does not attend.

    Args:
        tokens: from `[batch, tokens, features]` to `[n, features]`, without padding.

    Attributes:
        largest: float32 `[2, kv_heads]`, the largest magnitudes of the keys, after rotary positions, and the values.
    """

    def __init__(self, tokens: Callable[[Tensor], Tensor]) -> None:
        self._tokens = tokens
        self.largest: Tensor

    def attend(self, layer: int, q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, positions_bt: Tensor) -> Tensor:
        del layer, positions_bt
        heads = k_bthd.shape[2]
        found = [self._tokens(x.flatten(2)).unflatten(1, (heads, -1)).abs().amax((0, 2)) for x in (k_bthd, v_bthd)]
        self.largest = torch.stack(found).float()
        return q_bthd


def scales_of(scheme: KVCacheScheme, largest: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The scales of keys and values, float32 `[kv_heads]` each, that map the largest magnitudes to the largest code;
    all equal unless the scheme has one per head. For zeros the scale is 1."""
    found = []
    for each in largest:
        own = each if scheme.per_head else each.max().expand(len(each))
        scales = own / LARGEST[scheme.stored]
        found.append(torch.where(scales > 0, scales, 1.0))
    return found[0], found[1]
