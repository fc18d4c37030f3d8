"""How `mla_attention` cuts the heads and keys of a row into blocks."""

import functools
from dataclasses import dataclass

from warpbus.errors import UsageError

WGMMA_KEYS = 64
"""Keys of a chunk with wgmma."""
KEYS = (32, 16)
"""Keys of a chunk with mma.sync; 16 where shared memory is small."""
HEADS = (8, 16, 24, 32)
"""Heads of a tile, rounded up: what the kernels are compiled for."""
GROUP = 8
"""Units of a group."""

_KEY = 576  # features of a key: kKeyDim in csrc/mla/shape.cuh
_ROW = _KEY + 8  # kRow in csrc/mla/sm80_attention.cu
_WGMMA_STAGES = 2
_STAGES = {False: (3, 5), True: (2, 2)}  # at least, at most, with mma.sync: chunks of an FP8 cache wait in registers
_WARPS = 8
_MOST_UNITS = 64  # of a row
_FINE, _UNIT = 16, 128  # up to so many units they have one chunk; beyond up to so many keys, until there are too many
_RESERVED = 1024  # bytes of shared memory that each block takes beside its own
_AROUND = 2  # what a block takes beside its chunks, in chunks


@dataclass(frozen=True)
class LatentDevice:
    """What decides how a row is cut: multiprocessors, bytes of shared memory of one, and whether there is wgmma."""

    multiprocessors: int
    shared: int
    wgmma: bool


@dataclass(frozen=True)
class LatentPlan:
    """How heads and keys of a row are cut; the names are those of csrc/mla/sm80_attention.cu.

    Attributes:
        heads, keys: the macros HEADS and KEYS.
        tiles: of `tile_heads` heads, each with blocks of its own.
        parts: of each row, of which a block has `parts_per_block`; `blocks` of a row and tile.
        shared: bytes of dynamic shared memory of a block.
    """

    heads: int
    keys: int
    tiles: int
    tile_heads: int
    stages: int
    chunks_per_unit: int
    units_per_part: int
    parts_per_block: int
    parts: int
    blocks: int
    shared: int

    @property
    def part_keys(self) -> int:
        """Keys of a part."""
        return self.units_per_part * self.chunks_per_unit * self.keys


@functools.lru_cache(maxsize=4096)
def plan(rows: int, heads: int, limit: int, device: LatentDevice, *, coded: bool = False) -> LatentPlan:
    """The cut that takes least time, of such the one with most blocks; units and groups depend on `limit` alone.

    Args:
        coded: the cache is in FP8.
    """
    compiled, keys, stages, shared = _fitted(heads, device, coded)
    tiles = -(-heads // compiled)
    tile_heads = -(-heads // tiles)
    chunks = -(-limit // keys)
    chunks_per_unit = max(min(_UNIT // keys, -(-chunks // _FINE)), -(-chunks // _MOST_UNITS))
    units = -(-chunks // chunks_per_unit)

    def cut(units_per_part: int, parts_per_block: int) -> tuple[int, int, LatentPlan]:
        parts = -(-units // units_per_part)
        blocks = -(-parts // parts_per_block)
        waves = -(-rows * tiles * blocks // device.multiprocessors)
        work = waves * (parts_per_block * units_per_part * chunks_per_unit + _AROUND)
        found = LatentPlan(
            *(_compiled(tile_heads), keys, tiles, tile_heads, stages, chunks_per_unit),
            *(units_per_part, parts_per_block, parts, blocks, shared),
        )
        return work, -blocks, found

    cuts = [cut(1, count) for count in (1, 2, 4)] + [cut(GROUP, count) for count in (1, 2, 4, 8)]
    return min(cuts, key=lambda found: found[:2])[2]


def _fitted(heads: int, device: LatentDevice, coded: bool) -> tuple[int, int, int, int]:
    """Heads that a tile has at most, keys of a chunk, stages, and shared memory of a block."""
    if device.wgmma:
        most = HEADS[-1]
        return most, WGMMA_KEYS, _WGMMA_STAGES, wgmma_bytes(_compiled(-(-heads // -(-heads // most))))
    fewest, largest = _STAGES[coded]
    for keys in KEYS:
        for most in reversed(HEADS):
            stage, others = 2 * keys * _ROW, other_bytes(_compiled(-(-heads // -(-heads // most))), keys)
            stages = min(largest, (device.shared - _RESERVED - others) // stage)
            if most >= min(heads, HEADS[2]) and stages >= fewest:
                return most, keys, stages, others + stages * stage
    raise UsageError(
        f"mla_attention: a multiprocessor has {device.shared} bytes of shared memory, too few: give a GPU since Ampere"
    )


def _compiled(heads: int) -> int:
    """The macro HEADS of the kernel for a tile of so many heads."""
    return next(bound for bound in HEADS if heads <= bound)


def wgmma_bytes(heads: int) -> int:
    """Bytes of shared memory of a block with wgmma: SHARED_BYTES."""
    keys = 2 * WGMMA_KEYS * _KEY * _WGMMA_STAGES
    others = heads * (2 * _KEY + 2 * WGMMA_KEYS + 4 * 2 * (WGMMA_KEYS + 4) + 16)
    return -(-(keys + others) // 1024) * 1024


def other_bytes(heads: int, keys: int) -> int:
    """Bytes of shared memory of a block of mla_attention beside its stages: OTHER_BYTES."""
    splits = _WARPS // (keys // 16)
    return heads * (2 * _ROW + 2 * (keys + 8) + 4 * splits * (keys + 4) + 16)
