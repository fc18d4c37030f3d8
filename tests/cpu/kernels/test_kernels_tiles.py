"""What the tilings of an architecture share, and the search over tilings and splits of k."""

import pytest
import torch

from warpbus.kernels.ops import gemm_sm80, gemm_sm90, w8a8, wna8_sm80, wna8_sm90, wna16_sm80, wna16_sm90
from warpbus.kernels.ops.split_k import cheapest
from warpbus.kernels.ops.tiles_sm80 import Sm80Tiling, choose, clocks
from warpbus.kernels.ops.tiles_sm90 import Sm90Tiling, shared_bytes

A = Sm80Tiling(128, 128, 32, 64, 64, stages=3, efficiency=0.9)
B = Sm80Tiling(64, 64, 64, 32, 32, stages=3, efficiency=0.7)


def test_the_cheapest_is_the_first_of_equals():
    assert cheapest((A, B), 1024, (1, 2), lambda tiling: tiling.tile_k, lambda tiling, part: 1.0) == (A, 1024)
    assert cheapest((B, A), 1024, (2, 1), lambda tiling: tiling.tile_k, lambda tiling, part: 1.0) == (B, 512)


def test_parts_cover_k_in_whole_steps():
    seen = []

    def cost(tiling, part):
        seen.append((tiling, part))
        return -part

    assert cheapest((A, B), 100, (1, 2, 3), lambda tiling: tiling.tile_k, cost) == (A, 128)
    assert seen == [(A, 128), (A, 64), (A, 64), (B, 128), (B, 64), (B, 64)]
    assert cheapest((A,), 0, (1,), lambda tiling: 8, cost) == (A, 8)


@pytest.mark.parametrize(("k", "most"), [(0, 1), (511, 1), (512, 2), (4096, 16), (10**6, 32)])
def test_a_split_leaves_a_block_enough_of_k(k, most):
    parts = []
    choose((A,), k, lambda tiling, part: parts.append(part) or 0.0)
    assert len(parts) == most


def test_clocks_count_waves_of_resident_blocks():
    def cost(m, resident):
        return clocks(A, m=m, n=128, k=4096, part=4096, resident=resident, multiprocessors=108, bytes_per_k=512)

    assert cost(108 * 128, 1) == cost(128, 1)
    assert cost(108 * 128 + 1, 1) > cost(108 * 128, 1)
    assert cost(216 * 128, 2) < cost(216 * 128, 1)


def test_threads():
    assert (A.threads, B.threads) == (128, 128)
    assert [tiling.threads for tiling in w8a8.AMPERE] == [256, 128]  # kThreads in sm80_w8a8.cu: 2 * TILE_N
    assert Sm90Tiling(64, 128, 8, 2, 1.0).threads == 256
    assert Sm90Tiling(256, 128, 4, 2, 1.0).threads == Sm90Tiling(128, 128, 4, 2, 1.0).threads == 384


def test_shared_memory_on_hopper():
    ring = 4 * ((128 + 256) * 128 + 2 * 8)
    assert shared_bytes(4, (128 + 256) * 128, 0) == ring + 1024
    assert Sm90Tiling(128, 256, 4, 2, 1.0).shared(2) == ring + 2 * (2 * 64 * 64 * 2 + 256 * 2) + 1024


def compiled():
    """Kernels with their threads, of every tiling."""
    for (tiling, *_), kernel in (*gemm_sm80._KERNELS.items(), *w8a8._AMPERE_KERNELS.items()):
        yield kernel, tiling.threads
    for (tiling, *_), kernel in (*wna16_sm80._KERNELS.items(), *wna8_sm80._KERNELS.items()):
        yield kernel, tiling.threads
    for (tiling, *_), kernel in w8a8._HOPPER_KERNELS.items():
        yield kernel, tiling.threads
    for tiling in gemm_sm90.TILINGS:
        yield gemm_sm90._kernel(torch.float16, tiling, 0, 0, 0), tiling.threads
    for tiling in wna16_sm90.TILINGS:
        yield tiling.kernel(torch.float16, 4), tiling.threads
    for kernel in wna8_sm90._KERNELS.values():
        yield kernel, 384


def test_every_block_fits_into_shared_memory():
    kernels = list(compiled())
    assert len(kernels) > 100
    for kernel, threads in kernels:
        room = 227 if kernel.unit.needs == "sm_90a" else 99
        assert int(dict(kernel.unit.macros)["SHARED_BYTES"]) <= room * 1024, kernel.unit.label
        assert threads % 32 == 0
        assert threads <= 1024
