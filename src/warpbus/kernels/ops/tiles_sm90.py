"""The tiles of products on Hopper's `wgmma`, and their shared memory.

A block has one warpgroup that loads and one or two that multiply; the operands pass through a ring of stages.
"""

from dataclasses import dataclass

from warpbus.kernels.ops.arguments import blocks

BOX = 64
"""Rows and columns of a 16-bit result that one copy stores; a row is as long as the 128-byte swizzle."""

ROW_BYTES = 128
"""Of a row of an operand in one stage: the swizzle."""


@dataclass(frozen=True)
class Sm90Tiling:
    """How a kernel divides a product `[m, n]`, of which a stage holds `ROW_BYTES` per row of both operands.

    Attributes:
        tile_m, tile_n: the tile of a block.
        stages: tiles of the operands in flight.
        buffers: staging buffers of each warpgroup that multiplies, of `BOX` by `BOX` results.
        efficiency: the expected share of the rate to which the kernel's cost model refers.
    """

    tile_m: int
    tile_n: int
    stages: int
    buffers: int
    efficiency: float

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply: two, but one for a tile of 64 rows."""
        return 1 if self.tile_m == BOX else 2

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (1 + self.consumers)

    def tiles(self, m: int, n: int) -> int:
        """How many tiles cover a product."""
        return blocks((m, self.tile_m), (n, self.tile_n))

    def shared(self, column_bytes: int) -> int:
        """Bytes of shared memory of a block.

        Args:
            column_bytes: that each warpgroup which multiplies keeps per column of the tile: bias or scales.
        """
        staging = self.consumers * (self.buffers * BOX * BOX * 2 + self.tile_n * column_bytes)
        return shared_bytes(self.stages, (self.tile_m + self.tile_n) * ROW_BYTES, staging)


def shared_bytes(stages: int, stage_bytes: int, others: int) -> int:
    """Bytes of shared memory of a block: the ring with two barriers per stage, others, and room to align to 1024."""
    return stages * (stage_bytes + 16) + others + 1024
