"""The cost model by which products on `mma.sync` choose their tiles: `gemm_sm80` and `wna16_sm80`.

In clocks of a multiprocessor. The rates are an A100's; what matters is how the costs of two tilings compare.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from warpbus.kernels.ops.arguments import blocks

_PRODUCTS = 1024  # multiplications and additions per clock
_BYTES = 40  # from L2 per clock, while all multiprocessors read
_MEMORY = 10  # from and to global memory per clock
_LATENCY = 800  # from a copy's start until it is there
_START = 2000  # of a block: the first tiles, and the results
_LAUNCH = 4000  # of split_k_reduce
_LEAST_PART = 256  # of k, below which splitting is not considered
_MOST_SPLITS = 32

_AnyTiling = TypeVar("_AnyTiling")


def cheapest(
    tilings: Sequence[_AnyTiling], k: int, step: Callable[[_AnyTiling], int], cost: Callable[[_AnyTiling, int], float]
) -> tuple[_AnyTiling, int]:
    """The tiling of least cost, and how much of k a block sums: a multiple of its step.

    Splitting k gives work to multiprocessors that would have none, where the product has few tiles. A second kernel
    then reads all partial sums.

    Args:
        step: of k, in one stage of a tiling.
        cost: of a tiling whose blocks sum a part of k; the first of equals is taken.
    """
    choices = []
    for tiling in tilings:
        for splits in range(1, max(1, min(_MOST_SPLITS, k // _LEAST_PART)) + 1):
            part = blocks((max(k, 1), splits * step(tiling))) * step(tiling)
            choices.append((cost(tiling, part), tiling, part))
    _, tiling, part = min(choices, key=lambda choice: choice[0])
    return tiling, part


def clocks(
    *,
    m: int,
    n: int,
    k: int,
    part: int,
    step: int,
    tiles: int,
    tile: int,
    efficiency: float,
    stages: int,
    resident: int,
    multiprocessors: int,
    bytes_per_k: float,
    weight_bytes: float = 0,
) -> float:
    """The expected time: a multiprocessor computes, reads or waits, and the slowest decides.

    Args:
        part: of k, that a block sums; `step`: of k, in one stage.
        tiles: that cover the product, of `tile` elements each.
        efficiency: the share of the tensor cores' rate that a full multiprocessor reaches.
        stages: in flight in a block; `resident`: blocks of a multiprocessor at a time.
        bytes_per_k: of both operands, that a block reads per element of k.
        weight_bytes: that come from global memory once.
    """
    splits = blocks((max(k, 1), part))
    share = blocks((tiles * splits, multiprocessors))
    rounds = blocks((share, resident))
    computing = share * part * tile / (_PRODUCTS * efficiency)
    reading = share * part * bytes_per_k / _BYTES
    loading = weight_bytes / (_MEMORY * multiprocessors)
    waiting = rounds * part / step * _LATENCY / (stages - 1)
    combining = _LAUNCH + 2 * 4 * splits * m * n / (_MEMORY * multiprocessors) if splits > 1 else 0
    return max(computing, reading, loading, waiting) + rounds * _START + combining
