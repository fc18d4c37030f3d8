"""The measured limits of this machine, with which the benchmarks compare their times."""

from functools import cache

import torch
from torch import Tensor

from warpbus.bench.timing import FULL, Call, measure
from warpbus.kernels.ops.gemv import gemv

# Far above every cache.
_GPU_BYTES = 2**30
_CPU_BYTES = 2**28


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written ones both counted, of a copy within the device's memory.

    The better of torch's copy and of a kernel that reads and writes as much: in a graph a copy is a node of its own
    kind, and slower.
    """
    source, target = _random(device), _random(device)
    copiers: list[Call] = [lambda one, other: other.copy_(one), lambda one, other: torch.neg(one, out=other)]
    timings = measure(copiers, lambda: (source, target), FULL)
    return 2 * source.nbytes / min(timing.median for timing in timings)


@cache
def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of reading alone: the best of two reductions and, on a GPU, two matrix-vector products."""
    source = _random(device)
    readers: list[Call] = [torch.sum, torch.amax]
    if device.type == "cuda":
        matrix = source.view(torch.float16).normal_().view(-1, 8192)
        x = torch.randn(8192, device=device, dtype=torch.float16)
        readers += [lambda _: torch.mv(matrix, x), lambda _: gemv(matrix, x)]
    timings = measure(readers, lambda: (source,), FULL)
    return source.nbytes / min(timing.median for timing in timings)


@cache
def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of torch's matrix product, 8192 wide on a GPU and 2048 wide on the CPU.

    It is what the vendor's library reaches, not what the silicon could: a kernel can be above it.
    """
    n = 8192 if device.type == "cuda" else 2048

    def make() -> tuple[Tensor, Tensor]:
        return torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)

    (timing,) = measure([torch.matmul], make, FULL)
    return 2 * n**3 / timing.median


@cache
def precision_rate(device: torch.device, precision: str) -> float:
    """Floating-point operations a second of the vendor's products as training has them; sizes as of `matrix_rate`.

    Args:
        precision: "fp32", "tf32", "bf16" or "fp8". A CPU has no product in the second and fourth: float32's is given.
    """
    if precision == "bf16":
        return matrix_rate(device, torch.bfloat16)
    if precision == "fp8" and device.type == "cuda":
        return _fp8_rate(device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        # Not from the cache of another precision.
        return matrix_rate.__wrapped__(device, torch.float32)
    finally:
        torch.set_float32_matmul_precision(before)


def _fp8_rate(device: torch.device) -> float:
    """Of e4m3 with a scale for each matrix, on GPUs that have it."""
    n, scale = 8192, torch.ones((), device=device)

    def make() -> tuple[Tensor, Tensor]:
        a, b = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        return a, b

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    (timing,) = measure([multiply], make, FULL)
    return 2 * n**3 / timing.median


def _random(device: torch.device) -> Tensor:
    return torch.randn((_GPU_BYTES if device.type == "cuda" else _CPU_BYTES) // 4, device=device)
