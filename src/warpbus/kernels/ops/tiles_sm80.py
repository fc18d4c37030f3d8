"""The tiles of products on `mma.sync`, and the cost model by which `gemm_sm80`, `wna16_sm80` and
`wna8_sm80` choose among them.

Costs are in clocks of a multiprocessor. The rates are an A100's; what matters is how the costs of two tilings compare.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from warpbus.kernels.ops.arguments import blocks
from warpbus.kernels.ops.split_k import cheapest

_PRODUCTS = 1024  # multiplications and additions per clock
_BYTES = 40  # from L2 per clock, while all multiprocessors read
_MEMORY = 10  # from and to global memory per clock
_LATENCY = 800  # from a copy's start until it is there
_START = 2000  # of a block: the first tiles, and the results
_LAUNCH = 4000  # of split_k_reduce
_LEAST_PART = 256  # of k, below which splitting is not considered
_MOST_SPLITS = 32
_RESERVED = 1024  # bytes of shared memory that the system takes of each block


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: they are few, and looked up at every launch
class Sm80Tiling:
    """How a kernel divides a product `[m, n]` among blocks and warps.

    Attributes:
        tile_m, tile_n, tile_k: the tile of a block, and the extent in k of one stage in shared memory.
        warp_m, warp_n: the tile of a warp.
        stages: tiles in shared memory.
        efficiency: the share of the tensor cores' rate that a full multiprocessor reaches, as expected.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    warp_m: int
    warp_n: int
    stages: int
    efficiency: float

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.tile_m // self.warp_m * (self.tile_n // self.warp_n) * 32

    def tiles(self, m: int, n: int) -> int:
        """How many tiles cover a product."""
        return blocks((m, self.tile_m), (n, self.tile_n))


_AnyTiling = TypeVar("_AnyTiling", bound=Sm80Tiling)


def choose(tilings: Sequence[_AnyTiling], k: int, cost: Callable[[_AnyTiling, int], float]) -> tuple[_AnyTiling, int]:
    """The tiling of least cost, and how much of k a block sums: a multiple of its `tile_k`.

    Args:
        cost: of a tiling whose blocks sum a part of k, see `clocks`; the first of equals is taken.
    """
    splits = range(1, max(1, min(_MOST_SPLITS, k // _LEAST_PART)) + 1)
    return cheapest(tilings, k, splits, lambda tiling: tiling.tile_k, cost)


def resident_within(registers: int, shared: int, shared_memory: int) -> int:
    """Blocks that a multiprocessor with so many bytes of shared memory holds at a time.

    Args:
        registers: blocks that have room for their registers.
        shared: bytes of a block.
    """
    return max(1, min(registers, shared_memory // (shared + _RESERVED)))


def clocks(
    tiling: Sm80Tiling,
    *,
    m: int,
    n: int,
    k: int,
    part: int,
    resident: int,
    multiprocessors: int,
    bytes_per_k: float,
    weight_bytes: float = 0,
    rate: float = 1,
) -> float:
    """The expected time: a multiprocessor computes, reads or waits, and the slowest decides.

    Args:
        part: of k, that a block sums.
        resident: blocks of a multiprocessor at a time.
        bytes_per_k: of both operands, that a block reads per element of k.
        weight_bytes: that come from global memory once.
        rate: of the tensor cores, relative to that for 16 bits.
    """
    splits = blocks((max(k, 1), part))
    share = blocks((tiling.tiles(m, n) * splits, multiprocessors))
    rounds = blocks((share, resident))
    computing = share * part * (tiling.tile_m * tiling.tile_n) / (rate * _PRODUCTS * tiling.efficiency)
    reading = share * part * bytes_per_k / _BYTES
    loading = weight_bytes / (_MEMORY * multiprocessors)
    waiting = rounds * part / tiling.tile_k * _LATENCY / (tiling.stages - 1)
    combining = _LAUNCH + 2 * 4 * splits * m * n / (_MEMORY * multiprocessors) if splits > 1 else 0
    return max(computing, reading, loading, waiting) + rounds * _START + combining
