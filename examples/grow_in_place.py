"""Grow memory in place by mapping pages, compared with allocating anew and copying.

python examples/grow_in_place.py [--device cuda] [--mb 256]

On a GPU, growing in place is `cuMemCreate` and `cuMemMap` (chapter 12 of the tutorial), on the CPU it is `mmap` with
`mprotect`. Both ways are timed in turn, until the memory has the wanted size; each ends with its new part written.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from warpbus.cuda.vmm import Arena

MB = 2**20


def seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(device: torch.device, size: int, runs: int) -> tuple[float, float]:
    """The medians of growing from `size` to `2 * size` bytes: in place, and by a new allocation and a copy."""
    mapped, copied = [], []
    for _ in range(runs):
        arena = Arena(2 * size, device)
        arena.resize(size)
        every = arena.tensor((2 * size,), torch.uint8)
        every[:size] = 1

        def grow(arena: Arena = arena, every: torch.Tensor = every) -> None:
            arena.resize(2 * size)
            every[size:] = 2

        mapped.append(seconds(grow, device))
        assert every[0] == 1
        assert every[-1] == 2
        del every, grow
        arena.close()

        old = torch.ones(size, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # torch's allocator then calls cudaMalloc, as a program without it does

        def move(old: torch.Tensor = old) -> torch.Tensor:
            new = torch.empty(2 * size, dtype=torch.uint8, device=device)
            new[:size] = old
            new[size:] = 2
            return new

        copied.append(seconds(move, device))
        del old, move
    return median(mapped), median(copied)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mb", type=int, default=256, help="the largest size before growing")
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    device = torch.device(options.device)
    print(f"{'MiB':>12}  {'grow in place, ms':>18}  {'allocate and copy, ms':>22}  {'ratio':>5}")
    size = 2 * MB
    while size <= options.mb * MB:
        mapped, copied = measure(device, size, options.runs)
        step = f"{size // MB} to {2 * size // MB}"
        print(f"{step:>12}  {mapped * 1e3:>18.3f}  {copied * 1e3:>22.3f}  {copied / mapped:>5.2f}")
        size *= 4


if __name__ == "__main__":
    main()
