"""The capabilities of each GPU architecture by which kernels are chosen: one row per architecture.

A kernel for a new GPU adds a row, or a column if the kernel needs an instruction that no other kernel needs. Shared
memory and multiprocessors differ within an architecture: `devices.shared_memory` and `green.multiprocessors` ask the
driver for them.
"""

import functools
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """The instructions of an architecture.

    Attributes:
        arch: such as "sm_90a", see `jit.architecture`.
        mma: tensor cores multiply float16, bfloat16 and int8 (mma.sync), and cp.async copies to shared memory.
        e4m3: tensor cores multiply float8_e4m3fn.
        tma: the copy engine with its tensor maps, bulk copies and barriers.
        clusters: the blocks of a cluster read each other's shared memory.
        dependent_launch: a kernel may start before the one ahead has ended, and wait for it inside.
        wgmma: products of a warpgroup, whose operands lie in shared memory.
    """

    arch: str
    mma: bool = False
    e4m3: bool = False
    tma: bool = False
    clusters: bool = False
    dependent_launch: bool = False
    wgmma: bool = False


_ROWS = (
    Capabilities("sm_80", mma=True),
    Capabilities("sm_89", mma=True, e4m3=True),
    Capabilities("sm_90a", mma=True, e4m3=True, tma=True, clusters=True, dependent_launch=True, wgmma=True),
    Capabilities("sm_100a", mma=True, e4m3=True, tma=True, clusters=True, dependent_launch=True),
    Capabilities("sm_120a", mma=True, e4m3=True, tma=True, clusters=True, dependent_launch=True),
)


@functools.cache
def capabilities(arch: str) -> Capabilities:
    """The row of an architecture such as "sm_86": its own, or that of the newest one before it.

    An architecture older than all rows gets a row without capabilities.
    """
    rows = [row for row in _ROWS if _number(row.arch) <= _number(arch)]
    return rows[-1] if rows else Capabilities(arch)


def _number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))
