"""A device query: the limits that the driver states for a GPU, and those that the system states for the CPU."""

import os
from dataclasses import dataclass
from pathlib import Path

from warpbus.cuda import driver
from warpbus.cuda.cpu import cpu_instructions, cpu_model

# Numbers in CUdevice_attribute that `driver` has no name for.
_BLOCK_Y, _BLOCK_Z, _GRID_Y, _GRID_Z = 3, 4, 6, 7
_SHARED_PER_BLOCK, _WARP, _REGISTERS_PER_BLOCK, _MULTIPROCESSORS = 8, 10, 12, 16
_L2, _THREADS_PER_MULTIPROCESSOR, _MAJOR, _MINOR = 38, 39, 75, 76
_SHARED_PER_MULTIPROCESSOR, _REGISTERS_PER_MULTIPROCESSOR = 81, 82

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_USED_INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")


@dataclass(frozen=True)
class GpuLimits:
    """The properties of a GPU that a program may query.

    Attributes:
        capability: compute capability, such as "9.0".
        block, grid: at most so many threads, and blocks, along x, y and z.
        shared_per_block: bytes of a `__shared__` array; `shared_per_block_optin` if a launch asks for dynamic memory.
        shared_per_multiprocessor, l2: bytes.
    """

    capability: str
    multiprocessors: int
    threads_per_multiprocessor: int
    threads_per_block: int
    block: tuple[int, int, int]
    grid: tuple[int, int, int]
    warp: int
    registers_per_block: int
    registers_per_multiprocessor: int
    shared_per_block: int
    shared_per_block_optin: int
    shared_per_multiprocessor: int
    l2: int


@dataclass(frozen=True)
class CpuLimits:
    """The CPU that runs everything where there is no GPU.

    Attributes:
        cores: that this process may use.
        instructions: those of the sets used by Warpbus and torch that it has, by Linux's names.
        caches: bytes by name, such as "L1 data"; of one core's, or of the one that it shares with others.
    """

    name: str
    cores: int
    instructions: tuple[str, ...]
    caches: dict[str, int]


def gpu_limits(index: int) -> GpuLimits:
    """The limits of a GPU by its number in CUDA, whose context need not exist.

    Raises:
        DeviceError: there is no driver, or it knows no such GPU.
    """

    driver.check(driver.library().cuInit(0), "starting CUDA")

    def get(which: int) -> int:
        return driver.attribute(which, index)

    return GpuLimits(
        capability=f"{get(_MAJOR)}.{get(_MINOR)}",
        multiprocessors=get(_MULTIPROCESSORS),
        threads_per_multiprocessor=get(_THREADS_PER_MULTIPROCESSOR),
        threads_per_block=get(driver.MAX_THREADS_PER_BLOCK),
        block=(get(driver.MAX_BLOCK_DIM_X), get(_BLOCK_Y), get(_BLOCK_Z)),
        grid=(get(driver.MAX_GRID_DIM_X), get(_GRID_Y), get(_GRID_Z)),
        warp=get(_WARP),
        registers_per_block=get(_REGISTERS_PER_BLOCK),
        registers_per_multiprocessor=get(_REGISTERS_PER_MULTIPROCESSOR),
        shared_per_block=get(_SHARED_PER_BLOCK),
        shared_per_block_optin=get(driver.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        shared_per_multiprocessor=get(_SHARED_PER_MULTIPROCESSOR),
        l2=get(_L2),
    )


def cpu_limits() -> CpuLimits:
    """The limits of this machine's CPU."""
    here = cpu_instructions()
    found = tuple(name for name in _USED_INSTRUCTIONS if name in here)
    return CpuLimits(cpu_model(), len(os.sched_getaffinity(0)), found, _caches())


def _caches() -> dict[str, int]:
    """The caches of the first core, smallest level first; empty where the system tells none."""
    found = {}
    for place in sorted(_CACHES.glob("index*")):
        try:
            level, kind, size = ((place / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        name = f"L{level}" if kind == "Unified" else f"L{level} {kind.lower()}"
        found[name] = int(size.removesuffix("K")) * 1024
    return found
