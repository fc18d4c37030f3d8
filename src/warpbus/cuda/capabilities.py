"""What the architectures can do: one row for each that kernels are compiled for. A kernel for a new GPU adds to its row."""

import functools
from dataclasses import dataclass

from warpbus.errors import DeviceError


@dataclass(frozen=True)
class Capabilities:
    """Instructions of an architecture that kernels are chosen by.

    Attributes:
        arch: such as "sm_90a", see `warpbus.cuda.jit.architecture`.
        cp_async: copies from global to shared memory beside arithmetic, and mma.sync of 16-bit and 8-bit integers.
        e4m3: tensor cores multiply float8_e4m3fn.
        tma: the copy engine (tensor maps, bulk copies) with its barriers, and programmatic dependent launch.
        clusters: blocks of a cluster read each other's shared memory.
        wgmma: warpgroup products, operands in shared memory. Hopper's alone.
    """

    arch: str
    cp_async: bool = False
    e4m3: bool = False
    tma: bool = False
    clusters: bool = False
    wgmma: bool = False


_ROWS = (
    Capabilities("sm_70"),
    Capabilities("sm_80", cp_async=True),
    Capabilities("sm_89", cp_async=True, e4m3=True),
    Capabilities("sm_90a", cp_async=True, e4m3=True, tma=True, clusters=True, wgmma=True),
    Capabilities("sm_100a", cp_async=True, e4m3=True, tma=True, clusters=True),
)
