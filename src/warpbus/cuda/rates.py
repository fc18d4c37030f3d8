"""How fast a device multiplies matrices and copies: the probes that every estimate of time rests on."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from warpbus.cuda.cards import CARDS, Card
from warpbus.cuda.staging import pinned_bytes

_GPU_SIZE, _CPU_SIZE = 4096, 512  # rows and columns: as fast as larger ones, and done within a millisecond or a few
_ROUNDS = 5
_COPIED = 2**26  # bytes
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


def card_of(device: torch.device) -> Card:
    """The card that a GPU is, with its memory and the measured rate of the link to the host.

    Of a GPU that is not among `CARDS`, the bandwidth of a copy is measured, too.
    """
    properties = torch.cuda.get_device_properties(device)
    link = _copy_rate(pinned_bytes(_COPIED), device)
    known = next((card for card in CARDS.values() if card.device == properties.name), None)
    if known is not None:
        return replace(known, memory=properties.total_memory, link=link)
    here = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    return Card(properties.name, properties.name, properties.total_memory, 2 * _copy_rate(here, device), link)


def _copy_rate(source: Tensor, device: torch.device) -> float:
    """Bytes per second of the fastest of several copies of a tensor to a GPU."""
    target = torch.empty(len(source), dtype=torch.uint8, device=device)
    fastest = float("inf")
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(device))
        target.copy_(source, non_blocking=True)
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        fastest = min(fastest, begin.elapsed_time(end) / 1e3)
    return len(source) / fastest
