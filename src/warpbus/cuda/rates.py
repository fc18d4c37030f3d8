"""How fast a device multiplies matrices: the probe that every estimate of time rests on."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

_GPU_SIZE, _CPU_SIZE = 4096, 512  # rows and columns: as fast as larger ones, and done within a millisecond or a few
_ROUNDS = 5
_SECONDS = 0.05  # of all samples together, at least


def matmul_rates(
    device: torch.device, dtypes: Sequence[torch.dtype], *, tf32: bool = False
) -> dict[torch.dtype, float]:
    """FLOP per second of the products of two square matrices, by dtype.

    Each rate is that of the fastest of several short samples, taken in turn: another program can only slow a sample
    down. On a CPU a sample is timed by the clock of its own thread, which stands still while the thread waits for a
    core, and the rate is multiplied by the number of threads that torch computes with. So a busy machine has nearly the
    rates of a quiet one, and no product is faster than they say.

    Args:
        device: a GPU or the CPU.
        dtypes: of the matrices.
        tf32: multiply float32 in TF32 on a GPU, as training does.
    """
    with _prepared(device, tf32):
        samples = {dtype: _sample(device, dtype) for dtype in dtypes}
        fastest = dict.fromkeys(samples, float("inf"))
        spent, rounds = 0.0, 0
        while rounds < _ROUNDS or spent < _SECONDS:
            for dtype, sample in samples.items():
                seconds = sample()
                fastest[dtype] = min(fastest[dtype], seconds)
                spent += seconds
            rounds += 1
    size, threads = (_GPU_SIZE, 1) if device.type == "cuda" else (_CPU_SIZE, torch.get_num_threads())
    return {dtype: threads * 2 * size**3 / seconds for dtype, seconds in fastest.items()}


@contextmanager
def _prepared(device: torch.device, tf32: bool) -> Iterator[None]:
    """One thread for samples on the CPU: several would count the time in which they wait for each other."""
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    if tf32:
        torch.set_float32_matmul_precision("high")
    if device.type != "cuda":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)


def _sample(device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
    """A function that multiplies once and returns the seconds that it took."""
    size = _GPU_SIZE if device.type == "cuda" else _CPU_SIZE
    factor = torch.randn(size, size, device=device).to(dtype)
    product = factor @ factor  # loads what the first product needs

    def on_gpu() -> float:
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.mm(factor, factor, out=product)
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1000

    def on_cpu() -> float:
        started = time.thread_time()
        torch.mm(factor, factor, out=product)
        return time.thread_time() - started

    return on_gpu if device.type == "cuda" else on_cpu
